"""Sequences that several ranks share: what the axis `sequence` puts on a model, and what it makes of batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..comm import Axis, Exchange, Mesh
from ..comm.solo import SoloRoute
from ..model.ledger import Ledger
from ..parallel.randomness import Randomness
from ..parallel.sequence_attention import SequenceAttention, check_attention
from ..parallel.sequence_data import SequenceData, SequenceError, Whole, check_model
from ..watch.log import logger
from .axes import SEQUENCE
from .config.config import Config
from .config.errors import ConfigError, Fault
from .pipeline_plan import LossFn

_MEET = (
    "attention written out in products, convolutions over tokens, recurrences and means over tokens see a rank's part "
    "alone; use scaled_dot_product_attention, or set parallel.sequence to 1"
)


class Sequences:
    """A rank's parts of the microbatches, with the attention that sees all of them. is_tried: by `try_once`."""

    def __init__(self, module: nn.Module, mesh: Mesh, ledger: Ledger, way: str) -> None:
        """way: sequence_parallel.attention of the config."""
        exchange = mesh.exchange((SEQUENCE,))
        self._device = mesh.world.device
        self._module = module
        self._data = SequenceData(module, exchange)
        self._attention = SequenceAttention(exchange, way, logger.info if mesh.world.rank == 0 else None)
        self._attention.put_on(module, ledger)
        self._randomness = Randomness(exchange, self._device)
        self.is_tried = False
        ledger.hook(module.register_forward_pre_hook(self._begin))
        ledger.hook(module.register_forward_hook(self._end, always_call=True))

    def part(self, batch: Any) -> tuple[Any, float | None]:
        """This rank's inputs of the model, and what its loss is to be multiplied by: see `SequenceData.part`."""
        made, whole, factor = self._data.part(batch, self._device)
        self._attention.forwards.expect(whole)
        return made, factor

    def _begin(self, module: nn.Module, args: Any) -> None:
        """Ranks have other tokens and other heads, so all that a forward draws is different on each."""
        self._attention.forwards.begin(type(module).__name__)
        if module.training:
            self._randomness.begin()
            self._randomness.leave_common(module)

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        self._randomness.return_to_common()
        self._attention.forwards.end(output)

    def try_once(self, batch: Any, loss_of: Callable[[Any], Tensor]) -> None:
        """Whether tokens meet in attention alone: where each sees itself alone, a loss knows of no other token.

        loss_of: inputs of the model. The first time with labels; all ranks at once. Raises SequenceError.
        """
        if not isinstance(batch, Mapping):
            return
        if batch.get("labels") is None and batch.get("shift_labels") is None:
            return
        self.is_tried = True
        axis = Axis(SEQUENCE, 0, (0,), (0,), SoloRoute(self._device))
        made, changed, is_telling = SequenceData(self._module, Exchange(axis)).trial(batch, self._device)
        attention, modes = self._attention, [(part, part.training) for part in self._module.modules()]
        before, attention.is_alone = attention.num_calls, True
        self._module.eval()
        try:
            with torch.no_grad():
                losses = []
                for inputs in (made, changed):
                    attention.forwards.expect(Whole())
                    losses.append(loss_of(inputs).double())
        finally:
            attention.is_alone = False
            for part, was_training in modes:
                part.training = was_training
        name = type(self._module).__name__
        if attention.num_calls == before:
            raise SequenceError(f"expected attention that ranks share in a forward of {name}, found none: {_MEET}")
        difference = (losses[0] - losses[1]).abs()
        if is_telling and bool(difference > self._tolerance() * losses[0].abs()):
            raise SequenceError(
                f"expected tokens of {name} to meet in shared attention alone, found a token's loss that changes with "
                f"other tokens though each sees itself alone: {_MEET}"
            )

    def _tolerance(self) -> float:
        """Of a loss; experts add the same numbers in another order where they get other tokens."""
        is_narrow = any(param.itemsize < 4 for param in self._module.parameters())
        return 1e-3 if is_narrow or torch.is_autocast_enabled(self._device.type) else 1e-5

    def part_of_call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, float | None]:
        """As `part`, of a call by hand. Raises SequenceError where its loss could not be that of the whole."""
        if args:
            raise SequenceError("expected a call with names alone, engine(**batch), found positional arguments")
        made, factor = self.part(kwargs)
        if torch.is_grad_enabled() and "shift_labels" not in made:
            raise SequenceError(
                "expected labels among the inputs: a rank has the logits of a part of each sequence, and a mean over "
                "them is not the mean over the whole; let the model compute the loss"
            )
        return made, factor


def weighted_loss(loss: Tensor, factor: float | None) -> Tensor:
    """A rank's part of the mean over a whole. factor: see `SequenceData.part`."""
    if factor is None:
        return loss
    return loss * factor if factor else torch.where(torch.ones_like(loss, dtype=torch.bool), 0.0, loss)  # may be NaN


def check_sequences(config: Config, module: nn.Module, loss_fn: LossFn) -> None:
    """Raises ConfigError where the model's sequences cannot be shared."""
    size = config.parallel.sequence
    if size == 1:
        return
    try:
        check_model(module)
        check_attention(module, size, config.sequence_parallel.attention, config.parallel.tensor)
        if loss_fn is not None:
            raise SequenceError(
                "loss_fn: expected none, since a rank's mean over its part of a sequence is not the mean over the "
                "whole; let the model compute the loss from labels"
            )
    except SequenceError as error:
        raise ConfigError([Fault("parallel.sequence", "conflict", error.message)]) from error
