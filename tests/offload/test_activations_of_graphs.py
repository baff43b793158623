"""Gradients are those without offload, to the last bit, whatever the graph saves and however it is used."""

import contextlib
import gc
import threading
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from lowtide.offload import HostStore
from lowtide.offload.activations import ActivationOffload, in_storages_of
from lowtide.offload.file_store import FileStore
from tests.kit import models
from tests.offload.activation_stores import MemoryStore, assert_same_bits, gradients, offload_for

ROWS, WIDTH = 16, 32
BYTES = ROWS * WIDTH * 4  # of one activation


class Model(nn.Module):
    """Blocks that each do `step` to (ROWS, WIDTH), and keep it between -1 and 1."""

    def __init__(self, step: Callable[[nn.Module, Tensor], Tensor], layers: int = 6) -> None:
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


def recomputed(layer: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(plain, layer, x, use_reentrant=False)


def recomputed_reentrantly(layer: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(plain, layer, x, use_reentrant=True)


STEPS = [
    plain,
    views_of_one_storage,
    transposed_and_expanded,
    masks,
    integers,
    changed_before_it_is_saved,
    halves_with_versions_of_their_own,
    complex_numbers,
    recomputed,
    recomputed_reentrantly,
]


def grad_of(param: Tensor) -> Tensor:
    assert param.grad is not None
    return param.grad


def inputs(seed: int = 1) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed)).requires_grad_()


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.mark.parametrize("budget", [1, 4 * BYTES, None])
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_gradients_are_the_same(step: Callable[[nn.Module, Tensor], Tensor], budget: int | None) -> None:
    model, store = Model(step), MemoryStore()
    offload = offload_for(model, store, budget)
    results = []
    for using in (None, offload, offload):
        torch.manual_seed(3)
        x = inputs()
        loss, grads = gradients(model, partial(model, x), using)
        assert x.grad is not None
        results.append((loss, [*grads, x.grad]))
    assert_same_bits(results[1], results[0])
    assert_same_bits(results[2], results[0])
    assert offload.offloaded_bytes > 0 and store.num_loads > 0
    offload.close()
    assert offload.resident_bytes == store.bytes_held == 0


def test_gradients_are_the_same_from_a_file(tmp_path: Path) -> None:
    model, store = Model(masks), FileStore(tmp_path, 0)
    offload = offload_for(model, store, 3 * BYTES)
    torch.manual_seed(3)
    expected = gradients(model, lambda: model(inputs()))
    for _ in range(3):
        torch.manual_seed(3)
        assert_same_bits(gradients(model, lambda: model(inputs()), offload), expected)
    offload.close()
    assert store.bytes_held == 0 < offload.offloaded_bytes
    store.close()


def test_recurrent_cells_are_the_same(store: MemoryStore) -> None:
    """Torch's own cells change parts of one storage in place, each with a version counter of its own."""
    torch.manual_seed(0)
    cell = nn.LSTMCell(WIDTH, WIDTH)

    def loss() -> Tensor:
        h, c = torch.zeros(ROWS, WIDTH), torch.zeros(ROWS, WIDTH)
        for step in range(5):
            h, c = cell(inputs(step), (h, c))
        return h.square().mean() + c.mean()

    expected = gradients(cell, loss)
    assert_same_bits(gradients(cell, loss, offload_for(cell, store, 2 * BYTES)), expected)
    assert store.num_loads > 0


def test_bfloat16_language_model_is_the_same(store: MemoryStore) -> None:
    torch.manual_seed(0)
    model = models.TinyGPT().bfloat16()
    batch = models.token_batch(0, 4)
    offload = offload_for(model, store, 4096)
    assert_same_bits(gradients(model, lambda: model(*batch), offload), gradients(model, lambda: model(*batch)))
    assert store.num_loads > 0


def test_backward_twice_is_the_same(store: MemoryStore) -> None:
    model = Model(plain)
    x = inputs()
    with offload_for(model, store, 2 * BYTES) as offload:
        loss = model(x)
    first = torch.autograd.grad(loss, [x, *model.parameters()], retain_graph=True)
    second = torch.autograd.grad(loss, [x, *model.parameters()])
    expected = torch.autograd.grad(model(x), [x, *model.parameters()])
    for one, other, plainly in zip(first, second, expected, strict=True):
        assert torch.equal(one, plainly) and torch.equal(other, plainly)
    assert offload.peak_resident_bytes <= 2 * BYTES


def test_gradient_of_a_gradient_is_the_same(store: MemoryStore) -> None:
    model = Model(plain)

    def second_order(offload: ActivationOffload | None) -> Tensor:
        x = inputs()
        with offload or contextlib.nullcontext():
            loss = model(x)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), x)[0]

    assert torch.equal(second_order(offload_for(model, store, 2 * BYTES)), second_order(None))
    assert store.num_loads > 0


