"""Training in plain torch with master weights, whose rounded copies compute: at once, or one update behind."""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.kit.training import Case, Outcome, one_thread


@dataclass(frozen=True)
class Dtypes:
    """What is computed, sent between ranks, and summed in."""

    compute: torch.dtype
    reduce: torch.dtype = torch.float32
    accumulate: torch.dtype = torch.float32


# What ADAMW says, by torch's fused kernel.
fused_adamw = partial(torch.optim.AdamW, lr=1e-2, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1, fused=True)


def train_delayed(
    case: Case,
    world_size: int,
    compute: torch.dtype = torch.float32,
    delay_after: int = 0,
    loss_scale: float = 1.0,
    **options: Any,
) -> Outcome:
    """Trains with a delay. delay_after: the number of updates that are not delayed."""
    return train_mixed(
        case, world_size, Dtypes(compute), lambda skipped: loss_scale, delay_after=delay_after, **options
    )


@one_thread()
def train_mixed(
    case: Case,
    world_size: int,
    dtypes: Dtypes,
    scale_of: Callable[[list[bool]], float] = lambda skipped: 1.0,
    make_optimizer: Callable[[list[Tensor]], torch.optim.Optimizer] = fused_adamw,
    delay_after: float = math.inf,
    settled_after: Collection[int] = (),
    lrs: Sequence[float] = (),
) -> Outcome:
    """Trains `case` in one process.

    scale_of: which steps were skipped so far -> the loss scale of the next one. settled_after: steps with whose updates
    the next ones compute, as if nothing were delayed. lrs: of each step, where it is not the optimizer's own.
    """
    torch.manual_seed(0)
    model = case.build()
    wholes = [_in_whole_vectors(param.detach()) for param in model.parameters()]
    masters = [whole[: p.numel()].view(p.shape) for whole, p in zip(wholes, model.parameters(), strict=True)]
    model = model.to(dtypes.compute)
    optimizer, outcome, num_updates = make_optimizer(wholes), Outcome(), 0
    for step in range(case.steps):
        scale = scale_of(outcome.skipped)
        seed = scale / case.accumulation if dtypes.compute == torch.float16 else scale  # sums may leave its range
        losses, sums = _gradients(model, case, step, world_size, dtypes, seed)
        factor = 1.0 / (world_size * case.accumulation * seed)
        outcome.scales.append(scale)
        outcome.losses.append(torch.stack(losses).mean().float().item())
        outcome.norms.append((torch.stack([total.double().norm() for total in sums]).norm() * factor).item())
        outcome.skipped.append(not all(bool(torch.isfinite(total).all()) for total in sums))
        if case.clip and outcome.norms[-1] > case.clip:
            factor *= case.clip / (outcome.norms[-1] + 1e-6)
        _take_over(model, masters)
        if outcome.skipped[-1]:
            continue
        for whole, total in zip(wholes, sums, strict=True):
            whole.grad = _in_whole_vectors(total.float() * factor)
        if lrs:
            optimizer.param_groups[0]["lr"] = lrs[step]
        optimizer.step()
        num_updates += 1
        if num_updates <= delay_after or step in settled_after:
            _take_over(model, masters)
    _take_over(model, masters)
    outcome.state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return outcome


def _in_whole_vectors(values: Tensor) -> Tensor:
    """Flat, with zeros behind them: torch's fused kernel rounds the elements that fill no vector in another way."""
    return torch.cat([values.flatten(), values.new_zeros(-values.numel() % 64)])


@torch.no_grad()
def _take_over(model: nn.Module, masters: Sequence[Tensor]) -> None:
    for param, master in zip(model.parameters(), masters, strict=True):
        param.copy_(master)


def _gradients(
    model: nn.Module, case: Case, step: int, world_size: int, dtypes: Dtypes, scale: float
) -> tuple[list[Tensor], list[Tensor]]:
    """Losses and sums of gradients, in the order of stages 2 and 3: by microbatch, and in each of them by rank."""
    params = list(model.parameters())
    sums = [torch.zeros_like(param, dtype=dtypes.accumulate) for param in params]
    batch, losses = case.global_batch(step, world_size), []
    for index in range(case.accumulation):
        for rank in range(world_size):
            part = [tensor.chunk(world_size)[rank].chunk(case.accumulation)[index] for tensor in batch]
            loss = model(*(t.to(dtypes.compute) if t.is_floating_point() else t for t in part))
            for total, gradient in zip(sums, torch.autograd.grad(loss * scale, params), strict=True):
                total.add_(gradient.to(dtypes.reduce))
            losses.append(loss.detach().double())
    return losses, sums
