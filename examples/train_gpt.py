"""Trains a byte-level GPT on the text of Python's own standard library, and shows what it has learnt.

    python examples/train_gpt.py                                             # one process
    lowtide launch --nproc 2 examples/train_gpt.py --config zero3            # two processes, ZeRO stage 3
    lowtide launch --nproc 2 examples/train_gpt.py --checkpoints runs/saved  # saves; run again, it goes on from there

How the work and the memory are divided is said in the config file alone. This script is the same for all of them.
"""

import argparse
import importlib.util
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from gpt_model import GPT, GPTShape, generate
from memory_use import MemoryWatch
from text_data import Text, batches, stdlib_files
from torch import Tensor
from training_display import TrainingDisplay

import lowtide

PROMPT = b"def read_file(self, path):\n"


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line; impossible values end the program with a message."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="zero3", help="a JSON file or the name of a preset (default: zero3)")
    parser.add_argument("--steps", type=positive, default=300, help="training steps (default: 300)")
    parser.add_argument("--batch-size-per-process", type=positive, default=16, help="pieces of text (default: 16)")
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="at its highest point (default: 0.003)")
    parser.add_argument("--layers", type=positive, default=4, help="number of layers (default: 4)")
    parser.add_argument("--heads", type=positive, default=4, help="attention heads in a layer (default: 4)")
    parser.add_argument("--width", type=positive, default=128, help="size of a layer's state (default: 128)")
    parser.add_argument("--context", type=positive, default=128, help="bytes that the model sees (default: 128)")
    parser.add_argument("--data", type=Path, help="a folder of .py files (default: Python's standard library)")
    parser.add_argument("--validation-batches", type=positive, default=8, help="batches to validate on (default: 8)")
    parser.add_argument("--sample-bytes", type=int, default=300, help="bytes to generate at the end (default: 300)")
    parser.add_argument("--print-every", type=positive, default=20, help="steps between two lines (default: 20)")
    parser.add_argument("--out", type=Path, default=Path("runs/gpt"), help="folder of the curve (default: runs/gpt)")
    parser.add_argument(
        "--checkpoints", type=Path, help="save here at the end, on Ctrl-C and on SIGTERM; go on from there"
    )
    parser.add_argument("--save-every", type=positive, help="also save after every so many steps, with --checkpoints")
    parser.add_argument("--report", type=Path, help="a JSON file for the final numbers")
    arguments = parser.parse_args(argv)
    if arguments.save_every and not arguments.checkpoints:
        parser.error("--save-every needs a folder to save in: give --checkpoints too")
    if importlib.util.find_spec("matplotlib") is None:
        parser.error('matplotlib draws the loss curve and is not installed: run pip install -e ".[examples]"')
    return arguments


def positive(text: str) -> int:
    """A number from the command line that has to be at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, found {value}")
    return value


def main(argv: list[str] | None = None) -> None:
    arguments = parse_arguments(argv)
    try:
        shape = shape_of(arguments)
        config = training_config(arguments)
        text = Text.from_files(stdlib_files(arguments.data))
    except (ValueError, FileNotFoundError) as error:
        raise SystemExit(f"train_gpt.py: {error}") from error

    with MemoryWatch() as memory, lowtide.initialize(lambda: GPT(shape), config) as engine:
        resume(engine, arguments)
        losses, tokens_per_second = train(engine, text, arguments, memory)
        if arguments.checkpoints:
            engine.save_checkpoint(arguments.checkpoints)
        validation_loss = validate(engine, text, arguments)
        sample = continued_text(engine, shape, arguments)
        states = engine.memory()
        is_first = engine.rank == 0
        world_size = engine.world_size
    if not is_first:
        return
    report = {
        "config": str(arguments.config),
        "processes": world_size,
        "steps": engine.global_step,
        "first_loss": losses[0],
        "final_loss": losses[-1],
        "validation_loss": validation_loss,
        "tokens_per_second": tokens_per_second,
        "parameter_bytes": states.parameter_bytes,
        "gradient_bytes": states.gradient_bytes,
        "optimizer_bytes": states.optimizer_bytes,
        "model_state_bytes": states.total_bytes,
        "start_bytes": memory.start_bytes,
        "peak_bytes": memory.peak_bytes,
        "curve": str(arguments.out / "loss_curve.png"),
        "sample": sample.decode("utf-8", errors="replace"),
    }
    finish(report, losses, arguments)


def shape_of(arguments: argparse.Namespace) -> GPTShape:
    """The model's size. Raises ValueError if it is impossible."""
    return GPTShape(arguments.layers, arguments.heads, arguments.width, arguments.context)


