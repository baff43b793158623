"""Transfers run beside the computation, in forward and in backward."""

import torch
from torch import Tensor, nn

from tests.offload.activation_stores import MemoryStore, offload_for

SHAPE = (64, 64)
BYTES = 64 * 64 * 4


def test_a_save_runs_while_the_forward_goes_on() -> None:
    """Room is made before it is needed: at half the budget."""
    store = MemoryStore()
    store.may_run.clear()
    offload = offload_for(nn.Module(), store, 8 * BYTES)
    x = torch.ones(SHAPE, requires_grad=True)
    with offload:
        y = x
        sent = []
        for _ in range(8):
            y = y.sin()
            sent.append(store.num_saves)
    store.may_run.set()  # nobody has waited for one
    assert sent == [0, 0, 0, 0, 1, 2, 3, 4]
    assert offload.resident_bytes == 8 * BYTES


def test_loads_are_started_before_they_are_asked_for() -> None:
    store = MemoryStore()
    offload = offload_for(nn.Module(), store, 4 * BYTES)
    x = torch.ones(SHAPE, requires_grad=True)
    loads: list[int] = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: object, gradient: Tensor) -> Tensor:
            loads.append(store.num_loads)
            store.may_run.set()
            store.settle()  # what is asked for next does not depend on how fast the machine is
            store.may_run.clear()  # nor is any waited for that was not on its way already
            return gradient

    with offload:
        y = x
        for _ in range(12):
            y = torch.sin(Look.apply(y))
    store.settle()
    y.sum().backward()
    # The four newest are here; when the fifth is asked for, the next ones are on their way too.
    assert loads[-1] == 8
    assert all(count >= min(index - 1, 8) for index, count in enumerate(loads))
    assert loads[4] > 1
