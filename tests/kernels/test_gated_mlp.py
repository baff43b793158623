"""SwiGLU and GeGLU in Triton's interpreter equal their formulas in float64, forward and backward."""

import math
from typing import get_args

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lowtide.kernels.gated_mlp import Activation, gated_reference, geglu, geglu_packed, swiglu, swiglu_packed
from tests.kernels.exact import DTYPES, assert_near_float64
from tests.kernels.recording import recorded_launches
from tests.kit.grids import pairs

# exp(-x) is infinite for x < -88, and the sigmoid 0, as it should be; numpy, which interprets the kernels, warns.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")

SHAPES = [(1, 1), (70, 30), (2, 1, 1100)]
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)


def fused(activation: Activation, gate: Tensor, up: Tensor) -> Tensor:
    if activation == "silu":
        return swiglu(gate, up, backend="triton")
    return geglu(gate, up, approximate="none" if activation == "gelu" else "tanh", backend="triton")


def fused_packed(activation: Activation, x: Tensor) -> Tensor:
    if activation == "silu":
        return swiglu_packed(x, backend="triton")
    return geglu_packed(x, approximate="none" if activation == "gelu" else "tanh", backend="triton")


def drawn(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    return (3 * torch.randn(shape, generator=generator)).to(dtype)


def grad_of(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


def check(activation: Activation, y: Tensor, gate: Tensor, up: Tensor, dy: Tensor, dgate: Tensor, dup: Tensor) -> None:
    """The activation is x s with 0 <= s <= 1, its slope s + x s (1 - s) u': float32 rounds s and 1 - s as it does 1.

    u' is 1 for silu, at most 1.6 (1 + 0.14 x^2) for the approximation by tanh, and nothing to gelu, whose density is at
    most 0.4.
    """
    exact_gate, exact_up = gate.detach().double().requires_grad_(), up.detach().double().requires_grad_()
    exact = gated_reference(exact_gate, exact_up, activation)
    exact.backward(dy.double())
    x, wide_up, g = exact_gate.detach().abs(), exact_up.detach().abs(), dy.double().abs()
    assert_near_float64(y, exact.detach(), x * wide_up)
    assert_near_float64(dup, grad_of(exact_up), g * x)
    inner_slope = {"silu": torch.ones_like(x), "gelu_tanh": 1.6 * (1 + 0.14 * x * x), "gelu": 0.4 * torch.ones_like(x)}
    assert_near_float64(dgate, grad_of(exact_gate), g * wide_up * (1 + x * inner_slope[activation]))


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(("shape", "dtype", "activation"), pairs(SHAPES, DTYPES, ACTIVATIONS), ids=str)
def test_it_equals_the_formula(
    shape: tuple[int, ...], dtype: torch.dtype, activation: Activation, generator: torch.Generator
) -> None:
    gate, up = (drawn(shape, dtype, generator).requires_grad_() for _ in range(2))
    dy = drawn(shape, dtype, generator)
    y = fused(activation, gate, up)
    y.backward(dy)
    assert y.dtype == dtype
    check(activation, y, gate, up, dy, grad_of(gate), grad_of(up))


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    ("shape", "activation"), list(zip([(5, 246), (2, 3, 2200), (14,)], ACTIVATIONS, strict=True)), ids=str
)
def test_two_halves_of_one_tensor(shape: tuple[int, ...], activation: Activation, generator: torch.Generator) -> None:
    x, n_cols = drawn(shape, torch.bfloat16, generator).requires_grad_(), shape[-1] // 2
    dy = drawn((*shape[:-1], n_cols), torch.bfloat16, generator)
    y = fused_packed(activation, x)
    y.backward(dy)
    dx = grad_of(x)
    assert y.shape == dy.shape and dx.is_contiguous()
    (gate, up), (dgate, dup) = x.split(n_cols, -1), dx.split(n_cols, -1)
    check(activation, y, gate, up, dy, dgate, dup)


def test_halves_are_read_where_they_lie(generator: torch.Generator) -> None:
    x = drawn((2, 3, 40), torch.float32, generator)
    with recorded_launches() as launches:
        swiglu_packed(x, backend="triton")
        swiglu(*x.chunk(2, -1), backend="triton")
    read = [
        (args["G_ptr"].data_ptr(), args["U_ptr"][0, 0, args["U_offset"] :].data_ptr())
        for args in (launch.args for launch in launches)
    ]
    assert read == 2 * [(x.data_ptr(), x.data_ptr() + 20 * x.element_size())]


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_large_values_neither_overflow_nor_lose_their_gradient(activation: Activation) -> None:
    gate = torch.tensor([-1e4, -200.0, -90.0, -20.0, 0.0, 20.0, 90.0, 200.0, 1e4], requires_grad=True)
    up = torch.full((9,), 2.0, requires_grad=True)
    y = fused(activation, gate, up)
    y.sum().backward()
    assert torch.equal(y[5:], 2 * gate[5:]) and torch.allclose(y[:5], torch.zeros(5), atol=1e-6)
    assert torch.allclose(grad_of(gate), torch.tensor([0.0] * 4 + [1.0] + [2.0] * 4), atol=1e-6)
    assert torch.equal(grad_of(up)[5:], gate[5:])


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_nan_stays_nan(activation: Activation) -> None:
    gate, up = torch.tensor([math.nan, 1.0, 1.0], requires_grad=True), torch.tensor([1.0, math.nan, 1.0])
    y = fused(activation, gate, up)
    y.sum().backward()
    assert y.isnan().tolist() == grad_of(gate).isnan().tolist() == [True, True, False]


def test_the_references_are_torch_s_activations(generator: torch.Generator) -> None:
    gate, up = (drawn((5, 12), torch.float32, generator).double() for _ in range(2))
    packed = torch.cat((gate, up), -1)
    expected = {
        "swiglu": (F.silu(gate) * up, swiglu(gate, up), swiglu_packed(packed)),
        "geglu": (F.gelu(gate, approximate="tanh") * up, geglu(gate, up), geglu_packed(packed)),
        "exact": (F.gelu(gate) * up, geglu(gate, up, approximate="none"), geglu_packed(packed, approximate="none")),
    }
    for wanted, *found in expected.values():
        for y in found:
            torch.testing.assert_close(y, wanted)


def test_strides_are_followed(generator: torch.Generator) -> None:
    wide = drawn((6, 40), torch.float32, generator)
    for view in (wide[::2, 3:30], wide.t(), wide[:, ::3], drawn((2, 5, 8), torch.float32, generator).transpose(0, 1)):
        gate, up = view.detach().requires_grad_(), view.flip(0).requires_grad_()
        assert not gate.is_contiguous()
        dy = drawn((*view.shape, 2), torch.float32, generator)[..., 0]
        y = swiglu(gate, up, backend="triton")
        y.backward(dy)
        check("silu", y, gate, up, dy, grad_of(gate), grad_of(up))


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (0,)], ids=str)
def test_empty_tensors_stay_empty(shape: tuple[int, ...]) -> None:
    gate = torch.empty(shape, requires_grad=True)
    y = swiglu(gate, gate, backend="triton")
    y.sum().backward()
    assert y.shape == grad_of(gate).shape == shape
    assert geglu_packed(gate, backend="triton").shape == (*shape[:-1], shape[-1] // 2)
