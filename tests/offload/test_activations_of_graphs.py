"""Gradients are those without offload, to the last bit, whatever the graph saves and however it is used."""

import contextlib
import gc
import threading
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn import functional

from lowtide.offload import FileStore, HostPool, HostStore, OffloadError, StagedStore, Store, residency
from lowtide.offload.activations import ActivationOffload, in_storages_of
from tests.kit.compiling import with_a_new_compiler
from tests.kit.training import logged, refusal
from tests.offload.held import bytes_held
from tests.offload.slow_store import SlowStore

ROWS, WIDTH = 16, 32
BYTES = ROWS * WIDTH * 4  # of one activation
Step = Callable[[nn.Module, Tensor], Tensor]


class Model(nn.Module):
    """Blocks that each do `step` to (ROWS, WIDTH), and keep it between -1 and 1."""

    def __init__(self, step: Step, layers: int = 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.step = step

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(self.step(layer, x))
        return x.square().mean()


def plain(layer: nn.Module, x: Tensor) -> Tensor:
    return torch.sin(layer(x))


def views_of_one_storage(layer: nn.Module, x: Tensor) -> Tensor:
    a, b = torch.sin(layer(x)).chunk(2, dim=1)
    return torch.cat([a.exp() * b, (a * b).t().contiguous().t()], dim=1)


def transposed_and_expanded(layer: nn.Module, x: Tensor) -> Tensor:
    y = layer(x)
    return y * y[:1].expand(ROWS, WIDTH) + (y.t() @ y.clone()).t()[:ROWS] * y


def masks(layer: nn.Module, x: Tensor) -> Tensor:
    y = layer(x)
    return functional.dropout(y.masked_fill(y > 0.3, 0.5), 0.25) + y.relu()


def integers(layer: nn.Module, x: Tensor) -> Tensor:
    y = layer(x)
    return y.gather(1, y.argsort(1)) + y.sort(1).values


def changed_before_it_is_saved(layer: nn.Module, x: Tensor) -> Tensor:
    y = layer(x)
    y += 1
    return (y.mul_(0.5).sigmoid_() * 1.0).exp_()


def halves_with_versions_of_their_own(layer: nn.Module, x: Tensor) -> Tensor:
    a, b = torch.unsafe_chunk(layer(x), 2, 1)  # as in torch's recurrent cells
    a = a.sigmoid_()
    other = (x * 1.5).exp()  # drives the storage of `a` out
    b = b.tanh_()
    return torch.cat([a * b, b], dim=1) * other


def complex_numbers(layer: nn.Module, x: Tensor) -> Tensor:
    z = torch.view_as_complex(layer(x).view(ROWS, -1, 2))
    return torch.view_as_real(z * z.conj() * z.exp()).reshape(ROWS, WIDTH)


STEPS = [
    plain,
    views_of_one_storage,
    transposed_and_expanded,
    masks,
    integers,
    changed_before_it_is_saved,
    halves_with_versions_of_their_own,
    complex_numbers,
]
Gradients = tuple[Tensor, list[Tensor]]


def inputs(seed: int = 1) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def offload_for(
    model: nn.Module, store: Any, budget_bytes: int | None = None, min_bytes: int = 256
) -> ActivationOffload:
    return ActivationOffload(store, min_bytes, budget_bytes, in_storages_of(model.parameters()))


def moving_all(store: Any, min_bytes: int = 1) -> ActivationOffload:
    """What has so many bytes does not stay longer than it must."""
    return ActivationOffload(store, min_bytes, 1, lambda tensor: False)


def forward(model: nn.Module, offload: ActivationOffload | None, x: Tensor | None = None) -> Tensor:
    with offload or contextlib.nullcontext():
        return model(inputs() if x is None else x)


def backward(model: nn.Module, loss: Tensor) -> Gradients:
    """The loss, and the gradient of every parameter."""
    model.zero_grad()
    loss.backward()
    return loss.detach(), [param.grad.clone() for param in model.parameters() if param.grad is not None]


def gradients(model: nn.Module, offload: ActivationOffload | None = None, x: Tensor | None = None) -> Gradients:
    torch.manual_seed(3)
    return backward(model, forward(model, offload, x))


def assert_same_bits(found: Gradients, expected: Gradients) -> None:
    assert found[0].isfinite() and torch.equal(found[0], expected[0])
    assert len(found[1]) == len(expected[1]) and all(map(torch.equal, found[1], expected[1]))


def assert_nothing_left(offload: ActivationOffload, store: SlowStore) -> None:
    store.settle()
    with offload:
        pass
    assert offload.residency.resident_bytes == bytes_held(store) == 0


@pytest.fixture
def store() -> SlowStore:
    return SlowStore()


# -- what graphs save -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [1, 4 * BYTES, None])
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_gradients_are_the_same(store: SlowStore, step: Step, budget: int | None) -> None:
    model = Model(step)
    offload = offload_for(model, store, budget)
    x, others = inputs(), [inputs(), inputs()]
    expected = gradients(model, x=x)
    for other in others:
        assert_same_bits(gradients(model, offload, other), expected)
        assert x.grad is not None and other.grad is not None and torch.equal(other.grad, x.grad)
    assert offload.residency.offloaded_bytes > 0 and store.count("load") > 0
    offload.close()
    assert offload.residency.resident_bytes == bytes_held(store) == 0


@pytest.mark.parametrize("is_staged", [False, True])
def test_gradients_are_the_same_from_a_file(tmp_path: Path, is_staged: bool) -> None:
    model, file, pool = Model(masks), FileStore(tmp_path, 0), HostPool()
    store: Store = StagedStore(file, pool) if is_staged else file
    offload = offload_for(model, store, 3 * BYTES)
    expected = gradients(model)
    for _ in range(3):
        assert_same_bits(gradients(model, offload), expected)
    offload.close()
    assert bytes_held(store) == 0 < offload.residency.offloaded_bytes
    store.close()
    assert pool.bytes_in_use == 0


def test_parameters_are_never_moved(store: SlowStore) -> None:
    """Nor views of a flat buffer that is emptied and filled again in between."""
    flat = torch.randn(WIDTH * WIDTH)
    weight = nn.Parameter(torch.empty(0))
    weight.data = flat.view(WIDTH, WIDTH)
    x, values = inputs(), flat.clone()
    with ActivationOffload(store, 1, 1, in_storages_of([flat])):
        loss = (x @ weight.t() @ weight).sum()
    expected = torch.autograd.grad((x @ weight.t() @ weight).sum(), x)[0]
    flat.untyped_storage().resize_(0)
    flat.untyped_storage().resize_(values.nbytes)
    flat.copy_(values)
    assert torch.equal(torch.autograd.grad(loss, x)[0], expected)
    assert all(kept.numel() < flat.nbytes for kept in store.kept.values())


def test_nothing_small_and_nothing_without_gradients_is_moved(store: SlowStore) -> None:
    model = Model(plain)
    offload = offload_for(model, store, 1, min_bytes=BYTES + 1)
    gradients(model, offload)
    with torch.no_grad():
        forward(model, offload_for(model, store, 1))
    assert store.trail == [] and offload.residency.peak_resident_bytes == 0


def test_a_storage_is_saved_and_counted_once(store: SlowStore) -> None:
    x = inputs()
    with moving_all(store) as offload:
        y = x.exp()  # saves what it returns
        outputs = [y.sin(), y.t().cos(), y[1:].tan(), y.view(-1).sinh()]  # the storage of `tan` is new
    assert offload.residency.resident_bytes + bytes_held(store) == 2 * BYTES - WIDTH * 4
    del outputs
    assert offload.residency.resident_bytes + bytes_held(store) == BYTES
    del y
    assert offload.residency.resident_bytes + bytes_held(store) == 0


def test_a_few_rows_of_a_data_set_do_not_move_all_of_it(store: SlowStore) -> None:
    data, model = torch.randn(1000, WIDTH), Model(plain)
    offload = offload_for(model, store, 1)
    assert_same_bits(gradients(model, offload, data[500:508]), gradients(model, x=data[500:508]))
    assert 0 < offload.residency.offloaded_bytes < data.nbytes // 4


@pytest.mark.parametrize("size", [4, ROWS])  # kept, offloaded
def test_a_saved_tensor_changed_in_place_is_torchs_error(size: int, store: SlowStore) -> None:
    def change(offload: ActivationOffload | None) -> str:
        x = torch.randn(size, WIDTH, requires_grad=True)
        with offload or contextlib.nullcontext():
            y = x.exp()
            z = y.sin()
        with torch.no_grad():
            y.mul_(2)
        return refusal(z.sum().backward, kind=RuntimeError)

    ours, theirs = change(moving_all(store, 1000)), change(None)
    assert "modified by an inplace operation" in theirs and ours.split(", which")[0] == theirs.split(", which")[0]
    assert f"[torch.FloatTensor [{size}, {WIDTH}]]" in ours
    version = "is at version 1; expected version 0 instead. Hint: enable anomaly detection"
    assert version in ours and version in theirs


# -- how graphs are used ----------------------------------------------------------------------------------------------


def test_gradient_of_a_gradient_is_the_same(store: SlowStore) -> None:
    model = Model(plain)

    def second_order(offload: ActivationOffload | None) -> Tensor:
        x = inputs()
        (slope,) = torch.autograd.grad(forward(model, offload, x), x, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), x)[0]

    assert torch.equal(second_order(offload_for(model, store, 2 * BYTES)), second_order(None))
    assert store.count("load") > 0


