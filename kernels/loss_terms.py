"""Options of a cross-entropy loss (`LossTerms`), and checks of its inputs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypedDict, get_args

import torch
from torch import Tensor

from .dispatch import Form

Reduction = Literal["mean", "sum", "none"]
"""mean, sum: over the labels that are not ignored; none: a loss for each label."""


class LossOptions(TypedDict, total=False):
    """Keyword arguments of the loss functions: the fields of `LossTerms`."""

    ignore_index: int
    label_smoothing: float
    z_loss: float
    soft_cap: float | None
    reduction: Reduction


@dataclass(frozen=True)
class LossTerms:
    """Options of a cross-entropy loss; `cross_entropy.py` has the formulas. Raises ValueError for invalid values."""

    ignore_index: int = -100
    label_smoothing: float = 0.0  # share of the target that is spread evenly over the vocabulary
    z_loss: float = 0.0  # factor of logsumexp^2
    soft_cap: float | None = None  # bound of the logits' magnitude
    reduction: Reduction = "mean"

    @classmethod
    def of(cls, function: str, options: LossOptions) -> LossTerms:
        """Make the options from keyword arguments of `function`. Raises TypeError for an unknown name."""
        unknown = [name for name in options if name not in LossOptions.__annotations__]
        if unknown:
            raise TypeError(f"{function}() got an unexpected keyword argument '{unknown[0]}'")
        return cls(**options)

    def __post_init__(self) -> None:
        if not 0.0 <= self.label_smoothing <= 1.0:
            raise ValueError(f"cross-entropy: expected label_smoothing in [0, 1], found {self.label_smoothing}")
        if not 0.0 <= self.z_loss < math.inf:
            raise ValueError(f"cross-entropy: expected z_loss of at least 0 and finite, found {self.z_loss}")
        if self.soft_cap is not None and not 0.0 < self.soft_cap < math.inf:
            raise ValueError(
                f"cross-entropy: expected soft_cap above 0 and finite, or None for no cap; found {self.soft_cap}"
            )
        if self.reduction not in get_args(Reduction):
            choices = ", ".join(f'"{name}"' for name in get_args(Reduction))
            raise ValueError(f'cross-entropy: expected a reduction of {choices}, found "{self.reduction}"')

    def divisor(self, labels: Tensor) -> Tensor | None:
        """Count the labels that are not ignored, () on their device, for the mean; None for sum and none."""
        return (labels != self.ignore_index).sum() if self.reduction == "mean" else None

    def reduced(self, of_rows: Tensor, divisor: Tensor | None, shape: torch.Size) -> Tensor:
        """Reduce of_rows, (n_rows,), to the result: `shape`, the labels' shape, for "none", else a scalar.

        The mean over no labels is NaN with zero gradients, as in torch.
        """
        if self.reduction == "none":
            return of_rows.view(shape)
        return of_rows.sum() / divisor if divisor is not None else of_rows.sum()

    def scale_of_rows(self, dloss: Tensor, divisor: Tensor | None) -> Tensor:
        """Return the gradient of the result with respect to each row's loss: () or (n_rows,)."""
        return dloss / divisor if divisor is not None else dloss.reshape(-1) if dloss.dim() else dloss


def check_labels_fit(kernel: str, name: str, x: Form, labels: Form) -> None:
    """Raise ValueError unless x is a floating-point (..., n), n > 0, and labels are (...), int32 or int64."""
    (shape, _, dtype, _), (labels_shape, _, labels_dtype, _) = x, labels
    if not shape or not dtype.is_floating_point or shape[-1] == 0:
        raise ValueError(
            f"{kernel}: expected floating-point {name} of shape (..., n) with n of at least 1, found "
            f"{tuple(shape)} {dtype}"
        )
    if labels_dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"{kernel}: expected labels of dtype torch.int64 or torch.int32, found {labels_dtype}; convert them with "
            ".long()"
        )
    if labels_shape != shape[:-1]:
        raise ValueError(
            f"{kernel}: expected labels of shape {tuple(shape[:-1])}, for {name} of shape {tuple(shape)}; found "
            f"{tuple(labels_shape)}"
        )


def check_label_range(kernel: str, labels: Tensor, num_classes: int, ignore_index: int) -> None:
    """Raise ValueError for the first label on a CPU that is neither in [0, num_classes) nor ignored."""
    if labels.device.type != "cpu":  # the host would wait for the device, whose kernels refuse such an index
        return
    bad = ((labels < 0) | (labels >= num_classes)) & (labels != ignore_index)
    if bad.any():
        at = tuple(int(index) for index in bad.nonzero()[0])
        raise ValueError(
            f"{kernel}: expected labels in [0, {num_classes}) or ignore_index {ignore_index}, found "
            f"{int(labels[at])} at {at}; {int(bad.sum())} labels are out of range"
        )
