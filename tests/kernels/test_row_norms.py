"""The RMS norm and the layer norm in Triton's interpreter equal their formulas in float64, forward and backward."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lowtide.kernels.row_norm import (
    add_layer_norm,
    add_rms_norm,
    layer_norm,
    layer_norm_reference,
    rms_norm,
    rms_norm_reference,
)
from lowtide.kernels.triton import row_norm as triton_form
from tests.kernels.exact import DTYPES, assert_near_float64
from tests.kit.grids import pairs

SHAPES = [(1, 1), (3, 7), (2, 3, 64), (70, 30), (5, 123), (4, 1, 257), (3, 1, 1100)]
EPS = 1e-5

Vectors = Sequence[Tensor | None]  # the weight, and the bias where the norm has one


@pytest.fixture(autouse=True)
def fresh_launches() -> Iterator[None]:
    """Some tests change the constants that prepared launches were made with."""
    for turn in range(2):
        triton_form._forward_launch.cache_clear()
        triton_form._backward_launch.cache_clear()
        if not turn:
            yield


@dataclass(frozen=True)
class Norm:
    """A norm, its form with a residual, its formula, how many vectors it takes, and the options it is called with."""

    norm: Callable[..., Tensor]
    add_norm: Callable[..., tuple[Tensor, Tensor]]
    reference: Callable[..., Tensor]
    num_vectors: int
    centers: bool
    options: Mapping[str, float] = field(default_factory=dict)

    def __call__(self, x: Tensor, vectors: Vectors, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """y and the rows that are normed."""
        if residual is not None:
            return self.add_norm(x, residual, *vectors, EPS, backend="triton", **self.options)
        return self.norm(x, *vectors, EPS, backend="triton", **self.options), x

    def vectors(self, n_cols: int, dtype: torch.dtype, generator: torch.Generator) -> list[Tensor]:
        return [drawn((n_cols,), dtype, generator) for _ in range(self.num_vectors)]

    def check(self, y: Tensor, h: Tensor, x: Tensor, vectors: Vectors, dy: Tensor, dh: Tensor | None = None) -> None:
        """y and the gradients of x and the vectors, given h, the rows that are normed.

        Float32 rounds on h - mean, which adds an error of size rstd |h| to h^; y is h^ weight + bias, dx a difference
        of two or three terms, the gradients of the vectors sums over rows.
        """
        exact_h, *exact_vectors = [None if v is None else v.detach().double().requires_grad_() for v in (h, *vectors)]
        assert exact_h is not None
        weight, *biases = exact_vectors
        offset = self.options.get("offset", 0.0)
        shifted = weight if weight is None else weight + offset
        exact = self.reference(exact_h, shifted, *biases, EPS)
        exact.backward(dy.double())
        wide, g = exact_h.detach(), dy.double()
        mean = wide.mean(-1, keepdim=True) if self.centers else torch.zeros(())
        rstd = torch.rsqrt((wide - mean).square().mean(-1, keepdim=True) + EPS)
        normed = ((wide - mean) * rstd).abs()
        if self.centers:
            normed = normed + rstd * wide.abs().amax(-1, keepdim=True)
        w = 1.0 if shifted is None else shifted.detach().abs()
        b = 0.0 if not biases or biases[0] is None else biases[0].detach().abs()
        assert_near_float64(y, exact.detach(), normed * w + b, steps=16)
        largest = (w * g.abs()).amax(-1, keepdim=True) * rstd
        dx, dx_size = grad_of(exact_h), largest * (2 + normed) * (1 + normed.amax(-1, keepdim=True))
        if not self.centers:
            dx_size = 2 * rstd * ((w * g).abs() + normed * ((w * g).abs() * normed).mean(-1, keepdim=True))
        if dh is not None:
            dx, dx_size = dx + dh.double(), dx_size + dh.double().abs()
        assert_near_float64(grad_of(x), dx, dx_size, steps=16)
        num_rows = wide.numel() // wide.shape[-1]
        for vector, exact_vector, size in zip(vectors, exact_vectors, (g.abs() * normed, g.abs()), strict=False):
            if vector is not None and exact_vector is not None and vector.requires_grad:
                size = size.reshape(-1, wide.shape[-1]).sum(0)
                assert_near_float64(grad_of(vector), grad_of(exact_vector), size, steps=16 + num_rows)


RMS = Norm(rms_norm, add_rms_norm, rms_norm_reference, num_vectors=1, centers=False)
RMS_OFFSET = Norm(rms_norm, add_rms_norm, rms_norm_reference, num_vectors=1, centers=False, options={"offset": 1.0})
LAYER = Norm(layer_norm, add_layer_norm, layer_norm_reference, num_vectors=2, centers=True)
NORMS = {"rms": RMS, "rms_offset": RMS_OFFSET, "layer": LAYER}
all_norms = pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)


def drawn(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator).to(dtype).requires_grad_()


def grad_of(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(("norm", "shape", "dtype"), pairs(list(NORMS.values()), SHAPES, DTYPES))
def test_it_equals_the_formula(
    norm: Norm, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator
) -> None:
    x, vectors = drawn(shape, dtype, generator), norm.vectors(shape[-1], dtype, generator)
    dy = torch.randn(shape, generator=generator).to(dtype)
    y, _ = norm(x, vectors)
    y.backward(dy)
    assert y.dtype == dtype and y.shape == shape
    norm.check(y, x, x, vectors, dy)


def test_the_references_are_torch_s(generator: torch.Generator) -> None:
    x, weight, bias = (torch.randn(size, generator=generator).double() for size in ((5, 123), (123,), (123,)))
    torch.testing.assert_close(rms_norm_reference(x, weight, EPS), F.rms_norm(x, (123,), weight, EPS))
    torch.testing.assert_close(rms_norm(x, weight, EPS, offset=1.0), F.rms_norm(x, (123,), weight + 1, EPS))
    torch.testing.assert_close(layer_norm_reference(x, weight, bias, EPS), F.layer_norm(x, (123,), weight, bias, EPS))
    torch.testing.assert_close(layer_norm(x, None, bias, EPS), F.layer_norm(x, (123,), None, bias, EPS))


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(("norm", "dtype", "uses"), pairs(list(NORMS.values()), DTYPES, ("both", "normed", "sum")))
def test_the_residual_is_added_first(norm: Norm, dtype: torch.dtype, uses: str, generator: torch.Generator) -> None:
    shape = (5, 123)
    x, residual = drawn(shape, dtype, generator), drawn(shape, dtype, generator)
    vectors = norm.vectors(shape[-1], dtype, generator)
    dy, dh = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    y, h = norm(x, vectors, residual)
    assert_near_float64(h, x.double() + residual.double())
    outputs = {"both": (y, h), "normed": (y,), "sum": (h,)}[uses]
    gradients = {"both": (dy, dh), "normed": (dy,), "sum": (dh,)}[uses]
    torch.autograd.backward(outputs, gradients)
    assert torch.equal(grad_of(x), grad_of(residual))
    if uses == "sum":
        assert torch.equal(grad_of(x), dh) and all(vector.grad is None for vector in vectors)
        return
    norm.check(y, h, x, vectors, dy, dh if uses == "both" else None)  # the norm is of the sum as it was rounded


VECTORS_THERE = [(norm, there) for norm in NORMS for there in product((True, False), repeat=NORMS[norm].num_vectors)]


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    ("name", "there", "has_residual"), [(*row, index % 3 != 1) for index, row in enumerate(VECTORS_THERE)]
)
def test_rows_wider_than_a_block(
    name: str,
    there: tuple[bool, ...],
    has_residual: bool,
    generator: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    norm = NORMS[name]
    monkeypatch.setattr(triton_form, "MAX_BLOCK_SIZE", 64)
    x, residual = (drawn((3, 200), torch.float32, generator) for _ in range(2))
    given = zip(norm.vectors(200, torch.float32, generator), there, strict=True)
    vectors = [vector if is_there else None for vector, is_there in given]
    dy = torch.randn(x.shape, generator=generator)
    y, h = norm(x, vectors, residual if has_residual else None)
    y.backward(dy)
    norm.check(y, h, x, vectors, dy)


@pytest.mark.parametrize("block_size", [64, 256])
def test_rows_far_from_zero_keep_their_variance(
    block_size: int, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mean(h^2) - mean(h)^2 in float32 would leave an error of 1e6 units in the last place of 1."""
    monkeypatch.setattr(triton_form, "MAX_BLOCK_SIZE", block_size)
    x = (1000 + torch.randn((4, 200), generator=generator)).requires_grad_()
    dy = torch.randn(x.shape, generator=generator)
    y, _ = LAYER(x, (None, None))
    y.backward(dy)
    LAYER.check(y, x, x, (None, None), dy)
    torch.testing.assert_close(y.var(-1, correction=0), torch.ones(4), rtol=1e-4, atol=0.0)


