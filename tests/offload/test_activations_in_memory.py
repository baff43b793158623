"""How much of the saved activations is in memory: counted by the offload, and by what is really alive."""

import contextlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lowtide.offload.file_store import FileStore
from tests.kit.ranks import in_a_new_process
from tests.kit.resident import peak_growth
from tests.offload.activation_stores import LiveBytes, MemoryStore, offload_for

ROWS, WIDTH = 64, 64
BYTES = ROWS * WIDTH * 4  # of one activation
LAYERS = 40


class Deep(nn.Module):
    """LAYERS linear layers, and after each a sine and an exponential: three saved activations."""

    def __init__(self, checkpoint_every: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.checkpoint_every = checkpoint_every
        self.begin_block = lambda: None

    def block(self, layer: nn.Module, x: Tensor) -> Tensor:
        return torch.exp(torch.sin(layer(x)))

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            self.begin_block()
            if self.checkpoint_every and index % self.checkpoint_every == 0:
                x = checkpoint(self.block, layer, x, use_reentrant=False)
            else:
                x = self.block(layer, x)
        return x.mean()


def inputs() -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("seconds", [0.0, 0.001])
@pytest.mark.parametrize("activations", [3, 10, 30])
def test_peak_stays_under_the_budget(activations: int, seconds: float) -> None:
    model, budget = Deep(), activations * BYTES
    store = MemoryStore(seconds)
    offload = offload_for(model, store, budget)
    alive = LiveBytes(offload, model)
    with alive.watching():
        loss = model(inputs())
    saved = 2 * LAYERS * BYTES  # the sine's input and the exponential's output, which is the next layer's input
    assert alive.total == saved + BYTES  # and the first layer's input, which is saved too
    assert offload.resident_bytes <= budget
    loss.backward()
    # Counted, it is within the budget. Alive is besides, for a moment, what the model holds itself: the tensors that
    # its current line reads and makes, and those of the node of the graph that runs.
    assert budget - BYTES <= offload.peak_resident_bytes <= budget
    assert alive.peak <= budget + 3 * BYTES < alive.total
    store.settle()
    with offload:
        pass
    assert offload.resident_bytes == store.bytes_held == alive.now == 0


def test_a_graph_that_is_kept_is_under_the_budget_too() -> None:
    """What a first backward has brought back makes room, and is counted until it has really gone."""
    model, store = Deep(), MemoryStore()
    offload = offload_for(model, store, 6 * BYTES)
    alive = LiveBytes(offload, model)
    with alive.watching():
        loss = model(inputs())
    for _ in range(3):
        loss.backward(retain_graph=True)
    assert offload.peak_resident_bytes <= 6 * BYTES
    assert alive.peak <= 9 * BYTES < alive.total
    assert alive.now <= 6 * BYTES


def test_checkpointed_blocks_hold_their_inputs_alone() -> None:
    model, store = Deep(checkpoint_every=1), MemoryStore()
    offload = offload_for(model, store, 4 * BYTES)
    alive = LiveBytes(offload, model)
    with alive.watching():
        loss = model(inputs())
    assert alive.total == LAYERS * BYTES
    assert alive.now <= 4 * BYTES
    loss.backward()
    assert offload.peak_resident_bytes <= 4 * BYTES
    assert alive.peak <= 6 * BYTES
    assert store.num_loads >= LAYERS - 4


def test_nothing_is_saved_where_all_fits_into_half_the_budget() -> None:
    model, store = Deep(), MemoryStore()
    total = (2 * LAYERS + 1) * BYTES
    with offload_for(model, store, 2 * total) as offload:
        loss = model(inputs())
    loss.backward()
    assert offload.offloaded_bytes == store.num_loads == 0
    assert offload.peak_resident_bytes == total


def test_nothing_is_loaded_where_all_fits_into_the_budget() -> None:
    model, store = Deep(), MemoryStore()
    total = (2 * LAYERS + 1) * BYTES
    with offload_for(model, store, total) as offload:
        loss = model(inputs())
    loss.backward()
    assert offload.peak_resident_bytes == total
    assert store.num_loads == 0 < offload.offloaded_bytes


def test_the_newest_stay() -> None:
    """Each of the oldest is saved once and loaded once."""
    model, store = Deep(), MemoryStore()
    with offload_for(model, store, 20 * BYTES):
        loss = model(inputs())
    saves = store.num_saves
    assert 2 * LAYERS + 1 - 20 <= saves <= 2 * LAYERS + 1 - 9
    loss.backward()
    assert store.num_saves == saves
    assert store.num_loads == 2 * LAYERS + 1 - 20


def test_what_backward_begins_with_needs_no_store() -> None:
    model, store = Deep(), MemoryStore()
    with offload_for(model, store, 20 * BYTES):
        loss = model(inputs())
    store.refusing.add("load")
    weight = model.layers[-9].get_parameter("weight")
    gradients = torch.autograd.grad(loss, weight)  # needs 9 x 2 + 1 tensors
    assert torch.equal(gradients[0], torch.autograd.grad(model(inputs()), weight)[0])


def test_an_operation_that_needs_more_than_the_budget_is_counted() -> None:
    class Many(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *xs: Tensor) -> Tensor:
            ctx.save_for_backward(*xs)
            return torch.stack(xs).sum(0)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
            return tuple(gradient * x for x in ctx.saved_tensors)

    xs = [torch.randn(ROWS, WIDTH, requires_grad=True) for _ in range(6)]
    store = MemoryStore()
    with offload_for(nn.Module(), store, 3 * BYTES) as offload:
        loss = Many.apply(*xs).sum()
    assert offload.peak_resident_bytes == 3 * BYTES
    found = torch.autograd.grad(loss, xs)
    assert offload.peak_resident_bytes == 6 * BYTES
    assert all(torch.equal(gradient, x) for gradient, x in zip(found, xs, strict=True))
    with offload:
        pass
    assert offload.resident_bytes == 0


def test_without_a_budget_three_blocks_are_in_memory() -> None:
    model, store = Deep(), MemoryStore()
    offload = offload_for(model, store)
    model.begin_block = offload.begin_block
    for _ in range(2):
        with offload:
            loss = model(inputs())
        loss.backward()
    assert offload.peak_resident_bytes <= 3 * 3 * BYTES  # the first block saves its input as well
    assert store.num_loads > 2 * (2 * LAYERS + 1 - 3 * 3 - 1)


def test_without_a_budget_or_blocks_three_tensors_are_in_memory() -> None:
    model, store = Deep(), MemoryStore()
    with offload_for(model, store) as offload:
        loss = model(inputs())
    loss.backward()
    assert offload.peak_resident_bytes == 3 * BYTES


def test_the_head_may_be_larger_than_a_block() -> None:
    """What comes after the last block does not drive the last blocks out, and is not kept room for in backward."""
    model, store = Deep(), MemoryStore()
    head = nn.Linear(WIDTH, 20 * WIDTH)
    offload = offload_for(nn.ModuleList([model, head]), store)
    model.begin_block = offload.begin_block
    saves = []
    for _ in range(2):
        with offload:
            loss = head(model(inputs()) + inputs()).exp().mean()
            saves.append(store.num_saves)
        assert BYTES * 20 <= offload.resident_bytes <= BYTES * (20 + 3 * 3 + 1)
        loss.backward()
    assert saves[1] <= 2 * (2 * LAYERS + 1)


def growth_in_training(folder: str | None) -> int:
    """Bytes by which the process grows in a step, as the kernel counts it. folder: for the offload; None for none."""
    torch.set_num_threads(1)
    model = Deep()
    x = torch.randn(4096, WIDTH)  # an activation has 1 MiB
    offload = offload_for(model, FileStore(folder, 0), 8 << 20) if folder is not None else None

    def step() -> None:
        with offload or contextlib.nullcontext():
            loss = model(x)
        loss.backward()
        model.zero_grad()

    return peak_growth(step)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_the_process_is_smaller(tmp_path: Path) -> None:
    """In processes of their own: what the C library does with freed memory is a setting of the whole process."""
    growth = {folder: in_a_new_process(growth_in_training, folder) for folder in (None, str(tmp_path))}
    assert growth[None] > 80 << 20  # 81 activations
    # 8 activations, those of the line or node that runs, and 24 MiB of the store's threads.
    assert growth[str(tmp_path)] < 32 << 20


def test_a_tensor_above_the_budget_is_told(caplog: pytest.LogCaptureFixture) -> None:
    model, store = Deep(), MemoryStore()
    offload = offload_for(model, store, BYTES // 2)
    with caplog.at_level("INFO", logger="lowtide"), offload:
        loss = model(inputs())
    loss.backward()
    assert offload.peak_resident_bytes == BYTES
    assert caplog.messages == [
        "activation offload: budget_bytes is 8,192, but a single saved tensor has 16,384 bytes: it stays in memory "
        "until the next tensor is saved"
    ]
