"""Parameters of models that are made inside of `zero.Init`: each rank has a part of each.

[Note: open and divided]
A parameter is made whole, by all ranks, as without `zero.Init`: it is open. When there are more bytes of open ones than
`OPEN_BYTES`, the oldest are divided: each rank keeps its part of rank 0's values, and the parameter becomes a
`ReleasedParameter`. Whatever reads or writes it later, in a constructor or after it, opens it again by that class, with
the bits that it had. So it does not matter when a module has finished its own initialization, and a parent may go over
the parameters of its children as often as it likes.

[Note: what other tensors see]
A view of an open parameter, `param.data` too, has the same memory, and may be written to at any time. So a parameter
is not divided while its memory has other users: torch counts them.

[Note: all ranks divide and open the same]
Both are collectives. That parameters are made and read in the same order on all ranks follows from the script, and is
checked each time; whether memory has other users also depends on Python's collector, so the ranks agree on it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any
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
from .owners import mark

OPEN_BYTES = 8 << 20
"""Of parameters that are whole, beside the two newest: a layer's weight and bias are drawn when both are made."""
_NEWEST = 2
_CHUNK_NUMEL = 4 << 20  # of a message

_TABLES = WeakIdKeyDictionary()
"""Parameter -> the `DividedParameters` that have it. As global as `owners._OWNERS` is, for the same reason."""


class _State(StrEnum):
    """Of an open parameter, as one rank sees it."""

    READY = "ready"
    IN_USE = "in use"  # by views, or inside of GatheredParameters
    GONE = "gone"


@dataclass(eq=False)
class _Entry:
    """A parameter and where its values are: in itself while it is open, else the part of this rank in `part`."""

    param: weakref.ref[nn.Parameter]
    number: int  # the same on all ranks
    nbytes: int
    shape: tuple[int, ...]
    part: Tensor | None = None
    num_gathered: int = 0  # contexts of GatheredParameters that it is in
    shown: object = None  # what it was when the outermost of these began
    take_reader: Callable[[], object] | None = None


