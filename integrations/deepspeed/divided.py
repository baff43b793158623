"""Parameters of models built inside `zero.Init`: each rank keeps a part of each.

[Note: open and divided]
A new parameter is open: whole on all ranks, as without `zero.Init`. When the open parameters exceed `OPEN_BYTES`, the
oldest are divided: each rank keeps its part of rank 0's values, and the parameter becomes a `ReleasedParameter`. Any
later read or write, in a constructor or after it, opens the parameter again through that class, with the same bits. So
a module need not say when its initialization is done, and a parent may change its children's parameters.

[Note: views]
A view of an open parameter, such as `param.data`, shares its memory and may be written at any time. So a parameter is
not divided while its storage has further users. torch counts them.

[Note: collectives]
Dividing and opening are collectives. All ranks run the same script, so they make and read parameters in the same order;
each collective checks this. Whether a storage has further users also depends on Python's garbage collector, so the
ranks agree on it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from ..comm import World
from ..engine.model.deferred import LaterModel
from ..offload import allocate_host, trim_heap
from ..zero.released import mark_present, mark_released, set_reader
from . import comm
from .accelerator import get_accelerator
from .config import DeepSpeedConfig
from .messages import UsageError, logger
from .owners import set_ds_attributes

OPEN_BYTES = 8 << 20  # limit of open parameters
_NEWEST = 2  # always stay open: a layer draws its weight and bias after making both
_CHUNK_NUMEL = 4 << 20  # of a message

# Parameter -> the `DividedParameters` that has it. Global like `owners._OWNERS`: scripts pass parameters alone.
_TABLES = WeakIdKeyDictionary()

_State = Literal["ready", "in use", "gone"]  # of an open parameter on a rank; views or GatheredParameters use it


@dataclass(eq=False)
class _Entry:
    """A parameter and its values: in the parameter while it is open, else this rank's `part`."""

    param: weakref.ref[nn.Parameter]
    number: int  # the same on all ranks
    nbytes: int
    shape: tuple[int, ...]
    part: Tensor | None = None
    num_gathered: int = 0  # open contexts of GatheredParameters
    fingerprint: object = None  # `_fingerprint` at the start of the outermost of these contexts
    remove_reader: Callable[[], object] | None = None


