"""What each kernel is measured with: inputs, forms that compute it, its formula, and the bytes that it must move.

Liger's forms are those that its patches put into a Llama. Each call begins with fresh inputs, since some of them write
over what they were given. Liger computes gradients of losses in forward: both passes are timed as one, and forward
without them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide.kernels.cross_entropy import cross_entropy
from lowtide.kernels.gated_mlp import geglu, swiglu
from lowtide.kernels.linear_cross_entropy import linear_cross_entropy
from lowtide.kernels.optimizer_states import StoredState, new_state, stored_states
from lowtide.kernels.optimizer_step import update_shard
from lowtide.kernels.quantized_blocks import QUANTIZED_BLOCK_NUMEL, dequantize, quantize, quantized_bytes
from lowtide.kernels.rotary import rotary_embedding
from lowtide.kernels.row_norm import add_rms_norm, rms_norm
from lowtide.kernels.sum_of_squares import squares_by_block
from lowtide.kernels.weight_rounding import Rounding
from lowtide.optimizers import OPTIMIZERS

Tensors = dict[str, Tensor]
Size = tuple[int, ...]
Form = Callable[[Tensors], Tensors]
"""Gives results by name from inputs by name, which it may overwrite. Tensors without gradient are results too."""

Pass = Literal["forward", "backward", "both"]
"""both: forward and backward in one, for peers that compute gradients in forward."""

FLOAT32_ROUNDING = 2.0**-23


@dataclass(frozen=True)
class Draw:
    """Random tensors on the device that is measured."""

    device: str
    generator: torch.Generator

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32, size: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device).mul_(size).to(dtype)

    def labels(self, num_rows: int, num_classes: int) -> Tensor:
        """(num_rows,) int64; one in eight is ignored (-100), but never the first."""
        labels = torch.randint(num_classes, (num_rows,), generator=self.generator, device=self.device)
        labels[1:][torch.rand(num_rows - 1, generator=self.generator, device=self.device) < 0.125] = -100
        return labels


@dataclass(frozen=True)
class Case:
    """One kernel, or one use of it, for several sizes.

    A forward pass is timed with gradients enabled where the case has a backward pass of its own, else without.
    """

    name: str
    file: str  # of kernels/
    draw: Callable[[Size, torch.dtype, Draw], Tensors]
    forms: Mapping[str, Form]  # by contender: "lowtide", "torch", "liger", and "compile": what torch.compile gets
    exact: Form  # from inputs in float64
    # From inputs and results: bytes, each read or written once. {}: a kernel that memory does not bound.
    moved: Callable[[Tensors, Tensors], Mapping[Pass, int]]
    sizes: tuple[Size, ...]  # ascending
    tiny: Size  # for Triton's interpreter: does not divide, few programs
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)
    passes: tuple[Pass, ...] = ("forward",)
    inputs_with_gradient: tuple[str, ...] = ()
    results_with_gradient: tuple[str, ...] = ()  # float results that a gradient comes from; others have none
    read: Callable[[Tensors], Tensors] = dict  # results -> what the formula gives
    allowed: Callable[[Tensors], Tensors] = lambda inputs: {}  # inputs in float64 -> what results may be off by
    summed_dims: Mapping[str, int] = field(default_factory=dict)  # product -> index of a size: so long are its sums
    inner_roundings: float = 0.0  # of intermediate values to the dtype: they act on an element whatever its own size


def nbytes(*tensors: Tensor) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def size_text(size: Size) -> str:
    return " x ".join(map(str, size))


def dtype_text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def largest_of_blocks(values: Tensor, block_numel: int) -> Tensor:
    """Of each element's block the largest magnitude: (n,) -> (n,)."""
    numel = values.numel()
    blocks = torch.nn.functional.pad(values.abs(), (0, -numel % block_numel)).view(-1, block_numel)
    return blocks.amax(1, keepdim=True).expand_as(blocks).reshape(-1)[:numel]


# -- kernels inside a model: norms, gated MLPs, rotary embeddings ----------------------------------------------------


EPS = 1e-5
NORM_SIZES = ((4096, 1024), (8192, 4096), (16384, 8192))  # rows, columns
GATED_SIZES = ((4096, 4096), (8192, 14336))
ROTARY_SIZES = ((1, 32, 8, 2048, 128), (4, 32, 8, 4096, 128))  # batch, heads of q, of k, sequence, elements of a head
BOTH_PASSES: tuple[Pass, ...] = ("forward", "backward")


