"""What operations do while tensors come and go: bytes that are alive, products, bytes that are moved."""

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
_IS_CAUSAL = {  # attention -> which argument says that half of it is not computed
    _aten._scaled_dot_product_flash_attention: 4,
    _aten._scaled_dot_product_flash_attention_for_cpu: 4,
    _aten._scaled_dot_product_efficient_attention: 6,
    _aten._scaled_dot_product_flash_attention_backward: 11,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: 7,
    _aten._scaled_dot_product_efficient_attention_backward: 11,
}
_ONLY_ALLOCATE = (*(_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided),)


class Done:
    """What operations did."""

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


class Results:
    """Of operations on tensors without memory: what was made of such arguments before is made again by its sizes alone.

    Torch finds the sizes of some operations in Python, at a hundred times the cost.
    """

    def __init__(self) -> None:
        self._makes_new: dict[Any, bool] = {}
        self._known: dict[Any, tuple[bool, list[_Sizes]]] = {}

    def of(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func not in self._makes_new:
            self._makes_new[func] = _makes_new(func)
        if not self._makes_new[func]:
            return func(*args, **kwargs)
        key = (func, _key(args), _key(tuple(kwargs.items())))
        if key in self._known:
            is_one, sizes = self._known[key]
            made = [torch.empty_strided(*size, dtype=dtype, device="meta") for *size, dtype in sizes]
            return made[0] if is_one else tuple(made)
        result = func(*args, **kwargs)
        outputs = [result] if isinstance(result, Tensor) else result
        given = {id(one.untyped_storage()) for one in tensors_of((args, kwargs))}
        if any(id(one.untyped_storage()) in given for one in tensors_of(outputs)):  # _unsafe_view says that it does not
            self._makes_new[func] = False
        elif all(isinstance(one, Tensor) and one.is_meta for one in outputs):
            sizes = [(tuple(one.shape), one.stride(), one.dtype) for one in outputs]
            self._known[key] = isinstance(result, Tensor), sizes
        return result


_Sizes = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]


def _makes_new(func: Any) -> bool:
    """Whether all that it returns are tensors, and nothing of it lies in what it was given."""
    schema = func._schema
    plain = all(one.alias_info is None for one in (*schema.arguments, *schema.returns))
    return plain and bool(schema.returns) and all(str(one.type) == "Tensor" for one in schema.returns)


def _key(value: Any) -> Any:
    """Of an argument: sizes of tensors, and numbers with their types, since 1 and 1.0 are equal."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.stride(), value.dtype, value.device.type
    if isinstance(value, list | tuple):
        return tuple(map(_key, value))
    return type(value), value


class Tracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of storages that are alive, the most of them since `begin`, and what operations do since then."""

    def __init__(self, known: Sequence[Tensor], results: Results | None = None) -> None:
        """known: storages that do not count. results: of operations without memory; None: each is made."""
        super().__init__()  # type: ignore[no-untyped-call]
        from torch.utils.flop_counter import flop_registry  # takes half a second

        self._results = results
        self._formulas: Mapping[Any, Callable[..., int]] = {**flop_registry, **attention_formulas()}
        self._seen: dict[int, weakref.ref[Any]] = {}
        self.live = self.peak = 0
        self.held = self.holding_peak = 0  # bytes that somebody would hold, and the most with them
        self.done = Done()
        for tensor in known:
            self.leave_out(tensor)

    def begin(self) -> int:
        """Counts anew; gives what is alive."""
        self.peak, self.done = self.live, Done()
        self.held, self.holding_peak = 0, self.live
        return self.live

    def begin_peak(self) -> int:
        """Looks for the most when anything is made from now on; gives the most up to now."""
        peak, self.peak = self.peak, 0
        return peak

    def leave_out(self, tensor: Tensor) -> None:
        """A storage that does not count."""
        storage = tensor.untyped_storage()
        if id(storage) in self._seen:
            self.live -= storage.nbytes()
        self._seen[id(storage)] = weakref.ref(storage, partial(self._forget, id(storage), 0))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _aten._local_scalar_dense.default and args[0].dtype == torch.bool:
            return True  # [Note: conditions] in `meta_run.py`
        result = func(*args, **kwargs) if self._results is None else self._results.of(func, args, kwargs)
        outputs = [result] if isinstance(result, Tensor) else tensors_of(result)
        made = [self._see(one.untyped_storage()) for one in outputs]
        packet = func._overloadpacket
        formula = self._formulas.get(packet)
        if formula is not None:
            flops = formula(*args, **kwargs, out_val=result)
            place = _IS_CAUSAL.get(packet)
            flops = flops // 2 if place is not None and len(args) > place and args[place] else flops
            self.done.flops += flops
            self._called_product(packet, flops, outputs)
            return result
        nbytes = 0
        if (any(made) or func._schema.is_mutable) and packet not in _ONLY_ALLOCATE:
            read = args[1:] if packet is _aten.embedding else args  # of a table only some rows
            nbytes = sum(one.nbytes for one in (*_given(read), *_given(kwargs.values()), *outputs))
            self.done.traffic += nbytes
        if nbytes:
            self.done.add(_name_of(packet), _dtype_of(outputs), nbytes)
        else:
            self.done.add("view", "", 0)
        return result

    def _called_product(self, packet: Any, flops: int, outputs: Sequence[Tensor]) -> None:
        """Matrices of a batch are counted one by one: what a core reaches depends on the size of each."""
        name, dtype, count = _product_name(packet), _dtype_of(outputs), 1
        if name == "bmm" and outputs:
            count = outputs[0].shape[0]
        self.done.add(name, dtype, flops // max(1, count), count)

    def _see(self, storage: torch.UntypedStorage) -> bool:
        """Whether it was not there before."""
        key = id(storage)
        if key in self._seen:
            return False
        nbytes = storage.nbytes()
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
    return [one for one in leaves if isinstance(one, Tensor)]


def _given(arguments: Iterable[Any]) -> Iterator[Tensor]:
    """Of an operation, which takes tensors and lists of them; without torch's trees, which cost as much as all else."""
    for one in arguments:
        if isinstance(one, Tensor):
            yield one
        elif isinstance(one, list | tuple):
            yield from _given(one)


@cache
def _name_of(packet: Any) -> str:
    return str(packet).removeprefix("aten.").rstrip("_")


def _product_name(packet: Any) -> str:
    """mm, bmm, attention or attention backward, for what torch has many of."""
    name = str(packet)
    if "attention" in name:
        return "attention backward" if "backward" in name else "attention"
    return "bmm" if "bmm" in name else "mm"


def _dtype_of(tensors: Sequence[Tensor]) -> str:
    return _name_of_dtype(tensors[0].dtype) if tensors else ""


@cache
def _name_of_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
