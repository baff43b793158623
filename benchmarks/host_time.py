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
from _harness import Parser, begin, columns_of, conclude, count, over, row_of
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


def milliseconds(step: Step, num_steps: int) -> float:
    """Return the least processor time of a step, of several in a row.

    One more is made before them: the collection of garbage and the turns of the others have emptied the processor's
    caches, as nothing does between the steps of a training.
    """
    step()
    marks = [time.process_time()]
    for _ in range(num_steps):
        step()
        marks.append(time.process_time())
    return 1e3 * min(after - before for before, after in pairwise(marks))


def measure(steps: dict[str, list[Step]], num_rounds: int, num_steps: int) -> dict[str, list[float]]:
    """Return the least time of each contender's steps, such as of both depths; contenders take turns."""
    least = {name: [float("inf")] * len(pair) for name, pair in steps.items()}
    names = list(steps)
    for index in range(num_rounds):
        first = index % len(names)
        for name in names[first:] + names[:first]:
            gc.collect()
            gc.disable()
            least[name] = [
                min(before, milliseconds(step, num_steps))
                for before, step in zip(least[name], steps[name], strict=True)
            ]
            gc.enable()
    return least


def summary(least: dict[str, list[float]], depths: list[int]) -> dict[str, dict[str, float | None]]:
    """Return a row for each contender: what a block and a step cost, and its own part of both."""
    found: dict[str, tuple[float, float]] = {}
    for name, (few, many) in least.items():
        block = (many - few) / (depths[1] - depths[0])
        found[name] = block, few - depths[0] * block
    base_block, base_step = found[BASELINE]
    peer = found["fsdp2"][0] - base_block if "fsdp2" in found else None
    return {
        name: {
            "block": block,
            "own block": block - base_block,
            "step": step,
            "own step": step - base_step,
            "own block / FSDP2's": over(block - base_block, peer),
        }
        for name, (block, step) in found.items()
    }


def show_kernels(options: argparse.Namespace) -> None:
    """Print what a launch of each fused layer costs, beside torch's own operators."""
    import _host_kernels

    with stubbed_kernels(), _host_kernels.without_kernels():
        steps = _host_kernels.steps()
        least = measure(steps, options.rounds, 20 * options.steps)
        found = {name: _host_kernels.row_of_kernel(steps[name], least[name]) for name in steps}
    forms = {name: ".0f" if "calls" in name else ".2f" for name in found["rms_norm"]}
    title = "Host time of a launch, microseconds and calls in Python"
    rows = [row_of(name, values) for name, values in found.items()]
    conclude(options, begin(), rows, {title: columns_of(forms, ["x forward", "x backward"])}, title)


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
        found = summary(measure(steps, options.rounds, options.steps), depths)
    rows = [row_of(name, values, kind=CONTENDERS[name].kind) for name, values in found.items()]
    columns = columns_of(dict.fromkeys(found[BASELINE], ".2f"), ["own block", "own step"])
    title = f"Host time of steps, {options.ranks} ranks, milliseconds"
    conclude(options, begin(), rows, {title: columns}, title)


if __name__ == "__main__":
    main()
