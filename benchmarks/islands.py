"""Trains the example's GPT on islands that exchange every so many steps, and compares losses with data parallelism's.

Every contender begins with the same values and sees the same global batches: an island, which is one rank here, its
share of each. With `--whole-batch` an island has a batch of its own as large as data parallelism's, as in the paper
(arXiv 2311.08105, section 3), so k islands see k times the text in as many steps. The loss of training is the mean of
the last tenth of the steps, on the first island; the other is of text that nobody trained on, of the first island's
parameters at the end. Bytes are those that an island sends in a step, in the mean; of data parallelism over as many
ranks as the last contender's it is what a ring's all-reduce sends. By default 2,000 steps of 0.9M parameters:

    python benchmarks/islands.py --batch-size 8 --context 64 --json islands.json
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from itertools import islice
from pathlib import Path
from typing import Any

import torch

import lowtide

KINDS = ("training", "validation")
EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
CONTENDERS: dict[str, tuple[int, dict[str, Any]]] = {  # islands, and more of the section `outer`
    "data parallel": (1, {}),
    "2 islands": (2, {}),
    "4 islands": (4, {}),
    "4 islands, streaming": (4, {"fragments": 2, "overlap": 2, "dtype": "bf16"}),
    "4 islands, plain mean": (4, {"optimizer": "average"}),
}
MOST = max(count for count, _ in CONTENDERS.values())


def config_of(name: str, options: argparse.Namespace) -> dict[str, Any]:
    warmup = max(options.steps // 20, 1)
    params = {"lr": options.learning_rate, "weight_decay": 0.1}
    schedule = {"warmup_num_steps": warmup, "total_num_steps": options.steps + warmup, "min_ratio": 0.1}
    config = {
        "train_batch_size": options.batch_size * (CONTENDERS[name][0] if options.whole_batch else 1),
        "optimizer": {"type": "adamw", "params": params},
        "scheduler": {"type": "cosine", "params": schedule},
        "zero_optimization": {"stage": 1},
        "gradient_clipping": 1.0,
        "seed": options.seed,
        "steps_per_print": 0,
    }
    count, outer = CONTENDERS[name]
    return {**config, "outer": {"every": options.every, "ranks": 1, **outer}} if count > 1 else config


def trained(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """What one contender came to."""
    from gpt_model import GPT, GPTShape
    from text_data import Text, batches, stdlib_files

    text = Text.from_files(stdlib_files())
    shape = GPTShape(options.layers, 4, options.width, options.context)
    torch.manual_seed(options.seed)
    with lowtide.initialize(GPT(shape), config_of(name, options)) as engine:
        rows = config_of(name, options)["train_batch_size"] // engine.data_size
        size = {"context": options.context, "batch_size": rows}
        place = {"rank": engine.data_rank, "world_size": engine.data_size}
        given = islice(batches(text.train, **size, **place), options.steps)
        losses = [engine.train_step(batch).loss for batch in given]
        engine.eval()
        whole = {"context": options.context, "batch_size": options.batch_size, "rank": 0, "world_size": 1}
        held_out = [
            engine.eval_step(batch).item()
            for batch in islice(batches(text.validation, **whole), options.validation_batches)
        ]
        numel = sum(shard.group.layout.shard_numel for shard in engine.optimizer.shards)
        outer = engine._outer
        sent = outer.ring.bytes_sent / options.steps if outer is not None else 2 * (MOST - 1) / MOST * 4 * numel
    last = [loss.item() for loss in losses[-max(options.steps // 10, 1) :]]
    return {
        "contender": name,
        "sent": sent,
        "training": sum(last) / len(last),
        "validation": sum(held_out) / len(held_out),
    }


def launched(name: str, arguments: list[str]) -> dict[str, Any]:
    """The same, on ranks of its own."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "row.json"
        launch = [sys.executable, "-c", "import sys; from lowtide.bin.main import main; sys.exit(main())", "launch"]
        ranks = ["--nproc", str(CONTENDERS[name][0]), "--islands", "1", "--quiet-ranks"]
        own = [str(Path(__file__).resolve()), *arguments, "--contenders", name, "--row", str(out)]
        subprocess.run([*launch, *ranks, *own], check=True, stdout=subprocess.DEVNULL)
        row: dict[str, Any] = json.loads(out.read_text())
        return row


def main(argv: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if argv is None else argv
    options = parser().parse_args(arguments)
    if options.row is not None:
        sys.path.insert(0, str(EXAMPLES))
        torch.set_num_threads(1)
        row = trained(options.contenders[0], options)
        if os.environ["RANK"] == "0":
            options.row.write_text(json.dumps(row))
        return
    rows = []
    for name in options.contenders:
        rows.append(launched(name, arguments))
        row, first = rows[-1], rows[0]
        losses = (f"{kind} {row[kind]:.4f} ({100 * (row[kind] / first[kind] - 1):+.2f} %)" for kind in KINDS)
        print(f"{name:24}  {row['sent'] / 1e3:9.1f} kB a step  {'  '.join(losses)}", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = result.add_argument
    add("--contenders", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS))
    add("--steps", type=int, default=2000, help="(default: 2000)")
    add("--every", type=int, default=50, help="steps between exchanges (default: 50)")
    add("--layers", type=int, default=4, help="(default: 4)")
    add("--width", type=int, default=128, help="(default: 128)")
    add("--context", type=int, default=128, help="bytes that the model sees (default: 128)")
    add("--batch-size", type=int, default=16, help="pieces of text, of all islands (default: 16)")
    add("--whole-batch", action="store_true", help="each island has as many pieces as data parallelism has in all")
    add("--learning-rate", type=float, default=3e-3, help="at its highest point (default: 0.003)")
    add("--seed", type=int, default=0, help="(default: 0)")
    add("--validation-batches", type=int, default=64, help="(default: 64)")
    add("--json", type=Path, help="a file for the numbers")
    add("--row", type=Path, help=argparse.SUPPRESS)
    return result


if __name__ == "__main__":
    main()
