"""What encodings of 8-bit optimizer states lose: of AdamW's update in one step, and of the loss of a short training.

    8-bit floats    ours, [Note: 8-bit states] in kernels/optimizer_states.py: blocks of 256, rounded at random
    companded       FlashOptim's, arXiv 2602.23349: 2x / (1 + |x|) of the mean, the root of the squares, in equal steps

The update of elements whose gradients are much smaller than those of others in their block is looked at apart. AdamW is
plain torch in float32 here, and states go through an encoding after each step:

    python benchmarks/state_codecs.py --seeds 0 1 2 3
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from lowtide.kernels.optimizer_states import narrow_blocks, widened_blocks

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
CONTEXT, BATCH_SIZE, WIDTH, LAYERS = 64, 8, 128, 4
BETAS, EPS, DECAY = (0.9, 0.999), 1e-8, 0.1
RATIOS = (1.0, 1e-2, 1e-4)
Codec = Callable[[Tensor, bool], Tensor]
"""(values, whether they are means of gradients and not of squares): as they are read again."""


def floats(values: Tensor, is_mean: bool) -> Tensor:
    payload = torch.empty(values.numel(), dtype=torch.int8 if is_mean else torch.uint8)
    scale = torch.empty(-(-values.numel() // 256))
    narrow_blocks(values, torch.randint(-(2**31), 2**31 - 1, values.shape, dtype=torch.int32), payload, scale)
    return widened_blocks(payload, scale)


def companded(size: int, is_random: bool) -> Codec:
    """size: of the groups that have a scale. At random the mean of squares is exact, and only 0 becomes 0."""

    def encode(values: Tensor, is_mean: bool) -> Tensor:
        groups = torch.nn.functional.pad(values, (0, -values.numel() % size)).view(-1, size)
        scale = groups.abs().amax(1, keepdim=True).clamp(min=1e-38)
        x = groups / scale
        noise = torch.rand(x.shape) if is_random else torch.full_like(x, 0.5)
        if is_mean:
            code = (127 * 2 * x / (1 + x.abs()) + noise).floor().clamp(-127, 127) / 127
            x = code / (2 - code.abs())
        else:
            x = 255**2 * x
            low = x.sqrt().floor().clamp(max=255)
            code = low + ((x - low.square()) / (2 * low + 1) > noise) if is_random else x.sqrt().round()
            code = torch.where(is_random & (x > 0), code.clamp(min=1), code)
            x = (code / 255).square()
        return (x * scale).view(-1)[: values.numel()]

    return encode


CODECS: dict[str, tuple[float, Codec]] = {  # bytes of an element; scales of groups of 32 counted as float16
    "8-bit floats": (1 + 4 / 256, floats),
    "companded, 32, nearest": (1 + 2 / 32, companded(32, False)),
    "companded, 32, random": (1 + 2 / 32, companded(32, True)),
    "companded, 256, nearest": (1 + 4 / 256, companded(256, False)),
    "companded, 256, random": (1 + 4 / 256, companded(256, True)),
}


def update_of(average: Tensor, squares: Tensor) -> Tensor:
    return average / (squares.sqrt() + EPS)


def error(codec: Codec, average: Tensor, squares: Tensor, looked_at: slice) -> float:
    """Of the update, as a part of its norm."""
    exact = update_of(average, squares)[looked_at]
    return float((update_of(codec(average, True), codec(squares, False))[looked_at] - exact).norm() / exact.norm())


def trained(seed: int, steps: int, learning_rate: float, codec: Codec | None) -> tuple[float, float, Tensor, Tensor]:
    """(loss of training, loss of validation, both states)."""
    from gpt_model import GPT, GPTShape
    from text_data import Text, batches, stdlib_files

    def given(values: Tensor, first: int, count: int) -> Any:
        size = {"context": CONTEXT, "batch_size": BATCH_SIZE, "rank": 0, "world_size": 1}
        return islice(batches(values, **size), first, first + count)

    text = Text.from_files(stdlib_files())
    torch.manual_seed(seed)
    model = GPT(GPTShape(LAYERS, 4, WIDTH, CONTEXT))
    params = list(model.parameters())
    flat = parameters_to_vector(params).detach()
    vector_to_parameters(flat, params)  # views of it
    average, squares = torch.zeros_like(flat), torch.zeros_like(flat)
    warmup, losses = max(steps // 20, 1), []
    for step, batch in enumerate(given(text.train, seed * steps, steps), 1):
        loss = model(**batch)
        gradient = torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, params)])
        gradient *= min(1.0, 1.0 / (float(gradient.norm()) + 1e-6))
        cosine = 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))
        lr = learning_rate * (step / warmup if step < warmup else 0.1 + 0.9 * cosine)
        average.lerp_(gradient, 1 - BETAS[0])
        squares.mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
        corrected = average / (1 - BETAS[0] ** step), squares / (1 - BETAS[1] ** step)
        flat.mul_(1 - lr * DECAY).sub_(update_of(*corrected), alpha=lr)
        if codec is not None:
            average, squares = codec(average, True), codec(squares, False)
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        held_out = mean(model(**batch).item() for batch in given(text.validation, 0, 64))
    return mean(losses[-max(steps // 10, 1) :]), held_out, average, squares


def print_errors(average: Tensor, squares: Tensor) -> None:
    print(f"{'error of the update':25} bytes  trained  " + "  ".join(f"beside 1: {ratio:g}" for ratio in RATIOS))
    for name, (nbytes, codec) in CODECS.items():
        found = [error(codec, average, squares, slice(None))]
        for ratio in RATIOS:  # every second element has gradients of this size, its neighbours of size 1
            size = torch.where(torch.arange(2**16) % 2 == 0, ratio, 1.0)
            made = 0.3 * size * torch.randn(2**16), size.square() * (0.5 + torch.rand(2**16))
            found.append(error(codec, *made, slice(0, None, 2)))
        print(f"{name:25} {nbytes:.3f}  " + "  ".join(f"{one:9.4f}" for one in found), flush=True)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--codecs", nargs="*", choices=list(CODECS), default=list(CODECS)[:2], help="trained with")
    parser.add_argument("--steps", type=int, default=300, help="(default: 300)")
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="at its highest point (default: 0.003)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="(default: 0)")
    options = parser.parse_args(argv)
    sys.path.insert(0, str(EXAMPLES))
    for seed in options.seeds:
        *first, average, squares = trained(seed, options.steps, options.learning_rate, None)
        if seed == options.seeds[0]:
            print_errors(average, squares)
        print(f"seed {seed}  {'float32':25} training {first[0]:.4f}  validation {first[1]:.4f}", flush=True)
        for name in options.codecs:
            found = trained(seed, options.steps, options.learning_rate, CODECS[name][1])
            parts = (f"{100 * (now / before - 1):+.2f} %" for now, before in zip(found[:2], first, strict=True))
            training, validation = parts
            print(f"seed {seed}  {name:25} training {training}  validation {validation}", flush=True)


if __name__ == "__main__":
    main()
