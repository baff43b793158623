"""The linear layer fused with its cross-entropy equals torch's two functions in float64, in one chunk and in many."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide.kernels.dispatch import Backend
from lowtide.kernels.linear_cross_entropy import linear_cross_entropy
from lowtide.kernels.loss_terms import LossTerms, Reduction
from lowtide.kernels.triton import cross_entropy as triton_form
from tests.kernels.exact import DTYPES
from tests.kernels.exact_losses import (
    ALL,
    PLAIN,
    drawn_labels,
    exact_losses,
    options_of,
    reduced,
)
from tests.kit.grids import pairs

BACKENDS = ("triton", "reference")
NUM_CLASSES, WIDTH = 37, 12
TERMS = [PLAIN, ALL, replace(ALL, reduction="none"), replace(PLAIN, reduction="sum")]
ROW_BYTES = {torch.float32: 48 * 4, torch.bfloat16: 48 * 2, torch.float16: 48 * 2}  # 37 columns, and padding


def drawn(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator).to(dtype).requires_grad_()


def assert_close(found: Tensor, exact: Tensor, dtype: torch.dtype, roundings: float = 1.0) -> None:
    """By norms: products of matrices round each term to `dtype`, by at most eps / 2, so sums by no more, together."""
    error = float((found.detach().double() - exact).norm())
    bound = roundings * torch.finfo(dtype).eps * float(exact.norm())
    assert error <= bound, (error, bound)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(("terms", "num_chunks", "dtype", "backend"), pairs(TERMS, (1, 3), DTYPES, BACKENDS))
def test_it_equals_torch(
    terms: LossTerms,
    num_chunks: int,
    dtype: torch.dtype,
    backend: Backend,
    generator: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(triton_form, "MAX_FORWARD_BLOCK_SIZE", 32)
    monkeypatch.setattr(triton_form, "MAX_BACKWARD_BLOCK_SIZE", 32)
    hidden, weight = drawn((2, 4, WIDTH), dtype, generator), drawn((NUM_CLASSES, WIDTH), dtype, generator)
    bias = drawn((NUM_CLASSES,), dtype, generator)
    labels = drawn_labels((2, 4), NUM_CLASSES, terms, generator)
    loss = linear_cross_entropy(
        hidden,
        weight,
        labels,
        bias,
        **options_of(terms),
        chunk_bytes={1: 8, 3: 3}[num_chunks] * ROW_BYTES[dtype],
        backend=backend,
    )
    dloss = torch.rand(loss.shape, generator=generator) + 0.5
    loss.backward(dloss)
    exact_inputs = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight, bias)]
    logits = F.linear(*exact_inputs)
    exact = reduced(exact_losses(logits, labels, terms), labels, terms)
    exact.backward(dloss.double())
    assert loss.dtype == torch.float32
    # Logits, of a size of 10 at most, are rounded to dtype: as an exponent it counts by their size.
    size = 2 * float(logits.detach().abs().max()) + 8
    assert_close(loss, exact.detach(), dtype, roundings=size)
    for found, wanted in zip((hidden, weight, bias), exact_inputs, strict=True):
        assert found.grad is not None and wanted.grad is not None and found.grad.dtype == dtype
        assert_close(found.grad, wanted.grad, dtype, roundings=size)


@pytest.mark.parametrize(
    ("needed", "reduction", "backend"), pairs(("hidden", "weight", "bias"), ("mean", "none"), BACKENDS)
)
def test_only_what_requires_a_gradient_gets_one(
    needed: str, reduction: Reduction, backend: Backend, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = {
        "hidden": torch.randn(6, WIDTH, generator=generator),
        "weight": torch.randn(NUM_CLASSES, WIDTH, generator=generator),
        "bias": torch.randn(NUM_CLASSES, generator=generator),
    }
    inputs[needed].requires_grad_()
    labels = torch.arange(6)
    products: list[int] = []
    real_mm = torch.mm

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        products.append(0)
        return real_mm(*args, **kwargs)

    monkeypatch.setattr(torch, "mm", counted)
    options: dict[str, Any] = {"reduction": reduction, "chunk_bytes": 6 * ROW_BYTES[torch.float32], "backend": backend}
    linear_cross_entropy(inputs["hidden"], inputs["weight"], labels, inputs["bias"], **options).sum().backward()
    assert len(products) == (0 if needed == "bias" else 1)  # the logits are an addmm
    found = {name: tensor.grad for name, tensor in inputs.items()}
    inputs[needed].grad = None
    logits = F.linear(inputs["hidden"], inputs["weight"], inputs["bias"])
    F.cross_entropy(logits, labels, reduction=reduction).sum().backward()
    for name, tensor in inputs.items():
        torch.testing.assert_close(found[name], tensor.grad)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_under_autocast_products_are_of_its_dtype(
    weight_dtype: torch.dtype, backend: Backend, generator: torch.Generator
) -> None:
    hidden, weight = drawn((6, WIDTH), torch.float32, generator), drawn((NUM_CLASSES, WIDTH), weight_dtype, generator)
    bias, labels = drawn((NUM_CLASSES,), torch.float32, generator), torch.arange(6)
    chunk_bytes = 2 * ROW_BYTES[torch.bfloat16]
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, labels, bias, chunk_bytes=chunk_bytes, backend=backend)
        loss.backward()
    rounded = [tensor.detach().bfloat16().requires_grad_() for tensor in (hidden, weight, bias)]
    same = linear_cross_entropy(rounded[0], rounded[1], labels, rounded[2], chunk_bytes=chunk_bytes, backend=backend)
    same.backward()
    assert torch.equal(loss, same)
    for found, wanted in zip((hidden, weight, bias), rounded, strict=True):
        assert found.grad is not None and found.grad.dtype == found.dtype
        assert wanted.grad is not None and torch.equal(found.grad.bfloat16(), wanted.grad)


def test_backward_is_in_the_dtype_of_forward(generator: torch.Generator) -> None:
    hidden, weight = drawn((6, WIDTH), torch.float16, generator), drawn((NUM_CLASSES, WIDTH), torch.float16, generator)
    gradients = []
    for in_autocast in (False, True):
        loss = linear_cross_entropy(hidden, weight, torch.arange(6), chunk_bytes=2 * ROW_BYTES[torch.float16])
        with torch.autocast("cpu", torch.bfloat16, enabled=in_autocast):
            gradients.append(torch.autograd.grad(loss, (hidden, weight)))
    for alone, within in zip(*gradients, strict=True):
        assert torch.equal(alone, within)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_of_float16_do_not_underflow(backend: Backend, generator: torch.Generator) -> None:
    """Probabilities of 2^-16 over 64 labels are gradients that float16 has only with the loss scale in them."""
    rows, loss_scale = 64, 2.0**16
    hidden, weight = drawn((rows, WIDTH), torch.float16, generator), torch.zeros(NUM_CLASSES, WIDTH).half()
    labels = torch.zeros(rows, dtype=torch.long)
    bias = torch.zeros(NUM_CLASSES).half()
    bias[0] = 11
    weight.requires_grad_()
    exact_weight = weight.detach().double().requires_grad_()
    (linear_cross_entropy(hidden, weight, labels, bias, backend=backend) * loss_scale).backward()
    logits = F.linear(hidden.detach().double(), exact_weight, bias.double())
    (F.cross_entropy(logits, labels) * loss_scale).backward()
    assert weight.grad is not None and exact_weight.grad is not None
    assert_close(weight.grad[1:], exact_weight.grad[1:], torch.float16, roundings=8)


def test_chunks_of_bfloat16_are_added_in_float32(generator: torch.Generator) -> None:
    """64 chunks are as exact as one, up to the rounding of each product; added in bfloat16 they would not be."""
    hidden, labels = drawn((512, WIDTH), torch.bfloat16, generator), torch.randint(0, 5, (512,), generator=generator)
    weight = drawn((NUM_CLASSES, WIDTH), torch.bfloat16, generator)
    exact_weight = weight.detach().double().requires_grad_()
    F.cross_entropy(F.linear(hidden.detach().double(), exact_weight), labels).backward()

    def error(num_chunks: int) -> float:
        weight.grad = None
        chunk_bytes = 512 // num_chunks * ROW_BYTES[torch.bfloat16]
        linear_cross_entropy(hidden, weight, labels, chunk_bytes=chunk_bytes).backward()
        assert weight.grad is not None and exact_weight.grad is not None
        return float((weight.grad.double() - exact_weight.grad).norm() / exact_weight.grad.norm())

    assert error(64) < 2 * error(1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_gradient_of_one_is_left_as_it_is(
    backend: Backend, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_form, "SCALE_BLOCK_SIZE", 128)  # 444 elements are no multiple
    weight = drawn((NUM_CLASSES, WIDTH), torch.float32, generator)
    hidden, labels = torch.randn(4, WIDTH, generator=generator), torch.arange(4)
    gradients: list[Tensor] = []
    for factor in (1.0, 0.25):
        weight.grad = None
        linear_cross_entropy(hidden, weight, labels, backend=backend).mul(factor).backward()
        assert weight.grad is not None
        gradients.append(weight.grad)
    assert torch.equal(gradients[0] * 0.25, gradients[1])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_empty_inputs(reduction: Reduction, backend: Backend) -> None:
    hidden, weight = torch.empty(0, WIDTH, requires_grad=True), torch.ones(NUM_CLASSES, WIDTH, requires_grad=True)
    loss = linear_cross_entropy(hidden, weight, torch.empty(0, dtype=torch.long), reduction=reduction, backend=backend)
    loss.sum().backward()
    assert loss.isnan().all() and loss.shape == (() if reduction == "mean" else (0,))
    assert hidden.grad is not None and weight.grad is not None and not weight.grad.any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_strides_are_followed(backend: Backend, generator: torch.Generator) -> None:
    hidden = torch.randn(WIDTH, 2, 5, generator=generator).permute(1, 2, 0)[:, :-1]
    weight = torch.randn(WIDTH, NUM_CLASSES, generator=generator).t().requires_grad_()
    labels = torch.randint(0, NUM_CLASSES, (2, 5), generator=generator)[:, 1:]
    loss = linear_cross_entropy(hidden, weight, labels, chunk_bytes=3 * ROW_BYTES[torch.float32], backend=backend)
    exact = F.cross_entropy(F.linear(hidden, weight).flatten(0, 1), labels.flatten())
    torch.testing.assert_close(loss, exact)
    torch.testing.assert_close(*(torch.autograd.grad(each, weight)[0] for each in (loss, exact)))


def test_float64_stays_float64(generator: torch.Generator) -> None:
    hidden, weight = (torch.randn(n, 3, generator=generator, dtype=torch.float64).requires_grad_() for n in (4, 5))
    labels = torch.tensor([0, 2, 4, 3])

    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, weight, labels, **options_of(ALL), chunk_bytes=8 * 16 * 3)

    assert loss(hidden, weight).dtype == torch.float64
    for needed in (hidden, weight):
        found, wanted = hidden.detach(), weight.detach()
        exact = reduced(exact_losses(F.linear(hidden, weight), labels, ALL), labels, ALL)
        torch.testing.assert_close(loss(found, wanted), exact.detach())
        torch.testing.assert_close(
            torch.autograd.grad(loss(hidden, weight), needed), torch.autograd.grad(exact, needed)
        )


def test_labels_out_of_range(generator: torch.Generator) -> None:
    hidden, weight = drawn((3, WIDTH), torch.float32, generator), drawn((NUM_CLASSES, WIDTH), torch.float32, generator)
    labels = torch.tensor([1, NUM_CLASSES, -100])
    losses = linear_cross_entropy(hidden, weight, labels, reduction="none", backend="triton")
    assert losses.isnan().tolist() == [False, True, False]
    linear_cross_entropy(hidden, weight, labels, backend="triton").backward()
    assert hidden.grad is not None and hidden.grad.isnan().all(1).tolist() == [False, True, False]
    with pytest.raises(ValueError, match=r"^linear_cross_entropy: expected labels in \[0, 37\) .* found 37 at \(1,\)"):
        linear_cross_entropy(hidden, weight, labels)


def test_a_second_backward_is_an_error(generator: torch.Generator) -> None:
    hidden, weight = drawn((3, WIDTH), torch.float32, generator), drawn((NUM_CLASSES, WIDTH), torch.float32, generator)
    loss = linear_cross_entropy(hidden, weight, torch.arange(3))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"expected a single backward, .* call linear_cross_entropy again"):
        loss.backward()
    late = linear_cross_entropy(hidden, weight, torch.arange(3), reduction="none").sum()
    late.backward(retain_graph=True)
    late.backward()  # computes them again
