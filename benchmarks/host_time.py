"""Measures what a step costs on the host: lowtide's stages beside FSDP2, DDP and plain torch, in milliseconds a block.

Nothing else is there to be waited for: the process group is torch's fake one of --ranks ranks, tensors are a few
elements on the CPU, and lowtide runs as on an accelerator, with Triton kernels whose launches do nothing. Every block
has the nine parameters of a Llama block; every step is forward, backward, clipping and AdamW.

A round makes --steps steps in a row of each contender, for models of two depths. The difference is what a block costs,
the rest what a step does. The least of all steps counts. A contender's own time is the processor's beyond the forward
and backward of the same model in plain torch.

Example:

    python benchmarks/host_time.py --json host_time.json
    python benchmarks/host_time.py --contenders lowtide-3 fsdp2
    python benchmarks/host_time.py --kernels
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import logging
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from _contenders import BUILDERS, CONTENDERS, Setup
from _harness import Parser, begin, count, make_table, over, shown, write_json
from _model import Stack
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

WIDTH = 16
BASELINE = "alone"
NAMES = [BASELINE, "single", "ddp", "fsdp2", *(f"lowtide-{stage}" for stage in range(4))]
CONFIG = {"communication": {"transport": "native"}, "steps_per_print": 0}
Step = Callable[[], object]


class Block(nn.Module):
    """The parameters of a Llama block: two norms, four weights of attention, three of the MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.attention = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.mlp = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value, output = self.attention
        gate, up, down = self.mlp
        y = self.norms[0](x)
        x = x + output(query(y) * key(y) + value(y))
        y = self.norms[1](x)
        out: Tensor = x + down(gate(y) * up(y))
        return out