def test_several_forwards_before_their_backwards_are_the_same(store: MemoryStore) -> None:
    model = Model(plain)
    offload = offload_for(model, store, 3 * BYTES)

    def losses(using: ActivationOffload | None) -> list[Tensor]:
        found = []
        for seed in range(3):
            with using or contextlib.nullcontext():
                found.append(model(inputs(seed)))
        return found

    for order in ([2, 1, 0], [0, 1, 2]):
        results = []
        for using in (None, offload):
            model.zero_grad()
            graphs = losses(using)
            for index in order:
                graphs[index].backward()
            results.append((torch.zeros(()), [grad_of(p).clone() for p in model.parameters()]))
        assert_same_bits(results[1], results[0])
    assert offload.peak_resident_bytes <= 3 * BYTES
    assert offload.resident_bytes == 0


def test_backward_in_another_thread_beside_a_forward_is_the_same() -> None:
    model, store = Model(plain, layers=30), MemoryStore(0.0005)
    offload = offload_for(model, store, 6 * BYTES)
    xs = [inputs(seed) for seed in range(4)]
    expected = [torch.autograd.grad(model(x), x)[0] for x in xs]
    found: list[Tensor] = []
    with offload:
        loss = model(xs[0])
    for following in range(1, 5):
        x = xs[following - 1]
        thread = threading.Thread(target=lambda loss=loss, x=x: found.append(torch.autograd.grad(loss, x)[0]))
        thread.start()
        with offload:
            loss = model(xs[following % 4])
        thread.join()
    del loss
    assert len(found) == 4 and all(map(torch.equal, found, expected))
    assert offload.peak_resident_bytes <= 6 * BYTES
    assert_nothing_left(offload, store)


def test_two_in_one_process_do_not_meet(store: MemoryStore) -> None:
    """Also with one store for both."""
    one, other = Model(plain), Model(masks)
    offloads = [offload_for(model, store, 2 * BYTES) for model in (one, other)]

    def loss_of(model: nn.Module) -> Tensor:
        return model(inputs())

    expected = []
    for model in (one, other):
        torch.manual_seed(5)
        expected.append(gradients(model, partial(loss_of, model)))
    losses = []
    for model, offload in zip((one, other), offloads, strict=True):
        model.zero_grad()
        torch.manual_seed(5)
        with offload:
            losses.append(model(inputs()))
    for model, loss, want in zip((one, other), losses, expected, strict=True):
        loss.backward()
        assert_same_bits((loss.detach(), [grad_of(p) for p in model.parameters()]), want)


def test_parameters_are_never_moved(store: MemoryStore) -> None:
    """Nor views of a flat buffer that is emptied and filled again in between."""
    flat = torch.randn(WIDTH * WIDTH)
    weight = nn.Parameter(torch.empty(0))
    weight.data = flat.view(WIDTH, WIDTH)
    offload = ActivationOffload(store, 1, 1, in_storages_of([flat]))
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    values = flat.clone()
    with offload:
        loss = (x @ weight.t() @ weight).sum()
    expected = torch.autograd.grad((x @ weight.t() @ weight).sum(), x)[0]
    flat.untyped_storage().resize_(0)
    flat.untyped_storage().resize_(values.nbytes)
    flat.copy_(values)
    assert torch.equal(torch.autograd.grad(loss, x)[0], expected)
    assert all(kept.numel() < flat.nbytes for kept in store.kept.values())


def test_small_tensors_stay(store: MemoryStore) -> None:
    model = Model(plain)
    offload = offload_for(model, store, 1, min_bytes=BYTES + 1)
    gradients(model, lambda: model(inputs()), offload)
    assert offload.peak_resident_bytes == offload.offloaded_bytes == 0


def test_a_storage_is_saved_and_counted_once(store: MemoryStore) -> None:
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    with ActivationOffload(store, 1, 1, lambda tensor: False) as offload:
        y = x.exp()  # saves what it returns
        outputs = [y.sin(), y.t().cos(), y[1:].tan(), y.view(-1).sinh()]  # the storage of `tan` is new
    assert offload.resident_bytes + store.bytes_held == 2 * BYTES - WIDTH * 4
    del outputs
    assert offload.resident_bytes + store.bytes_held == BYTES
    del y
    assert offload.resident_bytes + store.bytes_held == 0


def test_a_few_rows_of_a_data_set_do_not_move_all_of_it(store: MemoryStore) -> None:
    data = torch.randn(1000, WIDTH)
    model = Model(plain)
    offload = offload_for(model, store, 1)
    expected = gradients(model, lambda: model(data[500:508]))
    assert_same_bits(gradients(model, lambda: model(data[500:508]), offload), expected)
    assert 0 < offload.offloaded_bytes < data.nbytes // 4


