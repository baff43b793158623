"""Choose the form of a kernel: Triton on a GPU, eager reference elsewhere (`uses_triton`). What all kernels share."""

from __future__ import annotations

import importlib.util
import logging
import math
import os
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.autograd import Function, function as autograd_function
from torch.compiler import is_compiling

Backend = Literal["auto", "triton", "reference"]
"""auto: Triton for tensors on a GPU, if it is installed; triton: Triton, or an error; reference: eager torch."""

_BACKENDS = get_args(Backend)

TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

Form = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]
"""Shape, strides, dtype and device of a tensor: a key of prepared launches."""
MOST_PREPARED = 512  # forms that a kernel keeps: of a block's layers in several shapes


def uses_triton(backend: Backend, kernel: str, *tensors: Tensor | None) -> bool:
    """Tell if `kernel` runs its Triton form on these tensors, rather than its eager reference.

    "auto" chooses the reference for float64, without a GPU and without Triton. With Triton's interpreter
    (TRITON_INTERPRET=1), "triton" is possible on the CPU. Raises ValueError if tensors are on several devices, or if
    "triton" is not possible.
    """
    places = tuple([(tensor.device, tensor.dtype) for tensor in tensors if tensor is not None])
    choose = _choose if is_compiling() else _choose_once  # the compiler traces a cached function, and warns
    return choose(backend, kernel, places)


def _choose(backend: Backend, kernel: str, given: tuple[tuple[torch.device, torch.dtype], ...]) -> bool:
    devices = {device for device, _ in given}
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise ValueError(
            f"{kernel}: expected all tensors on the same device, found {names}; move them with .to(device)"
        )
    if backend == "reference" or (backend == "auto" and not given):
        return False
    if backend not in _BACKENDS:
        choices = " or ".join(f'"{name}"' for name in _BACKENDS)
        raise ValueError(f'{kernel}: expected backend {choices}, found "{backend}"')
    device = given[0][0].type if given else "cpu"
    if backend == "auto" and device != "cuda":
        return False
    # Integer tensors (labels) do not choose a form: every kernel takes int32 and int64.
    wide = [dtype for _, dtype in given if dtype.is_floating_point and dtype not in TRITON_DTYPES]
    if backend == "auto":
        # A compiler cannot trace the look, and itself needs Triton on a GPU.
        return not wide and (has_triton() if is_compiling() else _starts_or_says_so())
    if not has_triton():
        raise ValueError(f'{kernel}: backend "triton" needs the package triton; install it, or use "auto"')
    if device != "cuda" and not is_interpreted():
        raise ValueError(f'{kernel}: backend "triton" needs tensors on a GPU, found tensors on {device}; use "auto"')
    if wide:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in TRITON_DTYPES)
        raise ValueError(f'{kernel}: backend "triton" takes {names}, found {wide[0]}; use "auto"')
    return True


_choose_once = cache(_choose)  # a step asks for every layer


def form_of(tensor: Tensor) -> Form:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def form_uses_triton(backend: Backend, kernel: str, *forms: Form | None) -> bool:
    """Tell if `kernel` runs its Triton form on tensors of these forms. See `uses_triton`."""
    return _choose(backend, kernel, tuple([(form[3], form[2]) for form in forms if form is not None]))


def row_strides(*forms: Form | None) -> tuple[bool, list[int]]:
    """Return the distances in memory between the rows of tensors, (..., n); 0 for None.

    True, if a tensor has columns apart, or rows at several distances. Then they are those of contiguous copies of all.
    """
    strides = [0 if form is None else _row_stride(*form[:2]) for form in forms]
    if None not in strides:
        return False, strides  # type: ignore[return-value]
    return True, [0 if form is None else form[0][-1] for form in forms]


