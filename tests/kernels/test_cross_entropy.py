"""Cross-entropy, in Triton's interpreter and in its eager form, equals torch's in float64, forward and backward."""

from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide.kernels.cross_entropy import cross_entropy
from lowtide.kernels.dispatch import Backend
from lowtide.kernels.loss_terms import LossTerms, Reduction
from lowtide.kernels.triton import cross_entropy as triton_form
from tests.kernels.exact import DTYPES, assert_near_float64
from tests.kernels.exact_losses import (
    ALL,
    PLAIN,
    drawn_labels,
    exact_losses,
    options_of,
    reduced,
    sizes,
)
from tests.kit.grids import pairs
from tests.kit.training import refusal

BACKENDS = ("triton", "reference")
eager_form = import_module("lowtide.kernels.cross_entropy")  # by name: the package has the function of that name
TERMS = [
    PLAIN,
    replace(PLAIN, label_smoothing=0.2, reduction="sum"),
    replace(PLAIN, z_loss=0.1, reduction="none"),
    replace(PLAIN, soft_cap=2.0),
    ALL,
]


@pytest.fixture(autouse=True)
def no_launches_of_other_tests() -> Iterator[None]:
    """Prepared launches keep the sizes of blocks that a test sets."""
    eager_form._prepared.cache_clear()
    yield
    eager_form._prepared.cache_clear()


def check(
    logits: Tensor,
    labels: Tensor,
    terms: LossTerms,
    backend: Backend,
    generator: torch.Generator,
    overwrites: bool = False,
) -> None:
    """Loss, z-loss and gradient against float64, with a gradient from above of random size."""
    exact_logits = logits.detach().double().requires_grad_()
    logits = logits.requires_grad_()
    taken = logits * 1 if overwrites else logits
    loss = cross_entropy(taken, labels, **options_of(terms), overwrite_logits=overwrites, backend=backend)
    dloss = torch.rand(loss.shape, generator=generator) * 4 - 2
    loss.backward(dloss)
    size = sizes(exact_logits, labels, terms)
    exact = reduced(exact_losses(exact_logits, labels, terms), labels, terms)
    exact.backward(dloss.double())
    assert loss.dtype == torch.float32
    assert_near_float64(loss, exact.detach(), magnitude=reduced(size.loss, labels, terms))
    scale = dloss.double().expand(labels.shape)
    if terms.reduction == "mean":
        scale = scale / int((labels != terms.ignore_index).sum())
    assert logits.grad is not None and exact_logits.grad is not None
    assert_near_float64(logits.grad, exact_logits.grad, magnitude=size.dlogits * scale.abs().unsqueeze(-1))


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(("terms", "dtype", "backend"), pairs(TERMS, DTYPES, BACKENDS))
def test_it_equals_torch(
    terms: LossTerms,
    dtype: torch.dtype,
    backend: Backend,
    generator: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(triton_form, "MAX_FORWARD_BLOCK_SIZE", 64)
    monkeypatch.setattr(triton_form, "MAX_BACKWARD_BLOCK_SIZE", 32)
    monkeypatch.setattr(triton_form, "REDUCE_BLOCK_SIZE", 4)
    monkeypatch.setattr(eager_form, "_BLOCK_BYTES", 4 * 3 * 123)
    for shape in ((2, 3, 123), (5, 64)):
        logits = (3 * torch.randn(shape, generator=generator)).to(dtype)
        check(logits, drawn_labels(shape[:-1], shape[-1], terms, generator), terms, backend, generator)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(1, 1), (3,), (2, 1, 200)], ids=str)
def test_rows_of_one_block(shape: tuple[int, ...], backend: Backend, generator: torch.Generator) -> None:
    terms = replace(ALL, ignore_index=-1)
    logits = 3 * torch.randn(shape, generator=generator)
    check(logits, drawn_labels(shape[:-1], shape[-1], terms, generator), terms, backend, generator)


@pytest.mark.parametrize(("dtype", "reduction", "backend"), pairs(DTYPES, ("mean", "sum", "none"), BACKENDS), ids=str)
def test_the_gradient_can_take_the_place_of_the_logits(
    dtype: torch.dtype, reduction: Reduction, backend: Backend, generator: torch.Generator
) -> None:
    terms = replace(PLAIN, reduction=reduction)
    logits = torch.randn(6, 40, generator=generator).to(dtype)
    check(logits, drawn_labels((6,), 40, terms, generator), terms, backend, generator, overwrites=True)
    taken = logits.detach().requires_grad_() * 1
    taken.retain_grad()
    loss = cross_entropy(taken, torch.arange(6), reduction="sum", overwrite_logits=True, backend=backend)
    before = taken.detach().clone()
    assert torch.equal(taken, before)
    loss.backward()
    assert taken.grad is not None and torch.equal(taken.detach(), taken.grad) and not torch.equal(taken, before)


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_gradients_logits_are_kept(backend: Backend, generator: torch.Generator) -> None:
    logits = torch.randn(3, 8, generator=generator)
    before = logits.clone()
    with torch.no_grad():
        loss = cross_entropy(logits, torch.arange(3), overwrite_logits=True, backend=backend)
    assert torch.equal(logits, before) and not loss.requires_grad