def named(results: tuple[str, ...], found: Tensor | tuple[Tensor, ...]) -> Tensors:
    return dict(zip(results, found if isinstance(found, tuple) else (found,), strict=True))


def liger(name: str, results: tuple[str, ...], *inputs: str, more: tuple[Any, ...] = ()) -> Form:
    """Make a form of a function of `liger_kernel.transformers.functional`, of inputs by name and more arguments."""

    def form(t: Tensors) -> Tensors:
        from liger_kernel.transformers import functional

        return named(results, getattr(functional, name)(*(t[one] for one in inputs), *more))

    return form


def norm_case(name: str, ours: Callable[..., Any], peer: str) -> Case:
    """Build the case of an RMS norm, of a sum if the name says so. peer: Liger's."""
    of_sum = name.startswith("add_")
    inputs = ("x", "residual", "weight") if of_sum else ("x", "weight")
    results = ("y", "h") if of_sum else ("y",)

    def draw(size: Size, dtype: torch.dtype, source: Draw) -> Tensors:
        drawn = {key: source.normal(*size, dtype=dtype) for key in inputs if key != "weight"}
        return drawn | {"weight": source.normal(size[-1], dtype=dtype).add_(1.0)}

    def our_form(t: Tensors) -> Tensors:
        return named(results, ours(*(t[key] for key in inputs), EPS, backend="triton"))

    def torch_form(t: Tensors) -> Tensors:
        h = t["x"] + t["residual"] if of_sum else t["x"]
        y = F.rms_norm(h, h.shape[-1:], t["weight"], eps=EPS)
        return {"y": y, "h": h} if of_sum else {"y": y}

    def moved(t: Tensors, found: Tensors) -> Mapping[Pass, int]:
        """Read x, write y; read dy and x, write dx; both also the weight, and a float32 for each row."""
        x, weight, of_rows = t["x"].nbytes, t["weight"].nbytes, 4 * (t["x"].numel() // t["x"].shape[-1])
        return {
            "forward": (4 if of_sum else 2) * x + weight + of_rows,
            # dh is read beside dy; one gradient serves x and residual.
            "backward": (4 if of_sum else 3) * x + 2 * weight + of_rows,
        }

    form_of_peer = liger(peer, results, *inputs, more=(EPS,))
    return Case(
        name=name,
        file="row_norm",
        draw=draw,
        forms={"lowtide": our_form, "torch": torch_form, "compile": torch_form, "liger": form_of_peer},
        exact=torch_form,
        moved=moved,
        sizes=NORM_SIZES,
        tiny=(5, 123),
        passes=BOTH_PASSES,
        inputs_with_gradient=inputs,
        results_with_gradient=results,
        inner_roundings=4.0 if of_sum else 0.0,  # of h, on which the norm is computed
    )


def gated_case(name: str, ours: Form, plain: Callable[[Tensor], Tensor], peer: str) -> Case:
    def torch_form(t: Tensors) -> Tensors:
        return {"y": plain(t["gate"]) * t["up"]}

    def draw(size: Size, dtype: torch.dtype, source: Draw) -> Tensors:
        return {key: source.normal(*size, dtype=dtype) for key in ("gate", "up")}

    return Case(
        name=name,
        file="gated_mlp",
        draw=draw,
        forms={"lowtide": ours, "torch": torch_form, "compile": torch_form, "liger": liger(peer, ("y",), "gate", "up")},
        exact=torch_form,
        moved=lambda t, results: {"forward": 3 * t["gate"].nbytes, "backward": 5 * t["gate"].nbytes},
        sizes=GATED_SIZES,
        tiny=(5, 123),
        passes=BOTH_PASSES,
        inputs_with_gradient=("gate", "up"),
        results_with_gradient=("y",),
    )


def draw_rotary(size: Size, dtype: torch.dtype, draw: Draw) -> Tensors:
    """q and k as projections give them: transposed views of (batch, sequence, heads, elements of a head)."""
    batch, q_heads, k_heads, seq, head_dim = size
    inverse = 10000.0 ** (-torch.arange(0, head_dim, 2, device=draw.device) / head_dim)
    angles = torch.arange(seq, device=draw.device)[:, None] * inverse
    angles = torch.cat((angles, angles), dim=-1)[None]
    q, k = (draw.normal(batch, seq, heads, head_dim, dtype=dtype).transpose(1, 2) for heads in (q_heads, k_heads))
    return {"q": q, "k": k, "cos": angles.cos(), "sin": angles.sin()}


def torch_rotary(t: Tensors) -> Tensors:
    """As Hugging Face's `apply_rotary_pos_emb`, with tables of the dtype of q."""
    cos, sin = (t[name].unsqueeze(1).to(t["q"].dtype) for name in ("cos", "sin"))

    def rotated(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-second, first), dim=-1) * sin

    return {"q": rotated(t["q"]), "k": rotated(t["k"])}


