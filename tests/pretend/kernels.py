"""The optimizer's kernel on the pretended device: the launches are those of `kernels/triton/optimizer_step.py`.

In the place of Triton's kernel, the C++ kernel of the CPU computes the same bits. It reads what Triton's reads, when
Triton's does: the numbers of the step, the factor and the skip flag in memory of the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from typing import Any
from unittest import mock
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from lowtide.kernels import optimizer_step
from lowtide.kernels.dispatch import uses_triton
from lowtide.kernels.optimizer_states import StoredState, step_seed
from lowtide.kernels.optimizer_step import ShardUpdate, cpu_kernel
from lowtide.kernels.weight_rounding import Rounding
from lowtide.optimizers import OPTIMIZERS

TILE_NUMEL = 1024
FIELDS = ("w", "g", "s", "v", "s_scale", "v_scale", "out", "rest")


@cache
def operator() -> Any:
    """An operator that the device runs as all operators of the CPU: at once, or when a graph is replayed."""
    library = torch.library.Library("pretend_kernels", "DEF")
    changed = (f"Tensor({name}!)? {name}" for name in FIELDS if name not in ("w", "g"))
    library.define(
        f"update(Tensor(w!) w, Tensor g, {', '.join(changed)}, Tensor words, Tensor c, Tensor? factor, Tensor? skip, "
        "Tensor? ends, Tensor? choices, int first, int number, bool is_drawn, float scale, str rule) -> ()"
    )
    library.impl("update", update, "CPU")
    operator.library = library  # type: ignore[attr-defined]  # else it is undefined again
    return torch.ops.pretend_kernels.update


def update(
    w: Tensor, g: Tensor, s: Tensor | None, v: Tensor | None, s_scale: Tensor | None, v_scale: Tensor | None,
    out: Tensor | None, rest: Tensor | None, words: Tensor, c: Tensor, factor: Tensor | None, skip: Tensor | None,
    ends: Tensor | None, choices: Tensor | None, first: int, number: int, is_drawn: bool, scale: float, rule: str,
) -> None:  # fmt: skip
    """first: number of the shard's first program. number: of its first element, for its random bits."""
    if skip is not None and bool(skip.any()):
        return
    rows = [{"row": row} for row in c.view(-1, 8).tolist()]
    runs: list[tuple[int, Any]] = []
    begin = first * TILE_NUMEL
    found = [(w.numel(), 0)]
    if ends is not None and choices is not None:
        found = list(zip((ends - begin).tolist(), choices.tolist(), strict=True))
    for end, choice in found:
        if end > 0 and (not runs or runs[-1][0] < w.numel()):
            runs.append((min(end, w.numel()), rows[choice]))
    step = int(words[0]) * pow(0x9E3779B1, -1, 1 << 32) % (1 << 32)
    assert step_seed(step) == int(words[0]) % (1 << 32) and runs[-1][0] == w.numel()
    record = replace(OPTIMIZERS[rule], coefficients=lambda options, step: options["row"])
    states = [StoredState(one, scale) for one, scale in ((s, s_scale), (v, v_scale)) if one is not None]
    kernel = cpu_kernel()
    assert kernel is not None
    rounding = Rounding(0, number % (1 << 64)) if is_drawn else None
    shard = ShardUpdate(w, g, states, runs, [step] * len(runs), out, rounding, rest)
    assert kernel.serves(record, shard)
    key = tuple(int(word) % (1 << 32) for word in words[1:3])
    with mock.patch.object(optimizer_step, "step_key", lambda seed, step: key):
        kernel.update(record, shard, step, scale if factor is None else float(factor))


@contextmanager
def optimizer_kernel() -> Iterator[list[int]]:
    """Let updates on the pretended device be launched as on a GPU. The list takes the number of programs of each."""
    from lowtide.kernels.triton import optimizer_step as triton_form

    tables: dict[int, list[Any]] = {}  # by the address of a table: its rows
    tensors = WeakValueDictionary[int, Tensor]()  # by address
    launches: list[int] = []
    tensors_of, shard_table = triton_form._tensors, triton_form.shard_table

    def seen(shard: ShardUpdate) -> Any:
        found = tensors_of(shard)
        tensors.update({one.data_ptr(): one for one in found if one is not None})
        return found

    def table(rows: Any, *args: Any) -> Any:
        found = shard_table(rows, *args)
        tables[found[0].data_ptr()] = rows
        return found

    def launch(kernel: Any, grid: tuple[int], **given: Any) -> None:
        launches.append(*grid)
        for first, numel, number, *addresses in tables[given["SHARDS_ptr"].data_ptr()]:
            parts = [tensors[one] if one else None for one in addresses]
            assert parts[0] is not None and parts[0].numel() == numel
            operator()(
                *parts, given["WORDS_ptr"], given["C_ptr"], given["FACTOR_ptr"], given["SKIP_ptr"], given["ENDS_ptr"],
                given["CHOICES_ptr"], first, number, given["IS_DRAWN"], given["factor"], given["RULE"],
            )  # fmt: skip

    with ExitStack() as stack:
        for owner, name, stub in (
            (optimizer_step, "uses_triton", lambda *args: args[2].device.type == "pretend" or uses_triton(*args)),
            (triton_form, "_tensors", seen),
            (triton_form, "shard_table", table),
            (triton_form, "launch", launch),
        ):
            stack.enter_context(mock.patch.object(owner, name, stub))
        yield launches
