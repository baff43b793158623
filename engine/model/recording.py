"""Records the construction of a model on the meta device, to replay it with values.

[Note: what is recorded]
Two modes of torch make tensor constructors return meta tensors, and record each operation on these with the storages
that it reads and writes. Tensors from Python data (`torch.tensor`) are kept.

[Note: what is not recorded]
The recorder supports constructors that make tensors, fill them and compute with them. It refuses values that are read
(`item`, `numpy`), generators that are seeded or passed, random numbers on another device, and operations on tensors
with and without memory. A refusal is noted before it is raised, since a constructor may catch the error and take a
different path than with values. The model is then built with values (`engine/model/given_model.py`), which is always
correct.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn, TypeVar

import torch
import torch.utils._device
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

T = TypeVar("T")

_FROM_DATA = (torch.tensor, torch.as_tensor, torch.asarray)
_FILLS = {
    torch.ops.aten.copy_.default,
    torch.ops.aten.fill_.Scalar,
    torch.ops.aten.fill_.Tensor,
    torch.ops.aten.normal_.default,
    torch.ops.aten.uniform_.default,
    torch.ops.aten.zero_.default,
}
"""Operations that overwrite every element of their first argument and return it."""

_CERTAIN: dict[Any, Callable[..., bool]] = {
    torch.ops.aten.normal_.default: lambda mean=0.0, std=1.0, **options: std >= 0,
    torch.ops.aten.fill_.Tensor: lambda value: value.dim() == 0,
}
"""Fills -> whether a call with these arguments cannot fail, so that skipping its meta kernel hides no error."""

# Without its cache: transformers replaces torch.linspace during construction, and the cache would keep that.
_CONSTRUCTORS = frozenset(_device_constructors.__wrapped__())

_IS_META = Tensor.is_meta.__get__  # type: ignore[attr-defined]
_OTHER_WITHOUT_VALUES = {Tensor.apply_, Tensor.map_, Tensor.new_tensor, Tensor.data_ptr}
"""Functions that return a different result on a meta tensor, without an error."""
_MOVES = {Tensor.to, Tensor.cpu, Tensor.cuda}


class NotRecordedError(ValueError):
    """A constructor does something that cannot be recorded; see [Note: what is not recorded]."""


class MappedTensor(Tensor):
    """Values in a mapped file that does not change. A recording keeps the mapping instead of a copy."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # as nn.Parameter's


@dataclass(frozen=True)
class View:
    """A meta tensor as a view of a storage, by the storage's identity."""

    storage: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> View:
        """Describe a tensor. Raises NotRecordedError if its memory does not hold its values."""
        # The flags make values differ from the bytes in memory, and a view describes only bytes.
        if tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg():
            raise NotRecordedError("makes tensors that are sparse, conjugated or negated by a flag")
        shape, strides = tuple(tensor.shape), tuple(tensor.stride())
        # The address of the storage in C++: each call of `untyped_storage` makes another Python object.
        return cls(tensor.untyped_storage()._cdata, shape, strides, int(tensor.storage_offset()), tensor.dtype)

    def of_values(self, base: Tensor) -> Tensor:
        """Return the same view of memory with values."""
        whole = torch.empty(0, dtype=self.dtype, device=base.device)
        return whole.set_(base.untyped_storage(), self.offset, self.shape, self.strides)


@dataclass(frozen=True)
class RecordedOperation:
    """An operation with views in place of meta tensors in args and kwargs."""

    function: Callable[..., Any]
    args: Any
    kwargs: dict[str, Any]
    outputs: list[View]
    filled: int | None  # the storage that it overwrites as a whole without reading it
    default_dtype: torch.dtype  # at the time of the recording

    @property
    def views(self) -> Iterator[View]:
        """The views that it reads and writes."""
        return _found(View, (self.args, self.kwargs, self.outputs))

    @property
    def copied(self) -> Tensor | None:
        """The source of a plain copy, if it has the layout of the copy and can replace it."""
        if self.function != torch.ops.aten.copy_.default or not isinstance(self.args[1], Tensor):
            return None
        target, source = self.args[0], self.args[1]
        layout = tuple(source.shape), source.stride(), source.storage_offset(), source.dtype
        return source if layout == (target.shape, target.strides, 0, target.dtype) else None

    def run(self, real: dict[int, Tensor]) -> None:
        """Run the operation. real: storage -> a CPU tensor with it; new storages are added."""
        if self.filled is not None and self.filled not in real:
            whole: View = self.args[0]
            real[self.filled] = torch.empty_strided(whole.shape, whole.strides, dtype=whole.dtype)

        def materialize(value: Any) -> Any:
            if isinstance(value, View):
                return value.of_values(real[value.storage])
            is_meta = isinstance(value, torch.device) and value.type == "meta"
            return torch.device("cpu") if is_meta else value

        args, kwargs = _mapped(materialize, (self.args, self.kwargs))
        default = torch.get_default_dtype()
        torch.set_default_dtype(self.default_dtype)
        try:
            with torch.no_grad():
                result = self.function(*args, **kwargs)
        finally:
            torch.set_default_dtype(default)
        for view, tensor in zip(self.outputs, _tensors_in(result), strict=True):
            if view.storage not in real:
                real[view.storage] = _laid_out_as(view, tensor)


