"""Measures what a rank's host does in a job of so many ranks, without them.

Torch's fake process group says that there are 8 to 16,384, collectives move nothing, and one rank builds an
engine and makes steps. Work is counted in instructions of Python and calls of functions in C, the least of some rounds.
The order of a step's collectives must not depend on the number of ranks.

Example:

    python benchmarks/scale.py --png docs/images/scale.png
    python benchmarks/scale.py --ranks 8 16384 --zero 0 --rounds 5 --json scale.json
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import FrameType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from _contenders import lowtide_config
from _harness import Column, Parser, Row, begin, columns_of, conclude, count, row_of
from _model import Stack
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import lowtide

BLOCK_NUMEL = 1024  # of a shard: see zero/layout.py
MOST = 1.2  # times the work of the smallest world
WORK = ("initialize_work", "step_work")


Cost = dict[str, Any]
"""Of one rank. Work: instructions of Python and calls into C. order: a digest of a step's collectives."""


class Wire:
    """Stands for the collectives: takes note of them, and moves nothing."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self.names: list[str] = []
        self.sent_bytes = 0

    def note(self, name: str, times: int, output: Tensor, source: Any = None, *_: Any, **__: Any) -> Wire:
        """Note a collective, which sends the whole tensor so many times."""
        whole = source if name == "reduce-scatter" else output
        # Counters are packed into words of 64 bits, by as many bits as the number of ranks has.
        is_packed = whole.dtype == torch.int64
        self.names.append(name if is_packed else f"{name} {whole.numel()} {whole.dtype}")
        self.sent_bytes += times * whole.nbytes // self._ranks * (self._ranks - 1)
        return self

    def wait(self, *_: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


@contextlib.contextmanager
def world_of(ranks: int) -> Iterator[Wire]:
    """This process as rank 0 of so many."""
    wire = Wire(ranks)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    with (
        mock.patch("lowtide.comm.native._all_gather", partial(wire.note, "gather", 1)),
        mock.patch("lowtide.comm.native._reduce_scatter", partial(wire.note, "reduce-scatter", 1)),
        mock.patch("lowtide.comm.native._all_reduce", partial(wire.note, "all-reduce", 2)),
    ):
        try:
            yield wire
        finally:
            dist.destroy_process_group()


def cost_of(ranks: int, stage: int, num_blocks: int, width: int) -> Cost:
    """Return the cost of the third step, when all that is made once is there."""
    x, made = torch.ones(1, width), list[lowtide.Engine]()
    config = lowtide_config(stage, optimizer={"type": "sgd"}, gradient_clipping=1.0)
    model = Stack(nn.Linear(width, width, bias=False) for _ in range(num_blocks))
    with world_of(ranks) as wire:
        build_work = work_of(lambda: made.append(lowtide.initialize(model, config)))
        (engine,) = made
        engine.train_step((x,))
        wire.names.clear()
        wire.sent_bytes = 0
        engine.train_step((x,))
        order, sent = list(wire.names), wire.sent_bytes
        step_work = work_of(lambda: engine.train_step((x,)))
        engine.close()
    gc.collect()
    digest = hashlib.sha256("\n".join(order).encode()).hexdigest()[:12]
    work = {"initialize_work": build_work, "step_work": step_work}
    return {**work, "collectives": len(order), "sent_bytes": sent, "order": digest}


def work_of(call: Callable[[], object]) -> int:
    """Instructions of Python, and calls of what is written in C, in this thread."""
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    def profile(_: FrameType, event: str, __: object) -> None:
        nonlocal count
        count += event == "c_call"

    before = sys.gettrace(), sys.getprofile()
    sys.settrace(trace)
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.settrace(before[0])
        sys.setprofile(before[1])
    return count


def costs_by_world(worlds: Sequence[int], stage: int, num_blocks: int, rounds: int) -> list[Cost]:
    """Return the least work of each world. Raises RuntimeError where an order of collectives differs."""
    width = 1
    while width * width < BLOCK_NUMEL * max(worlds):
        width *= 2
    cost_of(worlds[0], stage, num_blocks, width=128)  # what is made once in a process
    all_rounds = [[cost_of(ranks, stage, num_blocks, width) for ranks in worlds] for _ in range(rounds)]
    if len({one["order"] for some in all_rounds for one in some}) > 1:
        raise RuntimeError(f"the order of collectives depends on the number of ranks: {all_rounds}")
    by_world = zip(*all_rounds, strict=True)
    return [some[0] | {name: min(one[name] for one in some) for name in WORK} for some in by_world]


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 1 where the host of the largest world has more than 1.2 times the work of the smallest."""
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--ranks", type=count(2), nargs="+", default=[8, 64, 512, 4096, 16384], help="powers of two")
    add("--zero", type=int, choices=range(4), default=3, help="the ZeRO stage")
    add("--blocks", type=count(), default=8, help="of the model")
    add("--rounds", type=count(), default=2)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    logging.disable(logging.INFO)
    worlds = sorted(options.ranks)
    costs = costs_by_world(worlds, options.zero, options.blocks, options.rounds)
    rows = [row_of(f"{ranks:,} ranks", one) for ranks, one in zip(worlds, costs, strict=True)]

    def ratio(name: str, row: Row) -> float:
        return float(row.more[name] / rows[0].more[name])

    columns = columns_of({"initialize_work": ",d", "step_work": ",d", "collectives": "d", "sent_bytes": ",d"})
    for name in WORK:
        heading = f"{name}, x the first"
        columns.append(Column(heading, partial(ratio, name), ".3f", heading, MOST))
    title = f"Work of a rank's host at stage {options.zero}"
    conclude(options, begin(), rows, {title: columns}, title)
    return int(any(ratio(name, rows[-1]) > MOST for name in WORK))


if __name__ == "__main__":
    sys.exit(main())
