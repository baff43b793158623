"""The RMS norm in Triton's interpreter equals the formula in float64, forward and backward."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lowtide.kernels.rms_norm import add_rms_norm, rms_norm, rms_norm_reference
from lowtide.kernels.triton import row_norm as triton_form
from tests.kernels.exact import DTYPES, assert_near_float64

SHAPES = [(1, 1), (3, 7), (2, 3, 64), (70, 30), (5, 123), (4, 1, 257), (3, 1, 1100)]
EPS = 1e-5


def drawn(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator).to(dtype).requires_grad_()


def widened(tensor: Tensor) -> Tensor:
    return tensor.detach().double().requires_grad_()


def grad_of(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


def check(
    y: Tensor, h: Tensor, x: Tensor, weight: Tensor | None, dy: Tensor, dh: Tensor | None = None, offset: float = 0.0
) -> None:
    """y and the gradients of x and weight, given h, the rows that are normed.

    dx is a difference of two terms, the second a mean over the row; dweight a sum over rows: float32 rounds on these.
    """
    exact_h, exact_weight = widened(h), widened(weight) if weight is not None else None
    exact = rms_norm_reference(exact_h, exact_weight, EPS, offset=offset)
    exact.backward(dy.double())
    assert_near_float64(y, exact.detach(), steps=16)
    wide = exact_h.detach()
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)
    normed = (wide * rstd).abs()
    g = dy.double() if exact_weight is None else dy.double() * (exact_weight.detach() + offset)
    dx = grad_of(exact_h) if dh is None else grad_of(exact_h) + dh.double()
    dx_size = rstd * (g.abs() + normed * (g.abs() * normed).mean(-1, keepdim=True))
    assert_near_float64(grad_of(x), dx, dx_size if dh is None else dx_size + dh.double().abs(), steps=32)
    if weight is not None and exact_weight is not None and weight.requires_grad:
        size = (dy.double().abs() * normed).reshape(-1, wide.shape[-1]).sum(0)
        num_rows = wide.numel() // wide.shape[-1]
        assert_near_float64(grad_of(weight), grad_of(exact_weight), size, steps=16 + num_rows)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_equals_the_formula(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> None:
    x, weight = drawn(shape, dtype, generator), drawn(shape[-1:], dtype, generator)
    dy = torch.randn(shape, generator=generator).to(dtype)
    y = rms_norm(x, weight, EPS, offset=1.0, backend="triton")
    y.backward(dy)
    assert y.dtype == dtype and y.shape == shape
    check(y, x, x, weight, dy, offset=1.0)


def test_the_reference_is_torch_s_rms_norm(generator: torch.Generator) -> None:
    x, weight = (torch.randn(size, generator=generator).double() for size in ((5, 123), (123,)))
    torch.testing.assert_close(rms_norm_reference(x, weight, EPS), F.rms_norm(x, (123,), weight, EPS))
    torch.testing.assert_close(rms_norm(x, weight, EPS, offset=1.0), F.rms_norm(x, (123,), weight + 1, EPS))


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
    if uses == "sum":
        assert torch.equal(grad_of(x), dh) and torch.equal(grad_of(residual), dh) and weight.grad is None
        return
    assert torch.equal(grad_of(x), grad_of(residual))
    check(y, h, x, weight, dy, dh if uses == "both" else None)  # the norm is of the sum as it was rounded


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("has_weight", [True, False])
@pytest.mark.parametrize("has_residual", [True, False])
def test_rows_wider_than_a_block(
    has_residual: bool, has_weight: bool, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_form, "MAX_BLOCK_SIZE", 64)
    x, residual = (drawn((3, 200), torch.float32, generator) for _ in range(2))
    weight = drawn((200,), torch.float32, generator) if has_weight else None
    dy = torch.randn(x.shape, generator=generator)
    if has_residual:
        y, h = add_rms_norm(x, residual, weight, EPS, backend="triton")
    else:
        y, h = rms_norm(x, weight, EPS, backend="triton"), x
    y.backward(dy)
    check(y, h, x, weight, dy)


def test_several_strips_add_up(generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows a tile, more rows than there are programs: strips of several tiles, the last one cut short."""
    monkeypatch.setattr(triton_form, "BACKWARD_THREAD_NUMEL", 1)
    monkeypatch.setattr(triton_form, "num_processors", lambda device: 2)
    shape = (53, 60)  # tiles of 2 rows, 8 programs, strips of 8 rows
    x, weight = (drawn(size, torch.float32, generator) for size in (shape, shape[-1:]))
    dy = torch.randn(shape, generator=generator)
    y = rms_norm(x, weight, EPS, backend="triton")
    y.backward(dy)
    check(y, x, x, weight, dy)