class Recording:
    """The recorded operations in order, and the values of tensors from Python data."""

    def __init__(self) -> None:
        self.operations: list[RecordedOperation] = []
        self.constants: dict[int, Tensor] = {}
        self.made: set[int] = set()  # storages of constants and of results
        self.alive: list[torch.UntypedStorage] = []  # keeps storages alive, so that no identity is reused
        self.random_state: Tensor | None = None
        """State of torch's CPU generator when the first tensor was made."""
        self.refused: str | None = None  # the first reason why it cannot be recorded
        self._state: Tensor | None = None  # torch's generator after the last draw; None: operations may draw
        self._mapped: list[tuple[Tensor, int]] = []  # tensors in files, with their versions

    @contextmanager
    def running(self, all_on_meta: bool = True) -> Iterator[None]:
        """Record construction in this context. Raises NotRecordedError if it cannot be replayed.

        all_on_meta: put all tensors on meta; else only those that their maker puts there, by `with
        torch.device("meta")`.
        """
        outside = torch.get_rng_state()
        self._state = outside if all_on_meta else None
        try:
            with _ConstructorRecorder(self, all_on_meta), _OperationRecorder(self), _trunc_normal_recorded(self):
                yield
            self._check_state()
            if any(tensor._version != version for tensor, version in self._mapped):
                self.refuse("changes tensors of a mapped file after it has copied them")
        except Exception as error:
            # for example from torch.FloatTensor(weight): no mode intercepts it
            is_of_meta = isinstance(error, RuntimeError | TypeError) and "meta" in str(error)
            if self.refused is None and not is_of_meta:
                raise
            self.refused = self.refused or str(error).splitlines()[0]
        finally:
            if all_on_meta:
                torch.set_rng_state(outside)
            self._state = None
        if self.refused is not None:
            raise NotRecordedError(
                f"the model builder cannot be recorded, since it {self.refused}; pass the constructed module instead"
            )

    def refuse(self, why: str) -> NoReturn:
        """Raise NotRecordedError; `running` raises it again if the builder catches it."""
        self.refused = self.refused or why
        raise NotRecordedError(why)

    def record(
        self, function: Callable[..., Any], args: Any, kwargs: dict[str, Any], result: Any, fills: bool = False
    ) -> None:
        """Record an operation on meta tensors. fills: it overwrites every element of its first argument."""
        outputs, inputs = _tensors_in(result), _tensors_in((args, kwargs))
        # Values are computed now. An operation that uses them later keeps a copy: see `_described`.
        if not any(tensor.is_meta for tensor in (*outputs, *inputs)):
            return
        if self.random_state is None:
            with _nothing_recorded():
                self.random_state = torch.get_rng_state()
        if any(tensor.is_meta and View.of(tensor).storage not in self.made for tensor in inputs):
            self.refuse("uses tensors without memory that are not made in the call, or not by an operation")
        if _draws(function):
            self._note_draw()
        described, options = _mapped(self._described, (args, kwargs))
        views = [View.of(tensor) for tensor in outputs]
        self.made.update(view.storage for view in views)
        self.alive.extend(tensor.untyped_storage() for tensor in outputs)
        filled = _whole_storage(inputs) if fills else None
        self.operations.append(
            RecordedOperation(function, described, options, views, filled, torch.get_default_dtype())
        )

    def check(self, function: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Refuse an operation that would give another result in a construction with memory."""
        inputs = _tensors_in((args, kwargs))
        with_values = [tensor for tensor in inputs if not tensor.is_meta]
        is_mixed = 0 < len(with_values) < len(inputs) and function is not torch.ops.aten.copy_.default
        if is_mixed and (with_values[0] is inputs[0] or any(tensor.dim() for tensor in with_values)):
            # torch's kernels fail on such a mix, or read memory that does not exist.
            self.refuse("computes with tensors that have memory and tensors that have none")
        if self._state is not None and _draws(function):
            on_meta = str(kwargs.get("device")) == "meta" or any(tensor.is_meta for tensor in inputs)
            if not on_meta or kwargs.get("generator") is not None:
                self.refuse("draws random numbers on a device that it names, or from a generator of its own")

    def constant(self, value: Tensor) -> Tensor:
        """Return a meta tensor for a tensor from Python data."""
        value = value if value.untyped_storage().resizable() else value.clone()  # the memory may be a NumPy array's
        meta = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        self.alive.append(meta.untyped_storage())
        self.constants[View.of(meta).storage] = value
        self.made.add(View.of(meta).storage)
        return meta.requires_grad_(value.requires_grad)

    def _described(self, leaf: Any) -> Any:
        """Return an argument to keep: a copy of values that may change, or the tensor itself if a file has them."""
        if not isinstance(leaf, Tensor):
            return leaf
        if leaf.is_meta:
            return View.of(leaf)
        if isinstance(leaf, MappedTensor) or leaf.untyped_storage().filename is not None:
            self._mapped.append((leaf, leaf._version))
            return leaf
        with _nothing_recorded():
            return leaf.detach().clone()

    def _check_state(self) -> None:
        """Refuse a changed state of torch's generator: recorded operations do not draw, so the builder must have set
        it.
        """
        with _nothing_recorded():
            if self._state is not None and not torch.equal(torch.get_rng_state(), self._state):
                self.refuse("sets the state of torch's generator")

    def _note_draw(self) -> None:
        """Advance torch's generator, so that a state that a constructor saves identifies a single operation."""
        self._check_state()
        if self._state is not None:
            with _nothing_recorded():
                torch.empty(1).random_()
                self._state = torch.get_rng_state()


@contextmanager
def _nothing_recorded() -> Iterator[None]:
    """Run operations with values without recording them."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


@contextmanager
def _trunc_normal_recorded(owner: Recording) -> Iterator[None]:
    """Record `trunc_normal_` as a single operation, since it reads the values it draws and skips meta tensors."""
    original = nn.init._no_grad_trunc_normal_

    def record(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not tensor.is_meta:
            return original(tensor, *args, **kwargs)
        owner.check(original, (tensor, *args), kwargs)
        owner.record(original, (tensor, *args), kwargs, tensor, fills=True)
        return tensor

    nn.init._no_grad_trunc_normal_ = record
    try:
        yield
    finally:
        nn.init._no_grad_trunc_normal_ = original


class _ConstructorRecorder(TorchFunctionMode):
    """Handles constructors, tensors from Python data, and questions for the device or for values.

    Like `with torch.device("meta")`, but invisible: transformers skips initialization if it sees that.
    """

    def __init__(self, owner: Recording, all_on_meta: bool) -> None:
        super().__init__()
        self._owner, self._all_on_meta = owner, all_on_meta

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        try:
            return self._called(func, args, kwargs)
        except Exception as error:  # the builder may catch it, but with values there would be no error
            if any(tensor.is_meta for tensor in _tensors_in((args, kwargs))):
                name = getattr(func, "__name__", str(func))
                self._owner.refused = self._owner.refused or f"calls {name} ({str(error).splitlines()[0]})"
            raise

    def _called(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        # Frame 0 is this function, 1 is `__torch_function__`, 2 is the code that called torch.
        if func == _IS_META and _caller_is(sys._getframe(2), nn.init, nn.modules.module):
            # orthogonal_, dirac_ and sparse_ do nothing on meta tensors: their operations must be recorded.
            # load_state_dict warns that it does nothing, and does what is recorded.
            return False
        if func in _OTHER_WITHOUT_VALUES and args[0].is_meta:
            self._owner.refuse(f"calls {func.__name__} of a tensor whose values come later")
        # torch rebuilds a pickled or copied meta tensor by this call, as another tensor without values.
        if func is torch.empty_strided and _caller_is(sys._getframe(2), torch._utils):
            self._owner.refuse("pickles a tensor, or copies it by copy.copy")
        if func in _MOVES and args[0].is_meta and self._all_on_meta:
            return _moved_nowhere(func, args, kwargs)
        if func in (Tensor.__getitem__, Tensor.__setitem__) and args[0].is_meta:
            return func(args[0], self._index(args[1]), *args[2:])
        data = next(iter((*args, *kwargs.values())), None)  # under any argument name
        device = kwargs.get("device") or ("meta" if self._all_on_meta else "cpu")
        if func not in _FROM_DATA or torch.device(device).type != "meta" or isinstance(data, Tensor):
            # `torch.normal` is a constructor if it is given numbers and a size.
            is_constructor = func in _CONSTRUCTORS or (func is torch.normal and not _tensors_in((args, kwargs)))
            if self._all_on_meta and is_constructor and kwargs.get("device") is None:
                kwargs = {**kwargs, "device": torch.device("meta")}
            return func(*args, **kwargs)
        value = func(*args, **{**kwargs, "device": "cpu"})
        if not value.numel():
            return value  # nothing to defer; transformers finds the default device by an empty tensor
        return self._owner.constant(value)

    def _index(self, index: Any) -> Any:
        """Make tensors of lists of numbers, as torch would do unseen."""
        if isinstance(index, tuple):
            return tuple(map(self._index, index))
        return self._owner.constant(torch.tensor(index, device="cpu")) if isinstance(index, list) and index else index


def _moved_nowhere(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run `to`, `cpu` or `cuda` of a tensor without values: only the dtype changes, since the engine decides on the
    device.
    """
    if func in (Tensor.cpu, Tensor.cuda):
        return args[0]
    if isinstance(args[1] if len(args) > 1 else None, Tensor):
        return args[0].to(args[1].dtype)
    copies = kwargs.pop("copy", False)
    _, dtype, _, memory_format = torch._C._nn._parse_to(*args[1:], **kwargs)
    options = {} if memory_format is None else {"memory_format": memory_format}
    return args[0].to(dtype or args[0].dtype, copy=copies, **options)


class _OperationRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, owner: Recording) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._owner = owner

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, else torch imports its compiler at the first operation."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, fills = kwargs or {}, func in _FILLS
        self._owner.check(func, args, kwargs)
        # The meta kernels of these two import torch's compiler (105 MiB) and leave the tensor unchanged.
        is_certain = func in _CERTAIN and _CERTAIN[func](*args[1:], **kwargs)
        result = args[0] if is_certain and args[0].is_meta else func(*args, **kwargs)
        if not func.is_view:  # a view is described by its storage
            self._owner.record(func, args, kwargs, result, fills)
        return result


