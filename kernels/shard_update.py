"""What the update of a shard works on."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from torch import Tensor

from ..optimizers.optimizer import Options
from .optimizer_states import STATE_BLOCK_NUMEL, StoredState

KERNEL = "optimizer_step"


class ShardUpdate(NamedTuple):  # one for each shard and step: a dataclass takes longer to make
    """A shard, and what its update needs; see `update_runs`. No runs: there is nothing of a parameter in it."""

    master: Tensor
    gradient: Tensor
    states: Sequence[StoredState]
    runs: Sequence[tuple[int, Options]]
    steps: Sequence[int]
    out: Tensor | None

    @property
    def numel(self) -> int:
        return self.master.numel()

    @property
    def is_used(self) -> bool:
        """Whether there is anything to update."""
        return bool(self.runs) and self.numel > 0

    @property
    def kind(self) -> Hashable:
        """Shards that agree in it can be updated by one launch, or none of them can."""
        of_tensors = [(tensor.dtype, tensor.is_contiguous()) for tensor in self.tensors]
        return self.master.device, self.out is None, *of_tensors

    @property
    def tensors(self) -> list[Tensor]:
        found: list[Tensor | None] = [self.master, self.gradient, self.out]
        for state in self.states:
            found += state.payload, state.scale
        return [tensor for tensor in found if tensor is not None]

    def check(self) -> None:
        """Raises ValueError where the tensors, the runs and the steps do not fit together."""
        numel, shape = self.numel, self.master.shape
        if len(shape) != 1 or not self.master.is_floating_point():
            raise ValueError(f"{KERNEL}: expected floating-point master (n,), found {tuple(shape)} {self.master.dtype}")
        for name, tensor in (("gradient", self.gradient), ("out", self.out)):
            if tensor is not None and (tensor.shape != shape or not tensor.is_floating_point()):
                raise ValueError(
                    f"{KERNEL}: expected floating-point {name} ({numel},) like master, found {tuple(tensor.shape)} "
                    f"{tensor.dtype}"
                )
        for index, state in enumerate(self.states):
            num_blocks = -(-numel // STATE_BLOCK_NUMEL)
            if state.payload.shape != shape or (state.scale is not None and state.scale.shape != (num_blocks,)):
                scale = None if state.scale is None else tuple(state.scale.shape)
                raise ValueError(
                    f"{KERNEL}: expected state {index} ({numel},) like master, and the scale of an 8-bit state "
                    f"({num_blocks},); found {tuple(state.payload.shape)}, scale {scale}"
                )
        ends = [0, *(end for end, _ in self.runs)]
        if self.runs and (ends[-1] != numel or ends != sorted(ends)):
            raise ValueError(f"{KERNEL}: expected ends of runs that ascend to {numel}, found {ends[1:]}")
        if len(self.steps) != len(self.runs):
            raise ValueError(f"{KERNEL}: expected a step of each of the {len(self.runs)} runs, found {len(self.steps)}")
