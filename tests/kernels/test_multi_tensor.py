"""Cast, scale and add of many tensors equal float64."""

import pytest
import torch
from torch import Tensor

from lowtide.kernels.dispatch import Backend
from lowtide.kernels.multi_tensor import copy_from_flat, copy_into_flat, copy_scaled
from tests.kernels.exact import DTYPES, assert_near_float64

BACKENDS: list[Backend] = ["triton", "reference"]
SHAPES = [(1,), (5, 123), (0,), (8192,), (3, 3000), (), (2, 8192)]


def drawn(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator).to(dtype)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("destination_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("source_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [1.0, -0.3, torch.tensor(0.7), torch.tensor([1.7], dtype=torch.float64)], ids=str)
def test_it_equals_the_formula(
    source_dtype: torch.dtype,
    destination_dtype: torch.dtype,
    scale: float | Tensor,
    backend: Backend,
    generator: torch.Generator,
) -> None:
    sources = [drawn(shape, source_dtype, generator) for shape in SHAPES]
    copies = [torch.empty(shape, dtype=destination_dtype) for shape in SHAPES]
    starts = [drawn(shape, destination_dtype, generator) for shape in SHAPES]
    sums = [start.clone() for start in starts]
    copy_scaled(copies, sources, scale, backend=backend)
    copy_scaled(sums, sources, scale, accumulate=True, backend=backend)
    factor = float(torch.as_tensor(scale, dtype=torch.float32))  # what a float32 holds of it
    for source, copied, start, total in zip(sources, copies, starts, sums, strict=True):
        scaled = source.double() * factor
        assert_near_float64(copied, scaled)
        exact = scaled + start.double()
        assert_near_float64(total, exact, magnitude=scaled.abs() + start.double().abs())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_copy_keeps_every_bit(dtype: torch.dtype, backend: Backend) -> None:
    integers = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}[dtype]
    bits = torch.arange(-32768, 32768, dtype=torch.int32)
    source = (bits * 65536 + 77 if dtype == torch.float32 else bits).to(integers).view(dtype)
    destination = torch.zeros_like(source)
    copy_scaled([destination], [source], backend=backend)
    assert torch.equal(destination.view(integers), source.view(integers))


