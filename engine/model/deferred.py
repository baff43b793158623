"""Building a model without its memory: construction is recorded on the meta device and replayed bit by bit.

[Note: recording]
Under a dispatch mode every operation of the constructor runs on meta tensors and is written down with the storages that
it reads and writes. `values` runs the same operations on the real device in the same order, so that random numbers come
out as if the model had been built at once; a storage lives from its first operation to its last. A parameter is handed
over after its last operation and then forgotten: what is alive at a time is about one parameter.

[Note: weights drawn twice]
Many models draw their weights in a second pass over all modules (`apply(init_weights)`). The replay has to draw what
the first pass drew, since the random numbers that follow depend on it, but need not keep it until the second pass: a
storage is also forgotten after the last operation that uses it before another one fills it.

    operation          empty a   uniform a   empty b   uniform b   normal a   normal b
    a is alive         xxxxxxxxxxxxxxxxxxx                          xxxxxxxx
    b is alive                               xxxxxxxxxxxxxxxxxxx              xxxxxxxx

Idea: deferred initialization, as in torchdistx.

[Note: built in files]
A constructor that the recorder does not know is run with values. Large tensors that it makes lie in mapped files
without a name, in the folder of temporary files. The kernel can write their pages back: what is in anonymous memory at
a time is about one tensor. The ranks of a host take turns, so a host has one such model at a time (`given_model.py`).
"""

from __future__ import annotations

import mmap
import tempfile
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ...offload import trim_heap
from ...watch.log import logger
from .recording import NotRecordedError, Recording, View

_NUM_NAMED = 3  # in an error; there may be hundreds
_FILE_BYTES = 1 << 16  # a smaller tensor is not worth a mapping, of which a process has 65,530

_REGISTERED = ("_parameters", "_buffers", "_modules")
_OPAQUE = (type, ModuleType, FunctionType, MethodType, BuiltinFunctionType, partial)
_DEPTH = 2  # objects in objects: a distribution has its base. Deeper there are trainers, and all that they know.
Found = Iterator[tuple[str, Tensor, Callable[[Tensor], None]]]


