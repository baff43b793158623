"""The RMS norm in Triton's interpreter equals the formula in float64, forward and backward."""

import pytest
import torch
from torch import Tensor

from lowtide.kernels.rms_norm import add_rms_norm, rms_norm, rms_norm_reference
from lowtide.kernels.triton import rms_norm as triton_form
from tests.kernels.exact import DTYPES, assert_near_float64

SHAPES = [(1, 1), (3, 7), (2, 3, 64), (5, 123), (4, 1, 257)]
EPS = 1e-5


def drawn(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator).to(dtype).requires_grad_()


def widened(*tensors: Tensor) -> list[Tensor]:
    return [tensor.detach().double().requires_grad_() for tensor in tensors]


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_equals_the_formula(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> None:
    x, weight = drawn(shape, dtype, generator), drawn(shape[-1:], dtype, generator)
    dy = torch.randn(shape, generator=generator).to(dtype)
    y = rms_norm(x, weight, EPS, offset=1.0, backend="triton")
    y.backward(dy)
    exact_x, exact_weight = widened(x, weight)
    exact = rms_norm_reference(exact_x, exact_weight, EPS, offset=1.0)
    exact.backward(dy.double())
    check(y, exact, (x, weight), (exact_x, exact_weight), dy)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("uses", ["both", "normed", "sum"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_residual_is_added_first(dtype: torch.dtype, uses: str, generator: torch.Generator) -> None:
    shape = (5, 123)
    x, residual = drawn(shape, dtype, generator), drawn(shape, dtype, generator)
    weight = drawn(shape[-1:], dtype, generator)
    dy, dh = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    y, h = add_rms_norm(x, residual, weight, EPS, backend="triton")
    assert_near_float64(h, x.double() + residual.double())
    outputs = {"both": (y, h), "normed": (y,), "sum": (h,)}[uses]
    gradients = {"both": (dy, dh), "normed": (dy,), "sum": (dh,)}[uses]
    torch.autograd.backward(outputs, gradients)
    exact_h, exact_weight = widened(h, weight)  # the norm is of the sum as it was rounded
    exact = rms_norm_reference(exact_h, exact_weight, EPS)
    parts = {"both": (exact, exact_h * 1.0), "normed": (exact,), "sum": (exact_h * 1.0,)}[uses]
    torch.autograd.backward(parts, [gradient.double() for gradient in gradients])
    if uses == "sum":
        assert torch.equal(x.grad, dh) and torch.equal(residual.grad, dh) and weight.grad is None
        return
    assert torch.equal(x.grad, residual.grad)
    check(y, exact, (x, weight), (exact_h, exact_weight), dy)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("has_weight", [True, False])
def test_rows_wider_than_a_block(has_weight: bool, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_form, "MAX_BLOCK_SIZE", 64)
    x, residual = (drawn((3, 200), torch.float32, generator) for _ in range(2))
    weight = drawn((200,), torch.float32, generator) if has_weight else None
    y, h = add_rms_norm(x, residual, weight, EPS, backend="triton")
    dy = torch.randn(x.shape, generator=generator)
    y.backward(dy)
    (exact_h,) = widened(h)
    exact_weight = widened(weight)[0] if weight is not None else None
    exact = rms_norm_reference(exact_h, exact_weight, EPS)
    exact.backward(dy.double())
    inputs = (x, weight) if weight is not None else (x,)
    exact_inputs = (exact_h, exact_weight) if exact_weight is not None else (exact_h,)
    check(y, exact, inputs, exact_inputs, dy)


def check(y: Tensor, exact: Tensor, inputs: tuple[Tensor, ...], exact_inputs: tuple[Tensor, ...], dy: Tensor) -> None:
    """dx is a difference of terms of size |rstd g|, dweight a sum over rows of |dy x^|: float32 rounds on these."""
    assert_near_float64(y, exact)
    h, n_cols = exact_inputs[0].detach(), exact.shape[-1]
    rstd = torch.rsqrt(h.square().mean(-1, keepdim=True) + EPS)
    weight = exact_inputs[1].detach().abs() + 1 if len(exact_inputs) > 1 else torch.ones(n_cols)
    largest = (rstd * (weight * dy.double()).abs().amax(-1, keepdim=True) * n_cols**0.5, None)
    if len(inputs) > 1:
        largest = (largest[0], (dy.double() * h * rstd).abs().reshape(-1, n_cols).sum(0))
    for found, wanted, size in zip(inputs, exact_inputs, largest, strict=False):
        assert found.grad is not None and wanted.grad is not None
        assert_near_float64(found.grad, wanted.grad, magnitude=size)


def test_strides_are_followed(generator: torch.Generator) -> None:
    wide = torch.randn(6, 40, generator=generator)
    for x in (wide[::2, 3:30], wide.t(), wide[:, ::3], torch.randn(2, 5, 8, generator=generator).transpose(0, 1)):
        found = rms_norm(x, None, EPS, backend="triton")
        assert_near_float64(found, rms_norm_reference(x.double(), None, EPS))


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (0,)], ids=str)
def test_empty_tensors_stay_empty(shape: tuple[int, ...]) -> None:
    x = torch.empty(shape, requires_grad=True)
    weight = torch.ones(shape[-1:], requires_grad=True)
    y = rms_norm(x, weight, backend="triton")
    y.sum().backward()
    assert y.shape == shape and x.grad is not None and weight.grad is not None
    assert not weight.grad.any()


def test_bad_shapes_are_errors() -> None:
    x = torch.ones(2, 8)
    with pytest.raises(ValueError, match=r"rms_norm: expected weight of shape \(8,\), .*; found \(7,\)"):
        rms_norm(x, torch.ones(7))
    with pytest.raises(ValueError, match=r"rms_norm: expected a floating-point x .*, found \(2, 8\) torch.int64"):
        rms_norm(x.long(), None)
    with pytest.raises(ValueError, match=r"add_rms_norm: expected residual like x, \(2, 8\) torch.float32, found"):
        add_rms_norm(x, x.half(), None)