@pytest.mark.parametrize("backend", BACKENDS)
def test_strides_and_odd_addresses_are_followed(backend: Backend, generator: torch.Generator) -> None:
    source = drawn((40, 300), torch.float32, generator)
    sources = [source.t(), source[:, ::2], source.view(-1)[1:10000], source.view(-1)[3:9000]]
    odd = torch.zeros(8998, dtype=torch.bfloat16)[1:]
    destinations = [torch.zeros(40, 300).t(), torch.zeros(40, 150), torch.zeros(9999), odd]
    copy_scaled(destinations, sources, 2.0, backend=backend)
    for found, wanted in zip(destinations, sources, strict=True):
        assert_near_float64(found, 2 * wanted.double())
    wide = torch.zeros(40, 600)
    copy_scaled([wide[:, ::2]], [source], backend=backend)
    assert torch.equal(wide[:, ::2], source) and not wide[:, 1::2].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_tensor_may_be_scaled_in_place(backend: Backend, generator: torch.Generator) -> None:
    tensors = [drawn(shape, torch.float32, generator) for shape in SHAPES]
    wanted = [tensor * 0.5 for tensor in tensors]
    copy_scaled(tensors, tensors, 0.5, backend=backend)
    assert all(torch.equal(tensor, one) for tensor, one in zip(tensors, wanted, strict=True))


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")  # from numpy, in Triton's interpreter
@pytest.mark.parametrize("backend", BACKENDS)
def test_values_that_are_not_finite_stay_so(backend: Backend) -> None:
    source = torch.tensor([torch.inf, -torch.inf, torch.nan, 1e30, 0.0])
    for dtype in DTYPES:
        destination = torch.zeros(5, dtype=dtype)
        copy_scaled([destination], [source], 2.0, backend=backend)
        assert destination[:2].tolist() == [torch.inf, -torch.inf] and destination[2].isnan() and destination[4] == 0
        assert destination[3].isinf() == (dtype == torch.float16)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_source_writes_zeros(backend: Backend, generator: torch.Generator) -> None:
    source = drawn((9000,), torch.bfloat16, generator)
    for accumulate in (False, True):
        destinations = [torch.full((9000,), 3.0), torch.full((9000,), 3.0)]
        copy_scaled(destinations, [None, source], accumulate=accumulate, backend=backend)
        assert (destinations[0] == (3.0 if accumulate else 0.0)).all()
        assert_near_float64(destinations[1], source.double() + (3.0 if accumulate else 0.0), magnitude=10.0)
    copy_scaled([], [], backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_flat_buffer_and_its_parts(backend: Backend, generator: torch.Generator) -> None:
    """Parts in any order, one of them cut, one without elements, with gaps before, between and behind them."""
    shapes, offsets = [(5, 123), (8192,), (0,), (7,)], [8224, 16, 8208, 9000]
    sources = [drawn(shape, torch.bfloat16, generator) for shape in shapes]
    covered = torch.zeros(10000, dtype=torch.bool)
    for offset, source in zip(offsets, sources, strict=True):
        covered[offset : offset + source.numel()] = True
    for accumulate in (False, True):
        for zero_gaps in (False, True):
            flat = torch.full((10000,), 3.0)
            copy_into_flat(flat, offsets, sources, 0.5, accumulate=accumulate, zero_gaps=zero_gaps, backend=backend)
            assert (flat[~covered] == (0.0 if zero_gaps else 3.0)).all()
            for offset, source in zip(offsets, sources, strict=True):
                exact = 0.5 * source.double() + (3.0 if accumulate else 0.0)
                assert_near_float64(flat[offset : offset + source.numel()].view(source.shape), exact, magnitude=10.0)
    back = [torch.empty_like(source) for source in sources]
    copy_into_flat(flat, offsets, sources, backend=backend)
    copy_from_flat(flat, offsets, back, backend=backend)
    assert all(torch.equal(one, source) for one, source in zip(back, sources, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_buffer_without_gaps(backend: Backend) -> None:
    flat = torch.zeros(32)
    copy_into_flat(flat, [16, 0], [torch.ones(16), torch.ones(4, 4)], zero_gaps=True, backend=backend)
    assert (flat == 1).all()
    copy_into_flat(flat, [], [], zero_gaps=True, backend=backend)
    assert not flat.any()


def test_launches_are_few() -> None:
    """One for each pair of dtypes, however many tensors there are; one more for odd addresses."""
    from lowtide.kernels.triton.launch import recorded_launches

    flat = torch.zeros(64 * 100)
    sources = [torch.ones(60) for _ in range(100)]
    with recorded_launches() as launches:
        copy_into_flat(flat, range(0, 6400, 64), sources, backend="triton")
    assert len(launches) == 1 and launches[0].args["IS_ALIGNED"]
    with recorded_launches() as launches:
        copy_into_flat(flat, range(0, 6400, 64), sources, zero_gaps=True, backend="triton")
    assert len(launches) == 2
    with recorded_launches() as launches:
        copy_scaled([flat[:60], flat[65:125]], sources[:2], backend="triton")
    assert [one.args["IS_ALIGNED"] for one in launches] == [True, False]


def test_float64_is_copied_exactly(generator: torch.Generator) -> None:
    source = torch.randn(100, generator=generator, dtype=torch.float64)
    destination = torch.ones(100, dtype=torch.float64)
    copy_scaled([destination], [source], 0.1, accumulate=True)
    torch.testing.assert_close(destination, source * 0.1 + 1, rtol=0, atol=1e-15)


def test_leaves_are_written_without_gradients() -> None:
    weight, source = torch.zeros(4, requires_grad=True), torch.ones(4, requires_grad=True)
    for backend in BACKENDS:
        copy_scaled([weight], [source], 2.0, backend=backend)
        assert weight.is_leaf and weight.tolist() == [2.0] * 4


def test_bad_arguments_are_errors() -> None:
    x = torch.ones(8)
    with pytest.raises(ValueError, match=r"expected as many sources as destinations, 2, found 1"):
        copy_scaled([x, x], [x])
    with pytest.raises(ValueError, match=r"expected source 1 of the shape of its destination, \(8,\), found \(2, 4\)"):
        copy_scaled([x, x], [x, x.view(2, 4)])
    with pytest.raises(ValueError, match=r"expected a floating-point source 0, found torch.int64"):
        copy_scaled([x], [x.long()])
    with pytest.raises(ValueError, match=r"expected a floating-point destination 0, found torch.int64"):
        copy_scaled([x.long()], [x])
    with pytest.raises(ValueError, match=r"floating-point tensor of one element, found \(8,\) torch.float32"):
        copy_scaled([x], [x], x)
    with pytest.raises(ValueError, match=r"contiguous flat buffer of one dimension, found \(4,\) with strides \(2,\)"):
        copy_into_flat(x[::2], [0], [x])
    with pytest.raises(ValueError, match=r"expected as many offsets as tensors, 1, found 2"):
        copy_into_flat(x, [0, 1], [x])
    with pytest.raises(ValueError, match=r"in flat, \[0, 8\), .*; found one at \[3, 11\), where \[0, 8\) is free"):
        copy_into_flat(x, [3], [x])
    with pytest.raises(ValueError, match=r"found one at \[2, 6\), where \[4, 8\) is free"):
        copy_from_flat(x, [2, 0], [torch.ones(4), torch.ones(4)])
    with pytest.raises(ValueError, match=r"found one at \[-1, 3\), where \[0, 8\) is free"):
        copy_from_flat(x, [-1], [torch.ones(4)])