def moved_by_rotary(t: Tensors, results: Tensors) -> Mapping[Pass, int]:
    one_pass = 2 * nbytes(t["q"], t["k"]) + nbytes(t["cos"], t["sin"])
    return {"forward": one_pass, "backward": one_pass}


ROTARY = Case(
    name="rotary_embedding",
    file="rotary",
    draw=draw_rotary,
    forms={
        "lowtide": lambda t: named(("q", "k"), rotary_embedding(t["q"], t["k"], t["cos"], t["sin"], backend="triton")),
        "torch": torch_rotary,
        "compile": torch_rotary,
        "liger": liger("liger_rope", ("q", "k"), "q", "k", "cos", "sin"),
    },
    exact=torch_rotary,
    moved=moved_by_rotary,
    sizes=ROTARY_SIZES,
    tiny=(2, 3, 1, 5, 16),
    passes=BOTH_PASSES,
    inputs_with_gradient=("q", "k"),
    results_with_gradient=("q", "k"),
)

LAYER_CASES = (
    norm_case("rms_norm", rms_norm, "liger_rms_norm"),
    norm_case("add_rms_norm", add_rms_norm, "liger_fused_add_rms_norm"),
    gated_case("swiglu", lambda t: {"y": swiglu(t["gate"], t["up"], backend="triton")}, F.silu, "liger_swiglu"),
    gated_case(
        "geglu",
        lambda t: {"y": geglu(t["gate"], t["up"], backend="triton")},
        lambda gate: F.gelu(gate, approximate="tanh"),
        "liger_geglu",
    ),
    ROTARY,
)


# -- losses ----------------------------------------------------------------------------------------------------------


def draw_logits(size: Size, dtype: torch.dtype, draw: Draw) -> Tensors:
    return {"logits": draw.normal(*size, dtype=dtype, size=2.0), "labels": draw.labels(*size)}


def draw_hidden(size: Size, dtype: torch.dtype, draw: Draw) -> Tensors:
    """Logits of about a standard normal distribution."""
    n_rows, n_cols, num_classes = size
    return {
        "hidden": draw.normal(n_rows, n_cols, dtype=dtype),
        "weight": draw.normal(num_classes, n_cols, dtype=dtype, size=n_cols**-0.5),
        "labels": draw.labels(n_rows, num_classes),
    }


def torch_loss(t: Tensors) -> Tensors:
    return {"loss": F.cross_entropy(t["logits"], t["labels"])}


def torch_wide_loss(t: Tensors) -> Tensors:
    """What Hugging Face's models compute: the loss of 16-bit logits in float32."""
    return {"loss": F.cross_entropy(t["logits"].float(), t["labels"])}


def torch_linear_loss(t: Tensors) -> Tensors:
    logits = F.linear(t["hidden"], t["weight"])
    return {"loss": F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), t["labels"])}


def moved_by_loss(t: Tensors, results: Tensors) -> Mapping[Pass, int]:
    """Ignored rows are counted: read the logits; read them again, write their gradient."""
    forward = nbytes(t["logits"], t["labels"])
    return {"forward": forward, "both": 2 * forward + t["logits"].nbytes}


LOSS_CASES = (
    Case(
        name="cross_entropy",
        file="cross_entropy",
        draw=draw_logits,
        forms={
            "lowtide": lambda t: {"loss": cross_entropy(t["logits"], t["labels"], backend="triton")},
            "torch": torch_loss,
            "compile": torch_wide_loss,
            "liger": liger("liger_cross_entropy", ("loss",), "logits", "labels"),
        },
        exact=torch_loss,
        moved=moved_by_loss,
        sizes=((4096, 32000), (4096, 128256)),
        tiny=(7, 300),
        passes=("forward", "both"),
        inputs_with_gradient=("logits",),
        results_with_gradient=("loss",),
    ),
    Case(
        name="linear_cross_entropy",
        file="linear_cross_entropy",
        draw=draw_hidden,
        forms={
            "lowtide": lambda t: {
                "loss": linear_cross_entropy(t["hidden"], t["weight"], t["labels"], backend="triton")
            },
            "torch": torch_linear_loss,
            "compile": torch_linear_loss,
            "liger": liger("liger_fused_linear_cross_entropy", ("loss",), "hidden", "weight", "labels"),
        },
        exact=torch_linear_loss,
        moved=lambda t, results: {},
        sizes=((4096, 2048, 32000), (8192, 4096, 128256)),
        tiny=(7, 24, 150),
        passes=("forward", "both"),
        inputs_with_gradient=("hidden", "weight"),
        results_with_gradient=("loss",),
        summed_dims={"dhidden": 2},
        inner_roundings=8.0,  # of logits and of their gradient, which matrix products read
    ),
)


