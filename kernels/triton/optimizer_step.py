"""Triton form of `kernels/optimizer_step.py`: each program updates a tile of a shard.

The operations on an element are those of the C++ kernel in the same order: single IEEE operations with the same fused
multiply-adds (the compiler may not contract any), and correctly rounded division and square root. So both kernels, and
torch's on the CPU in whole vectors, give the same bits, for every division into shards. Only denormal numbers differ:
the C++ kernel flushes them to zero, and this kernel keeps them.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...optimizers.optimizer import MAX_COEFFICIENTS, Optimizer, Options
from ..optimizer_states import STATE_BLOCK_NUMEL, signed_word, step_seed
from ..optimizer_step import ShardUpdate
from ..weight_rounding import Rounding, signed_long, step_key
from .launch import launch
from .optimizer_states import (
    load_state,
    nearest_bfloat16,
    numbered_noise,
    other_noise,
    rounded_at_random,
    rounding_noise,
    split_at_random,
    store_state,
    with_byte,
)

Coefficients = tuple[float, ...]
NUM_WORDS = 4  # before the coefficients in the numbers of a step: seed, two words of the key, nothing
Row = tuple[int, ...]
"""A row of `shard_table`: first program, length, number of the first element for its random bits, and addresses of
weight, gradient, two states, their scales, output and remainder; 0 for an absent tensor."""
NUM_FIELDS = 11
TILE_BLOCKS = 4  # a tile has 1024 elements: 4 per thread, 16 bytes of float32, or 8 if no tensor is as wide
_TENSORS = ("W", "G", "S", "V", "S_SCALE", "V_SCALE", "OUT", "REST")
_DTYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.int8: tl.int8,
    torch.uint8: tl.uint8,
}


@triton.jit
def _lerp(a, b, weight, is_from_b):
    """Interpolate with weights of `lerp_coefficients` in optimizers/optimizer.py."""
    return tl.fma(b - a, weight, tl.where(is_from_b != 0.0, b, a))


@triton.jit
def _updated(g, w, s, v, C_ptr, RULE: tl.constexpr, HAS_STATE: tl.constexpr):
    """Apply the rule to w and the states s and v. C_ptr: 8 coefficients of the rule's file in optimizers/."""
    c0, c1, c2, c3 = tl.load(C_ptr), tl.load(C_ptr + 1), tl.load(C_ptr + 2), tl.load(C_ptr + 3)
    c4, c5, c6, c7 = tl.load(C_ptr + 4), tl.load(C_ptr + 5), tl.load(C_ptr + 6), tl.load(C_ptr + 7)
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
    W_ptr, G_ptr, S_ptr, V_ptr, S_SCALE_ptr, V_SCALE_ptr, OUT_ptr, REST_ptr,
    WORDS_ptr, C_ptr, ENDS_ptr, CHOICES_ptr, FIRST_RUNS_ptr,
    program, tile, end, number, factor,
    RULE: tl.constexpr, TILE_BLOCKS: tl.constexpr, BLOCK_NUMEL: tl.constexpr,
    NUM_COEFFICIENTS: tl.constexpr, IS_DRAWN: tl.constexpr, IS_WHOLE: tl.constexpr,
):  # fmt: skip
    """Update a tile of the shard, up to element `end` unless IS_WHOLE."""
    start = tile * (TILE_BLOCKS * BLOCK_NUMEL)
    blocks = tl.arange(0, TILE_BLOCKS)
    at = blocks[:, None] * BLOCK_NUMEL + tl.arange(0, BLOCK_NUMEL)[None, :]  # in the tile
    if IS_WHOLE:
        ok = tl.full((TILE_BLOCKS, BLOCK_NUMEL), 1, tl.int1)
        block_ok = tl.full((TILE_BLOCKS,), 1, tl.int1)
    else:
        ok = at < (end - start).to(tl.int32)
        block_ok = blocks * BLOCK_NUMEL < (end - start).to(tl.int32)
    at_block = tile * TILE_BLOCKS + blocks
    g = tl.load(G_ptr + start + at, mask=ok, other=0.0).to(tl.float32) * factor
    old = tl.load(W_ptr + start + at, mask=ok, other=0.0)
    w = old.to(tl.float32)
    if REST_ptr is not None:
        old_rest = tl.load(REST_ptr + start + at, mask=ok, other=0)
        w = with_byte(w, old_rest) if IS_DRAWN else w + old_rest.to(tl.float32)
    # After the remainder was joined: an unchanged weight keeps both parts.
    before = w
    s = tl.zeros_like(w)
    v = tl.zeros_like(w)
    if S_ptr is not None:
        s = load_state(S_ptr + start, at, ok, S_SCALE_ptr, at_block, block_ok)
    if V_ptr is not None:
        v = load_state(V_ptr + start, at, ok, V_SCALE_ptr, at_block, block_ok)
    if IS_DRAWN:
        noise = numbered_noise(number + start + at, tl.load(WORDS_ptr + 1), tl.load(WORDS_ptr + 2))
    else:
        noise = rounding_noise(g, w, tl.load(WORDS_ptr))
    of_weight = noise >> 16
    of_split = noise >> 24
    if ENDS_ptr is None:
        w, s, v = _updated(g, w, s, v, C_ptr, RULE, S_ptr is not None)
    else:
        done = 0
        first = program.to(tl.int64) * (TILE_BLOCKS * BLOCK_NUMEL)  # ends of runs count over all shards
        for run in range(tl.load(FIRST_RUNS_ptr + program), tl.load(FIRST_RUNS_ptr + program + 1) + 1):
            C = C_ptr + tl.load(CHOICES_ptr + run) * NUM_COEFFICIENTS
            end_of_run = tl.minimum(tl.load(ENDS_ptr + run) - first, TILE_BLOCKS * BLOCK_NUMEL).to(tl.int32)
            new_w, new_s, new_v = _updated(g, w, s, v, C, RULE, S_ptr is not None)
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
    if IS_DRAWN and REST_ptr is not None:
        stored, rest = split_at_random(w, of_split)
        tl.store(REST_ptr + start + at, rest, mask=ok)
    elif IS_DRAWN:
        stored = rounded_at_random(w, of_weight)
    elif REST_ptr is not None:  # an unchanged weight must keep its bits: a sum has two forms at a tie
        stored = tl.where(w == before, old, nearest_bfloat16(w))
        rest = tl.where(w == before, old_rest, nearest_bfloat16(w - stored.to(tl.float32)))
        tl.store(REST_ptr + start + at, rest, mask=ok)
    else:
        stored = w.to(W_ptr.dtype.element_ty)
    tl.store(W_ptr + start + at, stored, mask=ok)
    if OUT_ptr is not None:
        tl.store(OUT_ptr + start + at, stored.to(tl.float32).to(OUT_ptr.dtype.element_ty), mask=ok)


