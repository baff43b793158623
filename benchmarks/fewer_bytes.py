"""Trains the example's GPT with fewer bytes of a parameter, or fewer bits of messages, and compares losses.

Every contender sees the same batches from the same initial values, in bfloat16. The loss of training is the mean of
the last tenth of the steps, the others of text that nobody trained on, with the last weights and with averaged ones.
Shown are means over the seeds, and of the differences from the first contender with the same seed, with their standard
error. --messages compares messages between four ranks, which stand for a host each but in "two levels".

Example:

    python benchmarks/fewer_bytes.py --batch-size 8 --context 64 --json fewer_bytes.json
    python benchmarks/fewer_bytes.py --messages --batch-size 8 --context 64 --seeds 0 1 --json fewer_bits.json
"""

from __future__ import annotations

import math
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from _harness import JobError, Parser, count, environment_of, job_of, run_ranks, write_json

import lowtide

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
KINDS = ("training", "validation", "averaged")
DECAY = 0.995  # of averages over some 200 steps: the loss of what those steps have in common, with less chance in it
NARROW = {"data_types": {"grad_accum_dtype": "bf16"}, "communication_data_type": "bf16"}


def _bytes(masters: bool | str, states: str, more: dict[str, Any] | None = None) -> dict[str, Any]:
    """More of a config: its masters and the dtype of its optimizer's states."""
    return {"bf16": {"enabled": True, "masters": masters}, "state_dtype": states, **(more or {})}


def _bits(stage: int, ranks_of_host: int = 1, zero: dict[str, Any] | None = None, **bits: int) -> dict[str, Any]:
    """More of a config: the bits of its messages."""
    communication = {"transport": "sockets", **bits, **({"ranks_of_host": ranks_of_host} if bits else {})}
    return {"zero_optimization": {"stage": stage, **(zero or {})}, "communication": communication}


BYTES: dict[str, dict[str, Any]] = {
    "fp32 masters": _bytes(True, "fp32"),
    "no masters": _bytes(False, "fp32"),
    "no masters, bf16 states": _bytes(False, "bf16"),
    "no masters, all bf16": _bytes(False, "bf16", NARROW),
    "kahan": _bytes("kahan", "fp32"),
    "kahan, all bf16": _bytes("kahan", "bf16", NARROW),
    "split": _bytes("int8", "fp32"),
    "split, states of 8 bits": _bytes("int8", "int8", NARROW),
}
HPZ = {"zero_hpz_partition_size": 2}
MESSAGES: dict[str, dict[str, Any]] = {
    "plain": _bits(2),
    "gradients 4": _bits(2, gradient_bits=4),
    "differences 4, gradients 4": _bits(2, gradient_bits=4, weight_bits=4),
    "weights 8, gradients 4": _bits(3, gradient_bits=4, weight_bits=8),
    "weights 4, gradients 4": _bits(3, gradient_bits=4, weight_bits=4),
    "two levels, hpZ, differences 4, gradients 4": _bits(3, 2, HPZ, gradient_bits=4, weight_bits=4),
}


def config_of(job: Mapping[str, Any]) -> dict[str, Any]:
    more = dict((BYTES | MESSAGES)[job["contender"]])
    warmup = max(job["steps"] // 20, 1)
    params = {"lr": job["learning_rate"], "weight_decay": 0.1, "state_dtype": more.pop("state_dtype", "fp32")}
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
    return {
        "contender": job["contender"],
        "seed": job["seed"],
        "bytes a parameter": most / shape.num_parameters,
        **dict(zip(KINDS, [statistics.fmean(last), *held_out], strict=True)),
    }


def losses_shown(rows: Sequence[Mapping[str, Any]], first: Sequence[Mapping[str, Any]]) -> str:
    """Of each kind the mean, and of its differences from the first's the mean with its standard error."""
    parts = []
    for kind in KINDS:
        differences = [100 * (row[kind] / other[kind] - 1) for row, other in zip(rows, first, strict=True)]
        error = f" +- {statistics.stdev(differences) / math.sqrt(len(rows)):.2f}" if len(rows) > 1 else ""
        mean = statistics.fmean(row[kind] for row in rows)
        parts.append(f"{kind} {mean:.4f} ({statistics.fmean(differences):+.2f}{error} %)")
    return "  ".join(parts)


def main(argv: list[str] | None = None) -> None:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--messages", action="store_true", help="compare bits of messages between ranks, not bytes of a parameter")
    add("--contenders", nargs="+", choices=[*BYTES, *MESSAGES], help="(default: all)")
    add("--ranks", type=count(), help="(default: 4 with --messages, else 1)")
    add("--steps", type=count(), default=2000, help="(default: 2000)")
    add("--layers", type=count(), default=4, help="(default: 4)")
    add("--width", type=count(), default=128, help="(default: 128)")
    add("--context", type=count(), default=128, help="bytes that the model sees (default: 128)")
    add("--batch-size", type=count(), default=16, help="pieces of text, of all ranks (default: 16)")
    add("--learning-rate", type=float, default=3e-3, help="at its highest point (default: 0.003)")
    add("--seeds", type=int, nargs="+", default=[0, 1, 2, 3], help="(default: 0 1 2 3)")
    add("--validation-batches", type=int, default=64, help="of a rank (default: 64)")
    add("--timeout", type=float, default=7200.0, metavar="SECONDS", help="longest time of one training (default: 7200)")
    options = parser.parse_args(argv)
    options.ranks = options.ranks or (4 if options.messages else 1)
    rows: list[dict[str, Any]] = []
    num_seeds, environment = len(options.seeds), environment_of(1, None)
    for name in options.contenders or (MESSAGES if options.messages else BYTES):
        for seed in options.seeds:
            job = job_of(options, worker="fewer_bytes:train", threads=1, contender=name, seed=seed)
            try:
                rows += run_ranks(job, options.ranks, sys.executable, environment, options.timeout)[:1]
            except JobError as error:
                raise SystemExit(f"fewer_bytes: {name}, seed {seed}: {error}") from error
            write_json(options, rows)
        losses = losses_shown(rows[-num_seeds:], rows[:num_seeds])
        print(f"{name:44}  {rows[-1]['bytes a parameter']:5.2f} bytes  {losses}", flush=True)


if __name__ == "__main__":
    main()