def build_step(name: str, num_blocks: int) -> Step:
    """Build a contender of `_contenders.py` for a model of so many blocks."""
    contender = CONTENDERS[name]
    options = contender.options | ({"more": CONFIG} if contender.kind == "lowtide" else {})
    model = Stack(Block() for _ in range(num_blocks))
    trainer = BUILDERS[contender.kind](model, Setup(clip=1.0), **options)
    if isinstance(trainer.model, nn.parallel.DistributedDataParallel):

        def done(_: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
            future = torch.futures.Future[Tensor]()
            future.set_result(bucket.buffer())
            return future

        trainer.model.register_comm_hook(None, done)  # the fake group's futures have no result
    x, targets = torch.ones(1, WIDTH), torch.zeros(1, WIDTH)
    return lambda: trainer.step(x, targets)


@contextlib.contextmanager
def stubbed_kernels() -> Iterator[None]:
    """Let lowtide take the CPU for an accelerator with Triton, whose kernels take no time."""

    def launch_squares(*args: Any, S_ptr: Tensor | None = None, **kwargs: Any) -> None:
        if S_ptr is not None:
            S_ptr.zero_()  # else the norm is of memory as it was found

    with contextlib.ExitStack() as stack:
        for name, stub in (
            ("offload.PagePool.is_possible", lambda: False),
            ("zero.unit.stages_early", lambda device: False),
            ("kernels.sum_of_squares.uses_triton", lambda *args: True),
            ("kernels.optimizer_step.uses_triton", lambda *args: True),
            ("kernels.exact_sum.uses_triton", lambda *args: True),
            ("engine.step.step_update._is_waited_for", lambda device: True),
            ("kernels.triton.sum_of_squares.launch", launch_squares),
            ("kernels.triton.optimizer_step.launch", lambda *args, **kwargs: None),
        ):
            stack.enter_context(mock.patch(f"lowtide.{name}", stub))
        yield


def milliseconds(step: Step, num_steps: int) -> tuple[float, float]:
    """Return the least wall and processor time of a step, of several in a row.

    One more is made before them: the collection of garbage and the turns of the others have emptied the processor's
    caches, as nothing does between the steps of a training.
    """
    step()
    marks = [(time.perf_counter(), time.process_time())]
    for _ in range(num_steps):
        step()
        marks.append((time.perf_counter(), time.process_time()))
    taken = [(after[0] - before[0], after[1] - before[1]) for before, after in pairwise(marks)]
    return 1e3 * min(wall for wall, _ in taken), 1e3 * min(processor for _, processor in taken)


def measure(steps: dict[str, list[Step]], num_rounds: int, num_steps: int) -> dict[str, list[list[float]]]:
    """Return the least wall and processor time of each contender at both depths; contenders take turns."""
    least = {name: [[float("inf")] * 2 for _ in pair] for name, pair in steps.items()}
    names = list(steps)
    for index in range(num_rounds):
        first = index % len(names)
        for name in names[first:] + names[:first]:
            gc.collect()
            gc.disable()
            for depth, step in enumerate(steps[name]):
                least[name][depth] = list(map(min, least[name][depth], milliseconds(step, num_steps)))
            gc.enable()
    return least


def summary(least: dict[str, list[list[float]]], depths: list[int]) -> dict[str, dict[str, float | None]]:
    """Return a row for each contender: what a block and a step cost, and its own part of both."""
    found: dict[str, tuple[list[float], list[float]]] = {}
    for name, (few, many) in least.items():
        block = [(large - small) / (depths[1] - depths[0]) for small, large in zip(few, many, strict=True)]
        found[name] = block, [whole - depths[0] * one for whole, one in zip(few, block, strict=True)]
    base_block, base_step = found[BASELINE]
    own = {name: block[1] - base_block[1] for name, (block, _) in found.items()}
    return {
        name: {
            "block, wall": block[0],
            "block, processor": block[1],
            "own block": own[name],
            "step, wall": step[0],
            "step, processor": step[1],
            "own step": step[1] - base_step[1],
            "own block / FSDP2's": over(own[name], own.get("fsdp2")),
        }
        for name, (block, step) in found.items()
    }


def show_kernels(options: argparse.Namespace) -> None:
    """Print what a launch of each fused layer costs, beside torch's own operators."""
    import _host_kernels

    with stubbed_kernels():
        rows = _host_kernels.measure(20 * options.rounds)
    names = list(rows["rms_norm"])
    lines = [
        [name, *(shown(row[key], ".0f" if "calls" in key else ".2f") for key in names)] for name, row in rows.items()
    ]
    begin().print(make_table("Host time of a launch, microseconds and calls in Python", ["kernel", *names], lines))
    write_json(options, {"torch": torch.__version__, "rows": rows})


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the checked command line; end the program with a message if it is not legal."""
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--contenders", nargs="+", choices=NAMES, default=NAMES, metavar="NAME", help=f"of {', '.join(NAMES)}")
    add("--depths", nargs=2, type=int, default=[2, 34], metavar="BLOCKS", help="of the two models (default: 2 34)")
    add("--ranks", type=count(), default=8, help="of the fake process group (default: 8)")
    add("--rounds", type=count(), default=15, help="default: 15")
    add("--steps", type=count(), default=5, help="of a contender in a round (default: 5)")
    add("--kernels", action="store_true", help="measure launches of fused layers, whose kernels do nothing, and end")
    options = parser.parse_args(arguments)
    if not 0 < options.depths[0] < options.depths[1]:
        parser.error(f"--depths: expected two numbers of blocks, the larger one last, found {options.depths}")
    return options


def main() -> None:
    options = parse_arguments()
    depths = options.depths
    logging.getLogger("lowtide").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=options.ranks)
    if options.kernels:
        show_kernels(options)
        return
    with stubbed_kernels():
        chosen = dict.fromkeys([BASELINE, *options.contenders])
        steps = {name: [build_step(name, depth) for depth in depths] for name in chosen}
        for step in [step for pair in steps.values() for step in pair]:
            milliseconds(step, 2)
        rows = summary(measure(steps, options.rounds, options.steps), depths)
    lines = [[name, *(shown(one, ".2f") for one in row.values())] for name, row in rows.items()]
    headings = ["contender", *rows[BASELINE]]
    begin().print(make_table(f"Host time of steps, {options.ranks} ranks, milliseconds", headings, lines))
    write_json(options, {"torch": torch.__version__, "depths": depths, "rows": rows})


if __name__ == "__main__":
    main()
