"""What a cross-entropy loss is made of, beside logits and labels, and what its inputs must be."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypedDict, get_args

import torch
from torch import Tensor

Reduction = Literal["mean", "sum", "none"]
"""mean: over the labels that are not ignored; sum: over them; none: a loss for each label."""


class LossOptions(TypedDict, total=False):
    """The fields of `LossTerms`, as a caller gives them by name."""

    ignore_index: int
    label_smoothing: float
    z_loss: float
    soft_cap: float | None
    reduction: Reduction


@dataclass(frozen=True)
class LossTerms:
    """The options of a cross-entropy loss; their formulas are in `cross_entropy.py`. ValueError for impossible ones."""

    ignore_index: int = -100
    label_smoothing: float = 0.0  # share of the target that is spread evenly over the vocabulary
    z_loss: float = 0.0  # factor of logsumexp^2
    soft_cap: float | None = None  # bound of the logits' size
    reduction: Reduction = "mean"

    @classmethod
    def of(cls, function: str, options: LossOptions) -> LossTerms:
        """What a caller of that function asks for. Raises TypeError for a name that is none of the fields."""
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
            raise ValueError(f'cross-entropy: expected reduction to be one of {choices}, found "{self.reduction}"')

    def divisor(self, labels: Tensor) -> Tensor | None:
        """What a sum over rows is divided by: for the mean how many labels count, () on their device; else None."""
        return (labels != self.ignore_index).sum() if self.reduction == "mean" else None

    def reduced(self, of_rows: Tensor, divisor: Tensor | None, shape: torch.Size) -> Tensor:
        """of_rows, (n_rows,), as the result: of `shape`, that of the labels, for "none", else a scalar.

        The mean over no labels is NaN, as that of torch; its gradients are zeros, as those of torch.
        """
        if self.reduction == "none":
            return of_rows.view(shape)
        return of_rows.sum() / divisor if divisor is not None else of_rows.sum()

    def scale_of_rows(self, dloss: Tensor, divisor: Tensor | None) -> Tensor:
        """The gradient of the result with respect to each row's loss: () or (n_rows,), on the device of dloss."""
        return dloss / divisor if divisor is not None else dloss.reshape(-1) if dloss.dim() else dloss


def check_labels_fit(kernel: str, name: str, x: Tensor, labels: Tensor) -> None:
    """Raises ValueError unless x is a floating-point (..., n), n > 0, and labels an int32 or int64 (...)."""
    if x.dim() == 0 or not x.is_floating_point() or x.shape[-1] == 0:
        raise ValueError(
            f"{kernel}: expected floating-point {name} of shape (..., n) with n of at least 1, found "
            f"{tuple(x.shape)} {x.dtype}"
        )
    if labels.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"{kernel}: expected labels of dtype torch.int64 or torch.int32, found {labels.dtype}; convert them with "
            ".long()"
        )
    if labels.shape != x.shape[:-1]:
        raise ValueError(
            f"{kernel}: expected labels of shape {tuple(x.shape[:-1])}, that of {name} {tuple(x.shape)} without its "
            f"last dimension; found {tuple(labels.shape)}"
        )


def check_label_range(kernel: str, labels: Tensor, num_classes: int, ignore_index: int) -> None:
    """Raises ValueError that names the first label that is neither in [0, num_classes) nor ignored.

    Of the CPU's alone: elsewhere the host would wait for the device, whose own kernels refuse an index out of range.
    """
    if labels.device.type != "cpu":
        return
    bad = ((labels < 0) | (labels >= num_classes)) & (labels != ignore_index)
    if bad.any():
        at = tuple(int(index) for index in bad.nonzero()[0])
        raise ValueError(
            f"{kernel}: expected labels in [0, {num_classes}), or ignore_index {ignore_index}; found "
            f"{int(labels[at])} at {at}, and {int(bad.sum())} such labels in all"
        )
