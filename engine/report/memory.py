"""Bytes of model states: by the formula of the paper, and as a rank holds them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...zero.optimizer import ShardedOptimizer
from ...zero.policy import ZeroPolicy
from ...zero.unit import Unit


@dataclass(frozen=True)
class ModelStateBytes:
    """Bytes of model states on a rank. Memory that ranks of a host share is divided by their number."""

    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes


def predict(
    num_params: int,
    stage: int,
    shard_size: int,
    param_bytes: int = 2,
    gradient_bytes: int = 2,
    state_bytes: int = 12,
) -> ModelStateBytes:
    """Return bytes of model states per rank, without gathered parameters and padding.

    The defaults are mixed precision with Adam: 2 bytes a parameter, 2 a gradient, 12 for master weight and two
    moments. Stage 0: 16 bytes per parameter; stage 1: 4 + 12/N; stage 2: 2 + 14/N; stage 3: 16/N. Source: ZeRO, arXiv
    1910.02054, section 5 and figure 1.
    """
    policy = ZeroPolicy.from_stage(stage)
    states = shard_size if policy.shards_states else 1
    return ModelStateBytes(
        num_params * param_bytes // (shard_size if policy.frees_parameters else 1),
        # Stage 1 divides only the states. Between backward and update each rank still has all gradients.
        num_params * gradient_bytes // (states if policy.reduces_every_backward else 1),
        num_params * state_bytes // states,
    )


def measure(units: Sequence[Unit], optimizer: ShardedOptimizer) -> ModelStateBytes:
    """Return the bytes of this rank's model states now."""
    parameters, gradients = 0, 0
    for unit in units:
        for group in unit.groups:
            # A copy that ranks of a host share counts in equal parts, so that the sum over ranks is what the host
            # holds.
            parameters += group.full_bytes // (group.axes.states.size if group.axes.copies_are_shared else 1)
            parameters += group.bytes_beside
        for gradient in unit.gradients:
            gradients += gradient.held_bytes
    return ModelStateBytes(parameters, gradients, optimizer.state_bytes())
