"""Measures what a step costs on the host: lowtide's stages beside FSDP2, DDP and plain torch, in milliseconds a block.

A GPU that computes a block in 2 ms waits for a host that takes longer. Here nothing else is there to be waited for: the
process group is torch's fake one of --ranks ranks, tensors are a few elements on the CPU, and lowtide runs as it would
on an accelerator, with Triton kernels whose launches do nothing. So what is left is Python, and the calls of torch's
operators. Every block has the nine parameters of a Llama block; every step is forward, backward, clipping and AdamW.

A round makes --steps steps in a row of each contender, for models of two depths, after one that is not counted. The
difference is what a block costs, the rest what a step does. Contenders take turns, and the least of all their steps
counts: what else the machine does can only add to one. A contender's own time is the processor's beyond the forward and
backward of the same model in plain torch; clipping and update are among it. On a GPU each operator costs some
microseconds more: --operators counts them, and --profile shows where the time goes.

Example:

    python benchmarks/host_time.py --json host_time.json
    python benchmarks/host_time.py --contenders lowtide-3 fsdp2 --bf16
    python benchmarks/host_time.py --operators lowtide-3
    python benchmarks/host_time.py --profile lowtide-3
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import cProfile
import gc
import logging
import pstats
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from _harness import Parser, begin, count, make_table, shown, write_json
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import lowtide

WIDTH = 16
CLIP = 1.0
BASELINE = "model alone"
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


class Model(nn.Module):
    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        loss: Tensor = self.head(x).float().square().mean()
        return loss


def by_torch(model: nn.Module, x: Tensor) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> None:
        model(x).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()

    return step


def model_alone(num_blocks: int, dtype: torch.dtype) -> Step:
    model, x = Model(num_blocks).to(dtype), torch.ones(1, WIDTH, dtype=dtype)

    def step() -> None:
        model(x).backward()
        model.zero_grad()

    return step


def plain(num_blocks: int, dtype: torch.dtype) -> Step:
    return by_torch(Model(num_blocks).to(dtype), torch.ones(1, WIDTH, dtype=dtype))


def ddp(num_blocks: int, dtype: torch.dtype) -> Step:
    model = DistributedDataParallel(Model(num_blocks).to(dtype))
    model.register_comm_hook(None, lambda _, bucket: done(bucket.buffer()))  # the fake group's futures have no result
    return by_torch(model, torch.ones(1, WIDTH, dtype=dtype))


def done(result: Tensor) -> torch.futures.Future[Tensor]:
    future = torch.futures.Future[Tensor]()
    future.set_result(result)
    return future


def fsdp2(num_blocks: int, dtype: torch.dtype) -> Step:
    model = Model(num_blocks)
    options: dict[str, Any] = {"mesh": init_device_mesh("cpu", (dist.get_world_size(),))}
    options["mp_policy"] = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for module in (*model.blocks, model):
        fully_shard(module, **options)
    return by_torch(model, torch.ones(1, WIDTH, dtype=dtype))


def ours(stage: int, num_blocks: int, dtype: torch.dtype) -> Step:
    config: dict[str, Any] = {
        "optimizer": {"type": "adamw"},
        "zero_optimization": {"stage": stage},
        "communication": {"transport": "native"},
        "gradient_clipping": CLIP,
        "bf16": {"enabled": dtype == torch.bfloat16},
        "steps_per_print": 0,
    }
    engine = lowtide.initialize(Model(num_blocks), config)
    x = torch.ones(1, WIDTH)
    return lambda: engine.train_step((x,))


CONTENDERS: dict[str, Callable[[int, torch.dtype], Step]] = {
    BASELINE: model_alone,
    "torch": plain,
    "ddp": ddp,
    "fsdp2": fsdp2,
    **{f"lowtide-{stage}": partial(ours, stage) for stage in range(4)},
}


@contextlib.contextmanager
def stubbed_kernels() -> Iterator[None]:
    """Inside of it lowtide takes the CPU for an accelerator with Triton, whose kernels take no time."""

    def launch_squares(*args: Any, S_ptr: Tensor | None = None, **kwargs: Any) -> None:
        if S_ptr is not None:
            S_ptr.zero_()  # else the norm is of memory as it was found

    def launch(*args: Any, **kwargs: Any) -> None: ...

    with contextlib.ExitStack() as stack:
        for name, stub in (
            ("offload.PagePool.is_possible", lambda: False),
            ("zero.unit.stages_early", lambda device: False),
            ("kernels.sum_of_squares.uses_triton", lambda *args: True),
            ("kernels.optimizer_step.uses_triton", lambda *args: True),
            ("kernels.exact_sum.uses_triton", lambda *args: True),
            ("engine.step.step_update._is_waited_for", lambda device: True),
            ("kernels.triton.sum_of_squares.launch", launch_squares),
            ("kernels.triton.optimizer_step.launch", launch),
        ):
            stack.enter_context(mock.patch(f"lowtide.{name}", stub))
        yield


def milliseconds(step: Step, num_steps: int) -> tuple[float, float]:
    """The least wall and processor time of a step, of several in a row.

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


