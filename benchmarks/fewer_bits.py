"""Trains the example's GPT on several ranks with messages of fewer and fewer bits, and compares losses.

Every contender sees the same batches from the same initial values, in bfloat16. The loss of training is the mean of
the last tenth of the steps, the others of text that nobody trained on, with the last weights and with averaged ones.
Two trainings whose last bits differ come to other losses: with several seeds, shown are means, also of the differences
with the same seed, with their standard error. Ranks are processes of this machine; all but those of "two levels" stand
for a host each. By default 2,000 steps of 0.9M parameters on four ranks:

    python benchmarks/fewer_bits.py --seeds 0 1 2 3 --json fewer_bits.json
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from _ranks import free_port
from _seeds import DECAY, losses_shown, mean_loss

import lowtide

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
ALONE = {"gradient_bits": 4, "ranks_of_host": 1}
TWO = {"gradient_bits": 4, "ranks_of_host": 2}
CONTENDERS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {  # stage, communication, more of the section
    "plain": (2, {}, {}),
    "gradients 4": (2, ALONE, {}),
    "differences 4, gradients 4": (2, {**ALONE, "weight_bits": 4}, {}),
    "weights 8, gradients 4": (3, {**ALONE, "weight_bits": 8}, {}),
    "weights 4, gradients 4": (3, {**ALONE, "weight_bits": 4}, {}),
    "two levels, hpZ, differences 4, gradients 4": (3, {**TWO, "weight_bits": 4}, {"zero_hpz_partition_size": 2}),
}


def config_of(name: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    stage, communication, zero = CONTENDERS[name]
    warmup = max(options.steps // 20, 1)
    schedule = {"warmup_num_steps": warmup, "total_num_steps": options.steps + warmup, "min_ratio": 0.1}
    return {
        "train_micro_batch_size_per_gpu": options.batch_size // options.ranks,
        "bf16": {"enabled": True},
        "optimizer": {"type": "adamw", "params": {"lr": options.learning_rate, "weight_decay": 0.1}},
        "scheduler": {"type": "cosine", "params": schedule},
        "zero_optimization": {"stage": stage, **zero},
        "communication": {"route": "sockets", **communication},
        "gradient_clipping": 1.0,
        "seed": seed,
        "steps_per_print": 0,
    }


def trained(name: str, seed: int, options: argparse.Namespace, rank: int) -> dict[str, Any]:
    """What one contender came to, on one rank."""
    sys.path.insert(0, str(EXAMPLES))
    from gpt_model import GPT, GPTShape
    from text_data import Text, batches, stdlib_files

    text = Text.from_files(stdlib_files())
    shape = GPTShape(options.layers, 4, options.width, options.context)
    rows = options.batch_size // options.ranks

    def given(values: torch.Tensor, count: int) -> Any:
        size = {"context": options.context, "batch_size": rows, "rank": rank, "world_size": options.ranks}
        return islice(batches(values, **size), count)

    torch.manual_seed(seed)
    with lowtide.initialize(GPT(shape), config_of(name, seed, options)) as engine:
        engine.ema(DECAY)
        losses = []
        for batch in given(text.train, options.steps):
            engine.backward(engine(**batch))
            losses.append(engine.step().loss)
        held_out = [mean_loss(engine, given(text.validation, options.validation_batches))]
        with engine.ema_weights():
            held_out.append(mean_loss(engine, given(text.validation, options.validation_batches)))
    last = [loss.item() for loss in losses[-max(options.steps // 10, 1) :]]
    return {"contender": name, "training": sum(last) / len(last), "validation": held_out[0], "averaged": held_out[1]}


def run_rank(rank: int, port: int, name: str, seed: int, options: argparse.Namespace, file: str) -> None:
    size = str(options.ranks)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    found = trained(name, seed, options, rank)
    if rank == 0:
        Path(file).write_text(json.dumps(found))


def of_ranks(name: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Starts the ranks of one contender; what rank 0 says."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        file, port = str(Path(folder) / "found.json"), free_port()
        ranks = [
            context.Process(target=run_rank, args=(rank, port, name, seed, options, file))
            for rank in range(options.ranks)
        ]
        for one in ranks:
            one.start()
        for one in ranks:
            one.join()
        if any(one.exitcode for one in ranks):
            raise SystemExit(f"{name}: ranks ended with {[one.exitcode for one in ranks]}")
        found: dict[str, Any] = json.loads(Path(file).read_text())
        return found


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contenders", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS))
    parser.add_argument("--ranks", type=int, default=4, help="(default: 4)")
    parser.add_argument("--steps", type=int, default=2000, help="(default: 2000)")
    parser.add_argument("--layers", type=int, default=4, help="(default: 4)")
    parser.add_argument("--width", type=int, default=128, help="(default: 128)")
    parser.add_argument("--context", type=int, default=64, help="bytes that the model sees (default: 64)")
    parser.add_argument("--batch-size", type=int, default=8, help="pieces of text, of all ranks (default: 8)")
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="at its highest point (default: 0.003)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="(default: 0)")
    parser.add_argument("--validation-batches", type=int, default=64, help="of a rank (default: 64)")
    parser.add_argument("--json", type=Path, help="a file for the numbers")
    options = parser.parse_args(argv)
    rows = []
    num_seeds = len(options.seeds)
    for name in options.contenders:
        for seed in options.seeds:
            rows.append({**of_ranks(name, seed, options), "seed": seed})
            if options.json is not None:
                options.json.write_text(json.dumps(rows, indent=2) + "\n")
        print(f"{name:44}  {losses_shown(rows[-num_seeds:], rows[:num_seeds])}", flush=True)


if __name__ == "__main__":
    main()
