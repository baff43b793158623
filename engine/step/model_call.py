"""How a driver calls the model for its loss: with a whole batch, or with this rank's part of its sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...comm import World
from ...kernels.fused_loss import loss_only
from ...parallel.sequence_data import SequenceShard
from ...parallel.split_self_check import SplitSelfCheck
from ...parallel.vocab_parallel import VocabParallelLogits
from ...pipe.split.trees import leaves, map_leaves
from ..model.given_model import LossFn
from ..model.sequences import Sequences
from .batch import call, loss_of, microbatches, prepared
from .steps import Steps


class ModelCall:
    """`ready`, then `output`, then `loss`: of one microbatch."""

    def __init__(
        self,
        loss_fn: LossFn,
        sequences: Sequences | None,
        splits: SplitSelfCheck | None,
        world: World,
        dtype: torch.dtype | None,
        rows_per_microbatch: int | None,
    ) -> None:
        """sequences: of which other ranks have parts. splits: of layers, to be compared with whole ones.

        dtype: of floating-point inputs; None: as they are. rows_per_microbatch: None: any.
        """
        self.sequences = sequences
        self.splits = splits
        self._loss_fn = loss_fn
        self._world, self._dtype = world, dtype
        self._rows_per_microbatch = rows_per_microbatch

    def microbatches_of(self, steps: Steps, batch: Any) -> Iterator[Any]:
        """Those of this rank's share of a global batch, or drawn from an iterator. Raises ValueError."""
        found = microbatches(batch, steps.accumulated.accumulation, self._rows_per_microbatch)
        return self._world.progress.drawn(found) if self._world.progress.is_on else found

    def prepared(self, steps: Steps) -> Callable[[Any], Any]:
        """Makes inputs of a forward, on the device and in the compute dtype."""
        return partial(prepared, device=self._world.device, dtype=self._dtype, mark=steps.scale.mark_input)

    def ready(self, steps: Steps, batch: Any) -> Any:
        """The batch on the device, as far as it is this rank's."""
        if self.sequences is None:
            return prepared(batch, self._world.device, self._dtype, steps.scale.mark_input)
        return self.sequences.part(batch).changed(self.prepared(steps))

    def ready_by_hand(self, steps: Steps, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """As `ready`, of the inputs with names of a call."""
        if self.sequences is None:
            return prepared(kwargs, self._world.device, self._dtype, steps.scale.mark_input)
        return self.sequences.part_of_call(args, kwargs).changed(self.prepared(steps))

    def run(self, ready: Any, forward: Callable[[], Any]) -> Any:
        """What a forward of the model with this gives."""
        return forward() if self.sequences is None else self.sequences.run(ready, forward)

    def output(self, model: nn.Module, ready: Any) -> Any:
        """What the model returns, of which nothing is read but what the loss needs."""
        with nullcontext() if self._loss_fn is not None else loss_only():  # fused models compute no more
            return call(model, ready) if self.sequences is None else self.run(ready, lambda: call(model, ready))

    def loss(self, output: Any, ready: Any) -> Tensor:
        """(); of a part, what it adds to the mean over the whole."""
        factor = _factor_of(ready)
        if factor == 0 and self._loss_fn is not None and (found := _differentiable(output)):
            return torch.stack([one.reshape(-1)[:0].sum() for one in found]).sum()  # 0, with their graph
        loss = loss_of(output, ready, self._loss_fn)
        return loss if factor is None else _weighted(loss, factor)

    def weighted(self, output: Any, ready: Any) -> Any:
        """What a call by hand returns: of a model that gives the mean loss of a part, as `loss`."""
        factor = _factor_of(ready)
        is_loss = self._loss_fn is None or (isinstance(output, Tensor) and output.numel() == 1)
        return output if factor is None or not is_loss else _weighted(loss_of(output, ready, None), factor)

    def own(self, x: Tensor, fill: float) -> Tensor:
        """This rank's part of (rows, tokens, ...): all, where ranks do not share sequences."""
        return x if self.sequences is None else self.sequences.own(x, fill)

    def whole_output(self, output: Any, tokens: int) -> Any:
        """See `Engine.whole_output`."""

        def whole(leaf: Any) -> Any:
            if isinstance(leaf, VocabParallelLogits):
                leaf = leaf.detach().whole()
            if not isinstance(leaf, Tensor):
                return leaf
            return leaf.detach() if self.sequences is None else self.sequences.joined(leaf, tokens)

        return map_leaves(whole, output)


def _weighted(loss: Tensor, factor: float) -> Tensor:
    return loss * factor if factor else torch.where(torch.ones_like(loss, dtype=torch.bool), 0.0, loss)  # not NaN


def _factor_of(ready: Any) -> float | None:
    return ready.factor if isinstance(ready, SequenceShard) else None


def _differentiable(output: Any) -> list[Tensor]:
    found = (one.own if isinstance(one, VocabParallelLogits) else one for one in leaves(output))
    return [one for one in found if isinstance(one, Tensor) and one.requires_grad]
