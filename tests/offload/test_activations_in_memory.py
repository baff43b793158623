"""How much of the saved activations is in memory: counted by the offload, and by what is really alive."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from lowtide.offload.activations import ActivationOffload, in_storages_of
from tests.kit.training import logged
from tests.offload.slow_store import SlowStore
from tests.offload.test_activations_of_graphs import assert_nothing_left, offload_for

ROWS, WIDTH = 64, 64
BYTES = ROWS * WIDTH * 4  # of one activation
LAYERS = 40
TOTAL = (2 * LAYERS + 1) * BYTES  # the sines' inputs and the exponentials' outputs, and the first layer's input


class Deep(nn.Module):
    """LAYERS linear layers, and after each a sine and an exponential: three saved activations."""

    def __init__(self, is_checkpointed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.is_checkpointed = is_checkpointed
        self.begin_block = lambda: None

    def block(self, layer: nn.Module, x: Tensor) -> Tensor:
        return torch.exp(torch.sin(layer(x)))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            self.begin_block()
            x = checkpoint(self.block, layer, x, use_reentrant=False) if self.is_checkpointed else self.block(layer, x)
        return x.mean()


def inputs() -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))


class LiveBytes:
    """Counts the memory under saved tensors that really is alive, independently of what the offload says.

    Looks at every tensor that autograd saves, and at every one that it gets back.
    """

    def __init__(self, offload: ActivationOffload, model: nn.Module) -> None:
        self._offload = offload
        self._is_parameter = in_storages_of(model.parameters())
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0
        self.total = 0  # of all that was saved

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        pack, unpack = self._offload._pack, self._offload._unpack

        def watched_pack(tensor: Tensor) -> Any:
            packed = pack(tensor)
            self._look(tensor, is_new=True)
            return packed

        def watched_unpack(packed: Any) -> Tensor:
            tensor = unpack(packed)
            self._look(tensor, is_new=False)
            return tensor

        with self._offload, saved_tensors_hooks(watched_pack, watched_unpack):
            yield

    @property
    def now(self) -> int:
        self._storages = {key: item for key, item in self._storages.items() if not item[0].expired()}
        return sum(nbytes for _, nbytes in self._storages.values())

    def _look(self, tensor: Tensor, is_new: bool) -> None:
        if self._is_parameter(tensor):
            return
        reference = StorageWeakRef(tensor.untyped_storage())
        nbytes = tensor.untyped_storage().nbytes()
        if is_new and reference.cdata not in self._storages:
            self.total += nbytes
        self._storages[reference.cdata] = (reference, nbytes)
        self.peak = max(self.peak, self.now)


@dataclass
class Run:
    """A forward."""

    model: Deep
    store: SlowStore
    offload: ActivationOffload
    alive: LiveBytes
    loss: Tensor


def run(budget: int | None, seconds: float = 0.0, is_checkpointed: bool = False) -> Run:
    model, store = Deep(is_checkpointed), SlowStore(seconds)
    offload = offload_for(model, store, budget)
    alive = LiveBytes(offload, model)
    with alive.watching():
        loss = model(inputs())
    return Run(model, store, offload, alive, loss)


@pytest.mark.parametrize("seconds", [0.0, 0.001])
@pytest.mark.parametrize("activations", [3, 10, 30])
def test_peak_stays_under_the_budget(activations: int, seconds: float) -> None:
    budget = activations * BYTES
    one = run(budget, seconds)
    assert one.alive.total == TOTAL and one.offload.residency.resident_bytes <= budget
    one.loss.backward()
    # Counted, it is within the budget. Alive is besides, for a moment, what the model holds itself: the tensors that
    # its current line reads and makes, and those of the node of the graph that runs.
    assert budget - BYTES <= one.offload.residency.peak_resident_bytes <= budget
    assert one.alive.peak <= budget + 3 * BYTES < TOTAL
    assert_nothing_left(one.offload, one.store)
    assert one.alive.now == 0


def test_a_graph_that_is_kept_is_under_the_budget_too() -> None:
    """What a first backward has brought back makes room, and is counted until it has really gone."""
    one = run(6 * BYTES)
    weights = list(one.model.parameters())
    expected = torch.autograd.grad(one.model(inputs()), weights)
    for _ in range(3):
        assert all(map(torch.equal, torch.autograd.grad(one.loss, weights, retain_graph=True), expected))
    assert one.offload.residency.peak_resident_bytes <= 6 * BYTES
    assert one.alive.peak <= 9 * BYTES < one.alive.total
    assert one.alive.now <= 6 * BYTES


def test_checkpointed_blocks_hold_their_inputs_alone() -> None:
    one = run(4 * BYTES, is_checkpointed=True)
    assert one.alive.total == LAYERS * BYTES
    assert one.alive.now <= 4 * BYTES
    one.loss.backward()
    assert one.offload.residency.peak_resident_bytes <= 4 * BYTES
    assert one.alive.peak <= 6 * BYTES
    assert one.store.count("load") >= LAYERS - 4


def test_nothing_is_loaded_where_all_fits_and_nothing_saved_where_it_fits_into_half_the_budget() -> None:
    for budget, is_saved in ((2 * TOTAL, False), (TOTAL, True)):
        one = run(budget)
        one.loss.backward()
        assert one.offload.residency.peak_resident_bytes == TOTAL
        assert one.store.count("load") == 0 and (one.offload.residency.offloaded_bytes > 0) == is_saved


def test_the_newest_stay() -> None:
    """Each of the oldest is saved once and loaded once."""
    one = run(20 * BYTES)
    saves = one.store.count("save")
    assert 2 * LAYERS + 1 - 20 <= saves <= 2 * LAYERS + 1 - 9
    one.loss.backward()
    assert (one.store.count("save"), one.store.count("load")) == (saves, 2 * LAYERS + 1 - 20)


def test_what_backward_begins_with_needs_no_store() -> None:
    one = run(20 * BYTES)
    one.store.refusing.add("load")
    weight = one.model.layers[-9].get_parameter("weight")
    gradient = torch.autograd.grad(one.loss, weight)  # needs 9 x 2 + 1 tensors
    assert torch.equal(gradient[0], torch.autograd.grad(one.model(inputs()), weight)[0])


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
    store = SlowStore()
    with offload_for(nn.Module(), store, 3 * BYTES) as offload:
        loss = Many.apply(*xs).sum()
    assert offload.residency.peak_resident_bytes == 3 * BYTES
    assert all(map(torch.equal, torch.autograd.grad(loss, xs), xs))
    assert offload.residency.peak_resident_bytes == 6 * BYTES
    assert_nothing_left(offload, store)


def test_without_a_budget_three_tensors_are_in_memory_or_three_blocks() -> None:
    one = run(None)
    one.loss.backward()
    assert one.offload.residency.peak_resident_bytes == 3 * BYTES
    model, store = Deep(), SlowStore()
    offload = offload_for(model, store)
    model.begin_block = offload.begin_block
    for _ in range(2):
        with offload:
            loss = model(inputs())
        loss.backward()
    assert offload.residency.peak_resident_bytes <= 3 * 3 * BYTES  # the first block saves its input as well
    assert store.count("load") > 2 * (2 * LAYERS + 1 - 3 * 3 - 1)


def test_the_head_may_be_larger_than_a_block() -> None:
    """What comes after the last block does not drive the last blocks out, and is not kept room for in backward."""
    model, store, head = Deep(), SlowStore(), nn.Linear(WIDTH, 20 * WIDTH)
    offload = offload_for(nn.ModuleList([model, head]), store)
    model.begin_block = offload.begin_block
    for _ in range(2):
        with offload:
            loss = head(model(inputs()) + inputs()).exp().mean()
        assert BYTES * 20 <= offload.residency.resident_bytes <= BYTES * (20 + 3 * 3 + 1)
        loss.backward()
    assert store.count("save") <= 2 * (2 * LAYERS + 1)


def test_a_tensor_above_the_budget_is_told() -> None:
    with logged() as messages:
        one = run(BYTES // 2)
    one.loss.backward()
    assert one.offload.residency.peak_resident_bytes == BYTES
    assert messages == [
        "activation offload: budget_bytes is 8,192, but a single saved tensor has 16,384 bytes: it stays in memory "
        "until the next tensor is saved"
    ]


# -- overlap ----------------------------------------------------------------------------------------------------------


def test_a_save_runs_while_the_forward_goes_on() -> None:
    """Room is made before it is needed: at half the budget."""
    store = SlowStore()
    store.allow(set())
    offload = offload_for(nn.Module(), store, 8 * BYTES)
    y, sent = torch.ones(ROWS, WIDTH, requires_grad=True), []
    with offload:
        for _ in range(8):
            y = y.sin()
            sent.append(store.count("save"))
    store.allow(None)  # nobody has waited for one
    assert sent == [0, 0, 0, 0, 1, 2, 3, 4]
    assert offload.residency.resident_bytes == 8 * BYTES


def test_loads_are_started_before_they_are_asked_for() -> None:
    store = SlowStore()
    loads: list[int] = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: object, gradient: Tensor) -> Tensor:
            loads.append(store.count("load"))
            store.allow(None)
            store.settle()  # what is asked for next does not depend on how fast the machine is
            store.allow(set())  # nor is any waited for that was not on its way already
            return gradient

    y = torch.ones(ROWS, WIDTH, requires_grad=True)
    with offload_for(nn.Module(), store, 4 * BYTES):
        for _ in range(12):
            y = torch.sin(Look.apply(y))
    store.settle()
    y.sum().backward()
    # The four newest are here; when the fifth is asked for, the next ones are on their way too.
    assert loads[-1] == 8
    assert all(count >= min(index - 1, 8) for index, count in enumerate(loads))
    assert loads[4] > 1
