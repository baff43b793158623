"""Islands exchange in few bits: the same bits on all, near the mean by the scales, and not biased."""

import pytest
import torch
from torch import Tensor

from lowtide.comm.ring import Ring
from lowtide.engine.island_bits import InBlocks, message_bytes
from lowtide.kernels.weight_rounding import Rounding
from tests.comm.test_ring import COUNT, NUMEL, PLACES, on_all, values_of


def form_of(bits: int, island: int, rank: int, step: int = 1) -> InBlocks:
    return InBlocks(bits, Rounding.of(0, f"{island} {rank}", 0), step)


def scale_of(values: Tensor, bits: int) -> float:
    """The most that it is in any block."""
    return float(values.abs().max()) / (127 if bits == 8 else 7)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("count", [0, 1, 128, NUMEL])
def test_all_islands_read_the_same_mean_within_the_scales(bits: int, count: int) -> None:
    def work(ring: Ring, island: int, rank: int) -> tuple[Tensor, int]:
        values = values_of(island, rank)[:count]
        return ring.start(values, form_of(bits, island, rank)).result().values, ring.bytes_sent

    found = on_all(work)
    part_bytes = [message_bytes(len(part), bits) for part in torch.zeros(count).tensor_split(COUNT)]
    for island, rank in PLACES:
        values, sent = found[island, rank]
        assert torch.equal(values, found[0, rank][0])
        assert sent == sum(part_bytes) + (COUNT - 2) * part_bytes[island]
        terms = [values_of(one, rank)[:count] for one in range(COUNT)]
        mean = sum(terms, torch.zeros(count)) / COUNT
        if count:
            bound = sum(scale_of(term, bits) for term in terms) / COUNT
            bound += (float(mean.abs().max()) + bound) / (127 if bits == 8 else 7)
            assert float((values - mean).abs().max()) < bound


@pytest.mark.parametrize("bits", [8, 4])
def test_the_mean_of_many_exchanges_is_that_of_the_values(bits: int) -> None:
    values, draws = values_of(0, 0)[:100], 4000
    forms = [form_of(bits, 0, 0, step) for step in range(draws)]
    found = sum((form.read(form.write(values, 0), 100) for form in forms), torch.zeros(100)) / draws
    deviation = scale_of(values, bits) / 2 / draws**0.5  # of a mean of numbers that are rounded up or down
    assert float((found - values).abs().max()) < 4.5 * deviation