@pytest.mark.parametrize("max_block_size", [16, 8192])
@pytest.mark.parametrize("has_residual", [True, False])
def test_strides_are_followed(
    has_residual: bool, max_block_size: int, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_form, "MAX_BLOCK_SIZE", max_block_size)
    wide = torch.randn(6, 40, generator=generator)
    for view in (wide[::2, 3:30], wide.t(), wide[:, ::3], torch.randn(2, 5, 8, generator=generator).transpose(0, 1)):
        n_cols = view.shape[-1]
        x, weight = view.detach().requires_grad_(), torch.randn(n_cols, 2, generator=generator)[:, 0].requires_grad_()
        residual, dh = torch.randn((2, *view.shape[:-1], 3, n_cols), generator=generator)[..., 0, :]
        dy = torch.randn((*view.shape, 2), generator=generator)[..., 0]
        assert not (x.is_contiguous() or weight.is_contiguous() or residual.is_contiguous() or dy.is_contiguous())
        if has_residual:
            y, h = add_rms_norm(x, residual, weight, EPS, backend="triton")
            torch.autograd.backward((y, h), (dy, dh))
        else:
            y, h = rms_norm(x, weight, EPS, backend="triton"), x
            y.backward(dy)
        check(y, h, x, weight, dy, dh if has_residual else None)


def test_a_gradient_that_is_one_number_for_all(generator: torch.Generator) -> None:
    x, weight = drawn((5, 24), torch.float32, generator), drawn((24,), torch.float32, generator)
    y = rms_norm(x, weight, EPS, backend="triton")
    y.sum().backward()
    check(y, x, x, weight, torch.ones(5, 24))


def test_a_frozen_weight_gets_no_gradient(generator: torch.Generator) -> None:
    x, weight = drawn((5, 24), torch.float32, generator), torch.randn(24, generator=generator)
    dy = torch.randn(x.shape, generator=generator)
    y = rms_norm(x, weight, EPS, backend="triton")
    y.backward(dy)
    assert weight.grad is None
    check(y, x, x, weight, dy)


def test_a_weight_may_be_wider_than_the_rows(generator: torch.Generator) -> None:
    x, weight = drawn((5, 24), torch.bfloat16, generator), drawn((24,), torch.float32, generator)
    dy = torch.randn(x.shape, generator=generator).bfloat16()
    y = rms_norm(x, weight, EPS, backend="triton")
    y.backward(dy)
    assert y.dtype == torch.bfloat16 and grad_of(weight).dtype == torch.float32
    check(y, x, x, weight, dy)


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (0,)], ids=str)
def test_empty_tensors_stay_empty(shape: tuple[int, ...]) -> None:
    x = torch.empty(shape, requires_grad=True)
    weight = torch.ones(shape[-1:], requires_grad=True)
    y, h = add_rms_norm(x, x, weight, backend="triton")
    (y.sum() + h.sum()).backward()
    assert y.shape == h.shape == shape and grad_of(x).shape == shape
    assert not grad_of(weight).any()


def test_bad_shapes_are_errors() -> None:
    x = torch.ones(2, 8)
    with pytest.raises(ValueError, match=r"rms_norm: expected weight of shape \(8,\), .*; found \(7,\)"):
        rms_norm(x, torch.ones(7))
    with pytest.raises(ValueError, match=r"rms_norm: expected a floating-point x .*, found \(2, 8\) torch.int64"):
        rms_norm(x.long(), None)
    with pytest.raises(ValueError, match=r"add_rms_norm: expected residual like x, \(2, 8\) torch.float32, found"):
        add_rms_norm(x, x.half(), None)
