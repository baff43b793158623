"""The rotary embedding in Triton's interpreter equals the formula in float64, forward and backward."""

import pytest
import torch
from torch import Tensor

from lowtide.kernels.rotary import rotary_embedding, rotary_reference
from lowtide.kernels.triton import rotary as triton_form
from tests.kernels.exact import DTYPES, assert_near_float64
from tests.kit.grids import pairs

# (batch, q heads, k heads, seq, head_dim, rotary_dim)
SIZES = [(1, 1, 1, 1, 2, 2), (2, 4, 2, 2, 16, 16), (2, 3, 1, 3, 20, 12)]


def drawn(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator).to(dtype)


def heads_of(batch: int, heads: int, seq: int, head_dim: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """(batch, heads, seq, head_dim) as attention has it: a transposed (batch, seq, heads, head_dim)."""
    return drawn((batch, seq, heads, head_dim), dtype, generator).transpose(1, 2).requires_grad_()


def tables(
    batch: int, seq: int, rotary_dim: int, dtype: torch.dtype, generator: torch.Generator, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """cos and sin of angles drawn at random, equal within a pair."""
    angles = 6.3 * torch.rand((batch, seq, rotary_dim // 2), generator=generator)
    angles = angles.repeat_interleave(2, -1) if interleaved else torch.cat((angles, angles), -1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def check(found: Tensor, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, dy: Tensor | None = None) -> None:
    """found: of x, or where dy is given, the gradient of x. Float32 rounds on the two products that are added."""
    wide = x.detach().double().requires_grad_()
    exact = rotary_reference(wide, cos.double(), sin.double(), interleaved=interleaved)
    moved = x if dy is None else dy
    size = sum(
        rotary_reference(part, cos.double().abs(), sin.double().abs(), interleaved=interleaved).abs()
        for part in (moved.detach().double().abs(), sign_of_rotation(moved, cos.shape[-1], interleaved))
    )
    if dy is None:
        assert_near_float64(found, exact.detach(), size)
        return
    exact.backward(dy.double())
    assert wide.grad is not None
    assert_near_float64(found, wide.grad, size)


def sign_of_rotation(x: Tensor, rotary_dim: int, interleaved: bool) -> Tensor:
    """|x| with the sign turned in the second elements of pairs: one of the two sums is then without a difference."""
    turned = x.detach().double().abs()
    if interleaved:
        turned[..., 1:rotary_dim:2] *= -1
    else:
        turned[..., rotary_dim // 2 : rotary_dim] *= -1
    return turned


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(("sizes", "dtype", "interleaved"), pairs(SIZES, DTYPES, (False, True)), ids=str)
def test_it_equals_the_formula(
    sizes: tuple[int, ...], dtype: torch.dtype, interleaved: bool, generator: torch.Generator
) -> None:
    batch, q_heads, k_heads, seq, head_dim, rotary_dim = sizes
    q, k = (heads_of(batch, heads, seq, head_dim, dtype, generator) for heads in (q_heads, k_heads))
    cos, sin = (drawn((batch, seq, rotary_dim), torch.float32, generator) for _ in range(2))  # unequal within a pair
    rotated = rotary_embedding(q, k, cos, sin, interleaved=interleaved, backend="triton")
    gradients = [drawn(tuple(x.shape), dtype, generator) for x in (q, k)]
    torch.autograd.backward(rotated, gradients)
    for x, y, dy in zip((q, k), rotated, gradients, strict=True):
        assert y.dtype == dtype and x.grad is not None
        check(y, x, cos, sin, interleaved)
        check(x.grad, x, cos, sin, interleaved, dy)
        assert torch.equal(y[..., rotary_dim:], x[..., rotary_dim:])


@pytest.mark.parametrize(("dtype", "interleaved"), list(zip(DTYPES, (False, True, False), strict=True)), ids=str)
def test_tables_of_all_sequences_or_of_one_in_either_dtype(
    dtype: torch.dtype, interleaved: bool, generator: torch.Generator
) -> None:
    q, k = (heads_of(2, heads, 2, 8, dtype, generator) for heads in (4, 2))
    for table_batch in (1, 2):
        for table_dtype in {dtype, torch.float32}:
            cos, sin = tables(table_batch, 2, 8, table_dtype, generator, interleaved)
            for x, y in zip(
                (q, k), rotary_embedding(q, k, cos, sin, interleaved=interleaved, backend="triton"), strict=True
            ):
                check(y, x, cos, sin, interleaved)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("interleaved", [False, True])
def test_more_heads_than_a_program_holds_at_once(
    interleaved: bool, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_form, "MAX_TILE_NUMEL", 32)
    q, k = (heads_of(1, heads, 2, 16, torch.float32, generator) for heads in (7, 3))
    cos, sin = tables(1, 2, 8, torch.float32, generator, interleaved)
    for x, y in zip((q, k), rotary_embedding(q, k, cos, sin, interleaved=interleaved, backend="triton"), strict=True):
        check(y, x, cos, sin, interleaved)


def test_any_order_in_memory(generator: torch.Generator) -> None:
    cos, sin = tables(2, 2, 8, torch.float32, generator)
    packed = drawn((2, 2, 3, 4, 8), torch.float32, generator)  # queries, keys and values of one product
    views = {
        "part of a product": packed[:, :, 0].transpose(1, 2),
        "contiguous": drawn((2, 4, 2, 8), torch.float32, generator),
        "sequence first": drawn((2, 2, 4, 8), torch.float32, generator).permute(1, 2, 0, 3),
        "expanded": drawn((2, 1, 2, 8), torch.float32, generator).expand(2, 4, 2, 8),
        "columns apart": drawn((2, 4, 8, 2), torch.float32, generator).transpose(2, 3),
    }
    for q in views.values():
        k = packed[:, :, 1].transpose(1, 2)
        wide_cos = torch.stack((cos, cos), -1)[..., 0]  # with columns apart
        for x, y in zip((q, k), rotary_embedding(q, k, wide_cos, sin, backend="triton"), strict=True):
            check(y, x, cos, sin, False)


def test_a_gradient_that_is_one_number_for_all(generator: torch.Generator) -> None:
    q, k = (heads_of(1, 2, 3, 8, torch.float32, generator) for _ in range(2))
    cos, sin = tables(1, 3, 8, torch.float32, generator)
    rotary_embedding(q, k, cos, sin, backend="triton")[0].sum().backward()
    assert q.grad is not None and k.grad is not None
    check(q.grad, q, cos, sin, False, torch.ones(q.shape))
    assert not k.grad.any()


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_a_pair_turns_by_its_angle(interleaved: bool, backend: str) -> None:
    """(1, 0) turned by a becomes (cos a, sin a), wherever the two elements of the pair stand."""
    angle = torch.tensor(0.3)
    places = (2, 3) if interleaved else (1, 3)
    q = torch.zeros(1, 1, 1, 4)
    q[..., places[0]] = 1.0
    cos, sin = (value.expand(1, 1, 4) for value in (angle.cos(), angle.sin()))
    rotated, _ = rotary_embedding(q, q, cos, sin, interleaved=interleaved, backend=backend)  # type: ignore[arg-type]
    expected = torch.zeros(4)
    expected[places[0]], expected[places[1]] = angle.cos(), angle.sin()
    torch.testing.assert_close(rotated.flatten(), expected)


@pytest.mark.parametrize("sizes", [(0, 2, 3, 8), (2, 0, 3, 8), (2, 2, 0, 8), (2, 2, 3, 0)], ids=str)
def test_empty_tensors_stay_empty(sizes: tuple[int, int, int, int]) -> None:
    q = torch.empty(sizes, requires_grad=True)
    batch, _, seq, head_dim = sizes
    table = torch.ones(batch, seq, head_dim)
    rotated, _ = rotary_embedding(q, q, table, table, backend="triton")
    rotated.sum().backward()
    assert rotated.shape == sizes and q.grad is not None and q.grad.shape == sizes


def test_learned_tables_are_taken_where_nothing_is_learned() -> None:
    q, table = torch.ones(2, 4, 3, 8), torch.ones(1, 3, 8)
    with torch.no_grad():
        rotary_embedding(q, q, table, table.clone().requires_grad_())
