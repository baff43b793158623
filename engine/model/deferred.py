"""Builds a model without memory: construction is recorded on the meta device and replayed bit by bit.

[Note: recording]
A dispatch mode runs every operation of the constructor on meta tensors and records it with the storages that it reads
and writes. `values` runs the same operations on the real device in the same order, so that random numbers equal those
of a direct construction. A storage lives from its first operation to its last. A parameter is yielded after its last
operation and then dropped, so about a single parameter is alive at a time.

[Note: weights drawn twice]
Many models draw their weights again in a second pass over all modules (`apply(init_weights)`). The replay must draw the
first pass too, since later random numbers depend on it, but need not keep it. So a storage is also dropped after its
last operation before a new operation fills it.

    operation          empty a   uniform a   empty b   uniform b   normal a   normal b
    a is alive         xxxxxxxxxxxxxxxxxxx                          xxxxxxxx
    b is alive                               xxxxxxxxxxxxxxxxxxx              xxxxxxxx

Idea: deferred initialization, as in torchdistx.

[Note: built in files]
A constructor that cannot be recorded runs with values. Its large tensors lie in unnamed mapped files in the temporary
folder. The kernel can write their pages back, so about a single tensor is in anonymous memory at a time. The ranks of a
host take turns, so a host holds a single model of this kind at a time (`given_model.py`).
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

_NUM_NAMED = 3  # names in an error, since a model may have hundreds
_FILE_BYTES = 1 << 16  # smaller tensors stay in memory, since a process has at most 65,530 mappings

_REGISTERED = ("_parameters", "_buffers", "_modules")
_OPAQUE = (type, ModuleType, FunctionType, MethodType, BuiltinFunctionType, partial)
_DEPTH = 2  # depth of objects within objects: a distribution has a base. Deeper are trainers and their state.
Found = Iterator[tuple[str, Tensor, Callable[[Tensor], None]]]


class LaterModel(ABC):
    """A model without values. Parameters of `module` have shapes but no memory, except the `given` parameters."""

    module: nn.Module
    given: Sequence[nn.Parameter]
    random_state: Tensor | None
    """State of torch's generator for `values`, equal on all ranks. None: `values` draws nothing."""

    @abstractmethod
    def values(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield (parameter, values) for each parameter that is not given. All ranks must iterate together."""


@dataclass(frozen=True)
class _Place:
    """The place of a value in the model: a parameter, or with `puts` a buffer, attribute or list item."""

    name: str
    param: nn.Parameter | None
    view: View
    is_hidden: bool = False  # a parameter that is not registered in the model
    requires_grad: bool = False
    puts: list[Callable[[Tensor], None]] = field(default_factory=list)

    def put(self, value: Tensor) -> None:
        """Put the same tensor in all places. value: with separate memory."""
        one = nn.Parameter(value, self.requires_grad) if self.is_hidden else value.requires_grad_(self.requires_grad)
        for put in self.puts:
            put(one)


class DeferredModel(LaterModel):
    """A model on the meta device; `values` yields its real values, a parameter at a time."""

    def __init__(self, build: Callable[[], nn.Module], earlier: Recording | None = None) -> None:
        """Record `build`. earlier: a recording of parts of the model. Parameters with memory afterwards are `given`.

        Raises NotRecordedError if the constructor cannot be replayed; see [Note: what is not recorded].
        """
        recording = Recording() if earlier is None else earlier
        with recording.running():
            module = build()
        if not isinstance(module, nn.Module):
            raise ValueError(f"model: expected a callable that returns an nn.Module, found {type(module).__name__}")
        self.module = module
        self.given = [param for param in module.parameters() if not param.is_meta]
        """Parameters that already have values; `values` does not yield them."""
        if self.given and earlier is None:
            nbytes = sum(param.nbytes for param in self.given)
            logger.info("model: the builder made %d parameters with memory (%d bytes)", len(self.given), nbytes)
        self.random_state = torch.get_rng_state() if recording.random_state is None else recording.random_state
        self.peak_bytes = 0  # peak of real values alive at a time, known after `values` has run
        self._operations, self._constants, self._alive = recording.operations, recording.constants, recording.alive
        self._places = self._replace_by_shells(recording.made)

    def values(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield (parameter, its values on the CPU), each parameter once; buffers and other tensors are filled
        meanwhile.

        Random numbers are those of construction. If the generator has moved since then, it is restored afterwards; else
        it continues behind construction.
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
        # Constants that no operation uses have no last operation, and go to their places first.
        for storage in [key for key in real if key not in last_use]:
            yield from self._hand_over(real, storage, waiting)
        for index, operation in enumerate(self._operations):
            filled = operation.filled
            source = None if filled is None or last_use[filled] != index else operation.copied
            if filled is not None and source is not None:
                real[filled] = source  # for a mapped file, only the pages of this rank's shards are then read
            else:
                operation.run(real)
                nbytes = sum(tensor.untyped_storage().nbytes() for tensor in real.values())
                self.peak_bytes = max(self.peak_bytes, nbytes)
            for done in overwritten.get(index, ()):
                del real[done]
            for done in ending.get(index, ()):
                yield from self._hand_over(real, done, waiting)

    def _overwritten(self) -> dict[int, list[int]]:
        """Return operation -> storages that are next overwritten as a whole. See [Note: weights drawn twice]."""
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
        """Replace parameters by real parameters with a shape and no memory. Returns the place of each value.

        made: storages with recorded values. Raises ValueError for parameters or buffers that lie in no such storage.
        """
        shells: dict[int, nn.Parameter] = {}
        recorded: list[nn.Parameter] = []  # keeps replaced parameters alive, so that no identity is reused
        given = set(map(id, self.given))
        places: dict[int, _Place] = {}  # by identity of the tensor
        for owner, module in self.module.named_modules():
            prefix = f"{owner}." if owner else ""
            for name, param in module._parameters.items():
                # `check_model` refuses lazy parameters, and says why.
                if param is None or id(param) in given or isinstance(param, nn.UninitializedParameter):
                    continue
                if id(param) not in shells:
                    # A single element, expanded: a shape without memory. On the CPU, whatever the default device is.
                    nothing = torch.zeros((), dtype=param.dtype, device="cpu").expand(param.shape)
                    shell = shells[id(param)] = nn.Parameter(nothing, requires_grad=param.requires_grad)
                    _take_over(shell, param)
                    recorded.append(param)
                    places[id(param)] = _Place(prefix + name, shell, View.of(param))
                    self._alive.append(param.untyped_storage())
                module._parameters[name] = shells[id(param)]
            for name, buffer in module._buffers.items():
                # A buffer that is not on meta has its values already.
                if buffer is not None and buffer.is_meta:
                    self._await(places, prefix + name, buffer, partial(module._buffers.__setitem__, name))
        unknown = [place.name for place in places.values() if place.view.storage not in made]
        if unknown:
            more = f" and {len(unknown) - _NUM_NAMED} more" if len(unknown) > _NUM_NAMED else ""
            raise ValueError(
                "the model builder made parameters or buffers that cannot be replayed, for example before it was "
                f"called: {', '.join(unknown[:_NUM_NAMED])}{more}; make them within the call, or pass initialize the "
                "constructed module"
            )
        for name, tensor, put in plain_tensors(self.module):
            if id(tensor) in shells:
                put(shells[id(tensor)])
            elif tensor.is_meta and View.of(tensor).storage in made:  # else it is meant to stay on meta
                self._await(places, name, tensor, put)
        return list(places.values())

    def _await(self, places: dict[int, _Place], name: str, tensor: Tensor, put: Callable[[Tensor], None]) -> None:
        """Note a place for the tensor's value. A tensor in several places stays a single tensor."""
        if id(tensor) not in places:
            needs_grad = tensor.is_leaf and tensor.requires_grad
            places[id(tensor)] = _Place(name, None, View.of(tensor), isinstance(tensor, nn.Parameter), needs_grad)
            self._alive.append(tensor.untyped_storage())
        places[id(tensor)].puts.append(put)


def _take_over(shell: nn.Parameter, param: nn.Parameter) -> None:
    """Copy the attributes and hooks that a constructor put on a parameter."""
    vars(shell).update(vars(param))
    shell._backward_hooks = param._backward_hooks
    shell._post_accumulate_grad_hooks = param._post_accumulate_grad_hooks


def build_in_files(build: Callable[[], nn.Module]) -> nn.Module:
    """Build the model with values, large tensors in mapped files; see [Note: built in files]."""
    with _FileMemory():  # type: ignore[no-untyped-call]
        return build()


def module_for_shapes(build: Callable[[], nn.Module]) -> nn.Module:
    """Build the model for its shapes only. Nothing is drawn."""
    try:
        return DeferredModel(build).module
    except NotRecordedError as error:
        logger.info("model: built in memory-mapped files: %s", error)
        with torch.random.fork_rng(devices=()):
            return build_in_files(build)


class _FileMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that gives large CPU tensors of this thread the memory of unnamed files."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as in `recording.py`

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # A result that shares memory with an argument (a view, an operation in place) must keep it.
        is_new = isinstance(result, Tensor) and all(one.alias_info is None for one in func._schema.returns)
        if not is_new or result.device.type != "cpu" or result.layout != torch.strided or result.nbytes < _FILE_BYTES:
            return result
        # A part of a storage may share it with further results.
        if result.untyped_storage().nbytes() != result.nbytes:
            return result
        with tempfile.TemporaryFile() as file:
            file.truncate(result.nbytes)
            # The storage keeps the mapping, and the mapping outlives the file object. It frees the file at its end.
            memory = torch.frombuffer(mmap.mmap(file.fileno(), result.nbytes), dtype=torch.uint8)
        mapped = torch.empty(0, dtype=result.dtype)
        mapped.set_(memory.untyped_storage(), 0, result.shape, result.stride()).copy_(result)
        del result
        trim_heap()  # else freed memory stays fragmented, and the next tensors do not fit
        return mapped


def move(param: nn.Parameter, values: Tensor) -> None:
    """Give the parameter different memory, perhaps on another device; it stays the same object."""
    if torch._has_compatible_shallow_copy_type(param, values):
        param.data = values
    else:
        # For an out-of-tree device (NPU) `module.to` makes new parameters, and the caller's optimizer would keep the
        # old ones.
        torch._C._swap_tensor_impl(param, nn.Parameter(values, requires_grad=param.requires_grad))


def plain_tensors(model: nn.Module) -> Found:
    """Yield (name, tensor, setter) for each tensor in attributes of modules, also within lists, tuples and dicts.

    This includes tensors of modules in a list, which `state_dict` does not show (a frozen teacher), and of other
    objects: a diffusion's noise schedule, a distribution.
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
    """Yield the tensors in a value of an attribute, each with its name and setter.

    known: identities of visited values. depth: number of enclosing objects that are no modules.
    """
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
            # A tuple cannot be changed. A named tuple takes its items as arguments.
            put(type(value)(*items) if hasattr(value, "_fields") else type(value)(items))

        yield from _items(name, enumerate(value), put_in, known, depth)


def _items(name: str, items: Any, put: Callable[[Any, Any], None], known: set[int], depth: int = 0) -> Found:
    for key, value in list(items):
        yield from _within(f"{name}[{key!r}]", value, partial(put, key), known, depth)
