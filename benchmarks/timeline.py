"""Simulates a step on GPUs: which collectives run beside the computing, from the order in which they are called.

Nothing is measured here. The order is the planner's (`engine/plan/step_order.py`), and that is the engine's own.
FSDP2's is written down from its code, with the units of torchtitan's Llama: the embedding, each block, norm and head
together, these not resharded after forward. The machine is a model of one: computing at a given speed, and one queue of
collectives (`engine/plan/timeline.py`).

Example:

    python benchmarks/timeline.py --tokens 8192 4096 2048 --png docs/images/timeline.png
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from _harness import check_counts
from _report import make_table
from rich.console import Console

from lowtide.engine.blueprint.blueprint import Blueprint
from lowtide.engine.config.config import Config
from lowtide.engine.plan.exchange import CollectiveCosts
from lowtide.engine.plan.llama import Shape, build
from lowtide.engine.plan.machine import Machine
from lowtide.engine.plan.step_order import StepOrder
from lowtide.engine.plan.timeline import SimulatedSpan, SimulatedTimeline

_MS = 1e3


SHAPES = {
    "llama-8b": Shape(32, 4096, 32, 128256, 8192, kv_heads=8, mlp=14336),
    "llama-1b": Shape(16, 2048, 32, 128256, 8192, kv_heads=8, mlp=8192),
    "llama-70b": Shape(80, 8192, 64, 128256, 8192, kv_heads=8, mlp=28672),
}


# -- what is computed -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """What a step computes: seconds of a unit's forward and backward, and of the update."""

    shape: Shape
    machine: Machine
    tokens: int
    recomputes: bool

    def forward(self, numel: int, name: str) -> float:
        """Matrices, and causal attention in a block; an embedding only copies rows."""
        if "embedding" in name:
            return 2 * self.tokens * self.shape.hidden * 2 / self.machine.memory
        attention = 2 * self.tokens * self.shape.sequence * self.shape.hidden if "layers" in name else 0
        return (2 * numel * self.tokens + attention) / self.machine.flops

    def backward(self, numel: int, name: str) -> float:
        recomputed = self.forward(numel, name) if self.recomputes and "layers" in name else 0.0
        return 2 * self.forward(numel, name) + recomputed

    def update(self, numel: int) -> float:
        """AdamW over a shard: gradient, master, two moments read, the last three and the bf16 weights written."""
        return (4 * 4 + 3 * 4 + 2) * numel / self.machine.num_devices / self.machine.memory


# -- lowtide's order -------------------------------------------------------------------------------------------------


def run_lowtide(blueprint: Blueprint, work: Work) -> SimulatedTimeline:
    """A step of one microbatch at stage 3."""
    step = StepOrder(blueprint, CollectiveCosts(blueprint, work.machine), lambda group: group.full_bytes, is_last=True)
    numels = {unit.name: sum(g.layout.padded_numel for g in groups) for unit, groups in blueprint.places[0].units}
    timeline = step.timeline(_OfUnits(work, numels))
    timeline.phase = "end"
    timeline.compute("update", work.update(sum(numels.values())))
    return timeline


@dataclass(frozen=True)
class _OfUnits:
    """Work by the name of a unit; outside of units nothing is computed."""

    work: Work
    numels: dict[str, int]

    def forward(self, name: str) -> float:
        return self.work.forward(self.numels[name], name) if name in self.numels else 0.0

    def backward(self, name: str) -> float:
        return self.work.backward(self.numels[name], name) if name in self.numels else 0.0


# -- FSDP2's order ---------------------------------------------------------------------------------------------------


def run_fsdp2(blueprint: Blueprint, work: Work) -> SimulatedTimeline:
    """As `fully_shard` on each unit: the next forward's gather beside this one, the next backward's before it.

    The embedding and the rest, with the head, are torchtitan's. Source: torch/distributed/fsdp/_fully_shard,
    `FSDPParamGroup.pre_forward`, `pre_backward`, `post_backward`; bf16 parameters, float32 reductions.
    """
    timeline, exchange = SimulatedTimeline(), CollectiveCosts(blueprint, work.machine)
    units = [(unit.name, groups[0]) for unit, groups in blueprint.places[0].units if not unit.is_rest]

    def gather(index: int) -> SimulatedSpan:
        return timeline.start("gather", units[index][0], exchange.gather(units[index][1]).seconds)

    numels = [group.layout.padded_numel for _, group in units]
    coming = {0: gather(0)}
    for index, (name, _) in enumerate(units):
        timeline.wait(coming.pop(index))
        if index + 1 < len(units):
            coming[index + 1] = gather(index + 1)
        timeline.compute(name, work.forward(numels[index], name))
    timeline.phase = "backward"
    reducing: SimulatedSpan | None = None
    for index, (name, group) in reversed(list(enumerate(units))):
        if index in coming:
            timeline.wait(coming.pop(index))
        if index:
            coming[index - 1] = gather(index - 1)
        timeline.compute(name, work.backward(numels[index], name))
        if reducing is not None:
            timeline.wait(reducing)
        reducing = timeline.start("reduce", name, exchange.reduce(group).seconds)
    timeline.phase = "end"
    assert reducing is not None
    timeline.wait(reducing)
    timeline.compute("update", work.update(sum(numels)))
    return timeline