@pytest.mark.parametrize("order", [(2, 1, 0), (0, 1, 2)])
def test_several_forwards_before_their_backwards_are_the_same(store: SlowStore, order: tuple[int, ...]) -> None:
    model = Model(plain)
    offload = offload_for(model, store, 3 * BYTES)
    results = []
    for using in (None, offload):
        graphs = [forward(model, using, inputs(seed)) for seed in range(3)]
        results.append([backward(model, graphs[index]) for index in order])
        del graphs
    for found, expected in zip(*results, strict=True):
        assert_same_bits(found, expected)
    assert offload.residency.peak_resident_bytes <= 3 * BYTES and offload.residency.resident_bytes == 0


def test_backward_in_another_thread_beside_a_forward_is_the_same() -> None:
    model, store = Model(plain, layers=30), SlowStore(0.0005)
    offload = offload_for(model, store, 6 * BYTES)
    xs = [inputs(seed) for seed in range(4)]
    expected = [torch.autograd.grad(model(x), x)[0] for x in xs]
    found: list[Tensor] = []
    loss = forward(model, offload, xs[0])
    for number, x in enumerate(xs):
        thread = threading.Thread(target=lambda loss=loss, x=x: found.append(torch.autograd.grad(loss, x)[0]))
        thread.start()
        loss = forward(model, offload, xs[(number + 1) % 4])
        thread.join()
    del loss
    assert len(found) == 4 and all(map(torch.equal, found, expected))
    assert offload.residency.peak_resident_bytes <= 6 * BYTES
    assert_nothing_left(offload, store)