@triton.jit
def _pointer(address, DTYPE: tl.constexpr, IS_ALIGNED: tl.constexpr):
    pointer = address.to(tl.pointer_type(DTYPE))
    return tl.multiple_of(pointer, 16) if IS_ALIGNED else pointer


@triton.jit
def _kernel(
    SHARDS_ptr, SHARD_OF_PROGRAM_ptr, FACTOR_ptr, SKIP_ptr, WORDS_ptr, C_ptr, ENDS_ptr, CHOICES_ptr, FIRST_RUNS_ptr,
    factor,
    W: tl.constexpr, G: tl.constexpr, S: tl.constexpr, V: tl.constexpr, S_SCALE: tl.constexpr, V_SCALE: tl.constexpr,
    OUT: tl.constexpr, REST: tl.constexpr, IS_ALIGNED: tl.constexpr, NUM_FIELDS: tl.constexpr,
    RULE: tl.constexpr, TILE_BLOCKS: tl.constexpr, BLOCK_NUMEL: tl.constexpr,
    NUM_COEFFICIENTS: tl.constexpr, IS_DRAWN: tl.constexpr,
):  # fmt: skip
    """W, states = RULE(W, factor * G);  OUT = W, of every shard. W to REST: dtypes; None for an absent tensor."""
    TILE: tl.constexpr = TILE_BLOCKS * BLOCK_NUMEL
    program = tl.program_id(0)
    SHARD_ptr = SHARDS_ptr + tl.load(SHARD_OF_PROGRAM_ptr + program).to(tl.int64) * NUM_FIELDS
    tile = program - tl.load(SHARD_ptr)
    start = tile * TILE
    end = tl.load(SHARD_ptr + 1)
    number = tl.load(SHARD_ptr + 2)
    W_ptr = _pointer(tl.load(SHARD_ptr + 3), W, IS_ALIGNED)
    G_ptr = _pointer(tl.load(SHARD_ptr + 4), G, IS_ALIGNED)
    S_ptr = _pointer(tl.load(SHARD_ptr + 5), S, IS_ALIGNED) if S is not None else None
    V_ptr = _pointer(tl.load(SHARD_ptr + 6), V, IS_ALIGNED) if V is not None else None
    S_SCALE_ptr = _pointer(tl.load(SHARD_ptr + 7), S_SCALE, IS_ALIGNED) if S_SCALE is not None else None
    V_SCALE_ptr = _pointer(tl.load(SHARD_ptr + 8), V_SCALE, IS_ALIGNED) if V_SCALE is not None else None
    OUT_ptr = _pointer(tl.load(SHARD_ptr + 9), OUT, IS_ALIGNED) if OUT is not None else None
    REST_ptr = _pointer(tl.load(SHARD_ptr + 10), REST, IS_ALIGNED) if REST is not None else None
    if SKIP_ptr is not None:
        # In a skipped step the shard counts as empty: the program writes nothing, and the host need not know.
        end = tl.where(tl.load(SKIP_ptr) != 0, 0, end)
    if FACTOR_ptr is not None:
        factor = tl.load(FACTOR_ptr).to(tl.float32)
    # Without a mask, loads are 16 bytes wide for any length. IS_WHOLE tells the compiler to leave out the mask: it
    # would merge two branches that differ only in `end`.
    if start + TILE <= end:
        _update_tile(
            W_ptr, G_ptr, S_ptr, V_ptr, S_SCALE_ptr, V_SCALE_ptr, OUT_ptr, REST_ptr,
            WORDS_ptr, C_ptr, ENDS_ptr, CHOICES_ptr, FIRST_RUNS_ptr, program, tile, end, number, factor,
            RULE, TILE_BLOCKS, BLOCK_NUMEL, NUM_COEFFICIENTS, IS_DRAWN, True,
        )  # fmt: skip
    elif start < end:
        _update_tile(
            W_ptr, G_ptr, S_ptr, V_ptr, S_SCALE_ptr, V_SCALE_ptr, OUT_ptr, REST_ptr,
            WORDS_ptr, C_ptr, ENDS_ptr, CHOICES_ptr, FIRST_RUNS_ptr, program, tile, end, number, factor,
            RULE, TILE_BLOCKS, BLOCK_NUMEL, NUM_COEFFICIENTS, IS_DRAWN, False,
        )  # fmt: skip