# -- the command -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One contender at one number of tokens."""

    contender: str
    tokens: int
    step_seconds: float
    exposed_share: float
    exposed: dict[str, float]


def contenders(shape: Shape, machine: Machine) -> dict[str, Callable[[Work], SimulatedTimeline]]:
    """By name: each simulates a step."""
    model = build(shape)

    def blueprint(**zero: Any) -> Blueprint:
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 3, **zero},
            "optimizer": {"type": "AdamW", "params": {}},
        }
        return Blueprint.of(Config.load(config).resolve(machine.num_devices), model, machine.num_devices, device="cuda")

    ours, without = (
        blueprint(),
        blueprint(stage3_prefetch_bucket_size=0, units=[f"layers.{index}" for index in range(shape.layers)]),
    )
    return {
        "lowtide": lambda work: run_lowtide(ours, work),
        "lowtide, one unit at a time": lambda work: run_lowtide(without, work),
        "FSDP2": lambda work: run_fsdp2(ours, work),
    }


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Ends the program with what was expected and found where the command line cannot mean anything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-8b")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192], help="of a rank's microbatch")
    parser.add_argument("--tflops", type=float, default=450.0, help="that matrices reach, of each rank")
    parser.add_argument("--gbytes", type=float, default=330.0, help="GB/s that a ring of the ranks reaches, each way")
    parser.add_argument("--memory-gbytes", type=float, default=2800.0, help="GB/s of a rank's memory")
    parser.add_argument("--latency-us", type=float, default=30.0, help="of a collective")
    parser.add_argument("--recompute", action="store_true", help="activation checkpointing of the blocks")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--png", type=Path, help="of the first number of tokens")
    options = parser.parse_args(arguments)
    least = {"ranks": 2, **dict.fromkeys(("tflops", "gbytes", "memory_gbytes"), 1)}
    for name, low in least.items():
        if not math.isfinite(getattr(options, name)) or getattr(options, name) < low:
            flag = name.replace("_", "-")
            parser.error(f"--{flag}: expected at least {low}, found {getattr(options, name):g}")
    check_counts(parser, options, ["tokens"])
    return options


def machine_of(options: argparse.Namespace) -> Machine:
    """One host with so many ranks."""
    return Machine(
        devices_per_host=options.ranks,
        flops=options.tflops * 1e12,
        intra=options.gbytes * 1e9,
        memory=options.memory_gbytes * 1e9,
        intra_latency=options.latency_us * 1e-6,
    )


def main() -> None:
    """Simulates, prints the table, writes what was asked for."""
    options = parse_arguments()
    machine, shape = machine_of(options), SHAPES[options.shape]
    runs = contenders(shape, machine)
    rows, drawn = [], {}
    for tokens in options.tokens:
        for name, run in runs.items():
            timeline = run(Work(shape, machine, tokens, options.recompute))
            rows.append(Row(name, tokens, timeline.now, timeline.exposed_share, timeline.exposed))
            if tokens == options.tokens[0]:
                drawn[name] = timeline
    title = f"Simulated, not measured: {options.shape} on {options.ranks} ranks, {options.tflops:g} TFLOP/s"
    Console(width=130).print(_table(f"{title}, {options.gbytes:g} GB/s", rows))
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=2))
    if options.png:
        _draw(drawn, f"{title}, {options.tokens[0]} tokens", options.png)


def _table(title: str, rows: Sequence[Row]) -> Any:
    causes = list(dict.fromkeys(cause for row in rows for cause in row.exposed))
    headings = ["contender", "tokens", "step, ms", "exposed", *(f"{cause}, ms" for cause in causes)]
    table = make_table(title, headings, [])
    for row in rows:
        cells = [f"{row.exposed.get(cause, 0.0) * _MS:.1f}" for cause in causes]
        step, share = f"{row.step_seconds * _MS:.1f}", f"{100 * row.exposed_share:.1f} %"
        table.add_row(row.contender, str(row.tokens), step, share, *cells)
    return table


def _draw(timelines: dict[str, SimulatedTimeline], title: str, path: Path) -> None:
    """Two lines a contender: computing above, collectives below."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    colours = {"compute": "tab:blue", "gather": "tab:orange", "reduce": "tab:red"}
    figure = Figure(figsize=(12, 1.6 * len(timelines)), layout="constrained")
    panels = figure.subplots(len(timelines), 1, sharex=True, squeeze=False)
    for axes, (name, timeline) in zip(panels[:, 0], timelines.items(), strict=True):
        for kind, colour in colours.items():
            spans = [(s.start * _MS, (s.end - s.start) * _MS) for s in timeline.spans if s.kind == kind]
            axes.broken_barh(
                spans, (1 if kind == "compute" else 0, 0.9), color=colour, edgecolor="white", linewidth=0.3
            )
        axes.set_yticks([0.45, 1.45], ["collectives", "computing"])
        axes.set_title(f"{name}: {100 * timeline.exposed_share:.1f} % exposed", loc="left", fontsize=10)
    panels[-1, 0].set_xlabel("ms")
    handles = [Rectangle((0, 0), 1, 1, color=colour) for colour in colours.values()]
    figure.legend(handles, colours, loc="upper right", ncols=len(colours))
    figure.suptitle(title, x=0.01, ha="left")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
