"""The layer norm in Triton's interpreter equals the formula in float64, forward and backward."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lowtide.kernels.layer_norm import add_layer_norm, layer_norm, layer_norm_reference
from lowtide.kernels.triton import row_norm as triton_form
from tests.kernels.exact import DTYPES, assert_near_float64

SHAPES = [(1, 1), (3, 7), (2, 3, 64), (70, 30), (5, 123), (3, 1, 1100)]
EPS = 1e-5


def drawn(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator).to(dtype).requires_grad_()


def widened(*tensors: Tensor) -> list[Tensor]:
    return [tensor.detach().double().requires_grad_() for tensor in tensors]


def grad_of(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


def check(
    y: Tensor, h: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, dy: Tensor, dh: Tensor | None = None
) -> None:
    """y and the gradients of x, weight and bias, given h, the rows that are normed.

    Float32 rounds on h - mean, which adds an error of size rstd |h| to h^; y is h^ weight + bias, dx a difference of
    three terms, dweight and dbias sums over rows.
    """
    vectors = [vector for vector in (weight, bias) if vector is not None]
    exact_h, *exact_vectors = widened(h, *vectors)
    exact_weight = exact_vectors[0] if weight is not None else None
    exact_bias = exact_vectors[-1] if bias is not None else None
    exact = layer_norm_reference(exact_h, exact_weight, exact_bias, EPS)
    exact.backward(dy.double())
    wide, g = exact_h.detach(), dy.double()
    rstd = torch.rsqrt(wide.var(-1, keepdim=True, correction=0) + EPS)
    normed = (wide - wide.mean(-1, keepdim=True)) * rstd
    normed_size = normed.abs() + rstd * wide.abs().amax(-1, keepdim=True)
    w = exact_weight.detach().abs() if exact_weight is not None else torch.ones(wide.shape[-1], dtype=torch.float64)
    b = exact_bias.detach().abs() if exact_bias is not None else 0.0
    assert_near_float64(y, exact.detach(), normed_size * w + b, steps=16)
    largest = (w * g.abs()).amax(-1, keepdim=True) * rstd
    dx = grad_of(exact_h) if dh is None else grad_of(exact_h) + dh.double()
    dx_size = largest * (2 + normed_size) * (1 + normed_size.amax(-1, keepdim=True))
    assert_near_float64(grad_of(x), dx, dx_size if dh is None else dx_size + dh.double().abs(), steps=16)
    num_rows = wide.numel() // wide.shape[-1]
    if weight is not None and exact_weight is not None:
        size = (g.abs() * normed_size).reshape(-1, wide.shape[-1]).sum(0)
        assert_near_float64(grad_of(weight), grad_of(exact_weight), size, steps=16 + num_rows)
    if bias is not None and exact_bias is not None:
        size = g.abs().reshape(-1, wide.shape[-1]).sum(0)
        assert_near_float64(grad_of(bias), grad_of(exact_bias), size, steps=16 + num_rows)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_equals_the_formula(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> None:
    x, weight, bias = (drawn(size, dtype, generator) for size in (shape, shape[-1:], shape[-1:]))
    dy = torch.randn(shape, generator=generator).to(dtype)
    y = layer_norm(x, weight, bias, EPS, backend="triton")
    y.backward(dy)
    assert y.dtype == dtype and y.shape == shape
    check(y, x, x, weight, bias, dy)


def test_the_reference_is_torch_s_layer_norm(generator: torch.Generator) -> None:
    x, weight, bias = (torch.randn(size, generator=generator).double() for size in ((5, 123), (123,), (123,)))
    torch.testing.assert_close(layer_norm_reference(x, weight, bias, EPS), F.layer_norm(x, (123,), weight, bias, EPS))
    torch.testing.assert_close(layer_norm(x, None, bias, EPS), F.layer_norm(x, (123,), None, bias, EPS))


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("uses", ["both", "normed", "sum"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_residual_is_added_first(dtype: torch.dtype, uses: str, generator: torch.Generator) -> None:
    shape = (5, 123)
    x, residual = drawn(shape, dtype, generator), drawn(shape, dtype, generator)
    weight, bias = drawn(shape[-1:], dtype, generator), drawn(shape[-1:], dtype, generator)
    dy, dh = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    y, h = add_layer_norm(x, residual, weight, bias, EPS, backend="triton")
    assert_near_float64(h, x.double() + residual.double())
    outputs = {"both": (y, h), "normed": (y,), "sum": (h,)}[uses]
    gradients = {"both": (dy, dh), "normed": (dy,), "sum": (dh,)}[uses]
    torch.autograd.backward(outputs, gradients)
    if uses == "sum":
        assert torch.equal(grad_of(x), dh) and torch.equal(grad_of(residual), dh)
        assert weight.grad is None and bias.grad is None
        return
    assert torch.equal(grad_of(x), grad_of(residual))
    check(y, h, x, weight, bias, dy, dh if uses == "both" else None)  # the norm is of the sum as it was rounded


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("has_weight", [True, False])
@pytest.mark.parametrize("has_residual", [True, False])
def test_rows_wider_than_a_block(
    has_residual: bool, has_weight: bool, has_bias: bool, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_form, "MAX_BLOCK_SIZE", 64)
    shape = (3, 200)
    x, residual = (drawn(shape, torch.float32, generator) for _ in range(2))
    weight = drawn(shape[-1:], torch.float32, generator) if has_weight else None
    bias = drawn(shape[-1:], torch.float32, generator) if has_bias else None
    dy = torch.randn(shape, generator=generator)
    if has_residual:
        y, h = add_layer_norm(x, residual, weight, bias, EPS, backend="triton")
    else:
        y, h = layer_norm(x, weight, bias, EPS, backend="triton"), x
    y.backward(dy)
    check(y, h, x, weight, bias, dy)


@pytest.mark.parametrize("block_size", [64, 256])
def test_rows_far_from_zero_keep_their_variance(
    block_size: int, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mean(h^2) - mean(h)^2 in float32 would leave an error of 1e6 units in the last place of 1."""
    monkeypatch.setattr(triton_form, "MAX_BLOCK_SIZE", block_size)
    x = (1000 + torch.randn((4, 200), generator=generator)).requires_grad_()
    dy = torch.randn(x.shape, generator=generator)
    y = layer_norm(x, None, None, EPS, backend="triton")
    y.backward(dy)
    check(y, x, x, None, None, dy)
    torch.testing.assert_close(y.var(-1, correction=0), torch.ones(4), rtol=1e-4, atol=0.0)


