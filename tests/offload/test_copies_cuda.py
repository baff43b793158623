"""Copies between device and host run beside the work, and in order with it."""

import pytest
import torch

from lowtide.offload import HostCopies, HostPool, HostStore

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; run pytest -m gpu"),
]


def test_values_go_to_the_host_and_come_back_in_order_with_the_work() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    copies, pool = HostCopies(device), HostPool(pinned=True)
    buffer = pool.take(64 << 20).view(torch.float32)
    values = torch.zeros(16 << 20, device=device)
    for step in range(1, 6):
        values.fill_(step)
        leaving = copies.to_host(values, buffer)
        leaving.synchronize()
        assert leaving.query() and bool((buffer == step).all())
        values.zero_()
        buffer.add_(0.5)
        coming = copies.to_device(buffer, values)
        copies.wait_on_device(coming)
        assert bool((values == step + 0.5).all())  # though the host has not waited
        coming.synchronize()
    pool.give(buffer.view(torch.uint8))
    pool.close()


def test_copies_of_a_store_keep_their_order_with_the_work_around_them() -> None:
    store = HostStore()
    values = torch.zeros(64 << 20, dtype=torch.uint8, device="cuda")
    for step in range(1, 6):
        values.fill_(step)
        store.save("key", values).wait()
        values.zero_()
        store.load("key", values).wait()
        assert bool((values == step).all())
    store.close()


def test_host_buffers_are_pinned_at_their_exact_size() -> None:
    pool = HostPool(4096, pinned=True)
    buffer = pool.take(4097)
    assert buffer.is_pinned() and pool.bytes_in_use == 8192
    pool.give(buffer)
    pool.close()
