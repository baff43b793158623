"""Cases of the kernels over flat shards: the optimizer's, and sums of squares."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from _kernel_case import Case, Draw, Form, Pass, Size, Tensors, largest_of_blocks, nbytes
from torch import Tensor

from lowtide.kernels.optimizer_states import StoredState, new_state, stored_states
from lowtide.kernels.optimizer_step import update_shard
from lowtide.kernels.quantized_blocks import QUANTIZED_BLOCK_NUMEL, dequantize, quantize, quantized_bytes
from lowtide.kernels.sum_of_squares import squares_by_block
from lowtide.kernels.weight_rounding import Rounding
from lowtide.optimizers.table import OPTIMIZERS

NUMELS = ((1 << 20,), (1 << 24,), (1 << 27,))
TINY = (1300,)
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
        tiny=TINY,
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
    wide = values.to(torch.promote_types(values.dtype, torch.float32))
    if wide.numel() % BLOCK_NUMEL:
        wide = torch.nn.functional.pad(wide, (0, -wide.numel() % BLOCK_NUMEL))
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
        tiny=TINY,
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
