"""The RMS norm in Triton's interpreter equals its formula in float64, forward and backward."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lowtide.kernels.row_norm import add_rms_norm, launches_of, rms_norm, rms_norm_reference
from lowtide.kernels.triton import row_norm as triton_form
from tests.kernels.exact import DTYPES, assert_near_float64
from tests.kit.grids import pairs

SHAPES = [(1, 1), (2, 3, 64), (70, 30), (3, 1, 1100)]
EPS = 1e-5

OFFSETS = (0.0, 1.0)  # Llama's form, and Gemma's


@pytest.fixture(autouse=True)
def fresh_launches() -> Iterator[None]:
    """Some tests change the constants that prepared launches were made with."""
    launches_of.cache_clear()
    yield
    launches_of.cache_clear()


def norm(
    x: Tensor, weight: Tensor | None, offset: float = 0.0, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """y and the rows that are normed."""
    if residual is not None:
        return add_rms_norm(x, residual, weight, EPS, offset=offset, backend="triton")
    return rms_norm(x, weight, EPS, offset=offset, backend="triton"), x


def check(
    y: Tensor, h: Tensor, x: Tensor, weight: Tensor | None, offset: float, dy: Tensor, dh: Tensor | None = None
) -> None:
    """y and the gradients of x and the weight, given h, the rows that are normed.

    dx is a difference of two or three terms, the gradient of the weight a sum over rows.
    """
    exact_h = h.detach().double().requires_grad_()
    exact_weight = None if weight is None else weight.detach().double().requires_grad_()
    exact = rms_norm_reference(exact_h, exact_weight, EPS, offset=offset)
    exact.backward(dy.double())
    wide, g = exact_h.detach(), dy.double()
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)
    normed = (wide * rstd).abs()
    w = 1.0 if exact_weight is None else (exact_weight.detach() + offset).abs()
    assert_near_float64(y, exact.detach(), normed * w, steps=16)
    dx, dx_size = (
        grad_of(exact_h),
        2 * rstd * ((w * g).abs() + normed * ((w * g).abs() * normed).mean(-1, keepdim=True)),
    )
    if dh is not None:
        dx, dx_size = dx + dh.double(), dx_size + dh.double().abs()
    assert_near_float64(grad_of(x), dx, dx_size, steps=16)
    if weight is not None and exact_weight is not None and weight.requires_grad:
        size = (g.abs() * normed).reshape(-1, wide.shape[-1]).sum(0)
        assert_near_float64(grad_of(weight), grad_of(exact_weight), size, steps=16 + wide.numel() // wide.shape[-1])


def drawn(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator).to(dtype).requires_grad_()


def grad_of(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(("offset", "shape", "dtype"), pairs(OFFSETS, SHAPES, DTYPES))
def test_it_equals_the_formula(
    offset: float, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator
) -> None:
    x, weight = drawn(shape, dtype, generator), drawn(shape[-1:], dtype, generator)
    dy = torch.randn(shape, generator=generator).to(dtype)
    y, _ = norm(x, weight, offset)
    y.backward(dy)
    assert y.dtype == dtype and y.shape == shape
    check(y, x, x, weight, offset, dy)


def test_the_reference_is_torch_s(generator: torch.Generator) -> None:
    x, weight = (torch.randn(size, generator=generator).double() for size in ((5, 123), (123,)))
    torch.testing.assert_close(rms_norm_reference(x, weight, EPS), F.rms_norm(x, (123,), weight, EPS))
    torch.testing.assert_close(rms_norm(x, weight, EPS, offset=1.0), F.rms_norm(x, (123,), weight + 1, EPS))


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(("offset", "dtype", "uses"), pairs(OFFSETS, DTYPES, ("both", "normed", "sum")))
def test_the_residual_is_added_first(offset: float, dtype: torch.dtype, uses: str, generator: torch.Generator) -> None:
    shape = (5, 123)
    x, residual = drawn(shape, dtype, generator), drawn(shape, dtype, generator)
    weight = drawn(shape[-1:], dtype, generator)
    dy, dh = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    y, h = norm(x, weight, offset, residual)
    assert_near_float64(h, x.double() + residual.double())
    outputs = {"both": (y, h), "normed": (y,), "sum": (h,)}[uses]
    gradients = {"both": (dy, dh), "normed": (dy,), "sum": (dh,)}[uses]
    torch.autograd.backward(outputs, gradients)
    assert torch.equal(grad_of(x), grad_of(residual))
    if uses == "sum":
        assert torch.equal(grad_of(x), dh) and weight.grad is None
        return
    check(y, h, x, weight, offset, dy, dh if uses == "both" else None)  # of the sum as it was rounded


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    ("offset", "has_weight", "has_residual"), pairs(OFFSETS, (True, False), (True, False)), ids=str
)
def test_rows_wider_than_a_block(
    offset: float,
    has_weight: bool,
    has_residual: bool,
    generator: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(triton_form, "MAX_BLOCK_SIZE", 64)
    x, residual = (drawn((3, 200), torch.float32, generator) for _ in range(2))
    weight = drawn((200,), torch.float32, generator) if has_weight else None
    dy = torch.randn(x.shape, generator=generator)
    y, h = norm(x, weight, offset, residual if has_residual else None)
    y.backward(dy)
    check(y, h, x, weight, offset, dy)


def check_trained(x: Tensor, weight: Tensor, generator: torch.Generator) -> Tensor:
    """y of a forward and a backward that are those of the formula."""
    dy = torch.randn(x.shape, generator=generator).to(x.dtype)
    y, _ = norm(x, weight)
    y.backward(dy)
    check(y, x, x, weight, 0.0, dy)
    return y


def test_several_strips_add_up(generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows a tile, more rows than there are programs: strips of several tiles, the last one cut short."""
    monkeypatch.setattr(triton_form, "BACKWARD_THREAD_NUMEL", 1)
    monkeypatch.setattr(triton_form, "num_processors", lambda device: 2)
    shape = (53, 60)  # tiles of 2 rows, 8 programs, strips of 8 rows
    check_trained(drawn(shape, torch.float32, generator), drawn((60,), torch.float32, generator), generator)