@pytest.mark.parametrize("size", [4, ROWS])  # kept, offloaded
def test_a_saved_tensor_changed_in_place_is_torchs_error(size: int, store: MemoryStore) -> None:
    def change(offload: ActivationOffload | None) -> str:
        x = torch.randn(size, WIDTH, requires_grad=True)
        with offload or contextlib.nullcontext():
            y = x.exp()
            z = y.sin()
        with torch.no_grad():
            y.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation") as caught:
            z.sum().backward()
        return str(caught.value)

    ours = change(ActivationOffload(store, 1000, 1, lambda tensor: False))
    theirs = change(None)
    assert ours.split(", which")[0] == theirs.split(", which")[0]
    assert f"[torch.FloatTensor [{size}, {WIDTH}]]" in ours
    assert "is at version 1; expected version 0 instead. Hint: enable anomaly detection" in ours
    assert "is at version 1; expected version 0 instead. Hint: enable anomaly detection" in theirs


def test_hooks_inside_the_model_decide_for_what_they_enclose(store: MemoryStore) -> None:
    x = inputs()
    with ActivationOffload(store, 1, 1, lambda tensor: False) as offload:
        y = x.sin()
        with save_on_cpu():
            z = y.exp().cos().tan().sum()
    assert offload.resident_bytes + store.bytes_held == BYTES
    assert torch.equal(torch.autograd.grad(z, x)[0], torch.autograd.grad(x.sin().exp().cos().tan().sum(), x)[0])


def test_hooks_around_the_model_decide_and_the_log_says_so(
    store: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    model = Model(plain)
    offload = offload_for(model, store, 1)
    seen: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        seen.append(tensor.detach())
        return tensor.detach()

    with caplog.at_level("INFO", logger="lowtide"):
        for _ in range(2):
            with saved_tensors_hooks(pack, lambda tensor: tensor), offload:
                model(inputs()).backward()
    assert seen and offload.offloaded_bytes == 0
    assert caplog.messages == [
        "activation offload: saved-tensor hooks of the caller are active around the model, so nothing is offloaded "
        "there"
    ]


def test_host_memory_is_not_copied_to_host_memory(caplog: pytest.LogCaptureFixture) -> None:
    model, store = Model(plain), HostStore()
    offload = offload_for(model, store, 1)
    expected = gradients(model, lambda: model(inputs()))
    with caplog.at_level("INFO", logger="lowtide"):
        for _ in range(2):
            assert_same_bits(gradients(model, lambda: model(inputs()), offload), expected)
    assert offload.offloaded_bytes == offload.peak_resident_bytes == store.bytes_held == 0
    assert caplog.messages == [
        "activation offload: activations on the CPU are already in host memory and stay there; a file store would take "
        "them"
    ]


def assert_nothing_left(offload: ActivationOffload, store: MemoryStore) -> None:
    store.settle()
    with offload:
        pass
    assert offload.resident_bytes == store.bytes_held == 0


def test_nothing_is_left_of_a_graph_without_backward(store: MemoryStore) -> None:
    model = Model(plain)
    offload = offload_for(model, store, 2 * BYTES)
    with offload:
        loss = model(inputs())
    assert store.bytes_held > 0
    del loss
    assert_nothing_left(offload, store)


def test_nothing_is_left_of_a_forward_that_failed(store: MemoryStore) -> None:
    def fail(layer: nn.Module, x: Tensor) -> Tensor:
        if layer is model.layers[4]:
            raise KeyError("the model's own")
        return plain(layer, x)

    model = Model(fail)
    offload = offload_for(model, store, 2 * BYTES)
    with pytest.raises(KeyError), offload:
        model(inputs())
    gc.collect()
    assert offload.offloaded_bytes > 0
    assert_nothing_left(offload, store)
    model.step = plain
    expected = gradients(model, lambda: model(inputs()))
    assert_same_bits(gradients(model, lambda: model(inputs()), offload), expected)


def test_nothing_is_saved_without_gradients(store: MemoryStore) -> None:
    model = Model(plain)
    with offload_for(model, store, 1) as offload, torch.no_grad():
        model(inputs())
    assert offload.peak_resident_bytes == 0


@pytest.mark.parametrize("min_bytes", [1, BYTES + 1])  # offloaded, kept
def test_the_graph_is_no_reference_cycle(min_bytes: int, store: MemoryStore) -> None:
    """Memory goes with the last reference, with no garbage collector."""
    gc.disable()
    try:
        x = torch.randn(ROWS, WIDTH, requires_grad=True)
        with ActivationOffload(store, min_bytes, 1, lambda tensor: False):
            y = (x * 2).exp().tanh()
        node: Any = y.grad_fn
        node.metadata["owner"] = owner = Owner()
        del node
        alive = weakref.ref(owner)
        del owner
        assert alive() is not None
        del y
        assert alive() is None
    finally:
        gc.enable()


class Owner:
    """Something that a graph refers to."""