@pytest.mark.parametrize("backend", BACKENDS)
def test_who_needs_overwritten_logits_is_told(backend: Backend, generator: torch.Generator) -> None:
    leaf = torch.randn(3, 8, generator=generator, requires_grad=True)
    logits = leaf.tanh()  # tanh saves its result
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        cross_entropy(logits, torch.arange(3), overwrite_logits=True, backend=backend).backward()
    loss = cross_entropy(leaf * 1, torch.arange(3), overwrite_logits=True, backend=backend)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"allows a single backward, found a second.* use overwrite_logits=False"):
        loss.backward()
    with pytest.raises(ValueError, match=r"True expected logits that an operation computed, found a leaf tensor"):
        cross_entropy(leaf, torch.arange(3), overwrite_logits=True, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_strides_are_followed(backend: Backend, generator: torch.Generator) -> None:
    wide = torch.randn(6, 40, generator=generator)
    deep = torch.randn(4, 3, 9, generator=generator)
    labels = torch.randint(0, 3, (6, 2), generator=generator)
    for logits in (
        wide[::2, 3:30],
        wide.t()[:5],
        wide[:, ::3],
        deep[:, :-1],
        deep.transpose(0, 1),
        wide[:1].expand(4, -1),
    ):
        rows = logits.shape[:-1]
        taken = labels.view(-1)[: rows.numel()].view(rows)
        check(logits.detach(), taken, PLAIN, backend, generator)
    check(wide.clone(), labels[:, 0].int().contiguous(), PLAIN, backend, generator)
    check(deep[:, 0].contiguous(), labels[:4, 0], PLAIN, backend, generator)  # labels apart from each other
    expanded = wide[:1].clone().requires_grad_()
    again = expanded.detach().clone().requires_grad_()
    cross_entropy(expanded.expand(4, -1), labels[:4, 0], overwrite_logits=True, backend=backend).backward()
    F.cross_entropy(again.expand(4, -1), labels[:4, 0]).backward()
    torch.testing.assert_close(expanded.grad, again.grad)


@pytest.mark.parametrize("overwrites", [False, True])
def test_saved_logits_may_come_back_with_other_strides(overwrites: bool, generator: torch.Generator) -> None:
    """As hooks return them that hold saved tensors elsewhere."""
    wide, labels = torch.randn(6, 40, generator=generator), torch.arange(6)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x.contiguous()):
        check(wide[:, 3:30], labels, PLAIN, "triton", generator, overwrites)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x.t().contiguous().t() if x.dim() > 1 else x):
        check(wide, labels, PLAIN, "triton", generator, overwrites)


@pytest.mark.parametrize("backend", BACKENDS)
def test_infinite_logits_are_as_in_torch(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_form, "MAX_FORWARD_BLOCK_SIZE", 4)
    logits = torch.zeros(2, 12)
    logits[0, :8] = float("-inf")  # whole blocks of them, first
    logits[1, 1:11] = float("-inf")
    found, wanted = (logits.clone().requires_grad_() for _ in range(2))
    labels = torch.tensor([9, 0])
    loss = cross_entropy(found, labels, backend=backend)
    exact = F.cross_entropy(wanted, labels)
    loss.backward()
    exact.backward()
    torch.testing.assert_close(loss, exact)
    torch.testing.assert_close(found.grad, wanted.grad)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rows", [0, 3])
def test_the_mean_over_no_labels_is_that_of_torch(rows: int, backend: Backend) -> None:
    logits = torch.ones(rows, 5, requires_grad=True)
    labels = torch.full((rows,), -100)
    loss = cross_entropy(logits, labels, label_smoothing=0.1, backend=backend)
    loss.backward()
    assert loss.isnan() and F.cross_entropy(logits, labels).isnan()
    assert logits.grad is not None and logits.grad.shape == (rows, 5) and not logits.grad.any()
    assert cross_entropy(logits, labels, reduction="sum", backend=backend) == 0
    assert cross_entropy(logits, labels, reduction="none", backend=backend).tolist() == [0.0] * rows


@pytest.mark.parametrize("label", [-1, 8, 2**40])
def test_labels_out_of_range_are_nan_on_triton(label: int, generator: torch.Generator) -> None:
    logits = torch.randn(3, 8, generator=generator, requires_grad=True)
    labels = torch.tensor([1, label, 2])
    losses = cross_entropy(logits, labels, reduction="none", backend="triton")
    losses.sum().backward()
    assert logits.grad is not None
    assert losses.isnan().tolist() == [False, True, False]
    assert logits.grad.isnan().all(1).tolist() == [False, True, False]
    assert not logits.grad[::2].isnan().any()


def test_labels_out_of_range_are_errors_in_the_reference() -> None:
    labels = torch.tensor([[1, -100, 2], [0, 8, -3]])
    text = refusal(cross_entropy, torch.zeros(2, 3, 8), labels)
    assert text.startswith("cross_entropy: expected labels in [0, 8) or ignore_index -100, found 8 at (1, 1); 2 labels")


def test_float64_stays_float64(generator: torch.Generator) -> None:
    logits = torch.randn(4, 9, generator=generator, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([0, 2, 8, 5])

    def loss(logits: Tensor) -> Tensor:
        return cross_entropy(logits, labels, **options_of(replace(ALL, reduction="none")))

    assert loss(logits).dtype == torch.float64
    assert torch.autograd.gradcheck(loss, logits)


def test_under_autocast_it_is_torchs_loss(generator: torch.Generator) -> None:
    logits = torch.randn(4, 9, generator=generator).bfloat16()
    labels = torch.arange(4)
    with torch.autocast("cpu"):
        found, wanted = cross_entropy(logits, labels), F.cross_entropy(logits, labels)
    assert found.dtype == wanted.dtype == torch.float32
    torch.testing.assert_close(found, wanted)