def test_several_strips_add_up(generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows a tile, more rows than there are programs: strips of several tiles, the last one cut short."""
    monkeypatch.setattr(triton_form, "BACKWARD_THREAD_NUMEL", 1)
    monkeypatch.setattr(triton_form, "num_processors", lambda device: 2)
    shape = (53, 60)  # tiles of 2 rows, 8 programs, strips of 8 rows
    x, weight, bias = (drawn(size, torch.float32, generator) for size in (shape, shape[-1:], shape[-1:]))
    dy = torch.randn(shape, generator=generator)
    y = layer_norm(x, weight, bias, EPS, backend="triton")
    y.backward(dy)
    check(y, x, x, weight, bias, dy)


def test_strides_are_followed(generator: torch.Generator) -> None:
    wide = torch.randn(6, 40, generator=generator)
    weight = torch.randn(80, generator=generator)
    for view in (wide[::2, 3:30], wide.t(), wide[:, ::3], torch.randn(2, 5, 8, generator=generator).transpose(0, 1)):
        n_cols = view.shape[-1]
        x = view.detach().requires_grad_()
        assert not x.is_contiguous()
        w, b = weight[: 2 * n_cols : 2].requires_grad_(), weight[1 : 2 * n_cols : 2].requires_grad_()
        w.retain_grad()
        b.retain_grad()
        dy = torch.randn((*view.shape, 2), generator=generator)[..., 0]
        y = layer_norm(x, w, b, EPS, backend="triton")
        y.backward(dy)
        check(y, x, x, w, b, dy)


def test_a_gradient_that_is_one_number_for_all(generator: torch.Generator) -> None:
    x, weight = drawn((5, 24), torch.float32, generator), drawn((24,), torch.float32, generator)
    y = layer_norm(x, weight, None, EPS, backend="triton")
    y.sum().backward()
    check(y, x, x, weight, None, torch.ones(5, 24))


def test_a_weight_may_be_wider_than_the_rows(generator: torch.Generator) -> None:
    x = drawn((5, 24), torch.bfloat16, generator)
    weight, bias = drawn((24,), torch.float32, generator), drawn((24,), torch.float32, generator)
    dy = torch.randn(x.shape, generator=generator).bfloat16()
    y = layer_norm(x, weight, bias, EPS, backend="triton")
    y.backward(dy)
    assert y.dtype == torch.bfloat16 and grad_of(weight).dtype == torch.float32
    check(y, x, x, weight, bias, dy)


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (0,)], ids=str)
def test_empty_tensors_stay_empty(shape: tuple[int, ...]) -> None:
    x = torch.empty(shape, requires_grad=True)
    weight = torch.ones(shape[-1:], requires_grad=True)
    y, h = add_layer_norm(x, x, weight, None, backend="triton")
    (y.sum() + h.sum()).backward()
    assert y.shape == h.shape == shape and grad_of(x).shape == shape
    assert not grad_of(weight).any()


def test_bad_shapes_are_errors() -> None:
    x = torch.ones(2, 8)
    with pytest.raises(ValueError, match=r"layer_norm: expected weight of shape \(8,\), .*; found \(7,\)"):
        layer_norm(x, torch.ones(7), None)
    with pytest.raises(ValueError, match=r"add_layer_norm: expected bias of shape \(8,\), .*; found \(8, 1\)"):
        add_layer_norm(x, x, None, torch.ones(8, 1))
    with pytest.raises(ValueError, match=r"layer_norm: expected a floating-point x .*, found \(2, 8\) torch.int64"):
        layer_norm(x.long(), None, None)
    with pytest.raises(ValueError, match=r"add_layer_norm: expected residual like x, \(2, 8\) torch.float32, found"):
        add_layer_norm(x, x.half(), None, None)
