"""Fused linear and cross-entropy hold one chunk of logits, gradients, and next to nothing else, at any time."""

from collections.abc import Callable, Iterator
from importlib import import_module

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from lowtide.kernels.cross_entropy import cross_entropy
from lowtide.kernels.dispatch import Backend
from lowtide.kernels.linear_cross_entropy import linear_cross_entropy
from lowtide.kernels.loss_terms import Reduction
from lowtide.kernels.triton.launch import PreparedLaunch
from tests.kit.grids import pairs

BACKENDS = ("triton", "reference")
linear_form = import_module("lowtide.kernels.linear_cross_entropy")
eager_form = import_module("lowtide.kernels.cross_entropy")  # by name: the package has the function of that name
ROWS, WIDTH, CLASSES = 96, 64, 4096
LOGITS = ROWS * CLASSES * 4
CHUNK = LOGITS // 8
WEIGHT, HIDDEN = CLASSES * WIDTH * 4, ROWS * WIDTH * 4
SMALL = 16 * ROWS * 8  # labels, losses and the like: a few numbers a row
EAGER_BLOCK = 2 * CLASSES * 4


def peak_bytes(run: Callable[[], object]) -> int:
    """How much more than before is allocated while `run` runs, at most."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as recorded:
        run()
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    held, peak = 0, 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The eager form widens a block at a time: a few copies of it are what it may hold."""
    monkeypatch.setattr(eager_form, "_BLOCK_BYTES", EAGER_BLOCK)


@pytest.fixture(autouse=True)
def no_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels allocate nothing; Triton's interpreter, which copies what they are given, does."""
    monkeypatch.setattr(PreparedLaunch, "__call__", lambda *args: None)


@pytest.fixture(autouse=True)
def no_scratch_memory() -> Iterator[None]:
    """oneDNN copies the factors of a product in bfloat16 on some processors (AMX)."""
    torch.backends.mkldnn.set_flags(False)
    yield
    torch.backends.mkldnn.set_flags(True)


def eager_bytes(backend: Backend) -> int:
    return 6 * EAGER_BLOCK if backend == "reference" else 0


@pytest.mark.parametrize(("reduction", "is_frozen", "backend"), pairs(("mean", "none"), (False, True), BACKENDS))
def test_training_holds_one_chunk_and_the_gradients(reduction: Reduction, is_frozen: bool, backend: Backend) -> None:
    hidden, weight = torch.randn(ROWS, WIDTH, requires_grad=True), torch.randn(CLASSES, WIDTH)
    weight.requires_grad_(not is_frozen)
    labels = torch.randint(0, CLASSES, (ROWS,))

    def run() -> None:
        linear_cross_entropy(
            hidden, weight, labels, reduction=reduction, chunk_bytes=CHUNK, backend=backend
        ).sum().backward()

    run()
    hidden.grad = weight.grad = None
    expected = CHUNK + HIDDEN + (0 if is_frozen else WEIGHT)
    found = peak_bytes(run)
    assert expected <= found <= expected + SMALL + eager_bytes(backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_bfloat16_holds_the_sum_of_chunks_in_float32(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    strip_bytes = WEIGHT // 64
    monkeypatch.setattr(linear_form, "_STRIP_BYTES", strip_bytes)
    hidden, weight = (torch.randn(n, WIDTH, dtype=torch.bfloat16, requires_grad=True) for n in (ROWS, CLASSES))
    bias = torch.randn(CLASSES, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(0, CLASSES, (ROWS,))
    found = peak_bytes(
        lambda: linear_cross_entropy(hidden, weight, labels, bias, chunk_bytes=CHUNK // 2, backend=backend).backward()
    )
    in_chunks = CHUNK // 2 + HIDDEN // 2 + WEIGHT + strip_bytes + eager_bytes(backend)
    at_the_end = HIDDEN // 2 + WEIGHT + WEIGHT // 2  # rounded, when the chunk is gone
    # The bias's sum, and what is added to it.
    assert at_the_end <= found <= max(in_chunks, at_the_end) + SMALL + 4 * CLASSES * 4


@pytest.mark.parametrize("backend", BACKENDS)
def test_evaluation_holds_one_chunk(backend: Backend) -> None:
    hidden, weight = torch.randn(ROWS, WIDTH, requires_grad=True), torch.randn(CLASSES, WIDTH, requires_grad=True)
    labels = torch.randint(0, CLASSES, (ROWS,))
    with torch.no_grad():
        found = peak_bytes(lambda: linear_cross_entropy(hidden, weight, labels, chunk_bytes=CHUNK, backend=backend))
    assert CHUNK <= found <= CHUNK + SMALL + eager_bytes(backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("overwrites", [False, True])
def test_the_loss_of_logits_holds_one_gradient_or_none(overwrites: bool, backend: Backend) -> None:
    logits = torch.randn(ROWS, CLASSES, requires_grad=True) * 1
    labels = torch.randint(0, CLASSES, (ROWS,))

    def run() -> None:
        loss = cross_entropy(logits, labels, overwrite_logits=overwrites, backend=backend)
        torch.autograd.grad(loss, logits)

    expected = 0 if overwrites else LOGITS
    assert expected <= peak_bytes(run) <= expected + SMALL + eager_bytes(backend)
