"""The search for the longest sequence that trains in a given memory: `largest.py --sequence`.

The model, `SHAPE`, has the proportions of Llama 3 8B: half as many layers, a vocabulary of 32 times its width, an MLP
in a module of its own, no table of positions. The sequence is doubled until it does not fit, then bisected.
"""

from __future__ import annotations

import argparse
import sys
import time
from functools import partial
from typing import Any

import torch
from _contenders import Contender
from _largest_job import BudgetWork, run_budget_job
from _largest_report import MIB
from _largest_search import most_layers
from _model import SEED, GPTSize
from _ranks import JobError, OverBudget
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

LONG = ["lowtide-3", "lowtide-3-recompute", "lowtide-3-tiles", "lowtide-3-long"]
START, MOST = 64, 1 << 20  # tokens
SHAPE = GPTSize(num_layers=16, width=128, num_heads=4, sequence_length=0)
VOCABULARY = 32 * SHAPE.width


class LongBlock(nn.Module):
    """One pre-norm block, as `_model.Block`, with an `mlp` that is a module."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention_in, self.attention_out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, width = x.shape
        heads = self.attention_in(self.attention_norm(x)).view(batch, sequence, 3, self.num_heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(batch, sequence, width))
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class LongGPT(nn.Module):
    """Gives the mean cross-entropy; tokens, targets: (batch, sequence) int64 -> () float32."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, SHAPE.width)
        self.blocks = nn.ModuleList(LongBlock(SHAPE.width, SHAPE.num_heads) for _ in range(SHAPE.num_layers))
        self.final_norm = nn.LayerNorm(SHAPE.width)
        self.head = nn.Linear(SHAPE.width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.final_norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def build_long_batch(length: int, rows: int) -> tuple[Tensor, Tensor]:
    """Gives the global batch: (tokens, targets) of shape (rows, length)."""
    generator = torch.Generator().manual_seed(SEED)
    tokens = torch.randint(VOCABULARY, (rows, length + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def search(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Gives the longest sequence of each contender by its name: 0 where none fits, None where a job failed."""
    found: dict[str, Any] = {}
    title = f"longest sequence of a GPT of {SHAPE.num_layers} layers, {options.budget_mib} MiB a rank, {options.dtype}"
    table = Table(title=title)
    for heading in ("contender", "tokens of a rank", "x the first"):
        table.add_column(heading, justify="left" if heading == "contender" else "right")
    first: int | None = None
    for contender in options.contenders:
        try:
            longest = START * most_layers(
                partial(_fits, options, console, contender), 1, MOST // START, options.resolution
            )
        except JobError as error:
            console.print(f"{contender.label}: [red]FAILED[/red]", str(error), markup=True, highlight=False)
            found[contender.name] = None
            continue
        found[contender.name] = longest
        first = longest if first is None else first
        table.add_row(contender.label, f"{longest:,}", f"{longest / first:.1f}" if first else "-")
    console.print(table)
    return found


def _fits(options: argparse.Namespace, console: Console, contender: Contender, steps_of_length: int) -> bool:
    length, started = START * steps_of_length, time.monotonic()
    work = BudgetWork(
        size=options.size,
        num_layers=SHAPE.num_layers,
        ranks=options.ranks,
        threads=options.threads,
        microbatch=options.microbatch,
        warmup=0,
        steps=options.steps,
        device=options.device,
        recompute_blocks=options.recompute_blocks,
        dtype=options.dtype,
        budget_bytes=options.budget_mib * MIB,
        timeout_seconds=options.timeout,
        sequence_length=length,
    )
    try:
        job = run_budget_job(contender, work, sys.executable, options.offload_folder, options.allocator)
        fits = job.peak_bytes is not None and job.peak_bytes <= options.budget_mib * MIB
        peak = f"peak {(job.peak_bytes or 0) / MIB:.0f} MiB"
    except OverBudget:
        fits, peak = False, f"over {options.budget_mib} MiB"
    seconds = time.monotonic() - started
    says = "fits" if fits else "does not fit"
    console.print(f"{contender.label}  {length:,} tokens: {peak}, {says} [dim]({seconds:.0f} s)[/dim]", highlight=False)
    return fits
