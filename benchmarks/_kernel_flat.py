"""Cases of the kernels over flat shards and lists of tensors: the optimizer's, and quantization."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate, pairwise

import torch
from _kernel_case import Case, Draw, Form, Pass, Size, Tensors, largest_of_blocks, nbytes
from torch import Tensor

from lowtide.kernels.multi_tensor import copy_scaled
from lowtide.kernels.optimizer_states import StoredState, new_state, stored_states
from lowtide.kernels.optimizer_step import update_shard
from lowtide.kernels.quantize import dequantize, dequantize_reference, quantize
from lowtide.kernels.quantized import NF4_LEVELS, Format, Quantized
from lowtide.kernels.segment_norms import segment_norms
from lowtide.kernels.sum_of_squares import squares_by_block
from lowtide.optimizers.table import OPTIMIZERS

NUMELS = ((1 << 20,), (1 << 24,), (1 << 27,))
TINY = (1300,)
BLOCK_NUMEL = 1024
QUANTIZED_BLOCK_NUMEL = 256

STEP = 10
LR, BETA1, BETA2, ADAM_EPS, DECAY = 1e-2, 0.9, 0.999, 1e-8, 0.1
OPTIONS = {"lr": LR, "betas": (BETA1, BETA2), "eps": ADAM_EPS, "weight_decay": DECAY}
MOMENTS = [state.name for state in OPTIMIZERS["adamw"].states]
STATE_STEPS = {torch.bfloat16: 2.0**-7, torch.int8: 2.0**-3}  # between neighbours, over the value
STATE_FLOORS = {torch.bfloat16: 0.0, torch.int8: 2.0**-16}  # over the largest value of a block

LARGEST_ERRORS: dict[Format, float] = {"int8": 0.5 / 127, "int4": 0.5 / 7, "nf4": 0.152}  # over a block's largest value


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


def segments_of(numel: int) -> list[tuple[int, int]]:
    """Parameters of a model's blocks: large matrices and short vectors by turns, with no gap and to the shard's end."""
    matrix, vector = max(numel // 24, 1), max(numel // 20000, 1)
    ends = list(accumulate([matrix, vector, matrix, matrix, vector] * 8))
    return list(pairwise([0, *(end for end in ends if end < numel), numel]))


def our_norms(t: Tensors) -> Tensors:
    return {"norms": segment_norms(t["values"], segments_of(t["values"].numel()), backend="triton")}


def torch_norms(t: Tensors) -> Tensors:
    parts = [t["values"][start:end] for start, end in segments_of(t["values"].numel())]
    return {"norms": torch.stack(torch._foreach_norm(parts, 2, dtype=torch.float32)).double()}


def plain_norms(t: Tensors) -> Tensors:
    values = t["values"]
    wide = values.to(torch.promote_types(values.dtype, torch.float32))
    norms = [wide[start:end].square().sum().sqrt() for start, end in segments_of(values.numel())]
    return {"norms": torch.stack(norms).double()}


def draw_list(size: Size, dtype: torch.dtype, draw: Draw) -> Tensors:
    """Gradients of a model, and float32 tensors to accumulate them in."""
    (numel,) = size
    tensors = {"scale": torch.full((1,), 0.5, device=draw.device)}
    for index, (start, end) in enumerate(segments_of(numel)):
        tensors[f"source {index}"] = draw.normal(end - start, dtype=dtype)
        tensors[f"place {index}"] = draw.normal(end - start)
    return tensors


def lists_of(t: Tensors) -> tuple[list[Tensor], list[Tensor]]:
    places = [value for key, value in t.items() if key.startswith("place")]
    return places, [value for key, value in t.items() if key.startswith("source")]


def places_of(t: Tensors) -> Tensors:
    return {key: value for key, value in t.items() if key.startswith("place")}


def our_accumulation(t: Tensors) -> Tensors:
    places, sources = lists_of(t)
    copy_scaled(places, sources, t["scale"], accumulate=True, backend="triton")
    return places_of(t)


def torch_accumulation(t: Tensors) -> Tensors:
    """Torch's many-tensor operations, which take one dtype each."""
    places, sources = lists_of(t)
    if sources[0].dtype == places[0].dtype:
        scaled = torch._foreach_mul(sources, t["scale"].squeeze())
    else:
        scaled = tuple(torch.empty_like(place) for place in places)
        torch._foreach_copy_(scaled, sources)
        torch._foreach_mul_(scaled, t["scale"].squeeze())
    torch._foreach_add_(places, scaled)
    return places_of(t)


def plain_accumulation(t: Tensors) -> Tensors:
    for place, source in zip(*lists_of(t), strict=True):
        place.add_(source.to(place.dtype) * t["scale"])
    return places_of(t)


def moved_by_accumulation(t: Tensors, results: Tensors) -> Mapping[Pass, int]:
    places, sources = lists_of(t)
    return {"forward": 2 * nbytes(*places) + nbytes(*sources)}