# -- kernels over flat shards: the optimizer's, and sums of squares --------------------------------------------------


NUMELS = ((1 << 20,), (1 << 24,), (1 << 27,))
BLOCK_NUMEL = 1024
MESSAGE_BITS = 4

STEP = 10
LR, BETA1, BETA2, ADAM_EPS, DECAY = 1e-2, 0.9, 0.999, 1e-8, 0.1
OPTIONS = {"lr": LR, "betas": (BETA1, BETA2), "eps": ADAM_EPS, "weight_decay": DECAY}
MOMENTS = [state.name for state in OPTIMIZERS["adamw"].states]
STATE_STEPS = {torch.bfloat16: 2.0**-7, torch.int8: 2.0**-3}  # between neighbours, over the value
STATE_FLOORS = {torch.bfloat16: 0.0, torch.int8: 2.0**-16}  # over the largest value of a block


def draw_shard(state_dtype: torch.dtype, size: Size, dtype: torch.dtype, draw: Draw) -> Tensors:
    (numel,) = size
    tensors = {
        "master": draw.normal(numel),
        "gradient": draw.normal(numel, dtype=dtype),
        "scale": torch.full((1,), 0.5, device=draw.device),
        # As torch's kernel takes them.
        "inverse scale": torch.full((), 2.0, device=draw.device),
        "step": torch.full((), float(STEP), device=draw.device),
        "found inf": torch.zeros((), device=draw.device),
    }
    for state in OPTIMIZERS["adamw"].states:
        values = draw.normal(numel, size=0.5)
        states = new_state(state, tensors["master"], OPTIONS, state_dtype)
        stored_states(list(states.values()))[0].narrow(values.square_() if state.is_mean_of_squares else values)
        tensors |= states
    if dtype != torch.float32:
        tensors["out"] = torch.full((numel,), torch.nan, dtype=dtype, device=draw.device)
    return tensors


def states_of(t: Tensors) -> list[Tensor]:
    return [value for key, value in t.items() if key.split(".")[0] in MOMENTS]


def our_step(t: Tensors) -> Tensors:
    update_shard(
        OPTIMIZERS["adamw"], t["master"], t["gradient"], states_of(t), STEP, OPTIONS, t["scale"], t.get("out"),
        backend="triton",
    )  # fmt: skip
    return t


def torch_step(t: Tensors) -> Tensors:
    """torch.optim.AdamW(fused=True) with the scale on the GPU, around it the casts of 16-bit training."""
    torch._fused_adamw_(
        [t["master"]], [t["gradient"].float()], [t[MOMENTS[0]]], [t[MOMENTS[1]]], [], [t["step"]],
        lr=LR, beta1=BETA1, beta2=BETA2, weight_decay=DECAY, eps=ADAM_EPS, amsgrad=False, maximize=False,
        grad_scale=t["inverse scale"], found_inf=t["found inf"],
    )  # fmt: skip
    if "out" in t:
        t["out"].copy_(t["master"])
    return t


def plain_step(t: Tensors) -> Tensors:
    """The formula in the dtype of the master weights; narrow states are rounded to nearest."""
    wide = t["master"].dtype
    gradient = t["gradient"].to(wide) * t["scale"]
    mean, square = (read_states(t)[name].to(wide) for name in MOMENTS)
    mean = BETA1 * mean + (1 - BETA1) * gradient
    square = BETA2 * square + (1 - BETA2) * gradient.square()
    denominator = square.sqrt() / (1 - BETA2**STEP) ** 0.5 + ADAM_EPS
    master = t["master"] * (1 - LR * DECAY) - LR / (1 - BETA1**STEP) * mean / denominator
    results = {"master": t["master"].copy_(master)}
    if "out" in t:
        results["out"] = t["out"].copy_(master)
    for name, values in zip(MOMENTS, (mean, square), strict=True):
        results[name] = t[name].copy_(values) if t[name].is_floating_point() else values
    return results


