"""Splits batches of sequences over ranks, and keeps the facts about the whole that attention needs.

    tokens    a b c d e f g                  rank 0     rank 1
    labels    a b c d e f g  -> shifted  ->  b c d e    f g . .     each label stands at the token that predicts it
    positions 0 1 2 3 4 5 6                  0 1 2 3    4 5 6 7     as in the whole; padding makes the length divisible

Every rank of the axis gets the same batch. A rank's loss is the sum over its labels, divided by the number of labels of
the whole. So the losses and the gradients of the parts add up to those of the mean over the whole.

[Note: contexts in recomputations]
Several forwards, each with its mask, may be in flight before their backwards. A block is recomputed while autograd runs
a node of its forward. Autograd numbers nodes as they are made, so the number identifies the forward (`Forwards`). An
attention context lives as long as the graph of its forward.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from ..comm import Collectives
from ..offload import round_up, sent

IGNORED = -100
_TRIED = 16  # tokens
_TOKENS = ("input_ids", "inputs_embeds")


class SequenceError(ValueError):
    """A model or a batch whose sequences cannot be split."""

    def __init__(self, message: str) -> None:
        super().__init__(f"parallel.sequence: {message}")
        self.message = message


@dataclass(frozen=True)
class AttentionContext:
    """Facts about the tokens of all ranks that attention needs."""

    length: int | None = None  # without padding; None: no padding
    keys: Tensor | None = None  # (rows, tokens) bool: False at tokens that are masked
    packed: Tensor | None = None  # (rows, tokens): number of the sequence within a packed row
    is_blind: bool = False  # some token with a label sees no token, not even itself

    def whole_mask(self, query: Tensor, is_causal: bool, window: int | None, always: bool = False) -> Tensor | None:
        """Return `mask` of all tokens as (rows or 1, 1, tokens, tokens), or None if is_causal suffices."""
        tokens = query.shape[2]
        is_added_seen = not is_causal and self.length is not None and self.length < tokens
        is_narrow = window is not None and window < tokens
        if not (self.keys is not None or self.packed is not None or is_added_seen or is_narrow or always):
            return None
        return self.mask(range(tokens), range(tokens), is_causal, window, query.device)[:, None]

    def mask(self, queries: range, keys: range, is_causal: bool, window: int | None, device: torch.device) -> Tensor:
        """Return (rows or 1, queries, keys) bool, True if a query may look at a key. window: tokens up to itself."""
        at = torch.arange(queries.start, queries.stop, device=device)[:, None]
        of = torch.arange(keys.start, keys.stop, device=device)[None, :]
        seen = torch.ones(len(queries), len(keys), dtype=torch.bool, device=device)
        if is_causal:
            # Padding is at the end, so no token before it sees it.
            seen = of <= at
        elif self.length is not None:
            seen = seen & (of < self.length)
        if window is not None:
            seen = seen & (at - of < window)
        seen = seen[None]
        if self.keys is not None:
            seen = seen & self.keys[:, None, keys.start : keys.stop]
        if self.packed is not None:
            own, others = (
                self.packed[:, queries.start : queries.stop, None],
                self.packed[:, None, keys.start : keys.stop],
            )
            seen = seen & (own == others)
        return seen

    def to(self, device: torch.device) -> AttentionContext:
        keys, packed = (None if one is None else sent(one, device) for one in (self.keys, self.packed))
        return replace(self, keys=keys, packed=packed)


class SequenceShard(dict[str, Any]):
    """A rank's inputs of the model, with the attention context of the whole.

    factor: for a loss that is a mean over the rank's labels; None if the model takes the number of all labels. ignored:
    the label of tokens without a label.
    """

    def __init__(
        self, inputs: Mapping[str, Any], whole: AttentionContext, factor: float | None, ignored: int = IGNORED
    ) -> None:
        super().__init__(inputs)
        self.whole = whole
        self.factor = factor
        self.ignored = ignored

    def changed(self, change: Callable[[dict[str, Any]], dict[str, Any]]) -> SequenceShard:
        """Return a part with changed inputs, for example on a device."""
        return SequenceShard(change(dict(self)), self.whole, self.factor, self.ignored)


class SequenceData:
    """Splits microbatches into the parts of ranks."""

    def __init__(self, model: nn.Module, exchange: Collectives, has_own_loss: bool = True) -> None:
        """has_own_loss: the model computes the loss, not a loss_fn."""
        self._exchange = exchange
        accepted = inspect.signature(model.forward).parameters
        self._is_hugging_face = is_hugging_face(model)
        self._takes_count = self._is_hugging_face and has_own_loss
        self._takes_cache = "use_cache" in accepted
        self.ignored = IGNORED
        """The label of tokens without a label, if a batch has no `ignore_index`."""

    def part(self, batch: Any, device: torch.device, needs_labels: bool = True) -> SequenceShard:
        """Return this rank's part. needs_labels: whether a loss is computed with it. Raises SequenceError."""
        if not isinstance(batch, Mapping) or not any(isinstance(batch.get(name), Tensor) for name in _TOKENS):
            kind = "a mapping without them" if isinstance(batch, Mapping) else type(batch).__name__
            raise SequenceError(f"batch: expected a mapping with input_ids (or inputs_embeds), found {kind}")
        given = {name: value for name, value in batch.items() if value is not None}
        tokens = next(given[name] for name in _TOKENS if name in given)
        rows, length = tokens.shape[:2]
        self._check(given, length, needs_labels)
        ignored = int(given.get("ignore_index", self.ignored))
        positions = given.pop("position_ids", None)
        seen = given.pop("attention_mask", None)
        whole = self._whole(positions, seen, length)
        if positions is None:
            positions = torch.arange(length, device=tokens.device).expand(rows, length)
        made: dict[str, Any] = {"position_ids": self.own(positions, continues=True)}
        labels = given.pop("labels", None)
        shifted = given.pop("shift_labels", None)
        if shifted is None and labels is not None:
            # Before the cut: the label of a part's last token is the first token of the next part.
            shifted = functional.pad(labels, (0, 1), value=ignored)[:, 1:]
        for name, value in given.items():
            is_along = isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] == length
            made[name] = self.own(value) if is_along else value
        factor = None
        if shifted is not None:
            whole = replace(whole, is_blind=_is_blind(whole, shifted != ignored))
            own = made["shift_labels"] = self.own(shifted, fill=ignored)
            if labels is not None or self._takes_count:
                # Hugging Face computes a loss if it is given labels, and then takes shift_labels in their place.
                made["labels"] = own
            total = max(int((shifted != ignored).sum()), 1)
            if self._takes_count:
                # A given number stays: a trainer counts the labels of all microbatches.
                made.setdefault("num_items_in_batch", total)
            else:
                factor = int((own != ignored).sum()) / total
        if self._takes_cache:
            made["use_cache"] = False
        return SequenceShard(made, whole.to(device), factor, ignored)

    def all_labelled(self, batch: Any, device: torch.device) -> tuple[SequenceShard, SequenceShard | None]:
        """Return a few tokens, each visible one with a valid label. Only for an axis of a single rank, which has all
        tokens.

        The second counts its positions itself, by the mask of the batch; None if the batch has them.
        """
        part, seen = self.part(batch, device, needs_labels=False), batch.get("attention_mask")
        made, seen = _narrowed(dict(part), 0), None if seen is None else seen[:, :_TRIED]
        # A class that the batch has, or 0 if all labels are ignored (-100).
        label = int(part["shift_labels"].max().clamp(min=0))
        labels = torch.full_like(made["shift_labels"], label)
        counted = {name: value for name, value in made.items() if name != "position_ids"}
        if seen is not None and bool(seen.any()):
            counted["attention_mask"] = seen
            labels = labels.where(seen.to(labels.device) != 0, part.ignored)
        one, other = (SequenceShard(_with_labels(inputs, labels), part.whole, 1.0) for inputs in (made, counted))
        return one, other if self._is_hugging_face and batch.get("position_ids") is None else None

    def trial(
        self, batch: Any, device: torch.device
    ) -> tuple[SequenceShard, SequenceShard, int, bool, dict[str, Any] | None]:
        """Return a few tokens, to check that tokens mix in attention alone and that losses of parts add up.

        (one, other, at, differs, tried): in `one` only token `at` has a label; in `other` all tokens except `at` are
        changed, if `differs`; `tried` is a small batch with more labels, to be split, or None for a batch without
        labels. Only for an axis of a single rank, which has all tokens.
        """
        part = self.part(batch, device, needs_labels=False)
        labels, ignored, length = part.get("shift_labels"), part.ignored, part["position_ids"].shape[1]
        labelled = [length // 2] if labels is None else (labels != ignored).any(0).nonzero().flatten().tolist()
        # From the middle, so that tokens before it and behind it are changed.
        at = labelled[len(labelled) // 2] if labelled else 0
        first = max(min(at - _TRIED // 2, length - _TRIED), 0)
        made = _narrowed(dict(part), first)
        at -= first
        tried = dict(made)
        if labels is not None:
            kept = made["shift_labels"][:, at : at + 1]
            tokens = torch.arange(made["shift_labels"].shape[1], device=kept.device)
            made = _with_labels(made, kept.where(tokens == at, ignored))
            none = kept.where(tokens < 0, ignored)
            tried = _with_labels(tried, _tried_labels(none, labels[labels != ignored]))
        changed, differs = dict(made), bool(labelled)
        for name in _TOKENS:
            if name in made:
                changed[name] = made[name].roll(1, dims=1)
                changed[name][:, at] = made[name][:, at]
                differs = differs and not torch.equal(changed[name], made[name])
        one, other = (SequenceShard(inputs, part.whole, 1.0) for inputs in (made, changed))
        return one, other, at, differs, tried if labels is not None and labelled else None

    def _check(self, given: Mapping[str, Any], length: int, needs_labels: bool) -> None:
        positions, seen = given.get("position_ids"), given.get("attention_mask")
        if positions is not None and (positions.dim() != 2 or positions.shape[1] != length):
            raise SequenceError(
                f"position_ids: expected (rows, tokens) of {length} tokens, found {tuple(positions.shape)}"
            )
        if seen is not None and (seen.dim() != 2 or seen.shape[1] != length):
            raise SequenceError(
                f"attention_mask: expected (rows, tokens) of {length} tokens, 1 for visible tokens, found "
                f"{tuple(seen.shape)}"
            )
        if length < self._exchange.size:
            raise SequenceError(f"sequence({self._exchange.size}) > tokens({length}): a rank would have no token")
        if not self._is_hugging_face:
            wanted = ("position_ids", "shift_labels") if needs_labels else ("position_ids",)
            missing = [name for name in wanted if name not in given]
            if missing:
                raise SequenceError(
                    f"batch: expected {' and '.join(missing)} for a model that is not from transformers. position_ids "
                    "hold the positions of the tokens; shift_labels hold each label at the token that predicts it "
                    "(-100: no label); the loss is the mean over them"
                )
        elif needs_labels and not self._takes_count and not {"labels", "shift_labels"} & {*given}:
            raise SequenceError(
                "batch: expected labels or shift_labels for the loss_fn, which returns the mean over the shift_labels "
                f"of a part, found {', '.join(given)}"
            )

    def _whole(self, positions: Tensor | None, seen: Tensor | None, length: int) -> AttentionContext:
        size = round_up(length, self._exchange.size)
        keys = packed = None
        # Read before the engine moves the batch to the device, where a read would make the host wait.
        if seen is not None and not bool((seen != 0).all()):
            keys = functional.pad(seen != 0, (0, size - length))
        elif seen is None and positions is not None:  # as transformers does: positions that restart mean packing
            starts = positions.diff(dim=1, prepend=positions[:, :1] - 1) != 1
            if bool(starts.any()):
                packed = functional.pad(starts.cumsum(1), (0, size - length), value=-1)
        return AttentionContext(length, keys, packed)

    def own(self, x: Tensor, fill: float = 0, continues: bool = False) -> Tensor:
        """Return this rank's part of dimension 1, padded to divide. continues: pad with increasing numbers, not with
        `fill`.
        """
        length = x.shape[1]
        more = round_up(length, self._exchange.size) - length
        # transformers takes positions that begin again for a packed sequence.
        if more and continues:
            x = torch.cat([x, x[:, -1:] + torch.arange(1, more + 1, device=x.device)], dim=1)
        elif more:
            x = functional.pad(x, (*(0, 0) * (x.dim() - 2), 0, more), value=fill)
        return self._exchange.part(x, 1).contiguous()


def _narrowed(inputs: Mapping[str, Any], first: int) -> dict[str, Any]:
    """Return a few tokens, from `first` on."""
    length = inputs["position_ids"].shape[1]
    return {
        name: value[:, first : first + _TRIED].clone()
        if isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] == length
        else value
        for name, value in inputs.items()
    }


def _tried_labels(tried: Tensor, labels: Tensor) -> Tensor:
    """Set a label in the first half and two in the second, in two rows: (rows, tokens), which is changed in place.

    A mean that weighs classes, rows or parts then differs from the mean over labels. The values are the commonest and
    the rarest of `labels`, since a class with a smaller weight is often one of them.
    """
    values, counts = torch.unique(labels, return_counts=True)
    if len(values):
        values = values.flip(0)[counts.flip(0).argsort(stable=True)]  # ties: values that are far apart
        tried[0, 0] = values[-1]
        tried[0, -(-tried.shape[1] // 2)] = values[0]
        tried[-1, -1] = values[len(values) // 2]
    return tried


def _with_labels(inputs: dict[str, Any], labels: Tensor) -> dict[str, Any]:
    return inputs | {name: labels for name in ("shift_labels", "labels") if name in inputs}


def _is_blind(whole: AttentionContext, has_label: Tensor) -> bool:
    """Return whether a labelled token is padding with only padding before it. has_label: (rows, tokens)."""
    if whole.keys is None:
        return False
    sees = whole.keys[:, : has_label.shape[1]].cumsum(1) > 0
    return bool((has_label & ~sees).any())


def is_hugging_face(model: nn.Module) -> bool:
    return type(model).__module__.startswith("transformers.")


def check_model(model: nn.Module) -> None:
    """Raise SequenceError if the model's own loss is not known to be a sum over tokens."""
    if not is_hugging_face(model):
        return
    name = type(model).__name__
    if not name.endswith(("ForCausalLM", "LMHeadModel")) or getattr(model, "loss_type", None) not in (
        None,
        "ForCausalLM",
        name,
    ):
        raise SequenceError(f"expected a causal language model of transformers, or a plain module, found {name}")
    if getattr(model.config, "output_router_logits", False):
        raise SequenceError(
            "config.output_router_logits: the router loss is a mean over all tokens of a layer; set it to false"
        )


_LOSSES = {"cross_entropy", "nll_loss"}  # torch's functions, and our kernel of the same name
_AT = 4  # position of ignore_index: input, target, weight, size_average, ignore_index


class IgnoredLabels(TorchFunctionMode):
    """A mode around a loss. found: the `ignore_index` of each cross-entropy call, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[int] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in _LOSSES:
            self.found.append(kwargs.get("ignore_index", args[_AT] if len(args) > _AT else IGNORED))
        return func(*args, **kwargs)


_KEY = "lowtide.sequence"


class Forwards:
    """The attention contexts of the forwards in flight. See [Note: contexts in recomputations]."""

    def __init__(self) -> None:
        self._running: tuple[AttentionContext, int] | None = None  # with the number of its first node
        self._kept: list[tuple[int, int, weakref.ref[AttentionContext]]] = []  # with their ranges of node numbers

    def begin(self, whole: AttentionContext) -> None:
        """Begin a forward in this context."""
        self._running = whole, _number()

    def check(self, model: str) -> None:
        """Raise SequenceError if the model was called directly, not through the engine."""
        if self._running is None:
            raise SequenceError(
                f"expected engine(**batch), engine.train_step or engine.eval_step, found a direct call of the {model} "
                "or its generate(); generate with an engine that has parallel.sequence 1"
            )

    def end(self, output: Any) -> None:
        """End the forward. The graph of its output keeps the context alive; after an error output is None."""
        if self._running is None:
            return
        (whole, first), self._running = self._running, None
        self._kept = [kept for kept in self._kept if kept[2]() is not None]
        # Without gradients nothing is recomputed, so this context is not needed later.
        if torch.is_grad_enabled():
            self._kept.append((first, _number(), weakref.ref(whole)))
        for one in tree_leaves(output):
            if isinstance(one, Tensor) and one.grad_fn is not None:
                one.grad_fn.metadata[_KEY] = whole  # type: ignore[index]  # torch's stub says method, it is a property

    @property
    def whole(self) -> AttentionContext:
        """The context of the attention that is computed now. Raises SequenceError."""
        if torch._C._current_graph_task_id() == -1:
            if self._running is None:
                raise SequenceError("expected attention within a forward of the engine, found it outside")
            return self._running[0]
        alive = [(first, behind, whole) for first, behind, ref in self._kept if (whole := ref()) is not None]
        number = torch._C._current_autograd_node()._sequence_nr()
        for first, behind, whole in alive:
            if first <= number < behind:
                return whole
        if len(alive) == 1:  # a checkpoint inside a checkpoint: its nodes are younger
            return alive[0][2]
        raise SequenceError(
            f"a block is recomputed, but {len(alive)} forwards are in flight and its forward is unknown; use "
            "checkpoint(..., use_reentrant=False), or call engine.backward after each forward"
        )


def _number() -> int:
    """Return the number of the next autograd node."""
    number: int = torch._C._autograd._get_sequence_nr()
    return number