def our_quantize(format: Format, t: Tensors) -> Tensors:
    quantized = quantize(t["values"], format, QUANTIZED_BLOCK_NUMEL, backend="triton")
    return {"payload": quantized.payload, "scale": quantized.scale}


def plain_quantize(format: Format, t: Tensors) -> Tensors:
    """The formula as one writes it in torch, for whole blocks and whole bytes."""
    blocks = t["values"].float().view(-1, QUANTIZED_BLOCK_NUMEL)
    largest = blocks.abs().amax(1, keepdim=True)
    if format == "int8":
        scale = largest / 127
        return {"payload": (blocks / scale).round_().to(torch.int8).view(-1), "scale": scale.view(-1)}
    if format == "int4":
        scale = largest / 7
        code = ((blocks / scale).round_() + 8).to(torch.uint8).view(-1)
    else:
        scale, levels = largest, torch.tensor(NF4_LEVELS, device=blocks.device)
        code = torch.bucketize(blocks / largest, (levels[1:] + levels[:-1]) / 2).to(torch.uint8).view(-1)
    return {"payload": code[0::2] | code[1::2] << 4, "scale": scale.view(-1)}


def quantized_of(format: Format, t: Tensors) -> Quantized:
    payload = t["payload"]
    numel = payload.numel() * (1 if format == "int8" else 2)
    return Quantized(payload, t["scale"].float(), (numel,), format, QUANTIZED_BLOCK_NUMEL)


def values_of(format: Format, t: Tensors) -> Tensors:
    quantized = quantized_of(format, t)
    values = torch.empty(quantized.numel, device=quantized.payload.device)
    dequantize_reference(quantized, values, accumulate=False)
    return {"values": values}


def quantize_case(format: Format) -> Case:
    def plain(t: Tensors) -> Tensors:
        return plain_quantize(format, t)

    def moved(t: Tensors, results: Tensors) -> Mapping[Pass, int]:
        return {"forward": nbytes(t["values"], results["payload"], results["scale"])}

    def allowed(t: Tensors) -> Tensors:
        return {"values": LARGEST_ERRORS[format] * largest_of_blocks(t["values"], QUANTIZED_BLOCK_NUMEL)}

    return Case(
        name=f"quantize {format}",
        file="quantize",
        draw=lambda size, dtype, draw: {"values": draw.normal(*size, dtype=dtype)},
        forms={"lowtide": lambda t: our_quantize(format, t), "torch": plain, "compile": plain},
        exact=lambda t: {"values": t["values"]},
        moved=moved,
        sizes=NUMELS,
        tiny=TINY,
        read=lambda results: values_of(format, results),
        allowed=allowed,
    )


def dequantize_case(format: Format) -> Case:
    def draw(size: Size, dtype: torch.dtype, source: Draw) -> Tensors:
        quantized = quantize(source.normal(*size), format, QUANTIZED_BLOCK_NUMEL, backend="reference")
        return {
            "payload": quantized.payload,
            "scale": quantized.scale,
            "like": torch.empty(0, dtype=dtype, device=source.device),
        }

    def ours(t: Tensors) -> Tensors:
        return {"values": dequantize(quantized_of(format, t), t["like"].dtype, backend="triton")}

    def plain(t: Tensors) -> Tensors:
        """Of whole blocks: float32, or float64 where the scales are."""
        code = t["payload"]
        if format != "int8":
            code = torch.stack([code & 15, code >> 4], dim=1).view(-1)
        wide, numel = t["scale"].dtype, code.numel()
        if format == "nf4":
            level = torch.tensor(NF4_LEVELS, device=code.device)[code.int()].to(wide)
        else:
            level = code.to(wide) - (8 if format == "int4" else 0)
        scale = t["scale"][:, None].expand(-1, QUANTIZED_BLOCK_NUMEL).reshape(-1)[:numel]
        return {"values": (level * scale).to(t["like"].dtype)}

    def moved(t: Tensors, results: Tensors) -> Mapping[Pass, int]:
        return {"forward": nbytes(t["payload"], t["scale"], results["values"])}

    return Case(
        name=f"dequantize {format}",
        file="quantize",
        draw=draw,
        forms={"lowtide": ours, "torch": plain, "compile": plain},
        exact=plain,
        moved=moved,
        sizes=NUMELS,
        tiny=TINY,
    )


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
        name="segment_norms",
        file="segment_norms",
        draw=draw_values,
        forms={"lowtide": our_norms, "torch": torch_norms, "compile": plain_norms},
        exact=plain_norms,
        moved=lambda t, results: {"forward": nbytes(t["values"], results["norms"])},
        sizes=NUMELS,
        tiny=TINY,
    ),
    Case(
        name="multi_tensor accumulate",
        file="multi_tensor",
        draw=draw_list,
        forms={"lowtide": our_accumulation, "torch": torch_accumulation, "compile": plain_accumulation},
        exact=plain_accumulation,
        moved=moved_by_accumulation,
        sizes=NUMELS,
        tiny=TINY,
    ),
    *(quantize_case(format) for format in ("int8", "int4", "nf4")),
    *(dequantize_case(format) for format in ("int8", "int4", "nf4")),
)