class DividedParameters:
    """The parameters made in a `zero.Init`. All ranks must call methods marked as collectives."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._entries = WeakIdKeyDictionary()
        self._open: list[_Entry] = []  # by age
        self._num_made = 0
        self._limit = OPEN_BYTES

    def add(self, param: nn.Parameter) -> None:
        """Register a new parameter. May divide older parameters: a collective."""
        # A subclass may store its values in another way, and a parameter without values has nothing to divide.
        if type(param) is not nn.Parameter or param.is_meta or not param.numel() or param in self._entries:
            return
        entry = _Entry(weakref.ref(param), self._num_made, param.nbytes, tuple(param.shape))
        self._num_made += 1
        self._entries[param] = entry
        _TABLES[param] = self
        set_ds_attributes(param)
        self._open.append(entry)
        self._divide_oldest()

    def divide_all(self) -> None:
        """Divide all open parameters without further users. A collective."""
        self._divide(self._open)

    def _divide_oldest(self) -> None:
        if sum(entry.nbytes for entry in self._open) > self._limit:
            self._divide(self._open[:-_NEWEST])
            # Parameters in use stay open. With the plain limit, each new parameter would try again, by a collective.
            self._limit = OPEN_BYTES + sum(entry.nbytes for entry in self._open[:-_NEWEST])

    def _divide(self, entries: list[_Entry]) -> None:
        """Divide the entries that no rank uses otherwise. A collective."""
        by_rank = self._agree("divides", entries, [_state_of(entry) for entry in entries])
        for entry, *states in list(zip(entries, *by_rank, strict=True)):
            if set(states) == {"ready"}:
                self._take_part(entry)
            if set(states) in ({"ready"}, {"gone"}):
                self._open.remove(entry)
        # Without it the C library keeps the memory of the freed values.
        trim_heap()

    def _agree(self, action: str, entries: list[_Entry], own: object = None) -> list[Any]:
        """Return each rank's `own`. Raises UsageError on all ranks if their actions or entries differ. A collective."""
        place = action, [(entry.number, entry.shape) for entry in entries]
        everyone = self._world.gather_objects((place, own))
        for rank, (theirs, _) in enumerate(everyone):
            if theirs != everyone[0][0]:
                raise UsageError(
                    "zero.Init: expected all ranks to make and use the same parameters in the same order, but rank 0 "
                    f"{_described(everyone[0][0])} while rank {rank} {_described(theirs)}. Change parameters on one "
                    "rank only inside zero.GatheredParameters(params, modifier_rank=rank)"
                )
        return [value for _, value in everyone]

    def _take_part(self, entry: _Entry, source: int = 0) -> None:
        """Keep this rank's part of the values of rank `source`. A collective."""
        param = entry.param()
        assert param is not None
        flat = param.detach().reshape(-1)
        start, end = self._span(len(flat))
        entry.shape, entry.nbytes = tuple(param.shape), param.nbytes
        entry.part = _zeros_like(flat, end - start)
        # In chunks: a message exists beside the parameter.
        for begin in range(0, len(flat), _CHUNK_NUMEL):
            chunk = self._world.broadcast_tensor(flat[begin : begin + _CHUNK_NUMEL], source)
            low, high = max(start, begin), min(end, begin + len(chunk))
            if low < high:
                entry.part[low - start : high - start].copy_(chunk[low - begin : high - begin])
        # It is a view of the values: `_close` frees them only if nothing refers to them.
        del flat
        self._close(entry, param)

    def _close(self, entry: _Entry, param: nn.Parameter) -> None:
        """Leave an expanded NaN (0 for integers) in the parameter."""
        param.data = param.new_full((), torch.nan if param.dtype.is_floating_point else 0).expand(param.shape)
        mark_released([param], [f"of shape {tuple(param.shape)}"])

        def read(is_differentiated: bool, together: Iterable[nn.Parameter]) -> bool:
            self.open([param for param in together if param in self._entries])
            return True

        entry.remove_reader = set_reader(param, read)

    def open(self, params: Iterable[nn.Parameter], gathered: bool = False) -> None:
        """Make parameters whole. gathered: until `close_gathered`. A collective if any is divided."""
        entries: list[_Entry] = [self._entries[param] for param in params]
        divided = [entry for entry in entries if entry.part is not None]
        if divided:
            # Make room first: the parameters below will be open.
            self._divide_oldest()
            self._agree("opens", divided)
        for entry in divided:
            param = entry.param()
            assert param is not None
            whole = self._whole(entry, param)
            self._forget_part(entry, param)
            param.data = whole
            self._open.append(entry)
        for entry in entries if gathered else ():
            entry.num_gathered += 1
            if entry.num_gathered == 1:
                entry.fingerprint = _fingerprint(entry.param())

    def close_gathered(self, params: Iterable[nn.Parameter], modifier_rank: int | None) -> None:
        """End GatheredParameters without an error. A collective.

        modifier_rank: all ranks take its values. If None, raises UsageError for changed values.
        """
        entries: list[_Entry] = [self._entries[param] for param in params]
        changed = []
        for entry in entries:
            entry.num_gathered -= 1
            if not entry.num_gathered and _fingerprint(entry.param()) != entry.fingerprint:
                changed.append(entry.shape)
        by_rank = self._agree(f"ends GatheredParameters(modifier_rank={modifier_rank}) of", entries, changed)
        if modifier_rank is None:
            for rank, shapes in enumerate(by_rank):
                if shapes:
                    raise UsageError(
                        f"GatheredParameters: a parameter of shape {shapes[0]} was changed on rank {rank} without a "
                        "modifier_rank. Pass modifier_rank=RANK: all ranks then take the values of that rank"
                    )
            self._divide([entry for entry in self._open if entry in entries])
            return
        for entry in entries:
            if not entry.num_gathered:
                self._take_part(entry, modifier_rank)
                self._open.remove(entry)

    def _whole(self, entry: _Entry, param: nn.Parameter) -> Tensor:
        """Assemble the full values from all ranks' parts. A collective."""
        assert entry.part is not None
        flat = _zeros_like(param, param.numel(), self._world.device)
        start, end = self._span(len(flat))
        flat[start:end].copy_(entry.part)
        return self._world.assemble(flat).view(param.shape).to(entry.part.device)

    def _span(self, numel: int) -> tuple[int, int]:
        """Return [start, end) of this rank's part."""
        rank, size = self._world.rank, self._world.size
        # Parts differ by at most an element, and together they are the whole.
        return numel * rank // size, numel * (rank + 1) // size

    def _forget_part(self, entry: _Entry, param: nn.Parameter) -> None:
        entry.part = None
        assert entry.remove_reader is not None
        entry.remove_reader()
        mark_present([param])

    def is_divided(self, param: nn.Parameter) -> bool:
        return param in self._entries and self._entries[param].part is not None

    def hand_over(self, params: list[nn.Parameter]) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield each parameter with its values, and forget it; open parameters are only forgotten. A collective."""
        entries: list[_Entry] = [self._entries[param] for param in params]
        self._agree("initializes an engine with", entries)
        for entry in entries:
            param = entry.param()
            assert param is not None
            if entry.part is not None:
                whole = self._whole(entry, param)
                self._forget_part(entry, param)
                yield param, whole
            else:
                self._open.remove(entry)
            del self._entries[param], _TABLES[param]


def _state_of(entry: _Entry) -> _State:
    param = entry.param()
    if param is None:
        return "gone"
    # 2: the parameter itself, and the storage object in this expression.
    num_users: int = torch._C._storage_Use_Count(param.untyped_storage()._cdata)
    is_alone = num_users <= 2 and not entry.num_gathered and type(param) is nn.Parameter and param.is_contiguous()
    return "ready" if is_alone else "in use"


def _zeros_like(values: Tensor, numel: int, device: torch.device | None = None) -> Tensor:
    """Return zeros of shape (numel,) and the dtype of `values`."""
    device = values.device if device is None else device
    if device.type == "cpu" and numel:  # outside the heap: short-lived tensors would fragment it
        return allocate_host(numel * values.element_size()).view(values.dtype)
    return torch.zeros(numel, dtype=values.dtype, device=device)


def _fingerprint(param: nn.Parameter | None) -> object:
    """Return an object that differs if the values have changed."""
    if param is None:
        return None
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(param.element_size(), torch.uint8)
    # `_version` does not see writes through `.data`, and the pointer does not see writes in place. The sum sees most.
    return param.data_ptr(), param._version, int(param.detach().reshape(-1).view(words).sum())


def _described(place: Any) -> str:
    action, entries = place
    shown = ", ".join(f"number {number} of shape {shape}" for number, shape in entries[:3])
    return f"{action} {shown or 'nothing'}{', ...' if len(entries) > 3 else ''}"


def table_of(param: nn.Parameter) -> DividedParameters | None:
    """Return the table of a parameter, divided or open."""
    found: DividedParameters | None = _TABLES[param] if param in _TABLES else None  # noqa: SIM401  (it has no types)
    return found


class _Maker:
    """Replaces `nn.Parameter.__new__` inside `zero.Init`: registers parameters that this thread makes."""

    def __init__(self, make: Callable[..., nn.Parameter], table: DividedParameters) -> None:
        self._make = make
        self._table = table
        self._thread = threading.get_ident()

    def __call__(self, *args: Any, **kwargs: Any) -> nn.Parameter:
        made = self._make(*args, **kwargs)
        # Dividing is a collective, and a second thread makes parameters at any time.
        if threading.get_ident() == self._thread:
            self._table.add(made)
        return made


def is_dividing() -> bool:
    """Return whether `dividing` is active."""
    return isinstance(nn.Parameter.__new__, _Maker)


@contextmanager
def dividing(table: DividedParameters) -> Iterator[None]:
    """Open a context that registers new parameters in the table. Inside such a context, do nothing."""
    if is_dividing():
        yield
        return
    with mock.patch.object(nn.Parameter, "__new__", _Maker(nn.Parameter.__new__, table)):
        yield
    table.divide_all()


@contextmanager
def not_dividing() -> Iterator[None]:
    """Open a context, inside `dividing`, that makes parameters as usual."""
    maker = nn.Parameter.__new__
    made = maker._make if isinstance(maker, _Maker) else maker
    with mock.patch.object(nn.Parameter, "__new__", staticmethod(made)):
        yield


class DividedModel(LaterModel):
    """A model with divided parameters, for an engine."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.random_state = None
        self.given = []
        self._tables: dict[int, tuple[DividedParameters, list[nn.Parameter]]] = {}
        for param in module.parameters():
            table = table_of(param)
            if table is not None:
                self._tables.setdefault(id(table), (table, []))[1].append(param)
            if table is None or not table.is_divided(param):
                self.given.append(param)
        for table, params in self._tables.values():
            for param in params:
                if table.is_divided(param):
                    mark_present([param])  # with its NaN: building an engine needs only the shape

    @property
    def is_divided(self) -> bool:
        return bool(self._tables)

    def restore(self) -> None:
        """Mark the parameters that no engine has taken as divided again."""
        for table, params in self._tables.values():
            divided = [param for param in params if table.is_divided(param)]
            mark_released(divided, [f"of shape {tuple(param.shape)}" for param in divided])

    def values(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        for table, params in self._tables.values():
            yield from table.hand_over(params)


class Init:
    """A context, or a call with a module, that divides parameters over the ranks as they are made.

    Each rank keeps a part of each parameter in its host memory until `initialize` takes it. The values are rank 0's,
    with the same bits as without this context. Reading or changing a divided parameter opens it for a while, on all
    ranks together. Change it on one rank only inside `GatheredParameters(..., modifier_rank=...)`. If the config's
    stage is not 3, nothing is divided.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        zero_param_parallel_group: Any = None,
        zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False,
        sequence_data_parallel_group: Any = None,
        param_swapper: Any = None,
        tensor_overrides: Any = None,
    ) -> None:
        """module: a built module, to divide now. config_dict_or_path, config: give the stage; None:
        stage 3. dtype: of new parameters; None: as the script makes them.

        mem_efficient_linear, remote_device, pin_memory, zero_param_parallel_group and tensor_overrides have no effect:
        parts stay on the device of the parameters, and later on the config's. Raises NotImplementedError for
        groups of some of the ranks, quantized weights and a param_swapper.
        """
        self._context = ExitStack()
        self._dtype = dtype if enabled else None
        self._divides = False
        if not enabled:
            return
        comm.init_distributed()
        self._check_groups(data_parallel_group, sequence_data_parallel_group)
        _refuse("zero_quantized_weights", zero_quantized_weights)
        _refuse("zero_quantized_nontrainable_weights", zero_quantized_nontrainable_weights)
        _refuse("param_swapper", param_swapper)
        given = config if config is not None else config_dict_or_path
        self._divides = given is None or DeepSpeedConfig(given, mpu).stage == 3
        if not self._divides:
            logger.info("zero.Init: the config's stage is not 3, and nothing is divided")
        elif module is not None:
            table = _new_table()
            for param in module.parameters():
                table.add(param)
            table.divide_all()

    def _check_groups(self, *groups: Any) -> None:
        for group in groups:
            if group is not None and comm.get_world_size(group) != comm.get_world_size():
                raise NotImplementedError(
                    f"zero.Init: expected a data_parallel_group of all {comm.get_world_size()} ranks, found one of "
                    f"{comm.get_world_size(group)}. Parameters are divided over all ranks: leave it out"
                )

    def __enter__(self) -> Init:
        with ExitStack() as stack:
            if self._dtype is not None:
                stack.callback(torch.set_default_dtype, torch.get_default_dtype())
                torch.set_default_dtype(self._dtype)
            if self._divides:
                stack.enter_context(dividing(_new_table()))
            self._context = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)


def _new_table() -> DividedParameters:
    return DividedParameters(join_world())


def join_world() -> World:
    """Return this process's `World`: the processes of `comm.init_distributed`."""
    return World.join(get_accelerator().device_name(), comm.DEFAULT_TIMEOUT.total_seconds())


def _refuse(name: str, value: Any) -> None:
    if value:
        raise NotImplementedError(
            f"zero.Init: expected no {name}, found {value!r}. Weights are divided in their dtype: leave it out"
        )
