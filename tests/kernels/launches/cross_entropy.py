"""Launches of the cross-entropy."""

import torch

from lowtide.kernels.dispatch import form_of
from lowtide.kernels.loss_terms import LossTerms
from lowtide.kernels.triton import cross_entropy

PLAIN = LossTerms()
ALL = LossTerms(label_smoothing=0.1, z_loss=1e-4, soft_cap=30.0)


def meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def mean(dtype: torch.dtype, terms: LossTerms) -> None:
    """The loss, its reduction, and the gradient."""
    logits, labels = meta(4096, 32000, dtype=dtype), meta(4096, dtype=torch.int64)
    launches = cross_entropy.CrossEntropy(form_of(logits), form_of(labels), terms)
    loss, stats = launches.forward(logits, labels)
    launches.backward(loss, logits, labels, stats, overwrites=False)


def losses(dtype: torch.dtype, terms: LossTerms, n_cols: int, padding: int = 0, has_gradient: bool = False) -> None:
    logits = meta(64, n_cols + padding, dtype=dtype)
    scale = meta(dtype=torch.float32) if has_gradient else None
    cross_entropy.losses(logits, n_cols, meta(64, dtype=torch.int64), terms, scale)


def gradient(dtype: torch.dtype, terms: LossTerms, n_cols: int, padding: int = 0) -> None:
    logits = meta(64, n_cols + padding, dtype=dtype)
    labels, of_row = meta(64, dtype=torch.int32), meta(64, dtype=torch.float32)
    cross_entropy.gradient(logits, n_cols, labels, of_row, of_row, terms, logits)


CASES = {
    "mean": lambda dtype: mean(dtype, PLAIN),
    "mean with all terms": lambda dtype: mean(dtype, ALL),
    "losses": lambda dtype: losses(dtype, PLAIN, 128256),
    "losses with all terms": lambda dtype: losses(dtype, ALL, 128256),
    "losses of few blocks": lambda dtype: losses(dtype, ALL, 32000, has_gradient=True),
    "losses of one block": lambda dtype: losses(dtype, PLAIN, 2048),
    "losses and gradient": lambda dtype: losses(dtype, PLAIN, 128256, has_gradient=True),
    "losses and gradient with all terms": lambda dtype: losses(dtype, ALL, 128256, has_gradient=True),
    "losses and gradient of padded rows": lambda dtype: losses(dtype, PLAIN, 50257, 15, has_gradient=True),
    "losses and gradient of padded rows with all terms": lambda dtype: losses(dtype, ALL, 50257, 15, True),
    "losses and gradient of one block": lambda dtype: losses(dtype, ALL, 2048, has_gradient=True),
    "gradient": lambda dtype: gradient(dtype, PLAIN, 128256),
    "gradient with all terms": lambda dtype: gradient(dtype, ALL, 50257, 15),
    "scale": lambda dtype: cross_entropy.scale_(meta(1024, 4096, dtype=dtype), meta(dtype=torch.float32)),
}