class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """Counts the operators that are called inside."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.counts: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def operators_per_block(steps: tuple[Step, Step], depths: tuple[int, int]) -> dict[str, float]:
    found = []
    for step in steps:
        with Operators() as mode:
            step()
        found.append(mode.counts)
    few, many = found
    per_block = {name: (many[name] - few[name]) / (depths[1] - depths[0]) for name in many}
    return {name: count for name, count in sorted(per_block.items(), key=lambda item: -item[1]) if count}


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Gives the checked command line; ends the program with a message where it is not legal."""
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS), metavar="NAME", help="default: all")
    add("--depths", nargs=2, type=int, default=(2, 34), metavar="BLOCKS", help="of the two models (default: 2 34)")
    add("--ranks", type=count(), default=8, help="of the fake process group (default: 8)")
    add("--rounds", type=count(), default=15, help="default: 15")
    add("--steps", type=count(), default=5, help="of a contender in a round (default: 5)")
    add("--bf16", action="store_true", help="parameters are computed in bfloat16, sums are float32")
    add("--operators", choices=CONTENDERS, metavar="NAME", help="count the operators of one contender, and end")
    add("--profile", choices=CONTENDERS, metavar="NAME", help="show the functions that one spends its time in, and end")
    options = parser.parse_args(arguments)
    if not 0 < options.depths[0] < options.depths[1]:
        parser.error(f"--depths: expected two numbers of blocks, the larger one last, found {options.depths}")
    return options


def main() -> None:
    options = parse_arguments()
    depths = tuple(options.depths)
    logging.getLogger("lowtide").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=options.ranks)
    dtype = torch.bfloat16 if options.bf16 else torch.float32
    alone = options.operators or options.profile
    names = [alone] if alone else [BASELINE, *(name for name in options.contenders if name != BASELINE)]
    with stubbed_kernels():
        steps = {name: (CONTENDERS[name](depths[0], dtype), CONTENDERS[name](depths[1], dtype)) for name in names}
        for pair in steps.values():
            for step in pair:
                milliseconds(step, 2)
        if options.operators:
            counts = operators_per_block(steps[alone], depths)
            print(f"{sum(counts.values()):.1f} operators a block")
            print("\n".join(f"{count:6.1f} {name}" for name, count in counts.items()))
            return
        if options.profile:
            profile = cProfile.Profile()
            profile.runcall(milliseconds, steps[alone][1], 10)
            pstats.Stats(profile, stream=sys.stdout).sort_stats("tottime").print_stats(45)
            return
        times = measure(steps, options.rounds, options.steps)
    rows = summary(times, depths)
    show(rows, f"Host time of steps, {options.ranks} ranks, {str(dtype).removeprefix('torch.')}")
    write_json(options, {"torch": torch.__version__, "depths": depths, "rows": rows})


Times = dict[str, list[list[tuple[float, float]]]]
"""By contender, round and depth: wall and processor time of a step."""


def measure(steps: dict[str, tuple[Step, Step]], num_rounds: int, num_steps: int) -> Times:
    times: Times = {name: [] for name in steps}
    for index in range(num_rounds):
        names = list(steps)
        for name in names[index % len(names) :] + names[: index % len(names)]:
            gc.collect()
            gc.disable()
            times[name].append([milliseconds(step, num_steps) for step in steps[name]])
            gc.enable()
    return times


def summary(times: Times, depths: tuple[int, int]) -> list[dict[str, Any]]:
    def least(name: str, depth: int, clock: int) -> float:
        return min(of_round[depth][clock] for of_round in times[name])

    def per_block(name: str, clock: int) -> float:
        return (least(name, 1, clock) - least(name, 0, clock)) / (depths[1] - depths[0])

    def per_step(name: str, clock: int) -> float:
        return least(name, 0, clock) - depths[0] * per_block(name, clock)

    rows = []
    for name in times:
        row: dict[str, Any] = {"contender": name}
        for clock, kind in enumerate(("wall", "processor")):
            row[f"block, {kind}"], row[f"step, {kind}"] = per_block(name, clock), per_step(name, clock)
        row["own block"] = row["block, processor"] - per_block(BASELINE, 1)
        row["own step"] = row["step, processor"] - per_step(BASELINE, 1)
        rows.append(row)
    beyond = {row["contender"]: row["own block"] for row in rows}
    for row in rows:
        row["of fsdp2"] = row["own block"] / beyond["fsdp2"] if "fsdp2" in beyond else None
    return rows


def show(rows: list[dict[str, Any]], title: str) -> None:
    headings = ["contender", "ms a block", "processor", "own", "ms a step", "processor", "own", "own block / FSDP2's"]
    lines = []
    for row in rows:
        contender, *numbers = (row[key] for key in _COLUMNS)
        lines.append([contender, *("" if number is None else shown(number, ".2f") for number in numbers)])
    begin().print(make_table(title, headings, lines))


_COLUMNS = (
    *("contender", "block, wall", "block, processor", "own block", "step, wall", "step, processor", "own step"),
    "of fsdp2",
)


if __name__ == "__main__":
    main()