@pytest.mark.parametrize(("has_residual", "max_block_size"), [(True, 8192), (False, 16), (True, 16)])
def test_strides_are_followed(
    has_residual: bool, max_block_size: int, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_form, "MAX_BLOCK_SIZE", max_block_size)
    wide = torch.randn(6, 40, generator=generator)
    cube = torch.randn(2, 6, 8, generator=generator)
    for view in (wide[::2, 3:30], wide.t(), wide[:, ::3], cube.transpose(0, 1), cube[:, ::2], cube[:, :3]):
        n_cols = view.shape[-1]
        x = view.detach().requires_grad_()
        weight = torch.randn(n_cols, 2, generator=generator)[:, 0].requires_grad_()
        residual, dh = torch.randn((2, *view.shape[:-1], 3, n_cols), generator=generator)[..., 0, :]
        dy = torch.randn((*view.shape, 2), generator=generator)[..., 0]
        assert not any(tensor.is_contiguous() for tensor in (x, residual, dy, weight))
        y, h = norm(x, weight, 0.0, residual if has_residual else None)
        torch.autograd.backward(*(((y, h), (dy, dh)) if has_residual else (y, dy)))
        check(y, h, x, weight, 0.0, dy, dh if has_residual else None)


def test_saved_tensors_may_come_back_in_another_order(generator: torch.Generator) -> None:
    """As hooks return them, of activations that were on the host."""
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: torch.stack((t, t), -1)[..., 0]):
        check_trained(drawn((6, 24), torch.float32, generator), drawn((24,), torch.float32, generator), generator)


def test_a_gradient_that_is_one_number_for_all(generator: torch.Generator) -> None:
    x, weight = drawn((5, 24), torch.float32, generator), drawn((24,), torch.float32, generator)
    y, _ = norm(x, weight)
    y.sum().backward()
    check(y, x, x, weight, 0.0, torch.ones(5, 24))


def test_a_frozen_weight_gets_no_gradient(generator: torch.Generator) -> None:
    weight = torch.randn(24, generator=generator)
    check_trained(drawn((5, 24), torch.float32, generator), weight, generator)
    assert weight.grad is None


def test_a_weight_may_be_wider_than_the_rows(generator: torch.Generator) -> None:
    weight = drawn((24,), torch.float32, generator)
    y = check_trained(drawn((5, 24), torch.bfloat16, generator), weight, generator)
    assert y.dtype == torch.bfloat16 and grad_of(weight).dtype == torch.float32


def test_a_second_derivative_is_refused(generator: torch.Generator) -> None:
    x = drawn((5, 24), torch.float32, generator)
    (dx,) = torch.autograd.grad(norm(x, None)[0].square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice a function that was marked with @once_differentiable"):
        dx.sum().backward()


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (0,)], ids=str)
def test_empty_tensors_stay_empty(shape: tuple[int, ...]) -> None:
    x, weight = torch.empty(shape, requires_grad=True), torch.ones(shape[-1:], requires_grad=True)
    y, h = norm(x, weight, 0.0, x)
    (y.sum() + h.sum()).backward()
    assert y.shape == h.shape == shape and grad_of(x).shape == shape
    assert not grad_of(weight).any()
