"""The processes that a launcher has started, of which accelerate sees one alone where it looks for accelerators."""

from __future__ import annotations

import torch

from ..comm.rendezvous import num_started


def only_cpu() -> bool:
    """Whether this host has no accelerator; accelerate joins processes there only where it is told to use the CPU."""
    return not torch.accelerator.is_available()


def refuse_alone(num_processes: int) -> None:
    """Raises ValueError where accelerate counts other processes than an engine will.

    The loop of each would take all batches then, and write the files of all.
    """
    started = num_started()
    if started != num_processes:
        raise ValueError(
            f"Accelerator: expected the {started} processes that the launcher has started, found {num_processes} in "
            "accelerate: each would train on all batches; on a CPU say so, by TrainingArguments(use_cpu=True) or "
            "Accelerator(cpu=True)"
        )