@all_norms
def test_several_strips_add_up(norm: Norm, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows a tile, more rows than there are programs: strips of several tiles, the last one cut short."""
    monkeypatch.setattr(triton_form, "BACKWARD_THREAD_NUMEL", 1)
    monkeypatch.setattr(triton_form, "num_processors", lambda device: 2)
    shape = (53, 60)  # tiles of 2 rows, 8 programs, strips of 8 rows
    x, vectors = drawn(shape, torch.float32, generator), norm.vectors(60, torch.float32, generator)
    dy = torch.randn(shape, generator=generator)
    y, _ = norm(x, vectors)
    y.backward(dy)
    norm.check(y, x, x, vectors, dy)


@pytest.mark.parametrize(
    ("norm", "has_residual", "max_block_size"), pairs(list(NORMS.values()), (True, False), (16, 8192))
)
def test_strides_are_followed(
    norm: Norm, has_residual: bool, max_block_size: int, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_form, "MAX_BLOCK_SIZE", max_block_size)
    wide = torch.randn(6, 40, generator=generator)
    for view in (wide[::2, 3:30], wide.t(), wide[:, ::3], torch.randn(2, 5, 8, generator=generator).transpose(0, 1)):
        n_cols = view.shape[-1]
        x = view.detach().requires_grad_()
        columns = torch.randn(n_cols, norm.num_vectors + 1, generator=generator).unbind(1)[: norm.num_vectors]
        vectors = [column.requires_grad_() for column in columns]
        residual, dh = torch.randn((2, *view.shape[:-1], 3, n_cols), generator=generator)[..., 0, :]
        dy = torch.randn((*view.shape, 2), generator=generator)[..., 0]
        assert not any(tensor.is_contiguous() for tensor in (x, residual, dy, *vectors))
        y, h = norm(x, vectors, residual if has_residual else None)
        torch.autograd.backward(*(((y, h), (dy, dh)) if has_residual else (y, dy)))
        norm.check(y, h, x, vectors, dy, dh if has_residual else None)


@all_norms
def test_a_gradient_that_is_one_number_for_all(norm: Norm, generator: torch.Generator) -> None:
    x, vectors = drawn((5, 24), torch.float32, generator), norm.vectors(24, torch.float32, generator)
    y, _ = norm(x, vectors)
    y.sum().backward()
    norm.check(y, x, x, vectors, torch.ones(5, 24))


def test_a_frozen_weight_gets_no_gradient(generator: torch.Generator) -> None:
    x, weight = drawn((5, 24), torch.float32, generator), torch.randn(24, generator=generator)
    dy = torch.randn(x.shape, generator=generator)
    y, _ = RMS(x, [weight])
    y.backward(dy)
    assert weight.grad is None
    RMS.check(y, x, x, [weight], dy)


@all_norms
def test_a_weight_may_be_wider_than_the_rows(norm: Norm, generator: torch.Generator) -> None:
    x, vectors = drawn((5, 24), torch.bfloat16, generator), norm.vectors(24, torch.float32, generator)
    dy = torch.randn(x.shape, generator=generator).bfloat16()
    y, _ = norm(x, vectors)
    y.backward(dy)
    assert y.dtype == torch.bfloat16 and all(grad_of(vector).dtype == torch.float32 for vector in vectors)
    norm.check(y, x, x, vectors, dy)


@all_norms
@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (0,)], ids=str)
def test_empty_tensors_stay_empty(norm: Norm, shape: tuple[int, ...]) -> None:
    x = torch.empty(shape, requires_grad=True)
    vectors = [torch.ones(shape[-1:], requires_grad=True) for _ in range(norm.num_vectors)]
    y, h = norm(x, vectors, x)
    (y.sum() + h.sum()).backward()
    assert y.shape == h.shape == shape and grad_of(x).shape == shape
    assert not any(grad_of(vector).any() for vector in vectors)


X = torch.ones(2, 8)
REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: rms_norm(X, torch.ones(7)), r"rms_norm: expected weight of shape \(8,\), .*; found \(7,\)"),
    (lambda: layer_norm(X, torch.ones(7), None), r"layer_norm: expected weight of shape \(8,\), .*; found \(7,\)"),
    (lambda: add_layer_norm(X, X, None, torch.ones(8, 1)), r"expected bias of shape \(8,\), .*; found \(8, 1\)"),
    (lambda: rms_norm(X.long(), None), r"rms_norm: expected a floating-point x .*, found \(2, 8\) torch.int64"),
    (lambda: layer_norm(X.long(), None, None), r"layer_norm: expected a floating-point x .*, found \(2, 8\) torch.int"),
    (lambda: add_rms_norm(X, X.half(), None), r"add_rms_norm: expected residual like x, \(2, 8\) torch.float32, found"),
    (lambda: add_layer_norm(X, X.half(), None, None), r"add_layer_norm: expected residual like x, \(2, 8\) torch.floa"),
]


@pytest.mark.parametrize(("call", "text"), REFUSED)
def test_bad_shapes_are_errors(call: Callable[[], Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        call()
