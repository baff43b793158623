"""Copies between device and host run beside the work, and both waits mean what they say."""

import pytest
import torch

from lowtide.offload import HostPool, StreamCopies

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
NUMEL = 16 << 20


def test_values_go_to_the_host_and_come_back_in_order_with_the_work() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    copies, pool = StreamCopies(device), HostPool()
    buffer = pool.take(NUMEL * 4).view(torch.float32)
    values = torch.zeros(NUMEL, device=device)
    for step in range(1, 6):
        values.fill_(step)
        leaving = copies.to_host(values, buffer)
        leaving.wait_on_device()
        values.zero_()  # after the copy, though the host has not waited
        leaving.wait_on_host()
        assert bool((buffer == step).all())
        buffer.add_(0.5)
        coming = copies.to_device(buffer, values)
        coming.wait_on_device()
        assert bool((values == step + 0.5).all())
        coming.wait_on_host()
    pool.give(buffer.view(torch.uint8))
    pool.close()
