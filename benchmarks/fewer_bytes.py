"""Trains the example's GPT with fewer and fewer bytes of a parameter, and compares losses with fp32 masters'.

Every contender sees the same batches from the same initial values. The loss of training is the mean of the last tenth
of the steps, the others of text that nobody trained on, with the last weights and with averaged ones. Each is trained
with several seeds, since two trainings whose last bits differ come to other losses: shown are means over the seeds, of
the differences from the first contender with the same seed too, with the standard error of those. By default 2,000
steps of 0.9M parameters with 4 seeds:

    python benchmarks/fewer_bytes.py --batch-size 8 --context 64 --processes 4 --json fewer_bytes.json
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import multiprocessing
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from _seeds import DECAY, losses_shown, mean_loss

import lowtide

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
NARROW = {"data_types": {"grad_accum_dtype": "bf16"}, "communication_data_type": "bf16"}

CONTENDERS: dict[str, tuple[bool | str, str, dict[str, Any]]] = {  # masters, states, more of the config
    "fp32 masters": (True, "fp32", {}),
    "no masters": (False, "fp32", {}),
    "no masters, bf16 states": (False, "bf16", {}),
    "no masters, all bf16": (False, "bf16", NARROW),
    "kahan": ("kahan", "fp32", {}),
    "kahan, all bf16": ("kahan", "bf16", NARROW),
    "split": ("int8", "fp32", {}),
    "split, states of 8 bits": ("int8", "int8", NARROW),
}


def config_of(name: str, options: argparse.Namespace) -> dict[str, Any]:
    masters, state_dtype, more = CONTENDERS[name]
    warmup = max(options.steps // 20, 1)
    params = {"lr": options.learning_rate, "weight_decay": 0.1, "state_dtype": state_dtype}
    schedule = {"warmup_num_steps": warmup, "total_num_steps": options.steps + warmup, "min_ratio": 0.1}
    return {
        "train_micro_batch_size_per_gpu": options.batch_size,
        "bf16": {"enabled": True, "masters": masters},
        "optimizer": {"type": "adamw", "params": params},
        "scheduler": {"type": "cosine", "params": schedule},
        "gradient_clipping": 1.0,
        "seed": options.seed,
        "steps_per_print": 0,
        **more,
    }


def trained(job: tuple[str, int], options: argparse.Namespace) -> dict[str, Any]:
    """What one contender came to with one seed."""
    name, options.seed = job
    sys.path.insert(0, str(EXAMPLES))
    torch.set_num_threads(1)
    logging.getLogger("lowtide").setLevel(logging.WARNING)
    from gpt_model import GPT, GPTShape
    from text_data import Text, batches, stdlib_files

    text = Text.from_files(stdlib_files())
    shape = GPTShape(options.layers, 4, options.width, options.context)

    def given(values: torch.Tensor, count: int) -> Any:
        size = {"context": options.context, "batch_size": options.batch_size, "rank": 0, "world_size": 1}
        return islice(batches(values, **size), count)

    torch.manual_seed(options.seed)
    with lowtide.initialize(GPT(shape), config_of(name, options)) as engine:
        losses, most = [], 0
        for step, batch in enumerate(given(text.train, options.steps)):
            engine.backward(engine(**batch))
            if step == 1:
                memory = engine.memory()
                most = memory.parameter_bytes + memory.gradient_bytes + memory.optimizer_bytes
                engine.ema(DECAY)  # not before, since averages are bytes too
            losses.append(engine.step().loss)
        held_out = [mean_loss(engine, given(text.validation, options.validation_batches))]
        with engine.ema_weights():
            held_out.append(mean_loss(engine, given(text.validation, options.validation_batches)))
    last = [loss.item() for loss in losses[-max(options.steps // 10, 1) :]]
    return {
        "contender": name,
        "seed": options.seed,
        "bytes a parameter": most / shape.num_parameters,
        "training": sum(last) / len(last),
        "validation": held_out[0],
        "averaged": held_out[1],
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contenders", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS))
    parser.add_argument("--steps", type=int, default=2000, help="(default: 2000)")
    parser.add_argument("--layers", type=int, default=4, help="(default: 4)")
    parser.add_argument("--width", type=int, default=128, help="(default: 128)")
    parser.add_argument("--context", type=int, default=128, help="bytes that the model sees (default: 128)")
    parser.add_argument("--batch-size", type=int, default=16, help="pieces of text (default: 16)")
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="at its highest point (default: 0.003)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3], help="(default: 0 1 2 3)")
    parser.add_argument("--processes", type=int, default=1, help="trainings at a time, of one thread (default: 1)")
    parser.add_argument("--validation-batches", type=int, default=64, help="(default: 64)")
    parser.add_argument("--json", type=Path, help="a file for the numbers")
    options = parser.parse_args(argv)
    jobs = [(name, seed) for name in options.contenders for seed in options.seeds]
    rows: list[dict[str, Any]] = []
    with multiprocessing.get_context("spawn").Pool(options.processes, maxtasksperchild=1) as pool:
        for row in pool.imap(functools.partial(trained, options=options), jobs):
            rows.append(row)
            if len(rows) % len(options.seeds) == 0:
                own, first = rows[-len(options.seeds) :], rows[: len(options.seeds)]
                heading = f"{row['contender']:24}  {row['bytes a parameter']:5.2f} bytes"
                print(f"{heading}  {losses_shown(own, first)}", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
