"""Cases of the losses. Liger computes gradients in forward: both passes are timed as one, and forward without them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from _kernel_case import Case, Draw, Pass, Size, Tensors, nbytes
from torch import Tensor

from lowtide.kernels.cross_entropy import cross_entropy
from lowtide.kernels.linear_cross_entropy import linear_cross_entropy


def draw_logits(size: Size, dtype: torch.dtype, draw: Draw) -> Tensors:
    return {"logits": draw.normal(*size, dtype=dtype, size=2.0), "labels": draw.labels(*size)}


def draw_hidden(size: Size, dtype: torch.dtype, draw: Draw) -> Tensors:
    """Logits of about a standard normal distribution."""
    n_rows, n_cols, num_classes = size
    return {
        "hidden": draw.normal(n_rows, n_cols, dtype=dtype),
        "weight": draw.normal(num_classes, n_cols, dtype=dtype, size=n_cols**-0.5),
        "labels": draw.labels(n_rows, num_classes),
    }


def torch_loss(t: Tensors) -> Tensors:
    return {"loss": F.cross_entropy(t["logits"], t["labels"])}


def torch_wide_loss(t: Tensors) -> Tensors:
    """What Hugging Face's models compute: the loss of 16-bit logits in float32."""
    return {"loss": F.cross_entropy(t["logits"].float(), t["labels"])}


def liger_loss(t: Tensors) -> Tensors:
    from liger_kernel.transformers.functional import liger_cross_entropy

    return {"loss": liger_cross_entropy(t["logits"], t["labels"])}


def _wide_enough(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def torch_linear_loss(t: Tensors) -> Tensors:
    return {"loss": F.cross_entropy(_wide_enough(F.linear(t["hidden"], t["weight"])), t["labels"])}


def liger_linear_loss(t: Tensors) -> Tensors:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    return {"loss": liger_fused_linear_cross_entropy(t["hidden"], t["weight"], t["labels"])}


def moved_by_loss(t: Tensors, results: Tensors) -> Mapping[Pass, int]:
    """Ignored rows are counted: read the logits; read them again, write their gradient."""
    forward = nbytes(t["logits"], t["labels"])
    return {"forward": forward, "both": 2 * forward + t["logits"].nbytes}


def moved_by_linear_loss(t: Tensors, results: Tensors) -> Mapping[Pass, int]:
    """Inputs and gradients alone; its matrix products take longer than any of these bytes."""
    inputs = nbytes(t["hidden"], t["weight"])
    return {"forward": inputs + t["labels"].nbytes, "both": 2 * inputs + t["labels"].nbytes}


LOSS_CASES = (
    Case(
        name="cross_entropy",
        file="cross_entropy",
        draw=draw_logits,
        forms={
            "lowtide": lambda t: {"loss": cross_entropy(t["logits"], t["labels"], backend="triton")},
            "torch": torch_loss,
            "compile": torch_wide_loss,
            "liger": liger_loss,
        },
        exact=torch_loss,
        moved=moved_by_loss,
        sizes=((4096, 32000), (4096, 128256)),
        tiny=(7, 300),
        passes=("forward", "both"),
        inputs_with_gradient=("logits",),
        results_with_gradient=("loss",),
    ),
    Case(
        name="linear_cross_entropy",
        file="linear_cross_entropy",
        draw=draw_hidden,
        forms={
            "lowtide": lambda t: {
                "loss": linear_cross_entropy(t["hidden"], t["weight"], t["labels"], backend="triton")
            },
            "torch": torch_linear_loss,
            "compile": torch_linear_loss,
            "liger": liger_linear_loss,
        },
        exact=torch_linear_loss,
        moved=moved_by_linear_loss,
        sizes=((4096, 2048, 32000), (8192, 4096, 128256)),
        tiny=(7, 24, 150),
        passes=("forward", "both"),
        inputs_with_gradient=("hidden", "weight"),
        results_with_gradient=("loss",),
        summed_dims={"dhidden": 2},
        inner_roundings=8.0,  # of logits and of their gradient, which matrix products read
        is_memory_bound=False,
    ),
)