def _row_stride(shape: torch.Size, strides: tuple[int, ...]) -> int | None:
    if shape[-1] > 1 and strides[-1] != 1:
        return None
    # The stride of a dimension of size 1 is arbitrary. strict=False: the last stride is that of columns.
    dims = [(size, stride) for size, stride in zip(shape[:-1], strides, strict=False) if size != 1]
    # Rows at equal distances: a step of each outer dimension passes all rows of the next dimension.
    for (_, outer), (size, inner) in pairwise(dims):
        if outer != size * inner:
            return None
    return dims[-1][1] if dims else shape[-1]


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    # torch knows the rule: in strides a size of 0 counts as 1.
    return torch.empty(shape, device="meta").stride()


def together(tensor: Any) -> Any:
    """Return a tensor or None with adjacent rows and columns."""
    return tensor if tensor is None else tensor.contiguous()


def direct_apply(function: type[Function]) -> Callable[..., Any]:
    """Return `function.apply` without its look at each argument for torch.func: it costs more than a small kernel."""
    # Under a transform of torch.func the usual `apply` must run: it raises torch's error for functions without a rule.
    direct = super(Function, function).apply  # type: ignore[misc]  # of torch's class in C++

    def apply(*args: Any) -> Any:
        return (function.apply if torch._C._are_functorch_transforms_active() else direct)(*args)

    return apply


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Return torch's `once_differentiable`, but without two changes of the gradient mode where it is off already."""
    guarded = autograd_function.once_differentiable(backward)

    def choose(ctx: Any, *gradients: Tensor | None) -> Any:
        return (guarded if torch.is_grad_enabled() else backward)(ctx, *gradients)

    return choose


def operators() -> Any:
    """Return torch.ops.lowtide, which a compiler does not trace into."""
    # Here: it costs each import of lowtide, and few programs compile. torch 2.11 does not trace `from . import`.
    from .operators import LOWTIDE

    return LOWTIDE


@cache
def triton_form(name: str) -> Any:
    """Import the module `triton/<name>.py`, and cache it: an `import` statement costs time in every step."""
    return importlib.import_module(f".triton.{name}", __package__)


def is_interpreted() -> bool:
    """Tell if Triton kernels run in its interpreter, on the CPU."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@cache
def has_triton() -> bool:
    """Tell if the package triton is installed."""
    return importlib.util.find_spec("triton") is not None


@cache
def why_not_started() -> str:
    """Return why Triton starts no kernel on the GPU of this process, or ""."""
    if not has_triton():
        return "triton is not installed"
    try:
        # It builds a library, once for each user. Many images of containers have no compiler.
        importlib.import_module("triton.runtime.driver").driver.active.get_current_device()
    except Exception as error:  # of the compiler's process, of its loader, or of the driver
        return f"triton cannot start kernels, it needs a C compiler and Python's headers, python3-dev ({error})"
    return ""


@cache
def _starts_or_says_so() -> bool:
    if why := why_not_started():
        logger = logging.getLogger("lowtide")
        logger.warning("%s: kernels run as eager torch operations, which are slower on a GPU", why)
    return not why


def has_autocast(x: Tensor) -> bool:
    """Tell if autocast is enabled for the device of x."""
    # torch has no autocast for the meta device, on which the planner runs a model.
    return not x.is_meta and torch.is_autocast_enabled(x.device.type)


def product_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which torch's linear layer multiplies x: of x, or autocast's, which keeps float64."""
    return torch.get_autocast_dtype(x.device.type) if has_autocast(x) and x.dtype != torch.float64 else x.dtype


def as_rows(x: Tensor) -> Tensor:
    """Reshape x, (..., n), to (rows, n) with adjacent columns: a view of x if its strides allow it."""
    if x.dim() == 2 and x.stride(1) == 1:
        return x
    # reshape(-1, n) is ambiguous for an empty x.
    rows = x.reshape(-1, x.shape[-1]) if x.numel() else x.new_empty((math.prod(x.shape[:-1]), x.shape[-1]))
    return rows if rows.stride(-1) == 1 or rows.shape[-1] <= 1 else rows.contiguous()
