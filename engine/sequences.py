"""Sequences that several ranks share: what the axis `sequence` puts on a model, and what it makes of batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..comm import Mesh
from ..model.ledger import Ledger
from ..parallel.sequence_attention import SequenceAttention, check_attention
from ..parallel.sequence_data import SequenceData, SequenceError, check_model
from .axes import SEQUENCE
from .config.config import Config
from .config.errors import ConfigError, Fault
from .pipeline_plan import LossFn


class Sequences:
    """A rank's parts of the microbatches, with the attention that sees all of them."""

    def __init__(self, module: nn.Module, mesh: Mesh, ledger: Ledger) -> None:
        exchange = mesh.exchange((SEQUENCE,))
        self._device = mesh.world.device
        self._data = SequenceData(module, exchange)
        self._attention = SequenceAttention(exchange)
        self._attention.put_on(module, ledger)

    def part(self, batch: Any) -> tuple[Any, float | None]:
        """This rank's inputs of the model, and what its loss is to be multiplied by: see `SequenceData.part`."""
        made, self._attention.whole, factor = self._data.part(batch, self._device)
        return made, factor

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
        check_attention(module, size)
        if loss_fn is not None:
            raise SequenceError(
                "loss_fn: expected none, since a rank's mean over its part of a sequence is not the mean over the "
                "whole; let the model compute the loss from labels"
            )
    except SequenceError as error:
        raise ConfigError([Fault("parallel.sequence", "conflict", error.message)]) from error
