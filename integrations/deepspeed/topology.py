"""`deepspeed.runtime.pipe.topology`: map ranks to coordinates on named axes.

Also `deepspeed.utils.groups`: all ranks are data-parallel.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Sequence
from itertools import product
from typing import Any

from . import comm


class ProcessTopology:
    """A grid of ranks in the order of their coordinates, the last axis fastest."""

    def __init__(self, axes: Sequence[str], dims: Sequence[int]) -> None:
        self.axes = list(axes)
        self.dims = list(dims)
        self.ProcessCoord = namedtuple("ProcessCoord", self.axes)  # type: ignore[misc]  # its fields are data
        coords = product(*map(range, self.dims))
        make: Any = self.ProcessCoord
        self.mapping: dict[Any, int] = {make(*coord): rank for rank, coord in enumerate(coords)}

    def get_rank(self, **coord_kwargs: int) -> int:
        """Return the rank of a full coordinate. Raises ValueError if an axis is missing or the rank does not exist."""
        if set(coord_kwargs) != set(self.axes):
            raise ValueError(
                f"get_rank: expected a number for each of {self.axes}, found {sorted(coord_kwargs)}. Use filter_match "
                "for some of the axes"
            )
        key = self.ProcessCoord(**coord_kwargs)
        if key not in self.mapping:
            raise ValueError(f"get_rank: expected a coordinate below {self.dims}, found {coord_kwargs}")
        return self.mapping[key]

    def get_axis_names(self) -> list[str]:
        return self.axes

    def get_rank_repr(
        self, rank: int, omit_axes: Sequence[str] = ("data", "pipe"), inner_sep: str = "_", outer_sep: str = "-"
    ) -> str:
        """Return a rank's coordinate on the axes that are not omitted, as "model_01-expert_00"."""
        coord = self.get_coord(rank)
        kept = [axis for axis in self.axes if axis not in omit_axes]
        return outer_sep.join(f"{axis}{inner_sep}{getattr(coord, axis):02d}" for axis in kept)

    def get_dim(self, axis: str) -> int:
        """Return the size of an axis, 0 if it does not exist."""
        return self.dims[self.axes.index(axis)] if axis in self.axes else 0

    def get_coord(self, rank: int) -> Any:
        """Return a rank's coordinate. Raises ValueError for a rank that does not exist."""
        found = next((coord for coord, number in self.mapping.items() if number == rank), None)
        if found is None:
            raise ValueError(f"get_coord: expected a rank below {self.world_size()}, found {rank}")
        return found

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """Return the groups of ranks that differ only on this axis."""
        if axis not in self.axes:
            return []
        others = [name for name in self.axes if name != axis]
        return [
            [
                self.get_rank(**{axis: index}, **dict(zip(others, place, strict=True)))
                for index in range(self.get_dim(axis))
            ]
            for place in product(*(range(self.get_dim(name)) for name in others))
        ]

    def filter_match(self, **filter_kwargs: int) -> list[int]:
        """Return the ranks with these coordinates on these axes."""
        wanted = filter_kwargs.items()
        return [
            rank for coord, rank in self.mapping.items() if all(getattr(coord, key) == value for key, value in wanted)
        ]

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """Return the ranks with the coordinate `idx` on an axis."""
        return self.filter_match(**{axis: idx})

    def world_size(self) -> int:
        return len(self.mapping)

    def __str__(self) -> str:
        return str(self.mapping)


class PipeDataParallelTopology(ProcessTopology):
    """Pipeline stages outside, data-parallel ranks inside."""

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data"], [num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """Pipeline stages outside, then data-parallel ranks, then ranks that share layers."""

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data", "model"], [num_pp, num_dp, num_mp])


_GETTERS = {  # call -> attribute of PipelineParallelGrid
    "get_stage_id": "stage_id",
    "get_pipe_parallel_rank": "stage_id",
    "get_pipe_parallel_world_size": "pipe_parallel_size",
    "get_data_parallel_id": "data_parallel_id",
    "get_data_parallel_rank": "data_parallel_id",
    "get_data_parallel_world_size": "data_parallel_size",
    "get_model_parallel_rank": "model_id",
    "get_model_parallel_world_size": "model_parallel_size",
    "get_slice_parallel_rank": "model_id",
    "get_slice_parallel_world_size": "slice_parallel_size",
    "get_global_rank": "global_rank",
}


class PipelineParallelGrid:
    """This rank's place in a topology. It makes no process groups: the engine has its groups."""

    def __init__(self, topology: ProcessTopology | None = None, process_group: Any = None) -> None:
        self.global_rank = comm.get_rank() if comm.is_initialized() else 0
        self.world_size = comm.get_world_size() if comm.is_initialized() else 1
        self._topo = topology or PipeDataParallelTopology(1, self.world_size)
        coord = self._topo.get_coord(self.global_rank)
        self.stage_id: int = getattr(coord, "pipe", 0)
        self.data_parallel_id: int = getattr(coord, "data", 0)
        self.model_id: int = getattr(coord, "model", 0)
        self.pipe_parallel_size = max(1, self._topo.get_dim("pipe"))
        self.data_parallel_size = max(1, self._topo.get_dim("data"))
        self.model_parallel_size = max(1, self._topo.get_dim("model"))
        self.slice_parallel_size = self.model_parallel_size

    def __getattr__(self, name: str) -> Any:
        """Find DeepSpeed's getters, and Megatron's: see `_GETTERS`."""
        if name not in _GETTERS:
            raise AttributeError(f"PipelineParallelGrid has no attribute '{name}'")
        value = getattr(self, _GETTERS[name])
        return lambda: value

    def is_first_stage(self) -> bool:
        return self.stage_id == 0

    def is_last_stage(self) -> bool:
        return self.stage_id == self.pipe_parallel_size - 1

    def topology(self) -> ProcessTopology:
        return self._topo

    def stage_to_global(self, stage_id: int, **kwargs: int) -> int:
        """Return the rank of another stage with the same coordinates on all further axes."""
        place = {**self._topo.get_coord(self.global_rank)._asdict(), **kwargs, "pipe": stage_id}
        return self._topo.get_rank(**place)


def get_data_parallel_group() -> Any:
    return comm.get_world_group()


def get_data_parallel_world_size() -> int:
    return comm.get_world_size()


def get_data_parallel_rank() -> int:
    return comm.get_rank()


def get_model_parallel_group() -> None:
    return None


def get_model_parallel_world_size() -> int:
    return 1


def get_model_parallel_rank() -> int:
    return 0


get_tensor_model_parallel_group = get_model_parallel_group
get_tensor_model_parallel_world_size = get_model_parallel_world_size
get_tensor_model_parallel_rank = get_model_parallel_rank