def test_two_in_one_process_do_not_meet(store: SlowStore) -> None:
    """Also with one store for both."""
    both = [Model(plain), Model(views_of_one_storage)]
    expected = [gradients(model) for model in both]
    losses = [forward(model, offload_for(model, store, 2 * BYTES)) for model in both]
    for model, loss, want in zip(both, losses, expected, strict=True):
        assert_same_bits(backward(model, loss), want)


# -- who decides ------------------------------------------------------------------------------------------------------


def test_hooks_inside_the_model_decide_for_what_they_enclose(store: SlowStore) -> None:
    x = inputs()
    with moving_all(store) as offload:
        y = x.sin()
        with save_on_cpu():
            z = y.exp().cos().tan().sum()
    assert offload.residency.resident_bytes + bytes_held(store) == BYTES
    assert torch.equal(torch.autograd.grad(z, x)[0], torch.autograd.grad(x.sin().exp().cos().tan().sum(), x)[0])


def test_hooks_around_the_model_decide_and_the_log_says_so(store: SlowStore) -> None:
    model = Model(plain)
    offload = offload_for(model, store, 1)
    seen: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        seen.append(tensor.detach())
        return tensor.detach()

    with logged() as messages, saved_tensors_hooks(pack, lambda tensor: tensor):
        for _ in range(2):
            gradients(model, offload)
    assert seen and offload.residency.offloaded_bytes == 0
    assert messages == [
        "activation offload: saved-tensor hooks of the caller are active around the model, so nothing is offloaded "
        "there"
    ]


def test_host_memory_is_not_copied_to_host_memory() -> None:
    model, store = Model(plain), HostStore()
    offload = offload_for(model, store, 1)
    with logged() as messages:
        for _ in range(2):
            assert_same_bits(gradients(model, offload), gradients(model))
    assert offload.residency.offloaded_bytes == offload.residency.peak_resident_bytes == bytes_held(store) == 0
    assert messages == [
        "activation offload: activations on the CPU are already in host memory and stay there; a file store would take "
        "them"
    ]


def test_a_compiler_does_not_trace_the_hooks_of_what_runs_after_a_graph_break(store: SlowStore) -> None:
    """Operators of compiled code run alone there, and autograd calls the hooks in the midst of them."""

    def broken(layer: nn.Module, x: Tensor) -> Tensor:
        return layer(x).exp() + x[x > 0].sin().mean()  # how many are above 0 is in the data

    with_a_new_compiler()
    model = Model(broken, 2)
    compiled = torch.compile(model, backend="aot_eager")
    compiled(inputs())
    frames = counters["frames"]["total"]
    with moving_all(store) as offload:
        compiled(inputs()).backward()
    assert offload.residency.offloaded_bytes > 0
    assert counters["frames"]["total"] == frames


