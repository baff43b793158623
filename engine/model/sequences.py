"""Sequences that several ranks share: the axis `sequence` on a model and its batches.

`self_check` finds models whose tokens mix outside of attention, or whose losses of parts do not add up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...comm import Axis, Collectives, Mesh
from ...comm.axis import SoloTransport
from ...model.patches import ModelPatches
from ...model.recomputing import in_eval_mode
from ...parallel.randomness import Randomness
from ...parallel.sequence_attention import SequenceAttention, check_attention
from ...parallel.sequence_data import IgnoredLabels, SequenceData, SequenceError, SequenceShard, check_model
from ...pipe.split.trees import leaves
from ...watch.log import logger
from ..blueprint.axes import SEQUENCE
from ..config.config import Config
from ..config.errors import ConfigError, Fault
from .given_model import LossFn

_ADVICE = (
    "written-out attention, convolutions over tokens, recurrences and means over tokens see only a rank's part; use "
    "scaled_dot_product_attention, or set parallel.sequence to 1"
)

_OF_LOSS_FN = "; a loss_fn must ignore tokens without a label, and must not shift labels"


class Sequences:
    """A rank's parts of the microbatches, with attention over the whole sequences."""

    def __init__(self, module: nn.Module, mesh: Mesh, patches: ModelPatches, loss_fn: LossFn, way: str) -> None:
        """way: the config's sequence_parallel.attention."""
        exchange = self._exchange = mesh.exchange((SEQUENCE,))
        self._device = mesh.world.device
        self._module = module
        self._has_own_loss = loss_fn is None
        self._data = SequenceData(module, exchange, self._has_own_loss)
        self._data_by_hand = SequenceData(module, exchange)
        self._attention = SequenceAttention(exchange, way, logger.info if mesh.world.rank == 0 else None)
        self._attention.put_on(module, patches)
        self._randomness = Randomness(exchange, self._device)
        self._are_parts_known = False  # whether the script asked for its parts
        self._tried: set[bool] = set()  # checked calls: with labels, and without
        patches.hook(module.register_forward_pre_hook(self._check))

    def part(self, batch: Any) -> SequenceShard:
        """Return this rank's inputs of the model. Raises SequenceError."""
        return self._seen_by(self._data.part(batch, self._device))

    def part_of_call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> SequenceShard:
        """Return `part` for a call by hand. Raises SequenceError if the loss could not be that of the whole."""
        if args:
            raise SequenceError("expected a call with keyword arguments, engine(**batch), found positional arguments")
        part = self._seen_by(self._data_by_hand.part(kwargs, self._device, needs_labels=False))
        if torch.is_grad_enabled() and "shift_labels" not in part and not self._are_parts_known:
            raise SequenceError(
                f"expected labels among the inputs, or engine.sequence_part(labels, fill={part.ignored}) before the "
                "call: a rank has the logits of a part of each sequence. Its loss must be the sum over its labels "
                "divided by the number of all labels, not the mean over its part"
            )
        return part

    def _seen_by(self, part: SequenceShard) -> SequenceShard:
        if part.whole.is_blind and self._attention.has_eager_ring:
            raise SequenceError(
                "attention_mask: expected no label on a token that sees no token, found labels in padding at the "
                'start: "eager" attention averages all values for such a token, a ring returns zeros; use "sdpa", or '
                "pad at the end"
            )
        return part

    def own(self, x: Tensor, fill: float) -> Tensor:
        """Return this rank's part of (rows, tokens, ...)."""
        self._are_parts_known = True
        return self._data.own(x, fill)

    def joined(self, x: Tensor, tokens: int) -> Tensor:
        """Join parts (rows, tokens, ...) to the whole, or sum a loss () over the parts. Other tensors are returned
        unchanged.

        tokens: of the whole. Without gradients. A collective of the ranks that share sequences.
        """
        x = x.detach()
        if not x.dim():
            return self._exchange.sum(x.reshape(1), "a loss of parts")[0] if x.is_floating_point() else x
        # Parts are rounded up to equal lengths. Any other length is not that of tokens.
        if x.dim() == 1 or x.shape[1] != -(-tokens // self._exchange.size):
            return x
        return self._exchange.gather(x, 1, "an output of parts")[:, :tokens].contiguous()

    def run(self, part: SequenceShard, forward: Callable[[], Any]) -> Any:
        """Run a forward of the model with these inputs.

        Ranks have different tokens and heads, so each draws different random numbers.
        """
        forwards = self._attention.forwards
        forwards.begin(part.whole)
        if self._module.training:
            self._randomness.begin()
            self._randomness.leave_common(self._module)
        try:
            output = forward()
            forwards.end(output)
            return output
        finally:  # a pipeline stage leaves the forward in the middle, by an exception
            self._randomness.return_to_common()
            forwards.end(None)

    def self_check(
        self,
        batch: Any,
        loss_of: Callable[[SequenceShard], Tensor | None],
        output_of: Callable[[SequenceShard], Any] | None,
        summed: Callable[[Sequence[int]], Sequence[int]],
    ) -> None:
        """Check once that tokens mix only in attention, and that losses of parts add up to the loss of the whole.

        In the check each token attends to itself alone. Then its loss may not change with the other tokens. For calls
        without labels the output takes the place of the loss. loss_of: returns None if the loss is on another rank.
        output_of: None: calls have labels. summed: a sum over the ranks with parts of the model. A collective. Raises
        SequenceError.
        """
        if not isinstance(batch, Mapping):
            return
        has_labels = any(batch.get(name) is not None for name in ("labels", "shift_labels"))
        if has_labels in self._tried or not (has_labels or (output_of is not None and self._are_parts_known)):
            return
        if has_labels and "ignore_index" not in batch:
            self._find_ignored(batch, loss_of, summed)
        one, other, at, differs, tried = self._data_at(0, 1).trial(batch, self._device)
        attention = self._attention
        before, attention.is_alone, attention.fault = attention.num_calls, True, None
        # No further rank of the axis takes part in these forwards: `_data_at` divides for ranks that do not exist.
        try:
            with in_eval_mode(self._module):
                if output_of is not None and not has_labels:
                    loss_of = partial(self._seen, at, one["position_ids"].shape[1], output_of)
                losses = [loss_of(one)], [loss_of(other)]
                # The whole sequence, then its halves: their losses must add up to that of the whole.
                divided = [(0, 1), (0, 2), (1, 2)] if tried is not None else []
                parts = [loss_of(self._data_at(*place).part(tried, self._device)) for place in divided]
        finally:
            attention.is_alone = False
        tolerance = self._tolerance()
        mixes = differs and _differ(*losses, tolerance)
        is_no_sum = _differ(parts[:1], parts[1:], 10 * tolerance)  # sums in another order
        self._judge(*summed([attention.num_calls - before, mixes, is_no_sum, attention.fault is not None]))
        # After the judgement: a failed check is repeated with the next batch.
        self._tried.add(has_labels)

    def _find_ignored(
        self,
        batch: Any,
        loss_of: Callable[[SequenceShard], Tensor | None],
        summed: Callable[[Sequence[int]], Sequence[int]],
    ) -> None:
        """Find the label that the loss ignores, from its calls of torch's losses: parts are padded with it.

        Also check the positions of a batch without position_ids: parts count them from 0.
        """
        part, counted = self._data_at(0, 1).all_labelled(batch, self._device)
        self._attention.is_alone = True
        try:
            with in_eval_mode(self._module), IgnoredLabels() as labels:
                loss = loss_of(part)
                differs = counted is not None and _differ([loss], [loss_of(counted)], self._tolerance())
        finally:
            self._attention.is_alone = False
        of_loss = labels.found if self._has_own_loss else labels.found[-1:]  # a loss_fn runs after the model's loss
        found = [] if loss is None else sorted(set(of_loss))
        num_many, num_found, total, num_differ = summed([len(found) > 1, len(found) == 1, sum(found), differs])
        if num_differ:
            raise SequenceError(
                f"batch: expected position_ids, since {type(self._module).__name__} does not count positions from 0 "
                "through each row, found none; add the positions that it would use"
            )
        if num_many:
            listed = " and ".join(map(str, found)) or "several on a different rank"
            raise SequenceError(
                f"loss: expected the same ignore_index in all losses, since it pads the parts, found {listed}; use the "
                "same, or call engine(...) and engine.sequence_part(labels)"
            )
        if num_found:
            # A sum over the ranks: `num_found` ranks have the loss and added the same label.
            self._data.ignored = self._data_by_hand.ignored = total // num_found

    def _seen(self, at: int, tokens: int, output_of: Callable[[SequenceShard], Any], part: SequenceShard) -> Tensor:
        """Return () that depends on all outputs of token `at` of so many."""
        found = [one for one in leaves(output_of(part)) if isinstance(one, Tensor) and one.is_floating_point()]
        along = [one[:, at].double().square().sum() for one in found if one.dim() > 1 and one.shape[1] == tokens]
        if not along:
            raise SequenceError(
                f"expected outputs of {type(self._module).__name__} with tokens along dimension 1, found "
                f"{', '.join(str(tuple(one.shape)) for one in found) or 'no tensor'}"
            )
        return torch.stack(along).sum()

    def around_copy(self) -> AbstractContextManager[object]:
        """Return the context for the forward of a copy of the model that was made before this object."""
        return self._attention.around_copy()

    def _check(self, module: nn.Module, args: Any) -> None:
        self._attention.forwards.check(type(module).__name__)

    def _data_at(self, place: int, size: int) -> SequenceData:
        """Return the data of a rank in an axis of `size` that does not exist."""
        ranks = tuple(range(size))
        axis = Axis(SEQUENCE, place, ranks, ranks, SoloTransport(self._device))
        data = SequenceData(self._module, Collectives(axis), self._has_own_loss)
        data.ignored = self._data.ignored
        return data

    def _judge(self, num_calls: int, num_mixing: int, num_no_sums: int, num_faults: int) -> None:
        name = type(self._module).__name__
        if num_faults:
            raise SequenceError(self._attention.fault or f"attention of {name} on a different rank cannot be split")
        if not num_calls:
            raise SequenceError(f"expected split attention in a forward of {name}, found no call of it: {_ADVICE}")
        if num_mixing:
            raise SequenceError(
                f"expected tokens of {name} to mix only in attention, found that a token's loss depends on the rest "
                f"without attention: {_ADVICE}" + ("" if self._has_own_loss else _OF_LOSS_FN)
            )
        if num_no_sums:
            raise SequenceError(
                f"{f'the loss of {name}' if self._has_own_loss else 'loss_fn'}: expected the mean over the labels of "
                f"its part (shift_labels that are not {self._data.ignored}, each at the token that predicts it), found "
                "that the losses of parts, weighted by their numbers of labels, do not add up to the loss of the "
                "whole; for a different loss call engine(...) and engine.sequence_part(labels)"
            )

    def _tolerance(self) -> float:
        """Relative tolerance of a loss. Experts sum the same numbers in a different order for different tokens."""
        is_narrow = any(param.itemsize < 4 for param in self._module.parameters())
        return 1e-3 if is_narrow or torch.is_autocast_enabled(self._device.type) else 1e-5


def _differ(one: Sequence[Tensor | None], other: Sequence[Tensor | None], tolerance: float) -> bool:
    """Return whether the sums of losses differ, if they are on this rank."""
    sums = [sum(loss.double().item() for loss in losses if loss is not None) for losses in (one, other)]
    return not abs(sums[0] - sums[1]) <= tolerance * abs(sums[0])  # NaN differs


def check_sequences(config: Config, module: nn.Module) -> None:
    """Raise ConfigError if the model's sequences cannot be split over ranks."""
    size = config.parallel.sequence
    if size == 1:
        return
    try:
        check_model(module)
        check_attention(module, size, config.sequence_parallel.attention, config.parallel.tensor)
    except SequenceError as error:
        raise ConfigError([Fault("parallel.sequence", "conflict", error.message)]) from error
