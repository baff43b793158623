"""The delayed update in plain torch: parameters that compute, and master weights that are one update ahead of them."""

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor, nn

from tests.kit.training import Case, Outcome, one_thread
from tests.zero.mixed_precision import fused_adamw


@one_thread()
def train_delayed(
    case: Case,
    world_size: int,
    compute: torch.dtype = torch.float32,
    delay_after: int = 0,
    settled_after: Collection[int] = (),
    loss_scale: float = 1.0,
    lrs: Sequence[float] = (),
    make_optimizer: Callable[[list[Tensor]], torch.optim.Optimizer] = fused_adamw,
) -> Outcome:
    """Trains `case` in one process.

    delay_after: the number of updates that are not delayed.
    settled_after: steps with whose updates the next ones compute, as if nothing were delayed. lrs: of each step, where
    it is not the optimizer's own.
    """
    torch.manual_seed(0)
    model = case.build()
    wholes = [_in_whole_vectors(param.detach()) for param in model.parameters()]
    masters = [whole[: p.numel()].view(p.shape) for whole, p in zip(wholes, model.parameters(), strict=True)]
    model = model.to(compute)
    optimizer = make_optimizer(wholes)
    outcome = Outcome()
    num_updates = 0
    for step in range(case.steps):
        divided_before = case.accumulation if compute == torch.float16 else 1  # where sums may leave the range
        losses, sums = _gradients(model, case, step, world_size, loss_scale / divided_before)
        factor = divided_before / (world_size * case.accumulation * loss_scale)
        outcome.losses.append(torch.stack(losses).mean().float().item())
        outcome.norms.append((torch.stack([total.double().norm() for total in sums]).norm() * factor).item())
        outcome.skipped.append(not all(bool(torch.isfinite(total).all()) for total in sums))
        if case.clip and outcome.norms[-1] > case.clip:
            factor *= case.clip / (outcome.norms[-1] + 1e-6)
        take_over(model, masters)
        if outcome.skipped[-1]:
            continue
        for whole, total in zip(wholes, sums, strict=True):
            whole.grad = _in_whole_vectors(total * factor)
        if lrs:
            optimizer.param_groups[0]["lr"] = lrs[step]
        optimizer.step()
        num_updates += 1
        if num_updates <= delay_after or step in settled_after:
            take_over(model, masters)
    take_over(model, masters)
    outcome.state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return outcome


def _in_whole_vectors(values: Tensor) -> Tensor:
    """Flat, with zeros behind them: torch's fused kernel rounds the elements that fill no vector in another way."""
    return torch.cat([values.flatten(), values.new_zeros(-values.numel() % 64)])


def take_over(model: nn.Module, masters: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for param, master in zip(model.parameters(), masters, strict=True):
            param.copy_(master)


def _gradients(
    model: nn.Module, case: Case, step: int, world_size: int, scale: float
) -> tuple[list[Tensor], list[Tensor]]:
    """Losses, and the float32 sums of gradients: microbatch by microbatch, in each of them rank by rank."""
    params = list(model.parameters())
    sums = [torch.zeros_like(param, dtype=torch.float32) for param in params]
    batch, losses = case.global_batch(step, world_size), []
    for index in range(case.accumulation):
        for rank in range(world_size):
            part = [tensor.chunk(world_size)[rank].chunk(case.accumulation)[index] for tensor in batch]
            loss = model(*(t.to(params[0].dtype) if t.is_floating_point() else t for t in part))
            for total, gradient in zip(sums, torch.autograd.grad(loss * scale, params), strict=True):
                total.add_(gradient)
            losses.append(loss.detach().double())
    return losses, sums
