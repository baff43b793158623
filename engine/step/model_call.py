"""How a driver calls the model for its loss: with a whole batch, or with this rank's part of its sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ...comm import Mesh
from ...model.recomputing import in_eval_mode
from ...parallel.sequence_data import SequencePart
from ...parallel.split_trial import SplitTrial
from ...parallel.vocabulary import LogitParts
from ...pipe.split.trees import leaves, map_leaves
from ..model.given_model import LossFn
from ..model.sequences import Sequences
from .batch import call_for_loss, loss_of
from .steps import Steps


class ModelCall:
    """`ready`, then `output`, then `loss`: of one microbatch."""

    def __init__(self, loss_fn: LossFn, sequences: Sequences | None, splits: SplitTrial | None, mesh: Mesh) -> None:
        """sequences: of which other ranks have parts. splits: of layers, to be compared with whole ones."""
        self.sequences = sequences
        self._loss_fn = loss_fn
        self._splits = splits
        self._mesh = mesh

    def ready(self, steps: Steps, batch: Any) -> Any:
        """The batch on the device, as far as it is this rank's."""
        if self.sequences is None:
            return steps.inputs.prepared(batch)
        return self.sequences.part(batch).changed(steps.inputs.prepared)

    def ready_by_hand(self, steps: Steps, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """As `ready`, of the inputs with names of a call."""
        if self.sequences is None:
            return steps.inputs.prepared(kwargs)
        return self.sequences.part_of_call(args, kwargs).changed(steps.inputs.prepared)

    def run(self, ready: Any, forward: Callable[[], Any]) -> Any:
        """What a forward of the model with this gives."""
        return forward() if self.sequences is None else self.sequences.run(ready, forward)

    def output(self, model: nn.Module, ready: Any) -> Any:
        """What the model returns, of which nothing is read but what the loss needs."""
        if self.sequences is None:
            return call_for_loss(model, ready, self._loss_fn)
        return self.sequences.run(ready, lambda: call_for_loss(model, ready, self._loss_fn))

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
        """See `LoopCalls.whole_output`."""

        def whole(leaf: Any) -> Any:
            if isinstance(leaf, LogitParts):
                leaf = leaf.detach().whole()
            if not isinstance(leaf, Tensor):
                return leaf
            return leaf.detach() if self.sequences is None else self.sequences.joined(leaf, tokens)

        return map_leaves(whole, output)

    def try_once(
        self,
        steps: Steps,
        batch: Any,
        loss_of: Callable[[Any], Tensor | None],
        output_of: Callable[[Any], Any] | None = None,
        summed: Callable[[Sequence[int]], Sequence[int]] = lambda numbers: numbers,
    ) -> None:
        """See `Sequences.try_once`, which gets inputs on the device."""
        if self.sequences is None:
            return

        def ready(part: SequencePart) -> SequencePart:
            steps.begin_use()
            return part.changed(steps.inputs.prepared)

        outputs = None if output_of is None else lambda part: output_of(ready(part))
        self.sequences.try_once(batch, lambda part: loss_of(ready(part)), outputs, summed)

    def compare_once(self, steps: Steps, module: nn.Module, forward: Callable[[], Any]) -> None:
        """Whether split layers compute what they do as a whole, in a forward of the first microbatch.

        All ranks at once. Raises ValueError on all of them.
        """
        if self._splits is None or not torch.is_grad_enabled():
            return
        trial = self._splits
        steps.begin_use()
        around_copy = nullcontext if self.sequences is None else self.sequences.around_copy
        with in_eval_mode(module), trial.compared(around_copy):
            forward()
        self._judge(trial)

    @contextmanager
    def compared_in_passing(self) -> Iterator[None]:
        """As `compare_once`, around the forward of the first microbatch itself, which cannot be made twice."""
        trial = self._splits if torch.is_grad_enabled() else None
        with nullcontext() if trial is None else trial.compared_in_passing(in_eval_mode):
            yield
        if trial is not None:
            self._judge(trial)

    def _judge(self, trial: SplitTrial) -> None:
        """A collective."""
        wrong = [distance > 0 for distance in trial.distances.values()]
        sums = torch.tensor(wrong, dtype=torch.int64, device=self._mesh.world.device)
        trial.check(self._mesh.sum_small(sums, "the check of split layers").tolist())
        self._splits = None


def _weighted(loss: Tensor, factor: float) -> Tensor:
    return loss * factor if factor else torch.where(torch.ones_like(loss, dtype=torch.bool), 0.0, loss)  # not NaN


def _factor_of(ready: Any) -> float | None:
    return ready.factor if isinstance(ready, SequencePart) else None


def _differentiable(output: Any) -> list[Tensor]:
    found = (one.own if isinstance(one, LogitParts) else one for one in leaves(output))
    return [one for one in found if isinstance(one, Tensor) and one.requires_grad]
