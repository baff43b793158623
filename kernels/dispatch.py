"""Which form of a kernel runs: Triton on a GPU, the eager reference elsewhere; and rows, which most kernels take."""

from __future__ import annotations

import importlib.util
import logging
import os
from functools import cache
from typing import Any, Literal, get_args

import torch
from torch import Tensor

Backend = Literal["auto", "triton", "reference"]
"""auto: Triton for tensors on a GPU, where it can be imported; triton: always, or an error; reference: eager torch."""

_BACKENDS = get_args(Backend)

TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def uses_triton(backend: Backend, kernel: str, *tensors: Tensor | None) -> bool:
    """True where `kernel` is to run its Triton form on these tensors, False for its eager reference.

    "auto" leaves float64, other devices than GPUs, and machines without Triton to the reference. Tensors must be on one
    device: else ValueError. Raises ValueError for "triton" where that is not possible. Triton's interpreter
    (TRITON_INTERPRET=1) counts as possible on the CPU.
    """
    given = [tensor for tensor in tensors if tensor is not None]
    devices = {tensor.device for tensor in given}
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise ValueError(f"{kernel}: expected all tensors on one device, found {names}; move them with .to(device)")
    if backend == "reference" or (backend == "auto" and not given):
        return False
    if backend not in _BACKENDS:
        choices = ", ".join(f'"{name}"' for name in _BACKENDS)
        raise ValueError(f'{kernel}: expected backend to be one of {choices}, found "{backend}"')
    device = given[0].device.type if given else "cpu"
    if backend == "auto" and device != "cuda":
        return False
    wide = [tensor.dtype for tensor in given if tensor.is_floating_point() and tensor.dtype not in TRITON_DTYPES]
    if backend == "auto":
        return not wide and _has_triton_or_says_so()
    if not has_triton():
        raise ValueError(f'{kernel}: backend "triton" needs the package triton, which is not installed; use "auto"')
    if device != "cuda" and not is_interpreted():
        raise ValueError(f'{kernel}: backend "triton" needs tensors on a GPU, found them on {device}; use "auto"')
    if wide:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in TRITON_DTYPES)
        raise ValueError(f'{kernel}: backend "triton" takes {names}, found {wide[0]}; use "auto"')
    return True


@cache
def triton_form(name: str) -> Any:
    """The module `triton/<name>.py`. Looked up once: a step would pay for each `import` that it comes to."""
    return importlib.import_module(f".triton.{name}", __package__)


def is_interpreted() -> bool:
    """True where Triton kernels run in its interpreter, on the CPU."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@cache
def _has_triton_or_says_so() -> bool:
    if not has_triton():
        logger = logging.getLogger("lowtide")
        logger.warning("triton is not installed: kernels run as eager torch operations, which are slower on a GPU")
    return has_triton()


def as_rows(x: Tensor) -> Tensor:
    """x, (..., n), as (rows, n) with adjacent columns; a view of x where its strides allow it."""
    rows = x.reshape(-1, x.shape[-1]) if x.numel() else x.new_empty((_num_rows(x), x.shape[-1]))
    return rows if rows.stride(-1) == 1 or rows.shape[-1] <= 1 else rows.contiguous()


def check_row_weight(kernel: str, x: Tensor, name: str, weight: Tensor | None) -> None:
    """Raises ValueError unless x is a floating-point (..., n) and weight (n,), or None."""
    if x.dim() == 0 or not x.is_floating_point():
        raise ValueError(
            f"{kernel}: expected a floating-point x of at least one dimension, found {tuple(x.shape)} {x.dtype}"
        )
    if weight is not None and tuple(weight.shape) != (x.shape[-1],):
        raise ValueError(
            f"{kernel}: expected {name} of shape ({x.shape[-1]},), the last dimension of x, {tuple(x.shape)}; found "
            f"{tuple(weight.shape)}"
        )


def _num_rows(x: Tensor) -> int:
    count = 1
    for size in x.shape[:-1]:
        count *= size
    return count
