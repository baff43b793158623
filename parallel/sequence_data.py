"""Batches of sequences of which each rank takes a part, and what their parts must know of the whole.

    tokens    a b c d e f g                  rank 0     rank 1
    labels    a b c d e f g  -> shifted  ->  b c d e    f g . .     each label stands where it is predicted
    positions 0 1 2 3 4 5 6                  0 1 2 3    4 5 6 7     as in the whole; tokens are added to divide it

Every rank of the axis is given the same batch. A rank's loss is the sum over its labels, divided by the number of
labels of the whole: the parts add up to the mean over the whole, and so do their gradients.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..comm import Exchange
from ..offload import sent

IGNORED = -100
_TRIED = 16  # tokens
_TOKENS = ("input_ids", "inputs_embeds")


class SequenceError(ValueError):
    """A model or a batch whose sequences cannot be divided."""

    def __init__(self, message: str) -> None:
        super().__init__(f"parallel.sequence: {message}")
        self.message = message


@dataclass(frozen=True)
class Whole:
    """What attention has to know of the tokens of all ranks."""

    length: int | None = None  # without what was added; None: all that there are
    keys: Tensor | None = None  # (rows, tokens) bool: may be looked at
    packed: Tensor | None = None  # (rows, tokens): number of the sequence in a row of several

    def mask(self, query: Tensor, is_causal: bool, window: int | None, always: bool = False) -> Tensor | None:
        """(rows or 1, 1, tokens, tokens) bool, True where a query may look; None where is_causal says it all."""
        tokens = query.shape[2]
        length = tokens if self.length is None else self.length
        is_added_seen = not is_causal and length < tokens
        is_narrow = window is not None and window < tokens
        if not (self.keys is not None or self.packed is not None or is_added_seen or is_narrow or always):
            return None
        at = torch.arange(tokens, device=query.device)
        seen = torch.ones(tokens, tokens, dtype=torch.bool, device=query.device)
        if is_causal:
            seen = at[None, :] <= at[:, None]
        if window is not None:
            seen = seen & (at[:, None] - at[None, :] < window)
        if is_added_seen:
            seen = seen & (at < length)
        seen = seen[None, None]
        if self.keys is not None:
            seen = seen & self.keys[:, None, None, :]
        if self.packed is not None:
            seen = seen & (self.packed[:, None, :, None] == self.packed[:, None, None, :])
        return seen

    def to(self, device: torch.device) -> Whole:
        moved = (None if one is None else sent(one, device) for one in (self.keys, self.packed))
        return Whole(self.length, *moved)


class SequenceData:
    """Takes this rank's part of a microbatch."""

    def __init__(self, model: nn.Module, exchange: Exchange) -> None:
        self._exchange = exchange
        accepted = inspect.signature(model.forward).parameters
        self._is_hugging_face = is_hugging_face(model)
        self._takes_cache = "use_cache" in accepted

    def part(self, batch: Any, device: torch.device) -> tuple[dict[str, Any], Whole, float | None]:
        """The model's inputs, what attention must know, and the factor of a loss that is a mean over own labels.

        The factor is None where the model takes the number of all labels. Raises SequenceError.
        """
        if not isinstance(batch, Mapping) or not any(isinstance(batch.get(name), Tensor) for name in _TOKENS):
            kind = "a mapping without them" if isinstance(batch, Mapping) else type(batch).__name__
            raise SequenceError(f"batch: expected a mapping with input_ids (or inputs_embeds), found {kind}")
        given = {name: value for name, value in batch.items() if value is not None}
        tokens = next(given[name] for name in _TOKENS if name in given)
        rows, length = tokens.shape[:2]
        self._check(given, length)
        positions = given.pop("position_ids", None)
        seen = given.pop("attention_mask", None)
        whole = self._whole(positions, seen, length)
        if positions is None:
            positions = torch.arange(length, device=tokens.device).expand(rows, length)
        made: dict[str, Any] = {"position_ids": self._own(positions, continues=True)}
        labels = given.pop("labels", None)
        shifted = given.pop("shift_labels", None)
        if shifted is None and labels is not None:
            shifted = functional.pad(labels, (0, 1), value=IGNORED)[:, 1:]
        for name, value in given.items():
            is_along = isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] == length
            made[name] = self._own(value) if is_along else value
        factor = None
        if shifted is not None:
            own = made["shift_labels"] = self._own(shifted, fill=IGNORED)
            if self._is_hugging_face:
                made["labels"] = own
                made.setdefault("num_items_in_batch", max(int((shifted != IGNORED).sum()), 1))
            else:
                total = max(int((shifted != IGNORED).sum()), 1)
                factor = int((own != IGNORED).sum()) / total
        if self._takes_cache:
            made["use_cache"] = False
        return made, whole.to(device), factor

    def trial(self, batch: Any, device: torch.device) -> tuple[dict[str, Any], dict[str, Any], bool]:
        """A few tokens with one label in each row, the same with all other tokens changed, and whether there was such.

        Of data for one rank alone.
        """
        made, _, _ = self.part(batch, device)
        labels: Tensor = made["shift_labels"]
        length = labels.shape[1]
        labelled = (labels != IGNORED).any(0).nonzero().flatten().tolist()
        at = labelled[len(labelled) // 2] if labelled else 0
        first = max(min(at - _TRIED // 2, length - _TRIED), 0)
        for name, value in made.items():
            if isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] == length:
                made[name] = value[:, first : first + _TRIED].clone()
        at -= first
        kept = made["shift_labels"][:, at].clone()
        made["shift_labels"][:] = IGNORED
        made["shift_labels"][:, at] = kept
        if "labels" in made:
            made["labels"] = made["shift_labels"]
        changed, differs = dict(made), bool(labelled)
        for name in _TOKENS:
            if name in made:
                changed[name] = made[name].roll(1, dims=1)
                changed[name][:, at] = made[name][:, at]
                differs = differs and not torch.equal(changed[name], made[name])
        return made, changed, differs

    def _check(self, given: Mapping[str, Any], length: int) -> None:
        positions, seen = given.get("position_ids"), given.get("attention_mask")
        if positions is not None and (positions.dim() != 2 or positions.shape[1] != length):
            raise SequenceError(
                f"position_ids: expected (rows, tokens) of {length} tokens, found {tuple(positions.shape)}"
            )
        if seen is not None and (seen.dim() != 2 or seen.shape[1] != length):
            raise SequenceError(
                f"attention_mask: expected (rows, tokens) of {length} tokens, 1 where one may be looked at, found "
                f"{tuple(seen.shape)}"
            )
        if length < self._exchange.size:
            raise SequenceError(f"sequence({self._exchange.size}) > tokens({length}): a rank would have none")
        if not self._is_hugging_face:
            missing = [name for name in ("position_ids", "shift_labels") if name not in given]
            if missing:
                raise SequenceError(
                    f"batch: expected {' and '.join(missing)} for a model that is none of Hugging Face's: position_ids "
                    "say where a part stands, shift_labels have each label where it is predicted (-100: none), and "
                    "the model gives the mean loss over them"
                )

    def _whole(self, positions: Tensor | None, seen: Tensor | None, length: int) -> Whole:
        size = self._padded(length)
        keys = packed = None
        if seen is not None and not bool((seen != 0).all()):
            keys = functional.pad(seen != 0, (0, size - length))
        elif positions is not None:
            starts = positions.diff(dim=1, prepend=positions[:, :1] - 1) != 1
            if bool(starts.any()):
                packed = functional.pad(starts.cumsum(1), (0, size - length), value=-1)
        return Whole(length, keys, packed)

    def _padded(self, length: int) -> int:
        return -(-length // self._exchange.size) * self._exchange.size

    def _own(self, x: Tensor, fill: int = 0, continues: bool = False) -> Tensor:
        """This rank's part along dimension 1, of what is made to divide. continues: by numbers that go on."""
        length = x.shape[1]
        more = self._padded(length) - length
        if more and continues:
            x = torch.cat([x, x[:, -1:] + torch.arange(1, more + 1, device=x.device)], dim=1)
        elif more:
            x = functional.pad(x, (*(0, 0) * (x.dim() - 2), 0, more), value=fill)
        return self._exchange.part(x, 1).contiguous()


def is_hugging_face(model: nn.Module) -> bool:
    return type(model).__module__.startswith("transformers.")


def check_model(model: nn.Module) -> None:
    """Raises SequenceError where a model's own loss is not known to be a sum over tokens."""
    if not is_hugging_face(model):
        return
    name = type(model).__name__
    if not name.endswith(("ForCausalLM", "LMHeadModel")) or getattr(model, "loss_type", None) not in (
        None,
        "ForCausalLM",
        name,
    ):
        raise SequenceError(f"expected a causal language model of Hugging Face's, or a plain module, found {name}")
    if getattr(model.config, "output_router_logits", False):
        raise SequenceError(
            "config.output_router_logits: its loss is a mean over all tokens of a layer; set it to false"
        )
