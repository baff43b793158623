"""Cross-entropy by torch's own function in float64, and the sizes on which float32 rounding acts in it."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide.kernels.loss_terms import LossTerms

PLAIN = LossTerms()
ALL = LossTerms(label_smoothing=0.1, z_loss=1e-2, soft_cap=5.0, ignore_index=2)


def options_of(terms: LossTerms) -> dict[str, Any]:
    return {
        "ignore_index": terms.ignore_index,
        "label_smoothing": terms.label_smoothing,
        "z_loss": terms.z_loss,
        "soft_cap": terms.soft_cap,
        "reduction": terms.reduction,
    }


def drawn_labels(shape: tuple[int, ...], num_classes: int, terms: LossTerms, generator: torch.Generator) -> Tensor:
    """About one in four is ignored, but never the first."""
    labels = torch.randint(0, num_classes, shape, generator=generator)
    ignored = torch.rand(shape, generator=generator) < 0.25
    ignored.view(-1)[:1] = False
    labels[ignored] = terms.ignore_index
    if labels.view(-1)[0] == terms.ignore_index:
        labels.view(-1)[0] = 0
    return labels


@dataclass(frozen=True)
class Sizes:
    """Of the largest intermediate values, for `assert_near_float64`."""

    loss: Tensor  # of each row
    dlogits: Tensor  # of each logit, where the gradient from above is 1 for each row


def capped(logits: Tensor, soft_cap: float | None) -> Tensor:
    return soft_cap * torch.tanh(logits / soft_cap) if soft_cap is not None else logits


def exact_z_losses(logits: Tensor, labels: Tensor, terms: LossTerms) -> Tensor:
    lse = capped(logits, terms.soft_cap).logsumexp(-1)
    return terms.z_loss * lse.square() * (labels != terms.ignore_index)


def reduced(losses: Tensor, labels: Tensor, terms: LossTerms) -> Tensor:
    if terms.reduction == "none":
        return losses
    count = int((labels != terms.ignore_index).sum()) if terms.reduction == "mean" else 1
    return losses.sum() / count


def exact_losses(logits: Tensor, labels: Tensor, terms: LossTerms) -> Tensor:
    """Of each label, in the shape of labels. logits: (..., n) float64."""
    flat = F.cross_entropy(
        capped(logits, terms.soft_cap).reshape(-1, logits.shape[-1]),
        labels.reshape(-1).long(),
        ignore_index=terms.ignore_index,
        label_smoothing=terms.label_smoothing,
        reduction="none",
    )
    return flat.view(labels.shape) + exact_z_losses(logits, labels, terms)


def sizes(logits: Tensor, labels: Tensor, terms: LossTerms) -> Sizes:
    """An error of u, of the size of the cap or of u, is in lse, and by the exponential as a factor in the gradient."""
    logits = logits.detach()
    u = capped(logits, terms.soft_cap)
    lse = u.logsumexp(-1)
    of_exponent = 1 + (terms.soft_cap or 0.0) + u.abs().amax(-1) + lse.abs()
    of_loss = 2 * of_exponent + terms.z_loss * lse.abs() * (lse.abs() + 2 * of_exponent)
    kept = labels != terms.ignore_index
    index = labels.long().where(kept, 0).unsqueeze(-1)
    softmax = (u - lse.unsqueeze(-1)).exp()
    of_gradient = softmax * ((1 + 2 * terms.z_loss * lse.abs()) * of_exponent).unsqueeze(-1)
    of_gradient = of_gradient + terms.label_smoothing / logits.shape[-1]
    of_gradient = of_gradient.scatter_add(-1, index, torch.ones_like(of_gradient[..., :1]))
    return Sizes(of_loss * kept, of_gradient * kept.unsqueeze(-1))
