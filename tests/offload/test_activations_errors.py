"""A store that fails ends the step with an error that says so; the next step is as if nothing had been."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lowtide.offload import OffloadError
from lowtide.offload.activations import ActivationOffload
from tests.offload.activation_stores import MemoryStore, assert_same_bits, gradients, offload_for

ROWS, WIDTH = 16, 32
BYTES = ROWS * WIDTH * 4


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(8)))


def loss_of(module: nn.Module) -> Callable[[], Tensor]:
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    return lambda: module(x).square().mean()


@pytest.mark.parametrize("how", ["failing", "refusing"])
@pytest.mark.parametrize("verb", ["save", "load"])
def test_a_failing_store_ends_one_step(verb: str, how: str) -> None:
    module, store = model(), MemoryStore()
    offload = offload_for(module, store, 3 * BYTES)
    loss = loss_of(module)
    expected = gradients(module, loss)
    getattr(store, how).add(verb)
    reason = f"the disk of the test is {'full' if how == 'failing' else 'gone'} ({verb})"
    for _ in range(2):
        with pytest.raises(OffloadError) as caught:
            gradients(module, loss, offload)
        assert str(caught.value) == (
            f"activation offload: expected to {verb} 2,048 bytes of activations, but the store failed: {reason}. This "
            "step has changed no parameter. Correct the fault of the store, raise "
            "activation_checkpointing.offload.budget_bytes, or turn the offload off."
        )
        del caught
    getattr(store, how).clear()
    assert_same_bits(gradients(module, loss, offload), expected)
    store.settle()
    with offload:
        pass
    assert offload.resident_bytes == store.bytes_held == 0


def test_a_load_that_failed_can_be_tried_again() -> None:
    module, store = model(), MemoryStore()
    offload = offload_for(module, store, 3 * BYTES)
    loss = loss_of(module)
    expected = gradients(module, loss)
    module.zero_grad()
    with offload:
        value = loss()
    store.failing.add("load")
    with pytest.raises(OffloadError, match="expected to load"):
        value.backward(retain_graph=True)
    store.failing.clear()
    module.zero_grad()
    value.backward()
    assert_same_bits((value.detach(), [p.grad for p in module.parameters() if p.grad is not None]), expected)


def test_a_prefetch_that_failed_is_no_error_of_another_tensor() -> None:
    """Only who needs the bytes hears of it."""
    store = MemoryStore()
    offload = offload_for(nn.Module(), store, 2 * BYTES)
    x, z = torch.ones(ROWS, WIDTH, requires_grad=True), torch.ones(ROWS, WIDTH, requires_grad=True)
    with offload:
        unused = x.exp().exp()
        used = z.sin().cos().exp()
    store.refusing.add("load")
    assert torch.autograd.grad(used.sum(), used)[0].sum() == ROWS * WIDTH
    with pytest.raises(OffloadError, match="expected to load"):
        unused.sum().backward()


def test_after_close_backward_says_so() -> None:
    module, store = model(), MemoryStore()
    offload = offload_for(module, store, 3 * BYTES)
    with offload:
        loss = loss_of(module)()
    offload.close()
    assert offload.resident_bytes == store.bytes_held == 0
    with pytest.raises(OffloadError) as caught:
        loss.backward()
    assert str(caught.value) == (
        "activation offload: expected backward before close(), found the offload closed and the activations of "
        "this graph freed"
    )
    del loss, caught
    with pytest.raises(OffloadError, match="expected a forward before close\\(\\), found the offload closed"), offload:
        pass
    offload.close()


@pytest.mark.parametrize(("name", "values"), [("min_bytes", (0, 1)), ("budget_bytes", (1, 0))])
def test_bytes_must_be_positive(name: str, values: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=f"^{name}: expected a number of bytes above 0, found 0$"):
        ActivationOffload(MemoryStore(), *values, lambda tensor: False)
