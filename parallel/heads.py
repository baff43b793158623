"""Heads of an attention: what of them a rank has, and the counts that its module goes by."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from ..offload import Portion
from .splits import ParameterSplit, is_linear, width_out

_SIZES = ("head_dim", "key_value_proj_dim", "attention_head_size", "head_size", "d_kv")
_COUNTS = ("num_heads", "n_heads", "n_head", "num_attention_heads", "num_query_heads", "nhead")
_KEY_COUNTS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "num_kv")
_WIDTHS = ("split_size", "inner_dim", "all_head_size", "embed_dim", "hidden_size")
_GROUPS = ("num_key_value_groups", "n_rep")
_PROJECTIONS = {"q_proj", "k_proj", "v_proj", "q_lin", "k_lin", "v_lin", "query", "key", "value", "q", "k", "v"}
_PROJECTIONS |= {"q_attn", "c_attn", "qkv", "qkv_proj", "query_key_value"}


@dataclass(frozen=True)
class Heads:
    """The heads of one attention module, of which each rank computes some.

    Where there are fewer keys and values than ranks, several ranks have the same of them.
    """

    module: nn.Module
    size: int  # elements of one
    queries: int
    keys: int
    layers: frozenset[str]  # names of those that give them

    @classmethod
    def of(cls, parent: nn.Module, columns: dict[str, tuple[nn.Module, int]]) -> Heads | None:
        """columns: layers that are split by columns -> with the width of their smallest part. None: no attention.

        Where names say which of them are an attention's, the others are an MLP's beside it.
        """
        named = {name for name in columns if name.rpartition(".")[2] in _PROJECTIONS}
        widths = [width for name, (layer, width) in columns.items() if is_linear(layer) and name in (named or columns)]
        size = _number(parent, _SIZES)
        count = _number(parent, _COUNTS)
        if size is None and count is not None and widths and max(widths) % count == 0:
            size = max(widths) // count
        if size is None or not widths or any(width % size for width in widths):
            return None
        return cls(parent, size, max(widths) // size, min(widths) // size, frozenset(named or columns))

    def ranges(self, name: str, width: int, degree: int, has_parts: bool) -> list[tuple[int, int]]:
        """[low, high) of a layer's outputs, by place. Raises ValueError where the degree does not divide the heads."""
        heads = width // self.size
        if heads % degree == 0:
            step = heads // degree * self.size
            return [(place * step, (place + 1) * step) for place in range(degree)]
        if degree % heads == 0 and heads < self.queries and self.queries % degree == 0 and not has_parts:
            kept = [place * heads // degree for place in range(degree)]
            return [(head * self.size, (head + 1) * self.size) for head in kept]
        kind = "heads" if heads == self.queries else "key heads"
        raise ValueError(
            f"parallel.tensor: expected a degree that divides the heads of '{name}', found {kind}({heads}) / "
            f"tensor({degree}), which leaves {heads % degree}; set a divisor of {heads}, or "
            f'"tensor_parallel": {{"plan": {{"{name}": "whole"}}}} and the same for the layers beside it'
        )

    def parameters(self, degree: int) -> dict[str, ParameterSplit]:
        """Of the module itself, with a row for each head of queries, as the sinks of GPT-OSS."""
        step = self.queries // degree
        rows = [(place * step, (place + 1) * step) for place in range(degree)]
        return {
            key: ParameterSplit(tuple(Portion.along(tuple(param.shape), 0, [own]) for own in rows))
            for key, param in self.module.named_parameters(recurse=False)
            if param.ndim and param.shape[0] == self.queries
        }

    def local_counts(self, degree: int) -> Iterator[tuple[str, int]]:
        """(attribute of the module, its value for one rank's heads)."""
        queries, keys = self.queries // degree, max(1, self.keys // degree)
        for names, whole, own in (
            (_COUNTS, self.queries, queries),
            (_KEY_COUNTS, self.keys, keys),
            (_WIDTHS, self.queries * self.size, queries * self.size),
            (_GROUPS, self.queries // self.keys, queries // keys),
        ):
            for name in names:
                if self.module.__dict__.get(name) == whole != own:
                    yield name, own


def _number(module: nn.Module, names: tuple[str, ...]) -> int | None:
    values = (module.__dict__.get(name) for name in names)
    return next((value for value in values if type(value) is int and value > 0), None)


def smallest_part(module: nn.Module, parts: tuple[int, ...]) -> int:
    """The width of the smallest of several fused parts, in proportion `parts`."""
    return width_out(module) * min(parts) // sum(parts)
