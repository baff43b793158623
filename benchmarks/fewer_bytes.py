"""Trains the example's GPT with fewer bytes of a parameter, or fewer bits of messages, and compares losses.

Every contender sees the same batches from the same initial values, in bfloat16. The loss of training is the mean of
the last tenth of the steps, the others of text that nobody trained on, with the last weights and with averaged ones.
Shown are means over the seeds, and of the differences from the first contender with the same seed, with their standard
error. --messages compares messages between four ranks, which stand for a host each.

Example:

    python benchmarks/fewer_bytes.py --batch-size 8 --context 64 --json fewer_bytes.json
    python benchmarks/fewer_bytes.py --messages --batch-size 8 --context 64 --seeds 0 1 --json fewer_bits.json
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from _harness import Column, Contender, JobParser, Result, Row, by_name, compare, count, run_job

import lowtide

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
KINDS = ("training", "validation", "averaged")
DECAY = 0.995  # of averages over some 200 steps: the loss of what those steps have in common, with less chance in it
NARROW: dict[str, Any] = {"data_types": {"grad_accum_dtype": "bf16"}, "communication_data_type": "bf16"}


def _bytes(name: str, masters: bool | str, states: str = "bf16", **more: Any) -> Contender:
    """More of a config: its masters and the dtype of its optimizer's states."""
    return Contender(name, name, "lowtide", {"bf16": {"enabled": True, "masters": masters}, "state": states, **more})


def _bits(name: str, stage: int, **bits: int) -> Contender:
    """More of a config: the bits of its messages."""
    more = {"zero_optimization": {"stage": stage}, "communication": {"transport": "sockets", **bits}}
    return Contender(name, name, "lowtide", more)


BYTES = by_name(
    _bytes("fp32 masters", True, "fp32"),
    _bytes("no masters, all bf16", False, **NARROW),
    _bytes("kahan, all bf16", "kahan", **NARROW),
    _bytes("split, states of 8 bits", "int8", "int8", **NARROW),
)
MESSAGES = by_name(
    _bits("plain", 2),
    _bits("differences 4, gradients 4", 2, gradient_bits=4, weight_bits=4, ranks_of_host=1),
    _bits("weights 8, gradients 4", 3, gradient_bits=4, weight_bits=8, ranks_of_host=1),
    _bits("weights 4, gradients 4", 3, gradient_bits=4, weight_bits=4, ranks_of_host=1),
)


def config_of(job: Mapping[str, Any]) -> dict[str, Any]:
    more = dict(job["options"])
    warmup = max(job["steps"] // 20, 1)
    params = {"lr": job["learning_rate"], "weight_decay": 0.1, "state_dtype": more.pop("state", "fp32")}
    schedule = {"warmup_num_steps": warmup, "total_num_steps": job["steps"] + warmup, "min_ratio": 0.1}
    return {
        "train_micro_batch_size_per_gpu": job["batch_size"] // job["ranks"],
        "bf16": {"enabled": True},
        "optimizer": {"type": "adamw", "params": params},
        "scheduler": {"type": "cosine", "params": schedule},
        "gradient_clipping": 1.0,
        "seed": job["seed"],
        "steps_per_print": 0,
        **more,
    }


def train(job: dict[str, Any]) -> dict[str, Any]:
    """On a rank: what one contender came to with one seed."""
    sys.path.insert(0, str(EXAMPLES))
    from gpt_model import GPT, GPTShape
    from text_data import Text, batches, stdlib_files

    text = Text.from_files(stdlib_files())
    shape = GPTShape(job["layers"], 4, job["width"], job["context"])
    rows = job["batch_size"] // job["ranks"]

    def given(values: torch.Tensor, count: int) -> Any:
        place = {"rank": int(os.environ["RANK"]), "world_size": job["ranks"]}
        return islice(batches(values, context=job["context"], batch_size=rows, **place), count)

    def held_out_loss() -> float:
        batches = given(text.validation, job["validation_batches"])
        return statistics.fmean(engine.eval_step(batch).item() for batch in batches)

    torch.manual_seed(job["seed"])
    with lowtide.initialize(GPT(shape), config_of(job)) as engine:
        losses, most = [], 0
        for step, batch in enumerate(given(text.train, job["steps"])):
            engine.backward(engine(**batch))
            if step == 1:
                memory = engine.memory()
                most = memory.parameter_bytes + memory.gradient_bytes + memory.optimizer_bytes
                engine.ema(DECAY)  # not before, since averages are bytes too
            losses.append(engine.step().loss)
        held_out = [held_out_loss()]
        with engine.ema_weights():
            held_out.append(held_out_loss())
    last = [loss.item() for loss in losses[-max(job["steps"] // 10, 1) :]]
    found = dict(zip(KINDS, [statistics.fmean(last), *held_out], strict=True))
    return found | {"bytes a parameter": most / shape.num_parameters}


def run(options: argparse.Namespace, row: Row, _: str | None) -> Result:
    """Run one job, whose round is a seed."""
    found = run_job("fewer_bytes:train", options, row, None, seed=options.seeds[len(row.timed)])
    return Result([found[0]["validation"]], [], more=found[0])


def columns(rows: Sequence[Row]) -> list[Column]:
    """Of each kind the mean, and of its differences from the first's the mean with its standard error."""

    def mean(kind: str, row: Row) -> float:
        return statistics.fmean(job.more[kind] for job in row.timed.values())

    def difference(kind: str, row: Row) -> str | None:
        found = [100 * (own.more[kind] / first.more[kind] - 1) for own, first in row.beside(rows[0])]
        error = f" ± {statistics.stdev(found) / math.sqrt(len(found)):.2f}" if len(found) > 1 else ""
        return f"{statistics.fmean(found):+.2f}{error} %" if found else None

    found = [Column("bytes", lambda row: row.more["bytes a parameter"])]
    for kind in KINDS:
        found.append(Column(kind, partial(mean, kind), ".4f", f"loss, {kind}"))
        found.append(Column(f"{kind},\nbeside the first", partial(difference, kind)))
    return found


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = JobParser(__doc__, BYTES | MESSAGES)
    add = parser.add_argument
    add("--messages", action="store_true", help="compare bits of messages between ranks, not bytes of a parameter")
    add("--ranks", type=count(), help="(default: 4 with --messages, else 1)")
    add("--steps", type=count(), default=2000, help="(default: 2000)")
    add("--layers", type=count(), default=4, help="(default: 4)")
    add("--width", type=count(), default=128, help="(default: 128)")
    add("--context", type=count(), default=128, help="bytes that the model sees (default: 128)")
    add("--batch-size", type=count(), default=16, help="pieces of text, of all ranks (default: 16)")
    add("--learning-rate", type=float, default=3e-3, help="at its highest point (default: 0.003)")
    add("--seeds", type=int, nargs="+", default=[0, 1, 2, 3], help="each is a round (default: 0 1 2 3)")
    add("--validation-batches", type=int, default=64, help="of a rank (default: 64)")
    parser.set_defaults(timeout=7200.0)
    options = parser.parse_args(arguments)
    options.ranks, options.rounds = options.ranks or (4 if options.messages else 1), len(options.seeds)
    return parser.check(options, list(MESSAGES if options.messages else BYTES))


def main() -> int:
    options = parse_arguments()
    title = f"Losses after {options.steps} steps"
    return compare(options, title, partial(run, options), lambda rows: {title: columns(rows)})


if __name__ == "__main__":
    sys.exit(main())
