"""Experts of which each rank of a tensor axis has some columns: what they give is added up, once for a layer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..comm import Exchange
from ..model.ledger import Ledger
from .collectives import copied, gathered, scattered, summed
from .experts import inputs_of
from .splits import LayerSplit
from .token_parts import TokenParts

_BIAS = "down_proj_bias"


class ExpertSums:
    """One module of experts on one rank: `copied` in front, of tokens and weights of their choices; `summed` behind.

    Where a rank has a part of the tokens, they are gathered with their choices, and the sum is scattered: experts take
    each token by itself, so that any order of them will do. Hooks lie around the exchange of tokens with other ranks
    of an expert axis, which sends each token's row once, and not what is summed of it.
    """

    def __init__(self, layer: LayerSplit, exchange: Exchange, parts: TokenParts | None, ledger: Ledger) -> None:
        """Before the exchange of tokens is put on the module."""
        self._layer, self._exchange, self._parts = layer, exchange, parts
        module = layer.module
        self._inputs = inputs_of(module)
        ledger.hook(module.register_forward_pre_hook(self._before, with_kwargs=True))
        ledger.hook(module.register_forward_hook(self._behind))
        if _BIAS in layer.parameters and exchange.place:
            ledger.override(module, "forward", partial(_without_bias, module, module.forward))
        low, high = layer.inputs[exchange.place]
        for key, value in list(vars(module).items()):
            if "intermediate" in key and type(value) is int and value == layer.inputs[-1][1]:
                ledger.override(module, key, high - low)

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: Any) -> Any:
        x, choices, weights = *args, *(kwargs[name] for name in self._inputs[len(args) :])
        if self._has_part():
            return tuple(gathered(one, self._exchange, 0, self._layer.name) for one in (x, choices, weights)), {}
        return (self._copied(x), choices, self._copied(weights)), {}

    def _behind(self, module: nn.Module, args: Any, y: Tensor) -> Tensor:
        if self._has_part():
            return scattered(y, self._exchange, 0, self._layer.name)
        return summed(y, self._exchange, self._layer.name)

    def _has_part(self) -> bool:
        return self._parts is not None and self._parts.has_part(self._layer.module)

    def _copied(self, x: Tensor) -> Tensor:
        return copied(x, self._exchange, self._layer.name) if torch.is_grad_enabled() and x.requires_grad else x


def _without_bias(module: nn.Module, forward: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """The first rank adds it; here the module computes with zeros, and the bias gets its gradient, as it does there."""
    bias: Any = module._parameters[_BIAS]
    module._parameters[_BIAS] = _Unadded.apply(bias)  # type: ignore[no-untyped-call]  # as torch has it
    try:
        return forward(*args, **kwargs)
    finally:
        module._parameters[_BIAS] = bias


class _Unadded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, bias: Tensor) -> Tensor:
        return torch.zeros_like(bias)

    @staticmethod
    def backward(ctx: Any, *dy: Tensor) -> Any:
        return dy[0]