def read_states(t: Tensors) -> Tensors:
    """Weights, and states as values."""
    kept = {key: t[key] for key in ("master", "out") if key in t}
    widened = {
        name: StoredState(t[name], t[f"{name}.scale"].float()).widened() if f"{name}.scale" in t else t[name]
        for name in MOMENTS
    }
    return kept | widened


def allowed_for_states(state_dtype: torch.dtype, t: Tensors) -> Tensors:
    """A narrow state may be rounded up or down."""
    exact = plain_step({key: value.clone() for key, value in t.items()})
    return {
        name: STATE_STEPS[state_dtype] * exact[name].abs()
        + STATE_FLOORS[state_dtype] * largest_of_blocks(exact[name], 256)
        for name in MOMENTS
        if state_dtype in STATE_STEPS
    }


def moved_by_step(t: Tensors, results: Tensors) -> Mapping[Pass, int]:
    out = nbytes(t["out"]) if "out" in t else 0
    return {"forward": 2 * nbytes(t["master"], *states_of(t)) + t["gradient"].nbytes + out}


def step_case(name: str, state_dtype: torch.dtype, peers: Mapping[str, Form]) -> Case:
    return Case(
        name=name,
        file="optimizer_step",
        draw=lambda size, dtype, draw: draw_shard(state_dtype, size, dtype, draw),
        forms={"lowtide": our_step, **peers},
        exact=plain_step,
        moved=moved_by_step,
        sizes=NUMELS,
        tiny=(1300,),
        read=read_states,
        allowed=lambda t: allowed_for_states(state_dtype, t),
    )


def draw_values(size: Size, dtype: torch.dtype, draw: Draw) -> Tensors:
    flag = torch.zeros(1, dtype=torch.int32, device=draw.device)
    return {"values": draw.normal(*size, dtype=dtype), "non_finite": flag}


def our_squares(t: Tensors) -> Tensors:
    squares = squares_by_block(t["values"], BLOCK_NUMEL, non_finite=t["non_finite"], backend="triton")
    return {"squares": squares, "non_finite": t["non_finite"]}


def plain_squares(t: Tensors) -> Tensors:
    values = t["values"]
    wide = F.pad(values.to(torch.promote_types(values.dtype, torch.float32)), (0, -values.numel() % BLOCK_NUMEL))
    squares = wide.view(-1, BLOCK_NUMEL).square().sum(1).double()
    return {"squares": squares, "non_finite": t["non_finite"].masked_fill_(~squares.isfinite().all(), 1)}


def draw_message(size: Size, dtype: torch.dtype, draw: Draw) -> Tensors:
    (numel,) = size
    message = torch.zeros(quantized_bytes(numel, MESSAGE_BITS), dtype=torch.uint8, device=draw.device)
    return {"values": draw.normal(numel, dtype=dtype), "message": message, "sum": draw.normal(numel)}


def our_message(t: Tensors) -> Tensors:
    quantize(t["values"], MESSAGE_BITS, t["message"], rounding=Rounding(1, 0), step=STEP, backend="triton")
    dequantize(t["message"], MESSAGE_BITS, t["sum"], adds=True, backend="triton")
    return {"sum": t["sum"]}


def plain_message(t: Tensors) -> Tensors:
    return {"sum": t["sum"] + t["values"]}


def allowed_for_message(t: Tensors) -> Tensors:
    """A value is rounded up or down, by less than a scale."""
    return {"sum": largest_of_blocks(t["values"], QUANTIZED_BLOCK_NUMEL) / 7}


FLAT_CASES = (
    step_case("optimizer_step", torch.float32, {"torch": torch_step, "compile": plain_step}),
    step_case("optimizer_step bf16 states", torch.bfloat16, {"compile": plain_step}),
    step_case("optimizer_step int8 states", torch.int8, {}),
    Case(
        name="sum_of_squares",
        file="sum_of_squares",
        draw=draw_values,
        forms={"lowtide": our_squares, "torch": plain_squares, "compile": plain_squares},
        exact=plain_squares,
        moved=lambda t, results: {"forward": nbytes(t["values"], results["squares"])},
        sizes=NUMELS,
        tiny=(1300,),
    ),
    Case(
        name="quantized_blocks",
        file="quantized_blocks",
        draw=draw_message,
        forms={"lowtide": our_message},
        exact=plain_message,
        moved=lambda t, results: {"forward": nbytes(t["values"], t["message"], t["message"], t["sum"], t["sum"])},
        sizes=NUMELS,
        tiny=(1280,),
        allowed=allowed_for_message,
    ),
)


CASES: Mapping[str, Case] = {case.name: case for case in (*LAYER_CASES, *LOSS_CASES, *FLAT_CASES)}
