"""Losses of trainings with several seeds, beside those of a first contender with the same seeds."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lowtide import Engine

KINDS = ("training", "validation", "averaged")
DECAY = 0.995  # of averages over some 200 steps: the loss of what those steps have in common, with less chance in it


def mean_loss(engine: Engine, batches: Iterable[Mapping[str, Any]]) -> float:
    """Of batches that the engine is not trained on."""
    return statistics.fmean(engine.eval_step(batch).item() for batch in batches)


def losses_shown(rows: Sequence[Mapping[str, Any]], first: Sequence[Mapping[str, Any]]) -> str:
    """Of each kind the mean, and of its differences from the first's the mean with its standard error."""
    parts = []
    for kind in KINDS:
        differences = [100 * (row[kind] / other[kind] - 1) for row, other in zip(rows, first, strict=True)]
        error = f" +- {statistics.stdev(differences) / math.sqrt(len(rows)):.2f}" if len(rows) > 1 else ""
        mean = statistics.fmean(row[kind] for row in rows)
        parts.append(f"{kind} {mean:.4f} ({statistics.fmean(differences):+.2f}{error} %)")
    return "  ".join(parts)