def _caller_is(frame: FrameType | None, *modules: Any) -> bool:
    """Return whether code of these modules calls, also through a surrounding `with torch.device(...)`."""
    while frame is not None and frame.f_globals is vars(torch.utils._device):
        frame = frame.f_back
    return frame is not None and any(frame.f_globals is vars(one) for one in modules)


# torch's pytree functions would take most of a recording's time, since they look up registered classes.
def _mapped(change: Callable[[Any], Any], tree: Any) -> Any:
    """Map the leaves of lists, tuples and dicts."""
    if isinstance(tree, list | tuple):
        return type(tree)([_mapped(change, one) for one in tree])
    return {key: _mapped(change, one) for key, one in tree.items()} if isinstance(tree, dict) else change(tree)


def _tensors_in(tree: Any) -> list[Tensor]:
    """Return all tensors, in order."""
    return list(_found(Tensor, tree))


def _found(kind: type[T], tree: Any) -> Iterator[T]:
    if isinstance(tree, kind):
        yield tree
    elif isinstance(tree, list | tuple):
        for one in tree:
            yield from _found(kind, one)
    elif isinstance(tree, dict):
        for one in tree.values():
            yield from _found(kind, one)


def _draws(function: Callable[..., Any]) -> bool:
    """Return whether a function, of torch's dispatcher or of nn.init, draws random numbers."""
    tags = getattr(function, "tags", None)  # functions of nn.init have no tags, and are recorded because they draw
    return tags is None or torch.Tag.nondeterministic_seeded in tags


def _whole_storage(inputs: list[Tensor]) -> int | None:
    """Return the storage of the first input if the input covers it, row by row, and no further input shares it."""
    target = View.of(inputs[0])
    if target.offset or not inputs[0].is_contiguous() or inputs[0].nbytes != inputs[0].untyped_storage().nbytes():
        return None
    others = (tensor.untyped_storage()._cdata for tensor in inputs[1:])
    return None if target.storage in others else target.storage


def _laid_out_as(view: View, tensor: Tensor) -> Tensor:
    """Return the tensor with the strides of the meta device: CPU kernels (linalg.qr) may choose different strides."""
    if tuple(tensor.stride()) == view.strides or view.offset:
        return tensor
    return torch.empty_strided(view.shape, view.strides, dtype=view.dtype).copy_(tensor)
