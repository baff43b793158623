"""Stores of device tensors: copies run on streams, in order with the work."""

import pytest
import torch

from lowtide.offload import HostPool, HostStore

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; run pytest -m gpu"),
]


def test_copies_keep_their_order_with_the_work_around_them() -> None:
    store = HostStore()
    values = torch.zeros(64 << 20, dtype=torch.uint8, device="cuda")
    for step in range(1, 6):
        values.fill_(step)
        store.save("key", values).wait()
        values.zero_()
        store.load("key", values).wait()
        assert bool((values == step).all())
    store.drop("key")
    store.close()


def test_host_buffers_are_pinned_at_their_exact_size() -> None:
    pool = HostPool(None, 4096, pinned=True)
    buffer = pool.take(4097)
    assert buffer.is_pinned() and pool.bytes_in_use == 8192
    pool.give(buffer)
    pool.close()