# -- what is left -----------------------------------------------------------------------------------------------------


def test_nothing_is_left_of_a_graph_without_backward(store: SlowStore) -> None:
    model = Model(plain)
    offload = offload_for(model, store, 2 * BYTES)
    loss = forward(model, offload)
    assert bytes_held(store) > 0
    del loss
    assert_nothing_left(offload, store)


def test_nothing_is_left_of_a_forward_that_failed(store: SlowStore) -> None:
    def fail(layer: nn.Module, x: Tensor) -> Tensor:
        if layer is model.layers[4]:
            raise KeyError("the model's own")
        return plain(layer, x)

    model = Model(fail)
    offload = offload_for(model, store, 2 * BYTES)
    refusal(forward, model, offload, kind=KeyError)
    gc.collect()
    assert offload.residency.offloaded_bytes > 0
    assert_nothing_left(offload, store)
    model.step = plain
    assert_same_bits(gradients(model, offload), gradients(model))


class Owner:
    """Something that a graph refers to."""


@pytest.mark.parametrize("min_bytes", [1, BYTES + 1])  # offloaded, kept
def test_the_graph_is_no_reference_cycle(min_bytes: int, store: SlowStore) -> None:
    """Memory goes with the last reference, with no garbage collector."""
    gc.disable()
    try:
        with moving_all(store, min_bytes):
            y = (inputs() * 2).exp().tanh()
        node: Any = y.grad_fn
        node.metadata["owner"] = owner = Owner()
        alive = weakref.ref(owner)
        del node, owner
        assert alive() is not None
        del y
        assert alive() is None
    finally:
        gc.enable()


# -- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["failing", "refusing"])
@pytest.mark.parametrize("verb", ["save", "load"])
def test_a_failing_store_ends_one_step(store: SlowStore, verb: str, how: str) -> None:
    model = Model(plain)
    offload = offload_for(model, store, 3 * BYTES)
    expected = gradients(model)
    getattr(store, how).add(verb)
    reason = f"the disk of the test is {'full' if how == 'failing' else 'gone'} ({verb})"
    for _ in range(2):
        assert refusal(gradients, model, offload, kind=OffloadError) == (
            f"activation offload: expected to {verb} 2,048 bytes of activations, but the store failed: {reason}. This "
            "step has changed no parameter. Correct the fault of the store, raise "
            "activation_checkpointing.offload.budget_bytes, or turn the offload off."
        )
    getattr(store, how).clear()
    assert_same_bits(gradients(model, offload), expected)
    assert_nothing_left(offload, store)


def test_a_load_that_failed_can_be_tried_again(store: SlowStore) -> None:
    model = Model(plain)
    loss = forward(model, offload_for(model, store, 3 * BYTES))
    store.failing.add("load")
    assert "expected to load" in refusal(partial(loss.backward, retain_graph=True), kind=OffloadError)
    store.failing.clear()
    assert_same_bits(backward(model, loss), gradients(model))


@pytest.mark.parametrize("kind", [OffloadError, torch.OutOfMemoryError])
def test_a_prefetch_that_failed_is_no_error_of_another_tensor(
    store: SlowStore, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    """Only who needs the bytes hears of it."""
    x, asked = inputs(), Mock(side_effect=kind)
    with offload_for(nn.Module(), store, 2 * BYTES):
        unused = inputs().exp().exp()
        used = x.exp().exp()
    monkeypatch.setattr(residency, "_empty", asked)
    assert torch.autograd.grad(used.sum(), x)[0].shape == (ROWS, WIDTH)
    assert asked.called
    refusal(unused.sum().backward, kind=kind)


def test_after_close_backward_says_so(store: SlowStore) -> None:
    model = Model(plain)
    offload = offload_for(model, store, 3 * BYTES)
    loss = forward(model, offload)
    offload.close()
    assert offload.residency.resident_bytes == bytes_held(store) == 0
    assert refusal(loss.backward, kind=OffloadError) == (
        "activation offload: expected backward before close(), found the offload closed and the activations of "
        "this graph freed"
    )
    text = refusal(forward, model, offload, kind=OffloadError)
    assert "expected a forward before close(), found the offload closed" in text
    offload.close()


@pytest.mark.parametrize(("name", "values"), [("min_bytes", (0, 1)), ("budget_bytes", (1, 0))])
def test_bytes_must_be_positive(store: SlowStore, name: str, values: tuple[int, int]) -> None:
    text = refusal(ActivationOffload, store, *values, lambda tensor: False)
    assert text == f"{name}: expected a number of bytes above 0, found 0"