def update(
    optimizer: Optimizer,
    shards: Sequence[ShardUpdate],
    step: int,
    gradient_scale: float | Tensor,
    skip: Tensor | None,
) -> None:
    """Update shards with a single launch. shards: at least one, of the same kind, non-empty and contiguous."""
    launch_of = UpdateLaunch(optimizer, shards, step)
    numbers, device = numbers_of(step, shards[0].rounding, launch_of.coefficients), shards[0].master.device
    launch_of.start(number_table(numbers, device, stream_of(device)), gradient_scale, skip)


class UpdateLaunch:
    """A launch that updates shards of a kind. A graph can hold it: it reads the numbers of a step on the device."""

    def __init__(
        self, optimizer: Optimizer, shards: Sequence[ShardUpdate], step: int, merges_equal: bool = True
    ) -> None:
        """step: now. merges_equal: whether options with equal coefficients in this step count as the same options."""
        self._optimizer, self._shards = optimizer, shards
        self._device = shards[0].master.device
        stream, tile_numel = stream_of(self._device), TILE_BLOCKS * STATE_BLOCK_NUMEL
        num_programs: list[int] = []
        rows: list[Row] = []
        runs: list[tuple[int, Options]] = []
        steps: list[int] = []
        first = 0
        for shard in shards:
            runs += [(first * tile_numel + end, options) for end, options in shard.runs]
            steps += shard.steps
            numel = shard.numel
            num_programs.append(-(-numel // tile_numel))
            number = 0 if shard.rounding is None else signed_long(shard.rounding.first)
            addresses = [0 if tensor is None else tensor.data_ptr() for tensor in _tensors(shard)]
            rows.append((first, numel, number, *addresses))
            first += num_programs[-1]
            # The last run of a shard ends with its last tile: the runs of the next shard begin with a program.
            runs[-1] = (first * tile_numel, runs[-1][1])
        self._grid = (first,)
        self._table, self._is_aligned = shard_table(tuple(rows), self._device, stream)
        self._shard_of_program = shard_of_program(tuple(num_programs), self._device, stream)
        found = merged_runs(runs, steps, optimizer.coefficients_at, merges_equal)
        ends, choices, self.coefficients, self._sources = found  # coefficients: in this step
        self._runs: tuple[Tensor | None, ...] = (None, None, None)
        if len(ends) > 1:
            self._runs = run_table(ends, choices, tile_numel, self._device, stream)
        self._step = step

    @property
    def sources(self) -> tuple[tuple[int, int], ...]:
        """For each row of coefficients: the id of its options, and the number of steps that it has missed."""
        return tuple((id(options), self._step - step) for options, step in self._sources)

    def numbers_at(self, step: int) -> bytes:
        """Return `numbers_of` a step, with the options as they are now."""
        later, coefficients = step - self._step, self._optimizer.coefficients_at
        rows = [_coefficients_at(coefficients, options, of_run + later) for options, of_run in self._sources]
        return numbers_of(step, self._shards[0].rounding, rows)

    def start(self, numbers: Tensor, gradient_scale: float | Tensor, skip: Tensor | None) -> None:
        """Launch. numbers: those of `numbers_of`, (n,) int32 on the device."""
        found = [None if tensor is None else _DTYPES[tensor.dtype] for tensor in _tensors(self._shards[0])]
        dtypes: dict[str, Any] = dict(zip(_TENSORS, found, strict=True))
        has_factor = isinstance(gradient_scale, Tensor)
        ends, choices, first_runs = self._runs
        launch(
            _kernel, self._grid, num_warps=8 if self._shards[0].master.dtype == torch.float32 else 4,
            enable_fp_fusion=False,
            SHARDS_ptr=self._table, SHARD_OF_PROGRAM_ptr=self._shard_of_program,
            FACTOR_ptr=gradient_scale if has_factor else None, SKIP_ptr=skip,
            WORDS_ptr=numbers[:NUM_WORDS], C_ptr=numbers[NUM_WORDS:].view(torch.float32),
            ENDS_ptr=ends, CHOICES_ptr=choices, FIRST_RUNS_ptr=first_runs,
            factor=1.0 if has_factor else float(gradient_scale),
            **dtypes,
            IS_ALIGNED=self._is_aligned, NUM_FIELDS=NUM_FIELDS,
            RULE=self._optimizer.name, TILE_BLOCKS=TILE_BLOCKS, BLOCK_NUMEL=STATE_BLOCK_NUMEL,
            NUM_COEFFICIENTS=MAX_COEFFICIENTS, IS_DRAWN=self._shards[0].rounding is not None,
        )  # fmt: skip
        # A graph that saved the old values must raise an error.
        changed = [tensor for shard in self._shards for tensor in (shard.master, shard.out) if tensor is not None]
        torch.autograd.graph.increment_version(changed)


def _tensors(shard: ShardUpdate) -> list[Tensor | None]:
    """List the tensors of a shard in the order of the table's fields."""
    payloads: list[Tensor | None] = [None, None]
    scales: list[Tensor | None] = [None, None]
    for index, state in enumerate(shard.states):
        payloads[index], scales[index] = state.payload, state.scale
    return [shard.master, shard.gradient, *payloads, *scales, shard.out, shard.remainder]


# -- tables of shards and of runs of options, on the device -----------------------------------------------------------


# A table is cached for the stream of its copy: a different stream would have to wait for the copy.
@lru_cache(maxsize=64)
def shard_table(rows: tuple[Row, ...], device: torch.device, stream: int) -> tuple[Tensor, bool]:
    """Return the table of shards, (shards, NUM_FIELDS) int64, and True if all addresses are multiples of 16 bytes.

    Each shard has consecutive programs with a tile each; the last tile of a shard may be partial. If an address
    changes, such as a gradient's, the table is copied again.
    """
    is_aligned = not any(address % 16 for row in rows for address in row[3:])
    return on_device(torch.tensor(rows, dtype=torch.int64), device), is_aligned


@lru_cache(maxsize=64)
def shard_of_program(num_programs: tuple[int, ...], device: torch.device, stream: int) -> Tensor:
    """Return the index of the shard of each program, (programs,) int32. num_programs: of each shard."""
    shards = torch.arange(len(num_programs), dtype=torch.int32)
    return on_device(shards.repeat_interleave(torch.tensor(num_programs)), device)


def merged_runs(
    runs: Sequence[tuple[int, Options]],
    steps: Sequence[int],
    coefficients: Callable[[Options, int], Coefficients],
    merges_equal: bool = True,
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[Coefficients, ...], tuple[tuple[Options, int], ...]]:
    """Merge adjacent runs with the same options and step. runs: (end, options), ascending; steps: of each run.

    coefficients(options, step): the rule's numbers. merges_equal: merge also runs with equal coefficients.
    Returns the ends of the merged runs; the choice of each, an index in the rest: rows of MAX_COEFFICIENTS numbers, and
    the options and the step of each row.
    """
    by_options: dict[tuple[int, int], int] = {}  # (id of options, step) -> choice: many runs share few options
    by_value: dict[Any, int] = {}
    rows: list[Coefficients] = []
    sources: list[tuple[Options, int]] = []
    ends: list[int] = []
    choices: list[int] = []
    for (end, options), step in zip(runs, steps, strict=True):
        if end == (ends[-1] if ends else 0):
            continue
        choice = by_options.get((id(options), step))
        if choice is None:
            values = _coefficients_at(coefficients, options, step)
            choice = by_value.setdefault(values if merges_equal else len(rows), len(rows))
            by_options[id(options), step] = choice
            if choice == len(rows):
                rows.append(values)
                sources.append((options, step))
        if choices and choices[-1] == choice:
            ends[-1] = end
            continue
        ends.append(end)
        choices.append(choice)
    return tuple(ends), tuple(choices), tuple(rows), tuple(sources)


def _coefficients_at(coefficients: Callable[[Options, int], Coefficients], options: Options, step: int) -> Coefficients:
    values = tuple(coefficients(options, step))
    # The kernel always reads MAX_COEFFICIENTS numbers.
    return values + (0.0,) * (MAX_COEFFICIENTS - len(values))


def numbers_of(step: int, rounding: Rounding | None, coefficients: Sequence[Coefficients]) -> bytes:
    """Return NUM_WORDS int32 for the random bits of a step, then the coefficients in float32.

    rounding: of a shard; the seed is equal in all shards.
    """
    keys = (0, 0) if rounding is None else step_key(rounding.seed, step)
    words = array("i", [signed_word(word) for word in (step_seed(step), *keys, 0)])
    return words.tobytes() + b"".join(array("f", row).tobytes() for row in coefficients)


@lru_cache(maxsize=1024)
def run_table(
    ends: tuple[int, ...], choices: tuple[int, ...], tile_numel: int, device: torch.device, stream: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ends, choices and first_runs on the device, for programs of tile_numel elements.

    ends: (runs,) int64; choices: (runs,) int32; first_runs: (programs + 1,) int32, the run in which each program
    begins, then the last run. The table depends on the model alone, so it is copied once.
    """
    ends_tensor = torch.tensor(ends, dtype=torch.int64)
    starts = torch.arange(0, ends[-1], tile_numel)
    # right: a program that begins at the end of a run is in the next run.
    first_runs = torch.searchsorted(ends_tensor, starts, right=True, out_int32=True)
    first_runs = torch.cat([first_runs, torch.tensor([len(ends) - 1], dtype=torch.int32)])
    choices_tensor = torch.tensor(choices, dtype=torch.int32)
    return on_device(ends_tensor, device), on_device(choices_tensor, device), on_device(first_runs, device)


@lru_cache(maxsize=16)
def number_table(numbers: bytes, device: torch.device, stream: int) -> Tensor:
    """Return the numbers of a step on the device, (n,) int32. Launches with equal numbers share them."""
    return on_device(torch.frombuffer(bytearray(numbers), dtype=torch.int32), device)


def stream_of(device: torch.device) -> int:
    """Return the current stream, a key of cached tables; 0 without a GPU."""
    return int(torch.cuda.current_stream(device).cuda_stream) if device.type == "cuda" else 0


def on_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy values to the device, from pinned memory for a GPU, so that the host does not wait."""
    # The pinned tensor is dropped at once: torch's CachingHostAllocator reuses its memory only after the copy.
    return pinned(values, device).to(device, non_blocking=True)


def pinned(values: Tensor, device: torch.device) -> Tensor:
    """Return values in memory from which a copy to the device does not let the host wait."""
    return values if device.type in ("cpu", "meta") else torch.empty_like(values, pin_memory=True).copy_(values)
