"""A compiler sees a fused kernel as an operator: one graph, and the numbers of the eager call."""

from collections.abc import Callable
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from lowtide.kernels.cross_entropy import cross_entropy
from lowtide.kernels.dispatch import Backend, operators
from lowtide.kernels.gated_mlp import swiglu, swiglu_packed
from lowtide.kernels.rotary import rotary_embedding
from lowtide.kernels.row_norm import add_rms_norm, rms_norm
from lowtide.kernels.triton.rotary import Rotation
from tests.kit.compiling import with_a_new_compiler

ROWS, WIDTH = (2, 3), 12
X, W = (*ROWS, WIDTH), (WIDTH,)
HEADS: list[tuple[int, ...]] = [(2, 4, 5, 8), (2, 2, 5, 8)]  # of queries and of keys: (batch, heads, seq, head_dim)

CASES: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "rms_norm": (lambda x, w, backend: rms_norm(x, w, backend=backend), [X, W]),
    "rms_norm of ones": (lambda x, backend: rms_norm(x, None, backend=backend), [X]),
    "add_rms_norm": (lambda x, r, w, backend: add_rms_norm(x, r, w, backend=backend), [X, X, W]),
    "swiglu": (lambda gate, up, backend: swiglu(gate, up, backend=backend), [X, X]),
    "swiglu_packed": (lambda x, backend: swiglu_packed(x, backend=backend), [X]),
    "rotary_embedding": (lambda q, k, backend: rotary_embedding(q, k, *tables(8), backend=backend), HEADS),
    "neighbours": (lambda q, k, backend: rotary_embedding(q, k, *tables(8), interleaved=True, backend=backend), HEADS),
}


def tables(rotary_dim: int) -> tuple[Tensor, Tensor]:
    angles = torch.arange(5.0)[None, :, None] * torch.arange(1.0, rotary_dim + 1)
    return angles.cos(), angles.sin()


def run(function: Callable[..., Any], inputs: list[Tensor], backend: str) -> list[Tensor]:
    """Outputs and the gradients of all inputs."""
    found = function(*inputs, backend)
    outputs = list(found) if isinstance(found, tuple) else [found]
    slopes = [torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view(output.shape) for output in outputs]
    return [*outputs, *torch.autograd.grad(outputs, inputs, slopes)]


@pytest.mark.parametrize(("name", "backend"), list(zip(CASES, cycle(["auto", "triton"]), strict=False)))
def test_a_compiled_call_equals_the_eager_call(name: str, backend: str) -> None:
    """fullgraph=True raises where a graph breaks. "auto" is the reference here; Triton's form is interpreted.

    Each operator meets both, which an argument of it names.
    """
    function, shapes = CASES[name]
    dtype = torch.float32 if backend == "triton" else torch.bfloat16
    tolerance = 1e-5 if backend == "triton" else 2**-6
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]
    with_a_new_compiler()
    compiled = run(torch.compile(function, backend="aot_eager", fullgraph=True), inputs, backend)
    for found, expected in zip(compiled, run(function, inputs, backend), strict=True):
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


def test_without_rows_a_compiled_gradient_is_zero() -> None:
    """An expert without tokens has no rows."""
    with_a_new_compiler()
    torch.use_deterministic_algorithms(True)  # fills what nobody writes with NaN
    try:
        compiled = torch.compile(CASES["rms_norm"][0], backend="aot_eager", fullgraph=True)
        dweight = run(compiled, [torch.ones(0, WIDTH).requires_grad_(), torch.ones(W).requires_grad_()], "triton")[-1]
    finally:
        torch.use_deterministic_algorithms(False)
    torch.testing.assert_close(dweight, torch.zeros(W), rtol=0, atol=0)


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_a_compiled_loss_equals_the_eager_loss(backend: Backend) -> None:
    """The compiler traces the reference but for its check of labels, and leaves launches as they are."""
    logits, labels = torch.linspace(-1, 1, 24).view(3, 8).requires_grad_(), torch.tensor([1, -100, 2])

    def loss(logits: Tensor) -> Tensor:
        return cross_entropy(logits.sin(), labels, z_loss=0.1, backend=backend)

    with_a_new_compiler()
    found, expected = torch.compile(loss, backend="aot_eager")(logits), loss(logits)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(*(torch.autograd.grad(one, logits)[0] for one in (found, expected)))


def test_operators_keep_the_rules_of_torch() -> None:
    """Schemas, fake implementations, of a transposed x too, and gradients through the dispatcher."""
    lowtide = operators()
    x, w = (torch.randn(shape, requires_grad=True) for shape in (X, W))
    q, k = (torch.randn(shape, requires_grad=True) for shape in HEADS)
    turned, frozen = torch.randn(WIDTH, 3).t().requires_grad_(), torch.randn(WIDTH)
    torch.library.opcheck(lowtide.rms_norm, (turned, None, frozen, 1e-5, 0.0, "auto"))
    torch.library.opcheck(lowtide.gated_mlp, (turned, turned.detach().requires_grad_(), "silu", "auto"))
    _, dweight = lowtide.rms_norm_backward(turned, None, turned, frozen, torch.ones(3), False, 1e-5, 0.0, "auto")
    assert dweight.numel() == 0, "a frozen weight gets no gradient"
    torch.library.opcheck(lowtide.rms_norm, (x, x.detach().clone().requires_grad_(), w, 1e-5, 1.0, "auto"))
    torch.library.opcheck(lowtide.gated_mlp, (x, None, "silu", "auto"))
    torch.library.opcheck(lowtide.rotary, (q, k, *tables(8), False, False, "auto"))


def test_rotated_heads_are_not_copied_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel gives the promised strides, of heads that are parts of wider rows too; not if columns are apart."""
    q, k = (torch.randn(batch, seq, heads, 12)[..., :8].transpose(1, 2) for batch, heads, seq, _ in HEADS)
    rotated: list[Tensor] = []
    rotate = Rotation.rotate

    def noted(self: Rotation, *given: Any) -> tuple[Tensor, Tensor]:
        found = rotate(self, *given)
        rotated.extend(found)
        return found

    monkeypatch.setattr(Rotation, "rotate", noted)
    found = operators().rotary(q, k, *tables(8), False, False, "triton")
    assert [one.data_ptr() for one in found] == [one.data_ptr() for one in rotated]
    apart = q.mT.contiguous().mT
    for one in (q, apart):
        found = operators().rotary(one, k, *tables(8), False, False, "triton")
        assert [x.stride() for x in found] == [torch.empty_like(x).stride() for x in (one, k)]
