"""Stretches of a shard with options of their own, as an optimizer's kernel on the device reads them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ...optimizers.optimizer import MAX_COEFFICIENTS, Options

Coefficients = tuple[float, ...]


class OptionRuns(NamedTuple):
    """Stretches by number; neighbours differ in their coefficients."""

    ends: tuple[int, ...]
    choices: tuple[int, ...]  # index in `coefficients` of each stretch
    coefficients: tuple[Coefficients, ...]  # MAX_COEFFICIENTS numbers each, all different

    @staticmethod
    def of(
        runs: Sequence[tuple[int, Options]], steps: Sequence[int], coefficients: Callable[[Options, int], Coefficients]
    ) -> OptionRuns:
        """runs: (end, options), ascending; steps: of each run; coefficients: of options and step.

        Stretches with equal coefficients share them, and are one if adjacent.
        """
        by_options: dict[tuple[int, int], int] = {}  # id of options, which are few objects for many runs, and step
        by_value: dict[Coefficients, int] = {}
        ends: list[int] = []
        choices: list[int] = []
        for (end, options), step in zip(runs, steps, strict=True):
            if end == (ends[-1] if ends else 0):
                continue
            choice = by_options.get((id(options), step))
            if choice is None:
                # Whole numbers, as in weight_decay=0, would be compiled into a kernel of their own.
                values = tuple(map(float, coefficients(options, step)))
                values += (0.0,) * (MAX_COEFFICIENTS - len(values))
                choice = by_options[id(options), step] = by_value.setdefault(values, len(by_value))
            if choices and choices[-1] == choice:
                ends[-1] = end
                continue
            ends.append(end)
            choices.append(choice)
        return OptionRuns(tuple(ends), tuple(choices), tuple(by_value))


@dataclass(frozen=True)
class RunTable:
    """Which stretches a program of the kernel meets, on the device."""

    ends: Tensor  # (runs,) int64
    choices: Tensor  # (runs,) int32
    first_runs: Tensor  # (programs + 1,) int32: the stretch in which each program begins, and the last of all


# Both tables are kept for the stream that they were copied on: another would have to wait for the copy.
@lru_cache(maxsize=1024)
def run_table(
    ends: tuple[int, ...], choices: tuple[int, ...], tile_numel: int, device: torch.device, stream: int
) -> RunTable:
    """For programs of tile_numel elements each. It follows from the model alone, so it is copied once."""
    ends_tensor = torch.tensor(ends, dtype=torch.int64)
    starts = torch.arange(0, ends[-1], tile_numel)
    first_runs = torch.searchsorted(ends_tensor, starts, right=True, out_int32=True)
    first_runs = torch.cat([first_runs, torch.tensor([len(ends) - 1], dtype=torch.int32)])
    return RunTable(
        on_device(ends_tensor, device),
        on_device(torch.tensor(choices, dtype=torch.int32), device),
        on_device(first_runs, device),
    )


@lru_cache(maxsize=16)
def coefficient_table(coefficients: tuple[Coefficients, ...], device: torch.device, stream: int) -> Tensor:
    """(sets, MAX_COEFFICIENTS) float32. The shards of a step share it."""
    return on_device(torch.tensor(coefficients, dtype=torch.float32), device)


def stream_of(device: torch.device) -> int:
    """What the tables are kept for."""
    return int(torch.cuda.current_stream(device).cuda_stream) if device.type == "cuda" else 0


def on_device(values: Tensor, device: torch.device) -> Tensor:
    """The copy to a GPU is from pinned memory, so that the host does not wait for it."""
    if device.type == "cuda":
        values = values.pin_memory()
    return values.to(device, non_blocking=True)
