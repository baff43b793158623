"""A pipeline whose stages are divided as well: two stages x two data-parallel ranks, ZeRO-3, states on the host.

    lowtide launch --nproc 4 examples/pipeline_zero3.py --out trained

Each stage's parameters are divided over the ranks that have this stage, and gathered when the schedule comes to it.
Their masters and moments are in host memory and are updated there; --nvme FOLDER puts them into files. Run again with
the same --out, the script goes on, at any number of ranks, stages and with or without offloading.
"""

import argparse
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from gpt_model import GPT, GPTShape
from text_data import Text, batches, stdlib_files

import lowtide


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the folder of checkpoints and weights")
    parser.add_argument("--stages", type=int, default=2, help="ranks of a pipeline")
    parser.add_argument("--microbatches", type=int, default=4, help="that are under way in a step")
    parser.add_argument("--rows", type=int, default=4, help="of a microbatch")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--nvme", type=Path, help="a folder for masters and moments, in place of host memory")
    parser.add_argument("--data", type=Path, help="a folder of .py files (default: Python's standard library)")
    return parser.parse_args(argv)


def config_of(options: argparse.Namespace) -> dict[str, Any]:
    device = {"device": "nvme", "nvme_path": str(options.nvme)} if options.nvme else {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": options.rows,
        "gradient_accumulation_steps": options.microbatches,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "parallel": {"pipeline": options.stages},
        "pipeline": {"schedule": "1f1b"},
        "zero_optimization": {"stage": 3, "offload_optimizer": device},
        "optimizer": {"type": "adamw", "params": {"lr": 1e-3, "weight_decay": 0.1}},
        "checkpoint": {"folder": str(options.out), "every_steps": 50, "keep_last": 2, "on_sigterm": True},
        "steps_per_print": 10,
        "seed": 0,
    }


def main(argv: list[str] | None = None) -> None:
    options = arguments(argv)
    text = Text.from_files(stdlib_files(options.data))
    shape = GPTShape(options.layers, num_heads=4, width=options.width, context=options.context)
    with lowtide.initialize(lambda: GPT(shape), config_of(options)) as engine:
        with suppress(lowtide.NoCheckpointError):
            engine.load_checkpoint(options.out)
        # All ranks of a pipeline read the same rows: data_rank counts pipelines.
        rows = batches(
            text.train,
            context=options.context,
            batch_size=options.rows * options.microbatches,
            rank=engine.data_rank,
            world_size=engine.data_size,
        )
        for batch in islice(rows, engine.global_step, options.steps):
            loss = engine.train_step(batch).loss
        engine.save_checkpoint(options.out)
        states = engine.memory()
        print(
            f"rank {engine.rank}: step {engine.global_step}, loss {loss.item():.3f}, parameters "
            f"{states.parameter_bytes:,} bytes, masters and moments {states.optimizer_bytes:,}",
            flush=True,
        )
        engine.export(options.out / "weights")


if __name__ == "__main__":
    main()
