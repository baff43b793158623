"""Floating-point operations of a model's step, by formula: what rates of monitors are made of."""

from __future__ import annotations

import re
from dataclasses import dataclass

from torch import nn

_QUERIES = re.compile(r"(w|attn_|self_)?(q|qkv|query|query_key_value|c_attn|in)(_b)?(_proj|_lin)?", re.IGNORECASE)
_OUTPUTS = re.compile(r"(w|attn_|self_|attention_)?(o|out|output|c|dense)(_proj|_lin)?|proj", re.IGNORECASE)


@dataclass(frozen=True)
class ModelFlops:
    """Of a token, forward and backward; a backward is twice its forward. What is computed again is not counted.

    6 x num_params: matrix products with parameters, each counted, as in arXiv 2001.08361, section 2.1. 12 x length x
    attention_width: queries by keys and weights by values, of all pairs, as in arXiv 2204.02311, appendix B.
    """

    num_params: int
    attention_width: int
    """Heads x their size, of all layers together; 0: no attention was found."""

    @classmethod
    def of(cls, model: nn.Module) -> ModelFlops:
        """model: whole. An attention is a module with a layer named as that of queries."""
        return cls(sum(param.numel() for param in model.parameters()), sum(map(_width_of, model.modules())))

    def of_tokens(self, tokens: int, length: int) -> int:
        """tokens: of sequences so long."""
        return tokens * (6 * self.num_params + 12 * length * self.attention_width)


def _width_of(module: nn.Module) -> int:
    """Heads x their size: what the output layer takes, else what the queries are made of. 0: it is no attention."""
    if isinstance(module, nn.MultiheadAttention):
        return int(module.embed_dim)
    inputs = {name: _inputs_of(child) for name, child in module.named_children()}
    queries = [size for name, size in inputs.items() if size and _QUERIES.fullmatch(name)]
    if not queries:
        return 0
    outputs = [size for name, size in inputs.items() if size and _OUTPUTS.fullmatch(name)]
    return (outputs or queries)[-1]


def _inputs_of(layer: nn.Module) -> int:
    """Of a linear layer, one with adapters, or a Conv1D; 0 of others."""
    found: object = getattr(layer, "in_features", getattr(layer, "nx", 0))
    return found if isinstance(found, int) else 0
