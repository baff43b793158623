"""Whether what the ranks of a tensor axis have alike is used by them alike: looked at in the first backward."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..comm import Exchange
from ..model.ledger import Ledger
from .plan import TensorPlan

_MOST = 1e-3  # of a difference beside the gradient; ranks that compute the same are apart by roundings at most


def watch_copies(plan: TensorPlan, model: nn.Module, exchange: Exchange, ledger: Ledger) -> None:
    """Compares the first gradient of each parameter that all ranks have, and then looks no more.

    A parameter between a column and a row split that no plan names gets a part of its gradient on each rank, and its
    copies would drift apart without a word.
    """
    for name, param in model.named_parameters():
        if id(param) not in plan.parameters and param.requires_grad:
            handles: list[Any] = []
            handle = param.register_hook(partial(_compare, name, exchange, handles))  # type: ignore[no-untyped-call]
            handles.append(handle)
            ledger.hook(handle)


def _compare(name: str, exchange: Exchange, handles: list[Any], gradient: Tensor) -> None:
    handles.pop().remove()
    own = gradient.detach().double() if gradient.device.type != "mps" else gradient.detach().float()
    sums = torch.stack([own.sum(), own.abs().sum()]).view(1, 2)
    found = exchange.gather(sums, 0, f"the first gradient of '{name}'")
    difference, size = (found[:, 0].max() - found[:, 0].min()).abs(), found[:, 1].max()
    if bool(difference > _MOST * size):
        raise ValueError(
            f"parallel.tensor: expected one gradient of '{name}' on the {exchange.size} ranks that have it alike, "
            'found another on each: it is used between a column and a row split. Give its layer the style "partial" in '
            'tensor_parallel.plan, or those around it "whole"'
        )