def training_config(arguments: argparse.Namespace) -> dict[str, Any]:
    """The chosen config with the batch size and the learning rate of the command line, and a fixed seed.

    All else stays as it is. A config that names no optimizer gets AdamW, and one that names no scheduler gets a
    warm-up and a cosine. Raises ValueError if the batch cannot be divided.
    """
    config = lowtide.Config.load(arguments.config).as_dict()
    batch_size, count = arguments.batch_size_per_process, _microbatches(config)
    if batch_size % count:
        raise ValueError(
            f"--batch-size-per-process {batch_size} is not divisible by the config's gradient_accumulation_steps "
            f"({count}); try {batch_size + count - batch_size % count}"
        )
    config["train_batch_size"] = None
    config["train_micro_batch_size_per_gpu"] = batch_size // count
    config["gradient_accumulation_steps"] = count
    config["optimizer"] = config["optimizer"] or {"type": "adamw", "params": {"weight_decay": 0.1}}
    config["optimizer"]["params"]["lr"] = arguments.learning_rate
    if config["scheduler"] is None:
        warmup = max(arguments.steps // 20, 1)
        params = {"warmup_num_steps": warmup, "total_num_steps": arguments.steps + warmup, "min_ratio": 0.1}
        config["scheduler"] = {"type": "cosine", "params": params}
    config["seed"] = config["seed"] or 0
    if arguments.checkpoints:
        config["checkpoint"].update(folder=str(arguments.checkpoints), on_sigterm=True)
        config["checkpoint"]["every_steps"] = arguments.save_every or config["checkpoint"]["every_steps"]
    config["steps_per_print"] = 0  # this script draws its own progress
    return config


def _microbatches(config: dict[str, Any]) -> int:
    return config["gradient_accumulation_steps"] or config["pipeline"]["microbatches"] or 1


def continued_text(engine: lowtide.Engine, shape: GPTShape, arguments: argparse.Namespace) -> bytes:
    """Text by the trained model, on rank 0. Where a pipeline has split the model, it is put together there first."""
    model = engine.module
    if engine.data_size < engine.world_size:
        state = engine.state_dict()
        if engine.rank:
            return b""
        model = GPT(shape).eval()
        model.load_state_dict(state)
    return generate(model, PROMPT, arguments.sample_bytes, arguments.context, engine.device)


def resume(engine: lowtide.Engine, arguments: argparse.Namespace) -> None:
    """Goes on from the latest checkpoint, where there is one."""
    if arguments.checkpoints is None:
        return
    try:
        engine.load_checkpoint(arguments.checkpoints)
    except lowtide.NoCheckpointError:
        return
    if engine.global_step >= arguments.steps:
        raise SystemExit(
            f"train_gpt.py: {arguments.checkpoints} is at step {engine.global_step} already; "
            f"expected --steps above that, found {arguments.steps}"
        )


def text_batches(engine: lowtide.Engine, text: Tensor, arguments: argparse.Namespace) -> Iterator[dict[str, Tensor]]:
    """This process's share of every global batch. After the loss of a host it is larger than at the start."""
    global_batch = engine.config.train_batch_size
    assert global_batch is not None  # every config of this script has one
    return batches(
        text,
        context=arguments.context,
        batch_size=global_batch // engine.data_size,
        rank=engine.data_rank,
        world_size=engine.data_size,
    )


def train(
    engine: lowtide.Engine, text: Text, arguments: argparse.Namespace, memory: MemoryWatch
) -> tuple[list[float], float]:
    """Trains for the wished number of steps; gives the loss of each step and the speed in tokens per second."""
    losses: list[float] = []
    tokens_per_step = engine.config.train_batch_size * arguments.context
    with TrainingDisplay(
        num_steps=arguments.steps,
        tokens_per_step=tokens_per_step,
        print_every=arguments.print_every,
        visible=engine.rank == 0,
    ) as display:
        size, num_bytes = shape_of(arguments).num_parameters, len(text.train)
        display.say(f"{size / 1e6:.1f}M parameters, {num_bytes / 1e6:.1f}M bytes of text, config {arguments.config}")
        display.say(f"world size {engine.world_size}, {tokens_per_step:,} tokens a step")
        engine.train()
        for batch in islice(text_batches(engine, text.train, arguments), engine.global_step, arguments.steps):
            losses.append(engine.train_step(batch).loss.item())
            display.update(engine.global_step, losses[-1], memory.now_bytes)
    return losses, display.tokens_per_second


def validate(engine: lowtide.Engine, text: Text, arguments: argparse.Namespace) -> float:
    """The mean loss on text that was not trained on. Leaves the model in evaluation mode."""
    engine.eval()
    held_out = islice(text_batches(engine, text.validation, arguments), arguments.validation_batches)
    losses = [engine.eval_step(batch).item() for batch in held_out]
    return sum(losses) / len(losses)


def finish(report: dict[str, Any], losses: list[float], arguments: argparse.Namespace) -> None:
    """Draws the curve, writes the report, and prints both results and the generated text."""
    from loss_curve import draw_loss_curve

    title = f"byte-level GPT, config {report['config']}, {report['processes']} processes"
    draw_loss_curve(Path(report["curve"]), losses, report["validation_loss"], title)
    if arguments.report:
        arguments.report.parent.mkdir(parents=True, exist_ok=True)
        arguments.report.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(
        f"training loss {report['first_loss']:.3f} -> {report['final_loss']:.3f}, "
        f"validation loss {report['validation_loss']:.3f}"
    )
    print(f"loss curve: {report['curve']}")
    if arguments.sample_bytes:
        print(f"a sample, after the first line by the model:\n{report['sample']}")


if __name__ == "__main__":
    main()
