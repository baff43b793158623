"""Floating-point operations of a model's step, by formula, for the rates of monitors."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

_QUERIES = re.compile(r"(w|attn_|self_)?(q|qkv|query|query_key_value|c_attn|in)(_b)?(_proj|_lin)?", re.IGNORECASE)
_OUTPUTS = re.compile(r"(w|attn_|self_|attention_)?(o|out|output|c|dense)(_proj|_lin)?|proj", re.IGNORECASE)


@dataclass(frozen=True)
class ModelFlops:
    """Operations per token in forward and backward; a backward counts twice its forward. Recomputation is not counted.

    6 x num_params: matrix products with parameters (arXiv 2001.08361, section 2.1). 12 x length x attention_width:
    queries by keys and weights by values, for all pairs (arXiv 2204.02311, appendix B).
    """

    num_params: int
    attention_width: int
    """Heads x head size, summed over layers; 0: no attention was found."""

    @classmethod
    def of(cls, model: nn.Module) -> ModelFlops:
        """Count a whole model. A module with a query projection counts as an attention."""
        return cls(sum(param.numel() for param in model.parameters()), sum(map(_width_of, model.modules())))

    def of_tokens(self, tokens: int, length: int) -> int:
        """Return the operations of `tokens` tokens in sequences of `length`."""
        return tokens * (6 * self.num_params + 12 * length * self.attention_width)


def attention_formulas() -> dict[Any, Callable[..., int]]:
    """Return operation -> FLOPs from its tensors or shapes, for every attention kernel, by torch's formulas.

    torch has no formula for its CPU kernel, and before 2.12 refuses fewer key heads than query heads.
    """
    from torch.utils.flop_counter import flop_registry  # imports triton: [Note: what few trainings use] in `build.py`

    formulas: dict[Any, Callable[..., int]] = {}
    for suffix, of_queries in (("", 0), ("_backward", 1)):  # position of the queries, before keys and values
        for kernel in ("flash", "efficient", "cudnn"):
            operation = getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_attention{suffix}")
            formulas[operation] = partial(_with_heads_of_queries, flop_registry[operation], of_queries)
        flash, for_cpu = "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu"
        formulas[getattr(torch.ops.aten, for_cpu + suffix)] = formulas[getattr(torch.ops.aten, flash + suffix)]
    return formulas


def _with_heads_of_queries(formula: Callable[..., int], of_queries: int, *args: Any, **_: Any) -> int:
    """Apply a formula as if keys and values had as many heads as the queries, since each query head multiplies them."""
    shapes = [tuple(getattr(one, "shape", one)) for one in args[: of_queries + 3]]  # batch, heads, tokens, width
    heads = shapes[of_queries][1]
    keys, values = ((batch, heads, *rest) for batch, _, *rest in shapes[-2:])
    return formula(*shapes[:-2], keys, values)


def _width_of(module: nn.Module) -> int:
    """Return heads x head size: the inputs of the output layer, else of the query layer; 0 for a module without."""
    if isinstance(module, nn.MultiheadAttention):
        return int(module.embed_dim)
    inputs = {name: _inputs_of(child) for name, child in module.named_children()}
    queries = [size for name, size in inputs.items() if size and _QUERIES.fullmatch(name)]
    if not queries:
        return 0
    outputs = [size for name, size in inputs.items() if size and _OUTPUTS.fullmatch(name)]
    # The input of an output layer is heads x head size. That of a query layer is the model's width, and may differ.
    return (outputs or queries)[-1]


def _inputs_of(layer: nn.Module) -> int:
    """Return the inputs of a linear layer, adapter or Conv1D; 0 for any other module."""
    found: object = getattr(layer, "in_features", getattr(layer, "nx", 0))
    return found if isinstance(found, int) else 0
