"""What the update of a shard works on."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..optimizers.optimizer import Options
from .optimizer_states import STATE_BLOCK_NUMEL, StoredState
from .weight_rounding import Rounding

KERNEL = "optimizer_step"


@dataclass(slots=True, eq=False)
class ShardUpdate:
    """A shard, and what its update needs; see `update_runs`. No runs: there is nothing of a parameter in it.

    A shard may keep its own from step to step, and put the gradient, runs and steps of the next one in their place.
    """

    master: Tensor
    gradient: Tensor
    states: Sequence[StoredState]
    runs: Sequence[tuple[int, Options]]
    steps: Sequence[int]
    out: Tensor | None
    rounding: Rounding | None = None  # of master weights in bfloat16: at random
    remainder: Tensor | None = None  # (n,) what master weights in bfloat16 lack: bfloat16, or int8 beside a rounding
    numel: int = field(init=False)
    kind: Hashable = field(init=False)
    """Shards that agree in it can be updated by one launch, or none of them can."""

    def __post_init__(self) -> None:
        self.numel = self.master.numel()
        of_tensors = [(tensor.dtype, tensor.is_contiguous()) for tensor in self.tensors]
        is_absent = [one is None for one in (self.out, self.rounding, self.remainder)]
        self.kind = (self.master.device, *is_absent, *of_tensors)

    @property
    def is_used(self) -> bool:
        """Whether there is anything to update."""
        return bool(self.runs) and self.numel > 0

    @property
    def tensors(self) -> list[Tensor]:
        found: list[Tensor | None] = [self.master, self.gradient, self.out, self.remainder]
        for state in self.states:
            found += state.payload, state.scale
        return [tensor for tensor in found if tensor is not None]

    def part(self, start: int, end: int) -> ShardUpdate:
        """The tensors of elements start to end, start a multiple of 256; with the runs of the whole."""
        return replace(
            self,
            master=self.master[start:end],
            gradient=self.gradient[start:end],
            states=[state.part(start, end) for state in self.states],
            out=None if self.out is None else self.out[start:end],
            rounding=None if self.rounding is None else self.rounding.at(start),
            remainder=None if self.remainder is None else self.remainder[start:end],
        )

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
        remainder, expected = self.remainder, torch.bfloat16 if self.rounding is None else torch.int8
        if remainder is not None and (remainder.shape != shape or remainder.dtype != expected):
            raise ValueError(
                f"{KERNEL}: expected remainder ({numel},) {expected} like master, found {tuple(remainder.shape)} "
                f"{remainder.dtype}"
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
