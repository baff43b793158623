"""Mixed precision in plain torch: float32 master weights, 16-bit copies that compute, float32 sums of gradients."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tests.kit.training import Case, Outcome, one_thread


@dataclass(frozen=True)
class Dtypes:
    """What is computed, sent between ranks, and summed in."""

    compute: torch.dtype
    reduce: torch.dtype = torch.float32
    accumulate: torch.dtype = torch.float32


def fused_adamw(params: list[Tensor]) -> torch.optim.Optimizer:
    """What ADAMW says, by torch's fused kernel."""
    return torch.optim.AdamW(params, lr=1e-2, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1, fused=True)


@one_thread()
def train_mixed(
    case: Case,
    world_size: int,
    dtypes: Dtypes,
    scale_of: Callable[[list[bool]], float] = lambda skipped: 1.0,
    make_optimizer: Callable[[list[Tensor]], torch.optim.Optimizer] = fused_adamw,
) -> Outcome:
    """Trains `case` in one process. scale_of: which steps were skipped so far -> the loss scale of the next one."""
    torch.manual_seed(0)
    model = case.build()
    masters = [param.detach().clone() for param in model.parameters()]
    model = model.to(dtypes.compute)
    optimizer = make_optimizer(masters)
    outcome = Outcome()
    for step in range(case.steps):
        scale = scale_of(outcome.skipped)
        seed = scale / case.accumulation if dtypes.compute == torch.float16 else scale  # small where range is
        losses, sums = _gradients(model, _microbatches(case, step, world_size), dtypes, seed)
        grads = [total.float() * (1.0 / (world_size * case.accumulation * seed)) for total in sums]
        for master, grad in zip(masters, grads, strict=True):
            master.grad = grad
        outcome.skipped.append(not all(bool(torch.isfinite(total).all()) for total in sums))
        outcome.scales.append(scale)
        outcome.losses.append(torch.stack(losses).mean().item())
        outcome.norms.append(torch.stack([grad.double().norm() for grad in grads]).norm().item())
        if not outcome.skipped[-1]:
            if case.clip:
                torch.nn.utils.clip_grad_norm_(masters, case.clip)
            optimizer.step()
            with torch.no_grad():
                for param, master in zip(model.parameters(), masters, strict=True):
                    param.copy_(master)
    outcome.state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return outcome


def _microbatches(case: Case, step: int, world_size: int) -> list[list[tuple[Tensor, ...]]]:
    """[microbatch][rank]: the order in which stages 2 and 3 add gradients."""
    batch = case.global_batch(step, world_size)
    return [
        [
            tuple(tensor.chunk(world_size)[rank].chunk(case.accumulation)[index] for tensor in batch)
            for rank in range(world_size)
        ]
        for index in range(case.accumulation)
    ]


def _gradients(
    model: nn.Module, microbatches: list[list[tuple[Tensor, ...]]], dtypes: Dtypes, scale: float
) -> tuple[list[Tensor], list[Tensor]]:
    """Losses of all microbatches, and the sum over them of each parameter's gradient, in the accumulation dtype."""
    params = list(model.parameters())
    sums = [torch.zeros_like(param, dtype=dtypes.accumulate) for param in params]
    losses = []
    for ranks in microbatches:
        for part in ranks:
            loss = model(*(t.to(dtypes.compute) if t.is_floating_point() else t for t in part))
            gradients = torch.autograd.grad(loss * scale, params)
            for total, gradient in zip(sums, gradients, strict=True):
                total.add_(gradient.to(dtypes.reduce))
            losses.append(loss.detach().double())
    return losses, sums