class DividedParameters:
    """Those that were made in one `zero.Init`. What has collectives says so; all ranks call it."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._entries = WeakIdKeyDictionary()
        self._open: list[_Entry] = []  # by age
        self._num_made = 0
        self._limit = OPEN_BYTES

    def add(self, param: nn.Parameter) -> None:
        """Takes a parameter over that was just made. May divide others, which is a collective."""
        if type(param) is not nn.Parameter or param.is_meta or not param.numel() or param in self._entries:
            return
        entry = _Entry(weakref.ref(param), self._num_made, param.nbytes, tuple(param.shape))
        self._num_made += 1
        self._entries[param] = entry
        _TABLES[param] = self
        mark(param)
        self._open.append(entry)
        self._divide_oldest()

    def divide_all(self) -> None:
        """Divides what is open and not used otherwise. A collective."""
        self._divide(self._open)

    def _divide_oldest(self) -> None:
        if sum(entry.nbytes for entry in self._open) > self._limit:
            self._divide(self._open[:-_NEWEST])
            self._limit = OPEN_BYTES + sum(entry.nbytes for entry in self._open[:-_NEWEST])

    def _divide(self, entries: list[_Entry]) -> None:
        """Of these what no rank uses otherwise. A collective."""
        by_rank = self._agree("divides", entries, [_state_of(entry) for entry in entries])
        for entry, *states in list(zip(entries, *by_rank, strict=True)):
            if set(states) == {_State.READY}:
                self._take_part(entry)
            if set(states) in ({_State.READY}, {_State.GONE}):
                self._open.remove(entry)
        trim_heap()

    def _agree(self, action: str, entries: list[_Entry], own: object = None) -> list[Any]:
        """Of each rank its `own`. Raises UsageError, on all, where they are not at the same place. A collective."""
        place = action, [(entry.number, entry.shape) for entry in entries]
        everyone = self._world.gather_objects((place, own))
        for rank, (theirs, _) in enumerate(everyone):
            if theirs != everyone[0][0]:
                raise UsageError(
                    "zero.Init: expected all ranks to make and use the same parameters in the same order, found that "
                    f"rank 0 {_described(everyone[0][0])} where rank {rank} {_described(theirs)}; what one rank alone "
                    "does to parameters belongs into zero.GatheredParameters(params, modifier_rank=rank)"
                )
        return [one for _, one in everyone]

    def _take_part(self, entry: _Entry, source: int = 0) -> None:
        """Keeps this rank's part of one rank's values. A collective."""
        param = entry.param()
        assert param is not None
        flat = param.detach().reshape(-1)
        start, end = self._span(len(flat))
        entry.shape, entry.nbytes = tuple(param.shape), param.nbytes
        entry.part = _zeros_like(flat, end - start)
        for begin in range(0, len(flat), _CHUNK_NUMEL):
            chunk = self._world.broadcast_tensor(flat[begin : begin + _CHUNK_NUMEL], source)
            low, high = max(start, begin), min(end, begin + len(chunk))
            if low < high:
                entry.part[low - start : high - start].copy_(chunk[low - begin : high - begin])
        del flat
        self._close(entry, param)

    def _close(self, entry: _Entry, param: nn.Parameter) -> None:
        """Leaves the parameter a NaN in its shape."""
        param.data = param.new_full((), torch.nan if param.dtype.is_floating_point else 0).expand(param.shape)
        mark_released([param], [f"of shape {tuple(param.shape)}"])

        def read(is_differentiated: bool, together: Iterable[nn.Parameter]) -> bool:
            self.open([one for one in together if one in self._entries])
            return True

        entry.take_reader = set_reader(param, read)

    def open(self, params: Iterable[nn.Parameter], gathered: bool = False) -> None:
        """Makes them whole. gathered: until `close_gathered`. A collective, where one is divided."""
        entries: list[_Entry] = [self._entries[param] for param in params]
        divided = [entry for entry in entries if entry.part is not None]
        if divided:
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
                entry.shown = _mark(entry.param())

    def close_gathered(self, params: Iterable[nn.Parameter], modifier_rank: int | None) -> None:
        """The end of GatheredParameters, where nothing has failed. A collective.

        modifier_rank: whose values all have from now on. Raises UsageError where it is None and values are changed.
        """
        entries: list[_Entry] = [self._entries[param] for param in params]
        changed = []
        for entry in entries:
            entry.num_gathered -= 1
            if not entry.num_gathered and _mark(entry.param()) != entry.shown:
                changed.append(entry.shape)
        by_rank = self._agree(f"ends GatheredParameters(modifier_rank={modifier_rank}) of", entries, changed)
        if modifier_rank is None:
            for rank, shapes in enumerate(by_rank):
                if shapes:
                    raise UsageError(
                        f"GatheredParameters: expected a modifier_rank, found none, and a parameter of shape "
                        f"{shapes[0]} that was changed inside of it on rank {rank}; pass modifier_rank=RANK, whose "
                        "values all ranks then have"
                    )
            self._divide([entry for entry in self._open if entry in entries])
            return
        for entry in entries:
            if not entry.num_gathered:
                self._take_part(entry, modifier_rank)
                self._open.remove(entry)

    def _whole(self, entry: _Entry, param: nn.Parameter) -> Tensor:
        """A collective."""
        assert entry.part is not None
        flat = _zeros_like(param, param.numel(), self._world.device)
        start, end = self._span(len(flat))
        flat[start:end].copy_(entry.part)
        return self._world.assemble(flat).view(param.shape).to(entry.part.device)

    def _span(self, numel: int) -> tuple[int, int]:
        """This rank's part."""
        rank, size = self._world.rank, self._world.size
        return numel * rank // size, numel * (rank + 1) // size

    def _forget_part(self, entry: _Entry, param: nn.Parameter) -> None:
        entry.part = None
        assert entry.take_reader is not None
        entry.take_reader()
        mark_present([param])

    def is_divided(self, param: nn.Parameter) -> bool:
        return param in self._entries and self._entries[param].part is not None

    def hand_over(self, params: list[nn.Parameter]) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Each with its values, and forgets it. Open ones are forgotten at once. A collective."""
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
        return _State.GONE
    # The parameter itself, and what is asked here.
    num_users: int = torch._C._storage_Use_Count(param.untyped_storage()._cdata)
    is_alone = num_users <= 2 and not entry.num_gathered and type(param) is nn.Parameter and param.is_contiguous()
    return _State.READY if is_alone else _State.IN_USE


def _zeros_like(values: Tensor, numel: int, device: torch.device | None = None) -> Tensor:
    """(numel,) of the same type. On the host it is no part of the heap, which what comes and goes would tear up."""
    device = values.device if device is None else device
    if device.type == "cpu" and numel:
        return allocate_host(numel * values.element_size()).view(values.dtype)
    return torch.zeros(numel, dtype=values.dtype, device=device)


def _mark(param: nn.Parameter | None) -> object:
    """What tells whether values have changed."""
    if param is None:
        return None
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(param.element_size(), torch.uint8)
    return param.data_ptr(), param._version, int(param.detach().reshape(-1).view(words).sum())


def _described(place: Any) -> str:
    action, entries = place
    shown = ", ".join(f"number {number} of shape {shape}" for number, shape in entries[:3])
    return f"{action} {shown or 'nothing'}{', ...' if len(entries) > 3 else ''}"


def table_of(param: nn.Parameter) -> DividedParameters | None:
    """Those that have the parameter, divided or not."""
    found: DividedParameters | None = _TABLES[param] if param in _TABLES else None  # noqa: SIM401  (it has no types)
    return found


class _Maker:
    """Stands for `nn.Parameter.__new__` inside of `zero.Init`: what this thread makes is taken over."""

    def __init__(self, make: Callable[..., nn.Parameter], table: DividedParameters) -> None:
        self._make = make
        self._table = table
        self._thread = threading.get_ident()

    def __call__(self, *args: Any, **kwargs: Any) -> nn.Parameter:
        made = self._make(*args, **kwargs)
        if threading.get_ident() == self._thread:
            self._table.add(made)
        return made


def is_dividing() -> bool:
    """Whether this is inside of `dividing`."""
    return isinstance(nn.Parameter.__new__, _Maker)


@contextmanager
def dividing(table: DividedParameters) -> Iterator[None]:
    """A context in which parameters that are made are taken over; inside of another one, by that one."""
    if is_dividing():
        yield
        return
    with mock.patch.object(nn.Parameter, "__new__", _Maker(nn.Parameter.__new__, table)):
        yield
    table.divide_all()


@contextmanager
def not_dividing() -> Iterator[None]:
    """A context inside of `dividing` in which parameters are made as ever."""
    maker = nn.Parameter.__new__
    made = maker._make if isinstance(maker, _Maker) else maker
    with mock.patch.object(nn.Parameter, "__new__", staticmethod(made)):
        yield


class DividedModel(LaterModel):
    """A model of which parameters are divided, for an engine."""

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
                    mark_present([param])  # with the NaN that it has: who builds an engine asks for shapes alone

    @property
    def is_divided(self) -> bool:
        return bool(self._tables)

    def restore(self) -> None:
        """What no engine has taken is divided as before."""
        for table, params in self._tables.values():
            divided = [param for param in params if table.is_divided(param)]
            mark_released(divided, [f"of shape {tuple(param.shape)}" for param in divided])

    def values(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        for table, params in self._tables.values():
            yield from table.hand_over(params)


class Init:
    """A context, or a call with a module, in which parameters are divided over the ranks as they are made.

    A part of each stays on each rank's host, and `initialize` takes it. The values are rank 0's, with the bits that
    they have without this context. Reading or changing a divided parameter opens it for a while, on all ranks together;
    what one rank alone does to it belongs into `GatheredParameters(..., modifier_rank=...)`. With a config whose stage
    is not 3 nothing is divided.
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
        """module: one that is made already, whose parameters are divided now. config_dict_or_path, config: tells the
        stage; None: 3. dtype: of the parameters that are made; None: as they are.

        mem_efficient_linear, remote_device, pin_memory, zero_param_parallel_group and tensor_overrides have no effect:
        parts are where the parameters were made, and later where the config says. Raises NotImplementedError for groups
        of some of the ranks, quantized weights and a param_swapper.
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
                    f"{comm.get_world_size(group)}; parameters are divided over all of them: leave it out"
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
    """This process among those of `comm.init_distributed`."""
    return World.join(get_accelerator().device_name(), comm.DEFAULT_TIMEOUT.total_seconds())


def _refuse(name: str, value: Any) -> None:
    if value:
        raise NotImplementedError(
            f"zero.Init: expected no {name}, found {value!r}: weights are divided as they are; leave it out"
        )
