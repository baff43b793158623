"""A dispatch mode that counts live bytes, products and memory traffic of operations."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..model.model_flops import attention_formulas
from .profile import CollectiveCall, Operation

_aten = torch.ops.aten
_IS_CAUSAL = {  # attention -> index of the argument `is_causal`, which halves the operations
    _aten._scaled_dot_product_flash_attention: 4,
    _aten._scaled_dot_product_flash_attention_for_cpu: 4,
    _aten._scaled_dot_product_efficient_attention: 6,
    _aten._scaled_dot_product_flash_attention_backward: 11,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: 7,
    _aten._scaled_dot_product_efficient_attention_backward: 11,
}
_ONLY_ALLOCATE = (_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided)


class OperationCounts:
    """Operations since `Tracker.begin`."""

    def __init__(self) -> None:
        self.flops = self.traffic = 0
        self.exchanges: list[CollectiveCall] = []
        self._calls: dict[tuple[str, str, int], int] = {}

    def add(self, name: str, dtype: str, size: int, count: int = 1) -> None:
        key = (name, dtype, size)
        self._calls[key] = self._calls.get(key, 0) + count

    @property
    def operations(self) -> tuple[Operation, ...]:
        return tuple(Operation(*key, count) for key, count in self._calls.items())


_Sizes = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
Results = dict[Any, tuple[bool, list[_Sizes]]]
"""Sizes of known results, by operation and arguments: (whether the result is a single tensor, sizes of its tensors)."""


def _result_of(func: Any, args: Any, kwargs: Any, known: Results) -> Any:
    """Run an operation on meta tensors. Results for known arguments are made from their sizes alone.

    Torch infers the sizes of some operations in Python, which takes a hundred times as long.
    """
    # The schema of _unsafe_view denies that it returns a view.
    if func is _aten._unsafe_view.default or not _makes_new(func):
        return func(*args, **kwargs)
    key = (func, _key(args), _key(tuple(kwargs.items())))
    if key in known:
        is_tensor, sizes = known[key]
        made = [torch.empty_strided(*size, dtype=dtype, device="meta") for *size, dtype in sizes]
        return made[0] if is_tensor else tuple(made)
    result = func(*args, **kwargs)
    outputs = [result] if isinstance(result, Tensor) else result
    given = {id(tensor.untyped_storage()) for tensor in tensors_of((args, kwargs))}
    is_view = any(id(tensor.untyped_storage()) in given for tensor in tensors_of(outputs))
    if not is_view and all(isinstance(output, Tensor) and output.is_meta for output in outputs):
        sizes = [(tuple(output.shape), output.stride(), output.dtype) for output in outputs]
        known[key] = isinstance(result, Tensor), sizes
    return result


@cache
def _makes_new(func: Any) -> bool:
    """Return whether an operation returns tensors only, none of them a view of an argument."""
    schema = func._schema
    has_no_alias = all(value.alias_info is None for value in (*schema.arguments, *schema.returns))
    return has_no_alias and bool(schema.returns) and all(str(value.type) == "Tensor" for value in schema.returns)


def _key(value: Any) -> Any:
    """Return a hashable key of an argument: sizes of tensors, and numbers with their types, since 1 == 1.0."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.stride(), value.dtype, value.device.type
    if isinstance(value, list | tuple):
        return tuple(map(_key, value))
    return type(value), value


class Tracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts bytes of live storages, their peak since `begin`, and operations since `begin`."""

    def __init__(self, known: Sequence[Tensor], results: Results | None = None) -> None:
        """known: tensors that do not count. results: of operations that have run, to be extended; None: run each."""
        super().__init__()  # type: ignore[no-untyped-call]
        from torch.utils.flop_counter import flop_registry  # takes half a second

        self._results = results
        self._formulas: Mapping[Any, Callable[..., int]] = {**flop_registry, **attention_formulas()}
        self._seen: dict[int, weakref.ref[Any]] = {}
        self.live = self.peak = 0
        self.held = self.holding_peak = 0  # bytes of gradients that a pipeline would keep, and the peak with them
        self.counts = OperationCounts()
        for tensor in known:
            self.leave_out(tensor)

    def begin(self) -> int:
        """Restart the peak and the operations. Return the live bytes."""
        self.peak, self.counts = self.live, OperationCounts()
        self.held, self.holding_peak = 0, self.live
        return self.live

    def begin_peak(self) -> int:
        """Return the peak so far. The next peak starts with the next allocation."""
        # Zero, not `live`: memory that is live now belongs to the phase before, as `begin_gradient` explains.
        peak, self.peak = self.peak, 0
        return peak

    def leave_out(self, tensor: Tensor) -> None:
        """Do not count a storage."""
        storage = tensor.untyped_storage()
        # It may have been counted: inputs exist before the tracker is told to leave them out.
        if id(storage) in self._seen:
            self.live -= storage.nbytes()
        self._seen[id(storage)] = weakref.ref(storage, partial(self._forget, id(storage), 0))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _aten._local_scalar_dense.default and args[0].dtype == torch.bool:
            return True  # [Note: conditions] in `meta_run.py`
        result = func(*args, **kwargs) if self._results is None else _result_of(func, args, kwargs, self._results)
        outputs = [result] if isinstance(result, Tensor) else tensors_of(result)
        made = [self._see(output.untyped_storage()) for output in outputs]
        packet = func._overloadpacket
        formula = self._formulas.get(packet)
        if formula is not None:
            flops = formula(*args, **kwargs, out_val=result)
            place = _IS_CAUSAL.get(packet)
            # With a causal mask a token attends to half of the tokens on average.
            flops = flops // 2 if place is not None and len(args) > place and args[place] else flops
            self.counts.flops += flops
            self._called_product(packet, flops, outputs)
            return result
        nbytes = 0
        # An operation that makes no storage and writes nothing is a view: it moves no bytes.
        if (any(made) or func._schema.is_mutable) and packet not in _ONLY_ALLOCATE:
            read = args[1:] if packet is _aten.embedding else args  # only some rows of the table are read
            # An in-place result is counted as argument and as output: it is read and written.
            nbytes = sum(tensor.nbytes for tensor in (*_given(read), *_given(kwargs.values()), *outputs))
            self.counts.traffic += nbytes
        if nbytes:
            self.counts.add(_name_of(packet), _dtype_of(outputs), nbytes)
        else:
            self.counts.add("view", "", 0)
        return result

    def _called_product(self, packet: Any, flops: int, outputs: Sequence[Tensor]) -> None:
        """Count a product. The matrices of a batch count one by one: a core's speed depends on the size of each."""
        name, dtype, count = _product_name(packet), _dtype_of(outputs), 1
        if name == "bmm" and outputs:
            count = outputs[0].shape[0]
        self.counts.add(name, dtype, flops // max(1, count), count)

    def _see(self, storage: torch.UntypedStorage) -> bool:
        """Count a storage if it is new. Return whether it is."""
        key = id(storage)
        if key in self._seen:
            return False
        nbytes = storage.nbytes()
        # torch keeps a Python object for a storage as long as the storage lives, so its id names the storage.
        self._seen[key] = weakref.ref(storage, partial(self._forget, key, nbytes))
        self.live += nbytes
        self.peak = max(self.peak, self.live)
        self.holding_peak = max(self.holding_peak, self.live + self.held)
        return True

    def _forget(self, key: int, nbytes: int, _: Any) -> None:
        self._seen.pop(key, None)
        self.live -= nbytes


def tensors_of(value: Any) -> list[Tensor]:
    leaves = tree_leaves(dict(value) if isinstance(value, Mapping) else value)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _given(arguments: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors in an operation's arguments. torch's pytree would double the time of a profile."""
    for argument in arguments:
        if isinstance(argument, Tensor):
            yield argument
        elif isinstance(argument, list | tuple):
            yield from _given(argument)


@cache
def _name_of(packet: Any) -> str:
    return str(packet).removeprefix("aten.").rstrip("_")


def _product_name(packet: Any) -> str:
    """Return mm, bmm, attention or attention backward, for the many products of torch."""
    name = str(packet)
    if "attention" in name:
        return "attention backward" if "backward" in name else "attention"
    return "bmm" if "bmm" in name else "mm"


def _dtype_of(tensors: Sequence[Tensor]) -> str:
    return _name_of_dtype(tensors[0].dtype) if tensors else ""


@cache
def _name_of_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
