"""Triton form of `kernels/optimizer_step.py`: each program reads a tile of the shard, updates it and writes it.

The operations on an element are those of the C++ kernel, in its order: one IEEE operation each, a fused multiply-add
where it has one and nowhere else (the compiler may not contract others), division and square root correctly rounded.
So both kernels, and torch's on the CPU in whole vectors, give the same bits, and an element's bits do not depend on
where a shard is cut. Only denormal numbers differ: the C++ kernel flushes them to zero, this one keeps them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...optimizers.optimizer import MAX_COEFFICIENTS, Optimizer, Options
from ..optimizer_states import STATE_BLOCK_NUMEL, StoredState, signed_word, step_seed
from .launch import launch
from .optimizer_states import load_state, other_noise, rounding_noise, store_state
from .option_runs import OptionRuns, coefficient_table, run_table, stream_of

TILE_BLOCKS = 4  # a tile is 1024 elements: 4 a thread, 16 bytes of float32, or 8 where nothing is as wide


@triton.jit
def _lerp(a, b, weight, is_from_b):
    """See `lerp_coefficients` in optimizers/optimizer.py."""
    return tl.fma(b - a, weight, tl.where(is_from_b != 0.0, b, a))


@triton.jit
def _updated(g, w, s, v, c0, c1, c2, c3, c4, c5, c6, c7, RULE: tl.constexpr, HAS_STATE: tl.constexpr):
    """w and the states s and v after the rule; c0 to c7: its coefficients, see its file in optimizers/."""
    if RULE == "adamw" or RULE == "adam":
        if RULE == "adamw":
            w = w * c0
        else:
            g = tl.fma(w, c0, g)
        s = _lerp(s, g, c1, c2)
        v = tl.fma(g * c4, g, v * c3)
        w = w + tl.div_rn(s * c7, tl.div_rn(tl.sqrt_rn(v), c5) + c6)
    elif RULE == "lion":
        direction = _lerp(g, s, c1, c2)
        sign = tl.where(direction > 0.0, 1.0, tl.where(direction < 0.0, -1.0, 0.0))
        w = tl.fma(sign, c5, w * c0)
        s = _lerp(s, g, c3, c4)
    elif RULE == "adagrad":
        g = tl.fma(w, c0, g)
        s = tl.fma(g, g, s)
        w = w - tl.div_rn(g * c1, tl.sqrt_rn(s) + c2)
    else:
        tl.static_assert(RULE == "sgd")
        g = tl.fma(w, c0, g)
        if HAS_STATE:
            s = tl.fma(g, c3, s * c2)
            g = tl.fma(s, c5, g * c4)
        w = tl.fma(g, c1, w)
    return w, s, v


@triton.jit
def _update_tile(
    W_ptr, G_ptr, S_ptr, V_ptr, S_SCALE_ptr, V_SCALE_ptr, OUT_ptr, ENDS_ptr, CHOICES_ptr, FIRST_RUNS_ptr, C_ptr,
    program, end, seed, factor, c0, c1, c2, c3, c4, c5, c6, c7,
    RULE: tl.constexpr, TILE_BLOCKS: tl.constexpr, BLOCK_NUMEL: tl.constexpr,
    NUM_COEFFICIENTS: tl.constexpr, IS_WHOLE: tl.constexpr,
):  # fmt: skip
    """The elements from start on: a whole tile, or as many as there are before end."""
    start = program.to(tl.int64) * (TILE_BLOCKS * BLOCK_NUMEL)
    blocks = tl.arange(0, TILE_BLOCKS)
    at = blocks[:, None] * BLOCK_NUMEL + tl.arange(0, BLOCK_NUMEL)[None, :]  # in the tile
    if IS_WHOLE:
        ok = tl.full((TILE_BLOCKS, BLOCK_NUMEL), 1, tl.int1)
        block_ok = tl.full((TILE_BLOCKS,), 1, tl.int1)
    else:
        ok = at < (end - start).to(tl.int32)
        block_ok = blocks * BLOCK_NUMEL < (end - start).to(tl.int32)
    at_block = program.to(tl.int64) * TILE_BLOCKS + blocks
    g = tl.load(G_ptr + start + at, mask=ok, other=0.0).to(tl.float32) * factor
    w = tl.load(W_ptr + start + at, mask=ok, other=0.0).to(tl.float32)
    s = tl.zeros_like(w)
    v = tl.zeros_like(w)
    if S_ptr is not None:
        s = load_state(S_ptr + start, at, ok, S_SCALE_ptr, at_block, block_ok)
    if V_ptr is not None:
        v = load_state(V_ptr + start, at, ok, V_SCALE_ptr, at_block, block_ok)
    noise = rounding_noise(g, w, seed)
    if C_ptr is None:
        w, s, v = _updated(g, w, s, v, c0, c1, c2, c3, c4, c5, c6, c7, RULE, S_ptr is not None)
    else:
        done = 0
        for run in range(tl.load(FIRST_RUNS_ptr + program), tl.load(FIRST_RUNS_ptr + program + 1) + 1):
            C = C_ptr + tl.load(CHOICES_ptr + run) * NUM_COEFFICIENTS
            end_of_run = tl.minimum(tl.load(ENDS_ptr + run) - start, TILE_BLOCKS * BLOCK_NUMEL).to(tl.int32)
            new_w, new_s, new_v = _updated(
                g, w, s, v, tl.load(C), tl.load(C + 1), tl.load(C + 2), tl.load(C + 3), tl.load(C + 4),
                tl.load(C + 5), tl.load(C + 6), tl.load(C + 7), RULE, S_ptr is not None,
            )  # fmt: skip
            is_inside = (at >= done) & (at < end_of_run)
            w = tl.where(is_inside, new_w, w)
            s = tl.where(is_inside, new_s, s)
            v = tl.where(is_inside, new_v, v)
            done = end_of_run
    if S_ptr is not None:
        store_state(S_ptr + start, at, ok, S_SCALE_ptr, at_block, block_ok, s, noise)
        noise = other_noise(noise)
    if V_ptr is not None:
        store_state(V_ptr + start, at, ok, V_SCALE_ptr, at_block, block_ok, v, noise)
    stored = w.to(W_ptr.dtype.element_ty)
    tl.store(W_ptr + start + at, stored, mask=ok)
    if OUT_ptr is not None:
        tl.store(OUT_ptr + start + at, stored.to(tl.float32).to(OUT_ptr.dtype.element_ty), mask=ok)


# Numbers that differ between shards and steps: compiled once, not for each that 16 divides.
@triton.jit(do_not_specialize=["n", "seed"])
def _kernel(
    W_ptr, G_ptr, S_ptr, V_ptr, S_SCALE_ptr, V_SCALE_ptr, OUT_ptr, FACTOR_ptr, SKIP_ptr,
    ENDS_ptr, CHOICES_ptr, FIRST_RUNS_ptr, C_ptr,
    n, seed, factor, c0, c1, c2, c3, c4, c5, c6, c7,
    RULE: tl.constexpr, TILE_BLOCKS: tl.constexpr, BLOCK_NUMEL: tl.constexpr,
    NUM_COEFFICIENTS: tl.constexpr,
):  # fmt: skip
    """W, states = RULE(W, factor * G);  OUT = W. Pointers that are None: there is no such state, output or table."""
    TILE: tl.constexpr = TILE_BLOCKS * BLOCK_NUMEL
    program = tl.program_id(0)
    start = program.to(tl.int64) * TILE
    end = n.to(tl.int64)
    if SKIP_ptr is not None:
        end = tl.where(tl.load(SKIP_ptr) != 0, 0, end)
    if FACTOR_ptr is not None:
        factor = tl.load(FACTOR_ptr).to(tl.float32)
    # Without a mask, loads are 16 bytes wide whatever n is. The mask is not left to the compiler: it sees two branches
    # that differ in `end` alone as one.
    if start + TILE <= end:
        _update_tile(
            W_ptr, G_ptr, S_ptr, V_ptr, S_SCALE_ptr, V_SCALE_ptr, OUT_ptr, ENDS_ptr, CHOICES_ptr, FIRST_RUNS_ptr, C_ptr,
            program, end, seed, factor, c0, c1, c2, c3, c4, c5, c6, c7,
            RULE, TILE_BLOCKS, BLOCK_NUMEL, NUM_COEFFICIENTS, True,
        )  # fmt: skip
    elif start < end:
        _update_tile(
            W_ptr, G_ptr, S_ptr, V_ptr, S_SCALE_ptr, V_SCALE_ptr, OUT_ptr, ENDS_ptr, CHOICES_ptr, FIRST_RUNS_ptr, C_ptr,
            program, end, seed, factor, c0, c1, c2, c3, c4, c5, c6, c7,
            RULE, TILE_BLOCKS, BLOCK_NUMEL, NUM_COEFFICIENTS, False,
        )  # fmt: skip


def update(
    optimizer: Optimizer,
    master: Tensor,
    gradient: Tensor,
    states: Sequence[StoredState],
    step: int,
    runs: Sequence[tuple[int, Options]],
    steps: Sequence[int],
    gradient_scale: float | Tensor,
    out: Tensor | None,
    skip: Tensor | None,
) -> None:
    """As `optimizer_step.update_runs`; all contiguous, n at least 1; the gradient is only read."""
    tile_numel, device = TILE_BLOCKS * STATE_BLOCK_NUMEL, master.device
    chosen = OptionRuns.of(runs, steps, optimizer.coefficients_at)
    table = coefficients = None
    if len(chosen.ends) > 1:
        stream = stream_of(device)
        table = run_table(chosen.ends, chosen.choices, tile_numel, device, stream)
        coefficients = coefficient_table(chosen.coefficients, device, stream)
    payloads, scales = [state.payload for state in states], [state.scale for state in states]
    of_states: dict[str, Any] = dict(zip(("S_ptr", "V_ptr"), [*payloads, None, None], strict=False))
    of_states |= zip(("S_SCALE_ptr", "V_SCALE_ptr"), [*scales, None, None], strict=False)
    numbers: dict[str, Any] = {f"c{index}": value for index, value in enumerate(chosen.coefficients[0])}
    has_factor = isinstance(gradient_scale, Tensor)
    launch(
        _kernel, (-(-master.numel() // tile_numel),), num_warps=8 if master.dtype == torch.float32 else 4,
        enable_fp_fusion=False,
        W_ptr=master, G_ptr=gradient, OUT_ptr=out, **of_states,
        FACTOR_ptr=gradient_scale if has_factor else None, SKIP_ptr=skip,
        ENDS_ptr=table.ends if table is not None else None,
        CHOICES_ptr=table.choices if table is not None else None,
        FIRST_RUNS_ptr=table.first_runs if table is not None else None,
        C_ptr=coefficients,
        n=master.numel(), seed=signed_word(step_seed(step)), factor=1.0 if has_factor else float(gradient_scale),
        **numbers,
        RULE=optimizer.name, TILE_BLOCKS=TILE_BLOCKS, BLOCK_NUMEL=STATE_BLOCK_NUMEL,
        NUM_COEFFICIENTS=MAX_COEFFICIENTS,
    )  # fmt: skip
    for tensor in (master, *([] if out is None else [out])):  # a graph that saved them must not use them now
        torch.autograd.graph.increment_version(tensor)
