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
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any

import torch
import torch.utils._device
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from .later_model import LaterModel
from .plain_tensors import plain_tensors

_FROM_DATA = (torch.tensor, torch.as_tensor, torch.from_numpy)
_FILLS = {
    torch.ops.aten.copy_.default,
    torch.ops.aten.fill_.Scalar,
    torch.ops.aten.fill_.Tensor,
    torch.ops.aten.normal_.default,
    torch.ops.aten.uniform_.default,
    torch.ops.aten.zero_.default,
}
"""Operations that write every element of their first argument, whatever it holds, and return it."""

_CERTAIN: dict[Any, Callable[..., bool]] = {
    torch.ops.aten.normal_.default: lambda mean=0.0, std=1.0, **options: std >= 0,
    torch.ops.aten.fill_.Tensor: lambda value: value.dim() == 0,
}
"""Fills -> whether one with these arguments cannot fail, so that a builder never has to hear of an error."""

# Not by its cache: transformers replaces torch.linspace while it constructs, and who first asks then has that kept.
_CONSTRUCTORS = frozenset(_device_constructors.__wrapped__())

_NUM_NAMED = 3  # in an error; there may be hundreds

_IS_META = Tensor.is_meta.__get__  # type: ignore[attr-defined]


@dataclass(frozen=True)
class _View:
    """A meta tensor as a view of a storage."""

    storage: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype


@dataclass(frozen=True)
class _Operation:
    function: Callable[..., Any]
    args: Any
    kwargs: dict[str, Any]
    outputs: list[_View]
    filled: int | None  # the storage of which it writes every byte and reads none


@dataclass(frozen=True)
class _Place:
    """Where a value of the model goes: to a parameter, or by each of `puts` to a buffer, an attribute, a list."""

    name: str
    param: nn.Parameter | None
    view: _View
    is_hidden: bool = False  # a parameter that the model does not know
    requires_grad: bool = False
    puts: list[Callable[[Tensor], None]] = field(default_factory=list)

    def put(self, value: Tensor) -> None:
        """The same tensor everywhere. value: of its own memory."""
        one = nn.Parameter(value, self.requires_grad) if self.is_hidden else value.requires_grad_(self.requires_grad)
        for put in self.puts:
            put(one)


class Recording:
    """What constructors of modules do with tensors, which are on the meta device meanwhile."""

    def __init__(self) -> None:
        self.operations: list[_Operation] = []
        self.constants: dict[int, Tensor] = {}
        self.alive: list[torch.UntypedStorage] = []  # so that none gets the identity of an earlier one
        self.random_state: Tensor | None = None
        """Of torch's generator for the CPU, when the first tensor was made."""

    @contextmanager
    def running(self, all_on_meta: bool = True) -> Iterator[None]:
        """A context in which modules are made. Raises ValueError where values of tensors are read in it.

        all_on_meta: else only what its maker puts there himself, by `with torch.device("meta")`.
        """
        on_meta = _OnMeta() if all_on_meta else nullcontext()
        try:
            with on_meta, _DataRecorder(self, all_on_meta), _OperationRecorder(self), _trunc_normal_recorded(self):
                yield
        except (NotImplementedError, RuntimeError) as error:
            raise ValueError(
                "the model builder reads values of tensors while it constructs the model, which has no memory then "
                f"({str(error).splitlines()[0]}). Pass the constructed module to initialize in its place."
            ) from error

    def record(
        self, function: Callable[..., Any], args: Any, kwargs: dict[str, Any], result: Any, fills: bool = False
    ) -> None:
        """Writes an operation down, if it has to do with meta tensors.

        fills: it writes every element of its first argument, whatever that holds.
        """
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if not any(tensor.is_meta for tensor in outputs + inputs):
            return
        if self.random_state is None:
            self.random_state = torch.get_rng_state()
        self.alive.extend(tensor.untyped_storage() for tensor in outputs)
        described = tree_map(lambda leaf: _describe(leaf) if isinstance(leaf, Tensor) and leaf.is_meta else leaf, args)
        options = tree_map(lambda leaf: _describe(leaf) if isinstance(leaf, Tensor) and leaf.is_meta else leaf, kwargs)
        filled = _whole_storage(inputs) if fills else None
        self.operations.append(_Operation(function, described, options, [_describe(t) for t in outputs], filled))

    def record_constant(self, meta: Tensor, value: Tensor) -> None:
        """A tensor made from Python data: its values are kept as they are."""
        self.alive.append(meta.untyped_storage())
        self.constants[_describe(meta).storage] = value