class LaterModel(ABC):
    """module: whose parameters have shapes and no memory, but those that are `given`, which have their values."""

    module: nn.Module
    given: Sequence[nn.Parameter]
    random_state: Tensor | None
    """Of torch's generator, from which `values` draws: the same on all ranks. None: it draws nothing."""

    @abstractmethod
    def values(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """(parameter, its values), each parameter once but the given ones. All ranks must take them together."""


@dataclass(frozen=True)
class _Place:
    """Where a value of the model goes: to a parameter, or by each of `puts` to a buffer, an attribute, a list."""

    name: str
    param: nn.Parameter | None
    view: View
    is_hidden: bool = False  # a parameter that the model does not know
    requires_grad: bool = False
    puts: list[Callable[[Tensor], None]] = field(default_factory=list)

    def put(self, value: Tensor) -> None:
        """The same tensor everywhere. value: of its own memory."""
        one = nn.Parameter(value, self.requires_grad) if self.is_hidden else value.requires_grad_(self.requires_grad)
        for put in self.puts:
            put(one)


class DeferredModel(LaterModel):
    """A model on the meta device, whose real values `values` yields one parameter at a time."""

    def __init__(self, build: Callable[[], nn.Module], earlier: Recording | None = None) -> None:
        """build: constructs the model. earlier: of parts of it. What has its values at the end is `given`.

        Raises NotRecordedError where it does what cannot be done again; see [Note: what is not recorded].
        """
        recording = Recording() if earlier is None else earlier
        with recording.running():
            module = build()
        if not isinstance(module, nn.Module):
            raise ValueError(f"model: expected a callable that returns an nn.Module, found {type(module).__name__}")
        self.module = module
        self.given = [param for param in module.parameters() if not param.is_meta]
        """Parameters that have their values already, which `values` does not yield."""
        if self.given and earlier is None:
            nbytes = sum(param.nbytes for param in self.given)
            logger.info("model: the builder made %d parameters with memory (%d bytes)", len(self.given), nbytes)
        # As when construction began.
        self.random_state = torch.get_rng_state() if recording.random_state is None else recording.random_state
        self.peak_bytes = 0  # of real values alive at a time, after `values` has run
        self._operations, self._constants, self._alive = recording.operations, recording.constants, recording.alive
        self._places = self._replace_by_shells(recording.made)

    def values(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """(parameter, its values on the CPU), each parameter once; buffers and other tensors are filled on the way.

        Random numbers are those of construction. What has been drawn since is not drawn again: then torch's generator
        is afterwards where it was before; else it goes on behind those of construction.
        """
        now, first = torch.get_rng_state(), self.random_state
        assert first is not None
        torch.set_rng_state(first)
        yield from self._replayed()
        if not torch.equal(now, first):
            torch.set_rng_state(now)

    def _replayed(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        last_use: dict[int, int] = {}
        for index, operation in enumerate(self._operations):
            for view in operation.views:
                last_use[view.storage] = index
        waiting: dict[int, list[_Place]] = {}
        for place in self._places:
            waiting.setdefault(place.view.storage, []).append(place)
        ending: dict[int, list[int]] = {}
        for storage, index in last_use.items():
            ending.setdefault(index, []).append(storage)
        overwritten = self._overwritten()
        real = dict(self._constants)
        for storage in [key for key in real if key not in last_use]:
            yield from self._hand_over(real, storage, waiting)
        for index, operation in enumerate(self._operations):
            filled = operation.filled
            source = None if filled is None or last_use[filled] != index else operation.copied
            if filled is not None and source is not None:
                real[filled] = source  # perhaps a mapped file, of which only the pages of this rank's shards are read
            else:
                operation.run(real)
                nbytes = sum(tensor.untyped_storage().nbytes() for tensor in real.values())
                self.peak_bytes = max(self.peak_bytes, nbytes)
            for done in overwritten.get(index, ()):
                del real[done]
            for done in ending.get(index, ()):
                yield from self._hand_over(real, done, waiting)

    def _overwritten(self) -> dict[int, list[int]]:
        """By operation: the storages whose next use is to be filled as a whole. See [Note: weights drawn twice]."""
        found: dict[int, list[int]] = {}
        latest_use: dict[int, int] = {}
        for index, operation in enumerate(self._operations):
            storage = operation.filled
            if storage is not None and storage in latest_use:
                found.setdefault(latest_use[storage], []).append(storage)
            for view in operation.views:
                latest_use[view.storage] = index
        return found

    def _hand_over(
        self,
        real: dict[int, Tensor],
        storage: int,
        waiting: dict[int, list[_Place]],
    ) -> Iterator[tuple[nn.Parameter, Tensor]]:
        base = real.pop(storage)
        for place in waiting.pop(storage, ()):
            tensor = place.view.of_values(base)
            if place.param is None:
                place.put(tensor.clone())
            else:
                yield place.param, tensor

    def _replace_by_shells(self, made: set[int]) -> list[_Place]:
        """Parameters become real ones with a shape and no memory. Returns where each value goes.

        made: storages of which the values are recorded. Raises ValueError for a parameter or buffer of others.
        """
        shells: dict[int, nn.Parameter] = {}
        recorded: list[nn.Parameter] = []  # so that none gets the identity of one that is replaced
        given = set(map(id, self.given))
        places: dict[int, _Place] = {}  # by identity of the tensor
        for owner, module in self.module.named_modules():
            prefix = f"{owner}." if owner else ""
            for name, param in module._parameters.items():
                if param is None or id(param) in given or isinstance(param, nn.UninitializedParameter):
                    continue
                if id(param) not in shells:
                    nothing = torch.zeros((), dtype=param.dtype, device="cpu").expand(param.shape)
                    shell = shells[id(param)] = nn.Parameter(nothing, requires_grad=param.requires_grad)
                    _take_over(shell, param)
                    recorded.append(param)
                    places[id(param)] = _Place(prefix + name, shell, View.of(param))
                    self._alive.append(param.untyped_storage())
                module._parameters[name] = shells[id(param)]
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_meta:
                    self._await(places, prefix + name, buffer, partial(module._buffers.__setitem__, name))
        unknown = [place.name for place in places.values() if place.view.storage not in made]
        if unknown:
            more = f" and {len(unknown) - _NUM_NAMED} more" if len(unknown) > _NUM_NAMED else ""
            raise ValueError(
                "the model builder made parameters or buffers in a way that cannot be replayed, for example before it "
                f"was called: {', '.join(unknown[:_NUM_NAMED])}{more}; make them within the call, or pass the "
                "constructed module to initialize in its place"
            )
        for name, tensor, put in plain_tensors(self.module):
            if id(tensor) in shells:
                put(shells[id(tensor)])
            elif tensor.is_meta and View.of(tensor).storage in made:  # else its maker wants it there
                self._await(places, name, tensor, put)
        return list(places.values())

    def _await(self, places: dict[int, _Place], name: str, tensor: Tensor, put: Callable[[Tensor], None]) -> None:
        """Its value goes there. A tensor that is in several places is one afterwards too."""
        if id(tensor) not in places:
            needs_grad = tensor.is_leaf and tensor.requires_grad
            places[id(tensor)] = _Place(name, None, View.of(tensor), isinstance(tensor, nn.Parameter), needs_grad)
            self._alive.append(tensor.untyped_storage())
        places[id(tensor)].puts.append(put)


def _take_over(shell: nn.Parameter, param: nn.Parameter) -> None:
    """What a constructor has put on a parameter: that it is not to decay, say, or hooks for its gradient."""
    vars(shell).update(vars(param))
    shell._backward_hooks = param._backward_hooks
    shell._post_accumulate_grad_hooks = param._post_accumulate_grad_hooks


def build_in_files(build: Callable[[], nn.Module]) -> nn.Module:
    """The model with its values, of which the large ones are in mapped files; see [Note: built in files]."""
    with _FileMemory():  # type: ignore[no-untyped-call]
        return build()


def module_for_shapes(build: Callable[[], nn.Module]) -> nn.Module:
    """The model, of which values are not asked for. Nothing is drawn."""
    try:
        return DeferredModel(build).module
    except NotRecordedError as error:
        logger.info("model: built in memory-mapped files: %s", error)
        with torch.random.fork_rng(devices=()):
            return build_in_files(build)


class _FileMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Large tensors that operations of this thread make on the CPU get the memory of a file without a name."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as in `recording.py`

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_new = isinstance(result, Tensor) and all(one.alias_info is None for one in func._schema.returns)
        if not is_new or result.device.type != "cpu" or result.layout != torch.strided or result.nbytes < _FILE_BYTES:
            return result
        if result.untyped_storage().nbytes() != result.nbytes:
            return result
        with tempfile.TemporaryFile() as file:
            file.truncate(result.nbytes)
            memory = torch.frombuffer(mmap.mmap(file.fileno(), result.nbytes), dtype=torch.uint8)
        mapped = torch.empty(0, dtype=result.dtype)
        mapped.set_(memory.untyped_storage(), 0, result.shape, result.stride()).copy_(result)
        del result
        trim_heap()  # else its room stays, in pieces that the next ones do not fit into
        return mapped


def move(param: nn.Parameter, values: Tensor) -> None:
    """Gives the parameter other memory, perhaps of another device; it stays the same object."""
    if torch._has_compatible_shallow_copy_type(param, values):
        param.data = values
    else:
        # The device is of a package beside torch (NPU). There `module.to` makes new parameters, which an optimizer
        # that the caller has made would not know.
        torch._C._swap_tensor_impl(param, nn.Parameter(values, requires_grad=param.requires_grad))


def plain_tensors(model: nn.Module) -> Found:
    """(name, tensor, what puts another one there) of each place in an attribute, or in lists, tuples and dicts of it.

    So are those of modules in a list, which a model hides from its `state_dict`: a frozen teacher, say; and those of
    other objects: the noise schedule of a diffusion, a distribution.
    """
    known = set(map(id, model.modules()))
    for owner, module in model.named_modules():
        yield from _attributes(f"{owner}." if owner else "", module, known)


def _attributes(prefix: str, module: nn.Module, known: set[int]) -> Found:
    attributes = vars(module)
    for name, value in list(attributes.items()):
        if name not in _REGISTERED:
            yield from _within(prefix + name, value, partial(attributes.__setitem__, name), known)


def _within(name: str, value: Any, put: Callable[[Any], None], known: set[int], depth: int = 0) -> Found:
    """known: identities of what was looked through already. depth: in how many objects that are no modules."""
    if isinstance(value, Tensor):
        yield name, value, put
        return
    is_object = not isinstance(value, dict | list | deque | tuple | nn.Module)
    if id(value) in known or (is_object and (depth == _DEPTH or not hasattr(value, "__dict__"))):
        return
    if is_object and isinstance(value, _OPAQUE):
        return
    known.add(id(value))
    if isinstance(value, nn.Module):
        for registered in (value._parameters, value._buffers, value._modules):
            yield from _items(name, registered.items(), registered.__setitem__, known)
        yield from _attributes(f"{name}.", value, known)
    elif is_object:
        for attribute, one in list(vars(value).items()):
            put_there = partial(vars(value).__setitem__, attribute)
            yield from _within(f"{name}.{attribute}", one, put_there, known, depth + 1)
    elif isinstance(value, dict):
        yield from _items(name, value.items(), value.__setitem__, known, depth)
    elif isinstance(value, list | deque):
        yield from _items(name, enumerate(value), value.__setitem__, known, depth)
    else:
        items = list(value)

        def put_in(index: int, one: Any) -> None:
            items[index] = one
            put(type(value)(*items) if hasattr(value, "_fields") else type(value)(items))

        yield from _items(name, enumerate(value), put_in, known, depth)


def _items(name: str, items: Any, put: Callable[[Any, Any], None], known: set[int], depth: int = 0) -> Found:
    for key, value in list(items):
        yield from _within(f"{name}[{key!r}]", value, partial(put, key), known, depth)
