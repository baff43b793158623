"""Norms of segments of a shard equal float64, and add up however the buffer is sharded."""

import pytest
import torch

from lowtide.kernels.dispatch import Backend
from lowtide.kernels.segment_norms import segment_norms, segment_squares, squares_by_piece
from lowtide.kernels.triton import segment_norms as triton_form
from tests.kernels.exact import DTYPES

BACKENDS = ["triton", "reference"]
SEGMENTS = [(0, 16), (16, 5000), (5008, 5008), (5008, 5009), (5024, 20480), (1024, 2048), (4095, 4097), (0, 20480)]
FLOAT32_ROUNDING = 2.0**-23


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_equals_the_formula(dtype: torch.dtype, backend: Backend, generator: torch.Generator) -> None:
    shard = torch.randn(20480, generator=generator).to(dtype)
    for block_numel in (1024, 512):
        found = segment_squares(shard, SEGMENTS, block_numel=block_numel, backend=backend)
        norms = segment_norms(shard, SEGMENTS, block_numel=block_numel, backend=backend)
        exact = torch.stack([shard[start:end].double().square().sum() for start, end in SEGMENTS])
        assert found.dtype == torch.float64 and found.shape == exact.shape
        # A block of n squares is added in float32; the reference may add one by one, and squares a root.
        assert ((found - exact).abs() <= (block_numel + 6) * FLOAT32_ROUNDING * exact).all()
        assert torch.equal(norms, found.sqrt())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pieces_do_not_depend_on_the_sharding(dtype: torch.dtype, generator: torch.Generator) -> None:
    flat = torch.randn(16 * 1024, generator=generator).to(dtype)
    segments = [(0, 700), (704, 9000), (9008, 15000)]
    whole, counts = squares_by_piece(flat, segments, backend="triton")
    assert counts == [1, 9, 7]
    for shard_numel in (1024, 3 * 1024, 8 * 1024):
        pieces: list[list[torch.Tensor]] = [[] for _ in segments]
        for first in range(0, flat.numel(), shard_numel):
            shard = flat[first : first + shard_numel]
            inside = [(max(start - first, 0), min(max(end - first, 0), shard.numel())) for start, end in segments]
            inside = [(min(start, end), end) for start, end in inside]
            squares, numbers = squares_by_piece(shard, inside, backend="triton")
            for one, part in zip(pieces, squares.split(numbers), strict=True):
                one.append(part)
        assert torch.equal(torch.cat([part for one in pieces for part in one]), whole)


@pytest.mark.parametrize("num_pieces", [1, 5, 31, 32, 33, 700])
def test_pieces_are_added(num_pieces: int, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """One to several strides a program, and segments without pieces between."""
    monkeypatch.setattr(triton_form, "STRIDE", 32)
    counts = [0, num_pieces, 0, 3, num_pieces + 1]
    squares = torch.rand(sum(counts), generator=generator, dtype=torch.float64)
    found = triton_form.sums_of_pieces(squares, counts)
    exact = torch.stack([part.sum() for part in squares.split(counts)])
    torch.testing.assert_close(found, exact, rtol=1e-13, atol=0)
    assert torch.equal(found, triton_form.sums_of_pieces(squares, counts))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_value_that_is_not_finite_stays_in_its_segment(backend: Backend) -> None:
    shard = torch.ones(4096)
    shard[2000] = torch.nan
    shard[3000] = torch.inf
    found = segment_norms(shard, [(0, 1999), (1999, 2100), (2100, 2900), (2900, 4096)], backend=backend)
    assert found.isnan().tolist() == [False, True, False, False] and found.isinf().tolist() == [False] * 3 + [True]


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_to_sum(backend: Backend) -> None:
    assert segment_squares(torch.ones(64), [], backend=backend).shape == (0,)
    assert segment_squares(torch.ones(0), [(0, 0)], backend=backend).tolist() == [0.0]
    assert segment_squares(torch.ones(64), [(5, 5), (64, 64)], backend=backend).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_odd_addresses_give_the_same_bits(backend: Backend, generator: torch.Generator) -> None:
    shard = torch.randn(5000, generator=generator)
    segments = [(0, 2100), (2112, 5000)]
    off_by_one = torch.cat([shard[:1], shard])[1:]
    found = segment_squares(off_by_one, segments, backend=backend)
    assert torch.equal(found, segment_squares(shard, segments, backend=backend))


def test_bad_arguments_are_errors() -> None:
    shard = torch.ones(100)
    for start, end in ((-1, 5), (7, 6), (50, 101)):
        with pytest.raises(
            ValueError, match=rf"expected segment 1 to lie in the shard, \[0, 100\), found \[{start}, {end}\)"
        ):
            segment_norms(shard, [(0, 10), (start, end)])
    with pytest.raises(ValueError, match=r"contiguous shard of one dimension, found \(10, 10\) with strides \(10, 1\)"):
        segment_norms(shard.view(10, 10), [(0, 10)])
    with pytest.raises(ValueError, match=r"segment_norms: expected block_numel to be a power of 2 .*, found 1000"):
        segment_norms(shard, [(0, 10)], block_numel=1000)
    with pytest.raises(ValueError, match=r"segment_norms: expected floating-point values, found torch.int64"):
        segment_norms(shard.long(), [(0, 10)])
