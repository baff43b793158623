"""Copies between device and host run beside the work, and in order with it."""

import pytest
import torch

from lowtide.offload import HostCopies, HostPool

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; run pytest -m gpu"),
]
NUMEL = 16 << 20


def test_values_go_to_the_host_and_come_back_in_order_with_the_work() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    copies, pool = HostCopies(device), HostPool(pinned=True)
    buffer = pool.take(NUMEL * 4).view(torch.float32)
    values = torch.zeros(NUMEL, device=device)
    for step in range(1, 6):
        values.fill_(step)
        leaving = copies.to_host(values, buffer)
        leaving.wait()
        assert leaving.is_done and bool((buffer == step).all())
        values.zero_()
        buffer.add_(0.5)
        coming = copies.to_device(buffer, values)
        assert bool((values == step + 0.5).all())  # though the host has not waited
        coming.wait()
    pool.give(buffer.view(torch.uint8))
    pool.close()
