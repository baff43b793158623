"""A GPT that learns sums, in a loop of its own: forward, backward, step.

    python examples/nanogpt.py --out sums                             # one process, examples/nanogpt.json
    lowtide launch --nproc 2 examples/nanogpt.py --out sums           # two; run again, it goes on where it was
    lowtide launch --nproc 2 examples/nanogpt.py --out sums --config zero3_offload_cpu

The text is made on the spot: lines such as "37+48=85". How the work is divided says the config file alone.
"""

import argparse
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from gpt_model import GPT, GPTShape, generate
from torch import Tensor

import lowtide


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the folder of text and checkpoints")
    parser.add_argument("--config", default=Path(__file__).with_suffix(".json"), help="a file, or a preset's name")
    parser.add_argument("--steps", type=int, default=500, help="until there are so many")
    parser.add_argument("--eval-every", type=int, default=100, help="steps between two looks at text that is kept back")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--context", type=int, default=64, help="characters that the model sees")
    parser.add_argument("--prompt", default="12+34=", help="what it goes on with in the end")
    return parser.parse_args(argv)


def sums(num_lines: int = 20_000) -> Tensor:
    """(num_characters,) uint8: the same text each time."""
    pairs = torch.randint(100, (num_lines, 2), generator=torch.Generator().manual_seed(0)).tolist()
    text = "".join(f"{a}+{b}={a + b}\n" for a, b in pairs)
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def microbatch(text: Tensor, number: int, rows: int, context: int, engine: lowtide.Engine) -> tuple[Tensor, Tensor]:
    """This rank's rows of a microbatch: tokens and, one character later, targets, (rows, context) int64.

    number: of the microbatch since the start, from which its places are drawn.
    """
    generator = torch.Generator().manual_seed(number)
    starts = torch.randint(len(text) - context, (rows * engine.data_size,), generator=generator)
    own = starts.chunk(engine.data_size)[engine.data_rank]
    pieces = text[own[:, None] + torch.arange(context + 1)].long().to(engine.device)
    return pieces[:, :-1], pieces[:, 1:]


@torch.no_grad()
def held_back_loss(engine: lowtide.Engine, text: Tensor, rows: int, context: int) -> float:
    """The mean loss of this rank on four microbatches."""
    engine.eval()
    losses = [engine(*microbatch(text, number, rows, context, engine)) for number in range(4)]
    engine.train()
    return torch.stack(losses).mean().item()


def main(argv: list[str] | None = None) -> None:
    options = arguments(argv)
    shape = GPTShape(options.layers, num_heads=4, width=options.width, context=options.context)
    text = sums()
    train, kept = text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]
    with lowtide.initialize(lambda: GPT(shape), options.config) as engine:
        rows, accumulation = sizes_of(engine.config)
        with suppress(lowtide.NoCheckpointError):
            engine.load_checkpoint(options.out)
        while engine.global_step < options.steps:
            for index in range(accumulation):
                number = engine.global_step * accumulation + index
                loss = engine(*microbatch(train, number, rows, options.context, engine))
                engine.backward(loss)
            result = engine.step()
            if engine.global_step % options.eval_every == 0 or engine.global_step == options.steps:
                found = held_back_loss(engine, kept, rows, options.context)
                say(engine, step=engine.global_step, loss=loss.item(), held_back=found, norm=float(result.grad_norm))
                engine.save_checkpoint(options.out)
        engine.eval()
        answer = generate(engine.module, options.prompt.encode(), 6, options.context, engine.device)
        say(engine, sample=answer.decode(errors="replace"))


def sizes_of(config: lowtide.Config) -> tuple[int, int]:
    """Rows of a microbatch on each rank, and microbatches of a step; of a preset, which says neither, 16 and 1."""
    return config.train_micro_batch_size_per_gpu or 16, config.gradient_accumulation_steps or 1


def say(engine: lowtide.Engine, **values: Any) -> None:
    if engine.rank == 0:
        print(json.dumps({name: round(v, 4) if isinstance(v, float) else v for name, v in values.items()}), flush=True)


if __name__ == "__main__":
    main()
