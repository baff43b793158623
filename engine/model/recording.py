"""What constructors of modules do with tensors, written down while these are on the meta device.

[Note: values that a constructor reads]
Some read a value: `[rate.item() for rate in torch.linspace(0, 0.1, depth)]`, a mask's `nonzero()`. Where no random
number is in it, the operations that have made it are done at once, with values. Else it is an error: what the random
numbers are is only known when all that were drawn before have been drawn.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import FrameType
from typing import Any
from weakref import ref

import torch
import torch.utils._device
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from .recorded_generators import TORCHS, RecordedGenerator, check_seed, identity_of
from .recorded_operations import RecordedOperation, View, draws, mapped, on_cpu, tensors_in, written_by

_FROM_DATA = (torch.tensor, torch.as_tensor, torch.asarray)
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

_IS_META = Tensor.is_meta.__get__  # type: ignore[attr-defined]
_NUM_LOOKED_AT = 64  # elements of a list


class Recording:
    """Operations in their order, and the values of tensors that were made from Python's data."""

    def __init__(self) -> None:
        self.operations: list[RecordedOperation] = []
        self.constants: dict[int, Tensor] = {}
        self.alive: list[torch.UntypedStorage] = []  # so that none gets the identity of an earlier one
        self.random_state: Tensor | None = None
        """Of torch's generator for the CPU, behind which operations that are recorded go on."""
        self.generators: dict[int, RecordedGenerator] = {}
        """By what they are in C++: those that operations draw from, but for torch's."""
        self.of_arrays: set[int] = set()  # storages with values, which NumPy may change
        self._shared: list[tuple[Tensor, bytes]] = []  # with an array of NumPy's, and what it held then
        self.lent: dict[int, ref[Any]] = {}  # by storage, the array of NumPy's that has its values
        self._borrowers: dict[int, list[int]] = {}  # a storage with values -> the operations that read it
        self._earlier: RecordedGenerator | None = None  # torch's, of an earlier context
        self._torch: RecordedGenerator | None = None  # while what draws is recorded, and nothing draws

    @contextmanager
    def running(self, all_on_meta: bool = True) -> Iterator[None]:
        """A context in which modules are made. Raises ValueError where values of tensors are read in it.

        all_on_meta: else only what its maker puts there himself, by `with torch.device("meta")`.
        """
        on_meta = _OnMeta() if all_on_meta else nullcontext()
        generator = self._generator() if all_on_meta else nullcontext()
        data = _DataRecorder(self, all_on_meta)
        try:
            with generator, on_meta, data, _OperationRecorder(self, data), _torch_replaced(self):
                yield
            self._check_shared()
        except (NotImplementedError, RuntimeError, TypeError) as error:
            if isinstance(error, TypeError) and "meta" not in str(error):  # such as of torch.Tensor(weight)
                raise
            raise ValueError(
                "the model builder reads values of tensors while it constructs the model, which has no memory then "
                f"({str(error).splitlines()[0]}). Pass the constructed module to initialize in its place."
            ) from error

    @contextmanager
    def _generator(self) -> Iterator[None]:
        """torch's, and others that are drawn from, have states of our own, and theirs afterwards."""
        outside = torch.get_rng_state()
        if self._earlier is None or not self.operations:
            self._earlier = RecordedGenerator(torch.default_generator, self.operations)
        if not self.operations:
            self.random_state = outside
        self._torch = self._earlier
        self._torch.go_on()
        told, torch.initial_seed = torch.initial_seed, self._torch.told_seed
        torch.random.initial_seed = self._torch.told_seed
        try:
            yield
            for one in (self._torch, *self.generators.values()):
                one.note_state()
        finally:
            torch.initial_seed = torch.random.initial_seed = told
            self._torch = None
            torch.set_rng_state(outside)
            for one in self.generators.values():
                one.generator.set_state(one.first)

    def record(
        self, function: Callable[..., Any], args: Any, kwargs: dict[str, Any], result: Any, fills: bool = False
    ) -> None:
        """Writes an operation down, if it has to do with meta tensors.

        fills: it writes every element of its first argument, whatever that holds.
        """
        outputs = tensors_in(result)
        if not any(tensor.is_meta for tensor in (*outputs, *tensors_in((args, kwargs)))):
            return
        if "sparse" in str(function):
            raise NotImplementedError(f"{function} has no memory to be described by")
        if self.random_state is None:
            with _nothing_recorded():
                self.random_state = torch.get_rng_state()
        drawn_from = self._drawn_from(kwargs) if draws(function) else None
        if drawn_from is not None:
            drawn_from.note_state()
        self.alive.extend(tensor.untyped_storage() for tensor in outputs)
        for tensor in tensors_in((args, kwargs)):
            if not tensor.is_meta:
                self._borrowers.setdefault(View.of(tensor).storage, []).append(len(self.operations))
        operation = RecordedOperation.of(function, args, kwargs, outputs, fills)
        if self.lent and any(
            (array := self.lent.get(one.storage)) and array() is not None for one in operation.written
        ):
            raise NotImplementedError(f"{function} changes a tensor of which a NumPy array has the memory")
        is_of_array = any(View.of(tensor).storage in self.of_arrays for tensor in tensors_in((args, kwargs)))
        self.operations.append(operation.with_own_copies() if is_of_array else operation)
        if drawn_from is not None:
            drawn_from.take_seed()

    def beside_meta(self, function: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """The arguments, and where some have no memory, those that have values without it too.

        Kernels of torch fail on both, or read what is not there. What is copied alone may be a mapped file: it is not
        read. Before tensors with values are changed, operations that read them later get their own.
        """
        written = tensors_in(written_by(function, args, kwargs))
        with_values = [tensor for tensor in written if not tensor.is_meta]
        for tensor in with_values:
            for index in self._borrowers.pop(View.of(tensor).storage, ()):
                self.operations[index] = self.operations[index].with_own_copies()
        if with_values and any(leaf.is_meta for leaf in tensors_in((args, kwargs))):
            raise NotImplementedError(f"{function} changes a tensor that has memory by one that has none")
        if with_values or function is torch.ops.aten.copy_.default:
            return args, kwargs
        kinds = {leaf.is_meta for leaf in tensors_in((args, kwargs)) if leaf.is_meta or leaf.dim()}
        if len(kinds) < 2:
            return args, kwargs

        def without_memory(leaf: Any) -> Any:
            has_values = isinstance(leaf, Tensor) and not leaf.is_meta and leaf.dim()
            return self.constant(leaf.detach().clone()) if has_values else leaf

        lifted: tuple[Any, Any] = mapped(without_memory, (args, kwargs))
        return lifted

    def may_draw(self, args: Any, kwargs: dict[str, Any]) -> bool:
        """Whether an operation that draws does so on the meta device, or from a generator that no other has used."""
        device, generator = kwargs.get("device"), kwargs.get("generator")
        if generator is not None and identity_of(generator) not in (*self.generators, TORCHS):
            check_seed(generator.initial_seed())
            return True
        on_meta = device is not None and device.type == "meta"
        return on_meta or any(tensor.is_meta for tensor in tensors_in((args, kwargs)))

    def _drawn_from(self, kwargs: dict[str, Any]) -> RecordedGenerator | None:
        generator = kwargs.get("generator")
        if self._torch is None or generator is None or identity_of(generator) == TORCHS:
            return self._torch
        if identity_of(generator) not in self.generators:
            self.generators[identity_of(generator)] = RecordedGenerator(generator, self.operations)
        return self.generators[identity_of(generator)]

    def constant(self, value: Tensor) -> Tensor:
        """A meta tensor for a tensor that was made from Python's data: its values are kept as they are."""
        if value.layout != torch.strided:
            raise NotImplementedError(f"a tensor of layout {value.layout} has no memory to be described by")
        meta = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        self.alive.append(meta.untyped_storage())
        self.constants[View.of(meta).storage] = value
        return meta.requires_grad_(value.requires_grad)

    def shared(self, value: Tensor) -> Tensor:
        """The tensor, of which an array of NumPy's has or gets the memory."""
        with _nothing_recorded():
            self._shared.append((value, _bytes_of(value)))
        return value

    def _check_shared(self) -> None:
        """Raises ValueError where NumPy has changed what operations that come later have to find as it was."""
        if any(_bytes_of(value) != held for value, held in self._shared):
            raise ValueError(
                "the model builder changes a NumPy array that shares memory with a tensor (tensor.numpy(), "
                "torch.as_tensor(array)), whose values come later: expected a copy (tensor.numpy().copy(), "
                "torch.tensor(array)), or pass the constructed module to initialize in its place"
            )

    def value_of(self, tensor: Tensor) -> Tensor | None:
        """A meta tensor with its values now; None where they hang on random numbers."""
        view = View.of(tensor)
        needed, operations = {view.storage}, []
        for operation in reversed(self.operations):
            if any(one.storage in needed for one in operation.written):
                if operation.is_random:
                    return None
                operations.append(operation)
                needed.update(one.storage for one in operation.views)
                if operation.filled is not None:  # what it held before may be random
                    needed.discard(operation.filled)
        with _nothing_recorded():
            real = {storage: value.clone() for storage, value in self.constants.items() if storage in needed}
            for operation in reversed(operations):
                operation.run(real)
            return view.of_values(real[view.storage]) if view.storage in real else None

    def computed(self, function: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any] | None:
        """What an operation gives that needs values; None if it changes a meta tensor, or hangs on random numbers."""
        values: dict[int, Tensor] = {}
        for leaf in tensors_in((args, kwargs)):
            if leaf.is_meta:
                value = self.value_of(leaf)
                if value is None:
                    return None
                values[id(leaf)] = value
        if draws(function) or any(id(one) in values for one in tensors_in(written_by(function, args, kwargs))):
            return None
        with _nothing_recorded():
            real = mapped(lambda leaf: values.get(id(leaf), on_cpu(leaf)), (args, kwargs))
            result = function(*real[0], **real[1])
        if function is torch.ops.aten._to_copy.default or function._schema.is_mutable:
            return (result,)  # the caller wants it there
        return (mapped(lambda leaf: self.constant(leaf) if isinstance(leaf, Tensor) else leaf, result),)


def _bytes_of(value: Tensor) -> bytes:
    array: bytes = value.detach().resolve_conj().resolve_neg().numpy().tobytes()
    return array


@contextmanager
def _nothing_recorded() -> Iterator[None]:
    """Operations with values, in the midst of others."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


@contextmanager
def _torch_replaced(owner: Recording) -> Iterator[None]:
    """`trunc_normal_` looks at the values that it draws, and skips meta tensors: it is recorded as one operation.

    Of pickled meta tensors others are made, without values; and what `from_numpy` gives may be changed by NumPy.
    """
    draw, from_numpy = nn.init._no_grad_trunc_normal_, torch.from_numpy
    reduce: Any = Tensor._reduce_ex_internal

    def record(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not tensor.is_meta:
            return draw(tensor, *args, **kwargs)
        owner.record(draw, (tensor, *args), kwargs, tensor, fills=True)
        return tensor

    def pickled(tensor: Tensor, protocol: int) -> Any:
        if tensor.is_meta:
            raise RuntimeError("pickle or copy.copy of a tensor that has none")
        return reduce(tensor, protocol)

    def noted(array: Any) -> Tensor:
        tensor = from_numpy(array)
        owner.of_arrays.add(View.of(tensor).storage)
        owner.alive.append(tensor.untyped_storage())
        return tensor

    nn.init._no_grad_trunc_normal_ = record
    torch.from_numpy = noted  # type: ignore[assignment]
    Tensor._reduce_ex_internal = pickled  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.init._no_grad_trunc_normal_, torch.from_numpy = draw, from_numpy
        Tensor._reduce_ex_internal = reduce  # type: ignore[method-assign]


class _OnMeta(TorchFunctionMode):
    """As `with torch.device("meta")`, but not to be seen: transformers does not initialize where it sees that."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_constructor = func in _CONSTRUCTORS or (func is torch.normal and not tensors_in((args, kwargs)))
        if is_constructor and kwargs.get("device") is None:
            kwargs = {**kwargs, "device": torch.device("meta")}
        return func(*args, **kwargs)


class _DataRecorder(TorchFunctionMode):
    """What is made of Python's data, and what becomes it."""

    def __init__(self, owner: Recording, all_on_meta: bool) -> None:
        super().__init__()
        self.all_on_meta = all_on_meta
        self.num_open = 0  # calls of torch's functions
        self._owner = owner
        self._from_data = _FROM_DATA if all_on_meta else ()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.num_open += 1
        try:
            return self._called(func, args, kwargs)
        finally:
            self.num_open -= 1

    def _called(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if func == _IS_META and _is_asked_by_torch(sys._getframe(2)):
            # orthogonal_, dirac_ and sparse_ do nothing on meta tensors: their operations must be recorded.
            # load_state_dict warns that it does nothing, and does what is recorded.
            return False
        if func in (Tensor.__getitem__, Tensor.__setitem__) and args[0].is_meta:
            return func(args[0], self._index(args[1]), *args[2:])
        if func in _READ_IN_PYTHON and args[0].is_meta:
            value = None if func in (Tensor.apply_, Tensor.map_) else self._owner.value_of(args[0])
            if value is None:
                raise RuntimeError(f"{func.__name__} of a tensor that has none")
            if func is Tensor.tolist:
                return func(value)
            array = func(self._owner.shared(value), *args[1:], **kwargs)
            self._owner.lent[View.of(args[0]).storage] = ref(array)
            return array
        if func == Tensor.__format__ and args[0].is_meta:
            value = self._owner.value_of(args[0])
            if value is None and args[1]:
                raise RuntimeError(f"format '{args[1]}' of a tensor that has none")
            return func(args[0] if value is None else value, args[1])
        if func is Tensor.data_ptr and args[0].is_meta:  # so that tensors of one memory are found
            view = View.of(args[0])
            return view.storage + view.offset * view.dtype.itemsize
        if func is Tensor.new_tensor and args[0].is_meta and self.all_on_meta:
            func, kwargs = torch.tensor, {"dtype": args[0].dtype, **kwargs}
            args = args[1:]
        if func in _MOVES and args[0].is_meta and self.all_on_meta:
            return _moved_nowhere(func, args, kwargs)
        if func == _SET_DATA and args[0].is_meta and not args[1].is_meta:
            return func(args[0], self._owner.constant(args[1].detach()))
        data = next(iter((*args, *kwargs.values())), None)  # by whatever name
        device = kwargs.get("device") or "meta"  # as by device=weight.device
        if func not in self._from_data or torch.device(device).type != "meta" or isinstance(data, Tensor):
            return func(*args, **kwargs)
        args, kwargs = mapped(self._value, (args, kwargs)) if _has_tensors(data) else (args, kwargs)
        value = func(*args, **{**kwargs, "device": "cpu"})
        if not value.numel():
            return value  # nothing to defer; and transformers asks in this way for the default device
        is_own = value.untyped_storage().resizable()  # not of an array of NumPy's
        return self._owner.constant(value if is_own else self._owner.shared(value))

    def _value(self, leaf: Any) -> Any:
        """A number that is a tensor, in a list."""
        if not isinstance(leaf, Tensor) or not leaf.is_meta:
            return leaf
        return leaf.item() if (value := self._owner.value_of(leaf)) is None else value

    def _index(self, index: Any) -> Any:
        """torch makes tensors of lists of numbers where nobody sees it."""
        if isinstance(index, tuple):
            return tuple(map(self._index, index))
        if isinstance(index, list) and index and all(isinstance(one, bool) for one in index):
            index = [place for place, is_taken in enumerate(index) if is_taken]
        is_list = isinstance(index, list) and not any(isinstance(one, Tensor | slice | None) for one in index)
        kind = torch.long if is_list and not index else None
        return self._owner.constant(torch.tensor(index, dtype=kind, device="cpu")) if is_list else index


_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_READ_IN_PYTHON = {Tensor.numpy, Tensor.__array__, Tensor.tolist, Tensor.apply_, Tensor.map_}
"""What reads values and is no operation: on a meta tensor it does nothing, or fails in words of its own."""


_MOVES = {Tensor.to, Tensor.cpu, Tensor.cuda, Tensor.type, Tensor.type_as}


def _moved_nowhere(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """`to`, `cpu` or `cuda` of a tensor whose values come later, and to where the engine has them: a dtype at most."""
    if func in (Tensor.cpu, Tensor.cuda):
        return args[0]
    if isinstance(args[1] if len(args) > 1 else None, Tensor):
        return args[0].to(args[1].dtype)
    if func is Tensor.type:
        kind = next(iter((*args[1:], *kwargs.values())), None)
        kind = getattr(torch, kind.rpartition(".")[2]) if isinstance(kind, str) else kind  # "torch.FloatTensor"
        return func(args[0]) if kind is None else args[0].to(getattr(kind, "dtype", kind))
    copies = kwargs.pop("copy", False)
    _, dtype, _, memory_format = torch._C._nn._parse_to(*args[1:], **kwargs)
    options = {} if memory_format is None else {"memory_format": memory_format}
    return args[0].to(dtype or args[0].dtype, copy=copies, **options)


class _OperationRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, owner: Recording, data: _DataRecorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._owner, self._data = owner, data

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Else torch imports its compiler at the first operation, only to keep it away from here."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, fills = kwargs or {}, func in _FILLS
        if func is torch.ops.aten.empty.memory_format and self._data.all_on_meta and not self._data.num_open:
            kwargs = {**kwargs, "device": torch.device("meta")}  # torch.Tensor(3, 4), which is no function of torch's
        if self._data.all_on_meta and draws(func) and not self._owner.may_draw(args, kwargs):
            raise ValueError(
                f"the model builder draws random numbers ({func}) on a device that it names, while it constructs the "
                "model, where all that was drawn before is only drawn later: leave the device out, give it a "
                "generator, or pass the constructed module to initialize in its place"
            )
        # The kernels of these two for meta tensors import torch's compiler, 105 MiB, and leave the tensor as it is.
        is_certain = func in _CERTAIN and _CERTAIN[func](*args[1:], **kwargs)
        try:
            if self._data.all_on_meta:
                args, kwargs = self._owner.beside_meta(func, args, kwargs)
            result = args[0] if is_certain and args[0].is_meta else func(*args, **kwargs)
        except (NotImplementedError, RuntimeError):
            computed = self._owner.computed(func, args, kwargs)
            if computed is None:
                raise
            return computed[0]
        if not func.is_view:  # a view is described by its storage, and has no values of its own to wait for
            self._owner.record(func, args, kwargs, result, fills)
        return result


def _has_tensors(data: Any) -> bool:
    """Whether a list is one of tensors, by its first: others may be long."""
    while isinstance(data, list | tuple) and data:
        if any(isinstance(one, Tensor) for one in data[:_NUM_LOOKED_AT]):
            return True
        data = data[0]
    return False


def _is_asked_by_torch(frame: FrameType | None) -> bool:
    """Whether torch.nn.init or a module asks, also through a `with torch.device(...)` around the modules."""
    while frame is not None and frame.f_globals is vars(torch.utils._device):
        frame = frame.f_back
    return frame is not None and any(frame.f_globals is vars(one) for one in (nn.init, nn.modules.module))