class DeferredModel(LaterModel):
    """A model on the meta device, whose real values `values` yields one parameter at a time."""

    def __init__(self, build: Callable[[], nn.Module], earlier: Recording | None = None) -> None:
        """build: constructs the model. earlier: of parts of it; parts that were made at no such time are `given`.

        Raises ValueError where it reads values of tensors while it constructs.
        """
        recording = Recording() if earlier is None else earlier
        with recording.running():
            module = build()
        if not isinstance(module, nn.Module):
            raise ValueError(f"model: expected a callable that returns an nn.Module, found {type(module).__name__}")
        self.module = module
        self.given = [] if earlier is None else [param for param in module.parameters() if not param.is_meta]
        """Parameters that have their values already, which `values` does not yield."""
        # As when construction began.
        self.random_state = torch.get_rng_state() if recording.random_state is None else recording.random_state
        self.peak_bytes = 0  # of real values alive at a time, after `values` has run
        self._operations, self._constants, self._alive = recording.operations, recording.constants, recording.alive
        self._places = self._replace_by_shells()

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
            for view in _views_in((operation.args, operation.kwargs, operation.outputs)):
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
            source = None if filled is None or last_use[filled] != index else _copied(operation)
            if filled is not None and source is not None:
                real[filled] = source  # perhaps a mapped file, of which only the pages of this rank's shards are read
            else:
                self._run(operation, real)
                nbytes = sum(tensor.untyped_storage().nbytes() for tensor in real.values())
                self.peak_bytes = max(self.peak_bytes, nbytes)
            for done in overwritten.get(index, ()):
                del real[done]
            for done in ending.get(index, ()):
                yield from self._hand_over(real, done, waiting)
        if waiting:
            names = [place.name for places in waiting.values() for place in places]
            more = f" and {len(names) - _NUM_NAMED} more" if len(names) > _NUM_NAMED else ""
            raise ValueError(
                "the model builder made parameters or buffers in a way that cannot be replayed, for example before it "
                f"was called: {', '.join(names[:_NUM_NAMED])}{more}; make them within the call, or pass the "
                "constructed module to initialize in its place"
            )

    def _overwritten(self) -> dict[int, list[int]]:
        """By operation: the storages whose next use is to be filled as a whole. See [Note: weights drawn twice]."""
        found: dict[int, list[int]] = {}
        latest_use: dict[int, int] = {}
        for index, operation in enumerate(self._operations):
            storage = operation.filled
            if storage is not None and storage in latest_use:
                found.setdefault(latest_use[storage], []).append(storage)
            for view in _views_in((operation.args, operation.kwargs, operation.outputs)):
                latest_use[view.storage] = index
        return found

    def _run(self, operation: _Operation, real: dict[int, Tensor]) -> None:
        if operation.filled is not None and operation.filled not in real:
            whole: _View = operation.args[0]
            real[operation.filled] = torch.empty_strided(whole.shape, whole.strides, dtype=whole.dtype)

        def materialize(value: Any) -> Any:
            if isinstance(value, _View):
                return _view_of(real[value.storage], value)
            if isinstance(value, torch.device) and value.type == "meta":
                return torch.device("cpu")
            return value

        args, kwargs = tree_map(materialize, (operation.args, operation.kwargs))
        with torch.no_grad():
            result = operation.function(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        for view, tensor in zip(operation.outputs, tensors, strict=True):
            if view.storage not in real:
                real[view.storage] = _laid_out_as(view, tensor)

    def _hand_over(
        self,
        real: dict[int, Tensor],
        storage: int,
        waiting: dict[int, list[_Place]],
    ) -> Iterator[tuple[nn.Parameter, Tensor]]:
        base = real.pop(storage)
        for place in waiting.pop(storage, ()):
            tensor = _view_of(base, place.view)
            if place.param is None:
                place.put(tensor.clone())
            else:
                yield place.param, tensor

    def _replace_by_shells(self) -> list[_Place]:
        """Parameters become real ones with a shape and no memory. Returns where each value goes."""
        shells: dict[int, nn.Parameter] = {}
        given = set(map(id, self.given))
        places: dict[int, _Place] = {}  # by identity of the tensor
        for owner, module in self.module.named_modules():
            prefix = f"{owner}." if owner else ""
            for name, param in module._parameters.items():
                if param is None or id(param) in given:
                    continue
                if id(param) not in shells:
                    nothing = torch.zeros((), dtype=param.dtype, device="cpu").expand(param.shape)
                    shell = shells[id(param)] = nn.Parameter(nothing, requires_grad=param.requires_grad)
                    places[id(param)] = _Place(prefix + name, shell, _describe(param))
                    self._alive.append(param.untyped_storage())
                module._parameters[name] = shells[id(param)]
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_meta:
                    self._await(places, prefix + name, buffer, partial(module._buffers.__setitem__, name))
        made = self._constants.keys() | {view.storage for one in self._operations for view in one.outputs}
        for name, tensor, put in plain_tensors(self.module):
            if id(tensor) in shells:
                put(shells[id(tensor)])
            elif tensor.is_meta and _describe(tensor).storage in made:  # else its maker wants it there
                self._await(places, name, tensor, put)
        return list(places.values())

    def _await(self, places: dict[int, _Place], name: str, tensor: Tensor, put: Callable[[Tensor], None]) -> None:
        """Its value goes there. A tensor that is in several places is one afterwards too."""
        if id(tensor) not in places:
            needs_grad = tensor.is_leaf and tensor.requires_grad
            places[id(tensor)] = _Place(name, None, _describe(tensor), isinstance(tensor, nn.Parameter), needs_grad)
            self._alive.append(tensor.untyped_storage())
        places[id(tensor)].puts.append(put)


@contextmanager
def _trunc_normal_recorded(owner: Recording) -> Iterator[None]:
    """`trunc_normal_` looks at the values that it draws, and skips meta tensors: it is recorded as one operation."""
    original = nn.init._no_grad_trunc_normal_

    def record(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not tensor.is_meta:
            return original(tensor, *args, **kwargs)
        owner.record(original, (tensor, *args), kwargs, tensor, fills=True)
        return tensor

    nn.init._no_grad_trunc_normal_ = record
    try:
        yield
    finally:
        nn.init._no_grad_trunc_normal_ = original


class _OnMeta(TorchFunctionMode):
    """As `with torch.device("meta")`, but not to be seen: transformers does not initialize where it sees that."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _CONSTRUCTORS and kwargs.get("device") is None:
            kwargs = {**kwargs, "device": torch.device("meta")}
        return func(*args, **kwargs)


class _OperationRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, owner: Recording) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._owner = owner

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Else torch imports its compiler at the first operation, only to keep it away from here."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, fills = kwargs or {}, func in _FILLS
        # The kernels of these two for meta tensors import torch's compiler, 105 MiB, and leave the tensor as it is.
        is_certain = func in _CERTAIN and _CERTAIN[func](*args[1:], **kwargs)
        result = args[0] if is_certain and args[0].is_meta else func(*args, **kwargs)
        if not func.is_view:  # a view is described by its storage, and has no values of its own to wait for
            self._owner.record(func, args, kwargs, result, fills)
        return result


class _DataRecorder(TorchFunctionMode):
    def __init__(self, owner: Recording, all_on_meta: bool) -> None:
        super().__init__()
        self._owner = owner
        self._from_data = _FROM_DATA if all_on_meta else ()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func == _IS_META and _is_asked_by_init(sys._getframe(1)):
            return (
                False  # orthogonal_, dirac_ and sparse_ do nothing on meta tensors: their operations must be recorded
            )
        if func is Tensor.__getitem__ and args[0].is_meta and isinstance(args[1], list):
            # torch makes a tensor of the list where nobody sees it.
            return func(args[0], self._constant(torch.tensor(args[1], device="cpu")))
        if func not in self._from_data or kwargs.get("device") is not None or isinstance(args[0], Tensor):
            return func(*args, **kwargs)
        value = func(*args, **(kwargs if func is torch.from_numpy else {**kwargs, "device": "cpu"}))
        if not value.numel():
            return value  # nothing to defer; and transformers asks in this way for the default device
        return self._constant(value)

    def _constant(self, value: Tensor) -> Tensor:
        meta = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        self._owner.record_constant(meta, value)
        return meta.requires_grad_(value.requires_grad)


def _is_asked_by_init(frame: FrameType | None) -> bool:
    """Whether torch.nn.init asks, also through a `with torch.device(...)` around the modules."""
    while frame is not None and frame.f_globals is vars(torch.utils._device):
        frame = frame.f_back
    return frame is not None and frame.f_globals is vars(nn.init)


def _describe(tensor: Tensor) -> _View:
    return _View(
        tensor.untyped_storage()._cdata,
        tuple(tensor.shape),
        tuple(tensor.stride()),
        int(tensor.storage_offset()),
        tensor.dtype,
    )


def _whole_storage(inputs: list[Tensor]) -> int | None:
    """The storage of the first input, if that is all of it, row by row, and no other input lies in it."""
    target, others = _describe(inputs[0]), [_describe(tensor) for tensor in inputs[1:]]
    if target.offset or not inputs[0].is_contiguous() or inputs[0].nbytes != inputs[0].untyped_storage().nbytes():
        return None
    return None if any(other.storage == target.storage for other in others) else target.storage


def _copied(operation: _Operation) -> Tensor | None:
    """The tensor that an operation only copies, where that can stand for the copy: it is as the copy would be."""
    if operation.function != torch.ops.aten.copy_.default or not isinstance(operation.args[1], Tensor):
        return None
    target, source = operation.args[0], operation.args[1]
    found = target.shape, target.strides, 0, target.dtype
    return source if found == (tuple(source.shape), source.stride(), source.storage_offset(), source.dtype) else None


def _laid_out_as(view: _View, tensor: Tensor) -> Tensor:
    """The tensor with the strides that it had on the meta device: kernels for it (linalg.qr) may choose others."""
    if tuple(tensor.stride()) == view.strides or view.offset:
        return tensor
    return torch.empty_strided(view.shape, view.strides, dtype=view.dtype).copy_(tensor)


def _view_of(base: Tensor, view: _View) -> Tensor:
    whole = torch.empty(0, dtype=view.dtype)
    return whole.set_(base.untyped_storage(), view.offset, view.shape, view.strides)


def _views_in(tree: Any) -> Iterator[_View]:
    for leaf in tree_leaves(tree):
        if isinstance(leaf, _View):
            yield leaf
