"""A Llama described by its sizes alone, to plan models without code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...zero.plan import plan_units
from ..blueprint.blueprint import Blueprint
from ..model.prepared_model import tiles_of
from .meta_run import MetaRun
from .profile import Profile
from .splits import PlannedSplits

_SHORT = 2  # profiled layers: the last, and a representative of all before it
_SHORT_WITH_PARTS = 3  # also the first of a stage, whose input is not split into parts of tokens


@dataclass(frozen=True)
class Shape:
    """Sizes in elements. kv_heads: 0: as many as heads. mlp: 0: 8/3 of hidden, rounded up to a multiple of 256."""

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    sequence: int
    kv_heads: int = 0
    mlp: int = 0

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "vocabulary", "sequence"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, found {getattr(self, name)}")
        if self.hidden % self.heads:
            raise ValueError(f"heads({self.heads}) x head size(?) = hidden({self.hidden}) does not hold")
        if self.kv_heads < 0 or (self.kv_heads and self.heads % self.kv_heads):
            raise ValueError(f"kv heads({self.kv_heads}) x queries per head(?) = heads({self.heads}) does not hold")

    @property
    def inner(self) -> int:
        """Features between the linear layers of the MLP."""
        return self.mlp or -(-8 * self.hidden // 3 // 256) * 256


class Attention(nn.Module):
    """Grouped-query attention."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = shape.heads, shape.kv_heads or shape.heads
        self.head_dim = shape.hidden // shape.heads
        of_keys = self.num_kv_heads * self.head_dim
        self.q, self.k = nn.Linear(shape.hidden, shape.hidden, bias=False), nn.Linear(shape.hidden, of_keys, bias=False)
        self.v, self.o = nn.Linear(shape.hidden, of_keys, bias=False), nn.Linear(shape.hidden, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # (rows, sequence, hidden)
        rows, length, _ = x.shape
        q = self.q(x).view(rows, length, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.k(x).view(rows, length, self.num_kv_heads, self.head_dim).transpose(1, 2)
        v = self.v(x).view(rows, length, self.num_kv_heads, self.head_dim).transpose(1, 2)
        is_grouped = self.num_kv_heads < self.num_heads
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=is_grouped)
        result: Tensor = self.o(mixed.transpose(1, 2).reshape(rows, length, -1))
        return result


class Gated(nn.Module):
    """A gated MLP with SiLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(shape.hidden, shape.inner, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.inner, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # (rows, sequence, hidden)
        result: Tensor = self.down(functional.silu(self.gate(x)) * self.up(x))
        return result


class LlamaBlock(nn.Module):
    """Attention and a gated MLP, each with a norm before it and a residual connection."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.RMSNorm(shape.hidden), nn.RMSNorm(shape.hidden)
        self.attention, self.mlp = Attention(shape), Gated(shape)

    def forward(self, x: Tensor) -> Tensor:  # (rows, sequence, hidden)
        x = x + self.attention(self.norm(x))
        result: Tensor = x + self.mlp(self.norm2(x))
        return result


class Llama(nn.Module):
    """A Llama that returns its loss, the mean over labels.

    Rotary embeddings are left out, because their memory is small.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(LlamaBlock(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden)
        self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)

    def get_input_embeddings(self) -> nn.Module:
        """Return the embedding, by the name that Hugging Face uses."""
        return self.embedding

    def get_output_embeddings(self) -> nn.Module:
        """Return the head, by the name that Hugging Face uses."""
        return self.head

    def forward(self, input_ids: Tensor, position_ids: Tensor, shift_labels: Tensor) -> Tensor:  # (rows, sequence) each
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        # The loss of 16-bit logits is computed in float32, as Hugging Face's Llama does: its memory counts.
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), shift_labels.flatten())


def build(shape: Shape) -> Llama:
    """Build the model on the meta device."""
    with torch.device("meta"):
        return Llama(shape)


def batch(shape: Shape) -> dict[str, Tensor]:
    """Return a batch of the model on the meta device, tensors of shape (1, sequence)."""
    names = ("input_ids", "position_ids", "shift_labels")
    return {name: torch.empty(1, shape.sequence, dtype=torch.int64, device="meta") for name in names}


def short_profiler(shape: Shape, blueprint: Blueprint) -> Callable[[Any, int, int, bool], Profile]:
    """Return a function that profiles a few layers, which stand for all: layers are equal, except for the last.

    With sequence parallelism, activations are whole at both ends of each pipeline stage, so the first and last layers
    of each stage differ.
    """
    splits, units = PlannedSplits.of(blueprint), blueprint.config.zero_optimization.units
    lengths = [shape.layers]
    if splits.has_parts and splits.stages is not None:
        lengths = [len(names) for names in splits.stages]
    most = _SHORT_WITH_PARTS if splits.has_parts else _SHORT
    shorts = [*sorted({min(length, most) for length in lengths[:-1]}), min(lengths[-1], most)]
    starts = list(accumulate(shorts, initial=0))
    stages = [{f"layers.{number}" for number in range(*pair)} for pair in pairwise(starts)]
    stands_for = []  # by layer: the profiled layer
    for stage, length in enumerate(lengths):
        at = len(shorts) - 1 if stage == len(lengths) - 1 else shorts.index(min(length, most))
        for place in range(length):
            # The last layer of a stage stands for itself. A single layer stands for all layers before it.
            layer = shorts[at] - 1 if place == length - 1 else min(place, max(0, shorts[at] - 2))
            stands_for.append(f"layers.{starts[at] + layer}")

    def meta_run(num_layers: int, splits: PlannedSplits) -> MetaRun:
        model = build(replace(shape, layers=num_layers))
        of_model = plan_units(model, None if units == "auto" else units)
        tiles = tiles_of(blueprint.config)
        return MetaRun(model, of_model, blueprint.dtypes, blueprint.device, tiles=tiles, splits=splits)

    run = meta_run(starts[-1], replace(splits, stages=None if splits.stages is None else stages))

    def profile(batch: Any, rows: int, every: int, is_direct: bool) -> Profile:
        if every > 1:  # a few layers cannot show every k-th layer
            return meta_run(shape.layers, splits).profile(batch, rows, every, is_direct)
        short = run.profile(batch, rows, every, is_direct)
        layers = [name for name in short.parts if name.startswith("layers.")]
        parts = {}
        for name, part in short.parts.items():
            if name not in layers:
                parts[name] = part
            elif name == layers[0]:
                parts |= {f"layers.{layer}": short.parts[other] for layer, other in enumerate(stands_for)}
        return replace(short, parts=parts)

    return profile
