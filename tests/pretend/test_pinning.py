"""Who pins memory, and who asks an accelerator for anything."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import lowtide
from tests.kit.models import mlp, vector_batch
from tests.kit.ranks import on_device
from tests.kit.training import ADAMW


@pytest.mark.parametrize(
    ("device", "section", "pins"),
    [
        ("auto", {"device": "cpu"}, True),
        ("auto", {"device": "cpu", "pin_memory": False}, False),
        ("cpu", {"device": "cpu"}, False),
    ],
)
@on_device()
def test_memory_is_pinned_for_an_accelerator_that_trains(device: str, section: dict[str, Any], pins: bool) -> None:
    pinned = []
    make = torch.empty

    def empty(*shape: Any, **options: Any) -> torch.Tensor:
        memory = make(*shape, **options)
        if memory.is_pinned():
            pinned.append(memory.nbytes)
        return memory

    zero = {"stage": 3, "offload_optimizer": section, "offload_param": section}
    activations = {"offload": {"device": "cpu", "min_bytes": 1}} if section.get("pin_memory", True) else {}
    config = {"device": device, "optimizer": ADAMW, "zero_optimization": zero, "activation_checkpointing": activations}
    with patch.object(torch, "empty", empty):
        engine = lowtide.initialize(mlp(), config)
        engine.train_step(vector_batch(0, 1))
        engine.close()
    assert bool(pinned) == pins


@on_device()
def test_an_engine_on_the_cpu_leaves_the_accelerator_alone(tmp_path: Path) -> None:
    device = torch.get_device_module("pretend")
    untouched, held = device.get_rng_state(), torch.accelerator.memory_allocated()  # by what ran before
    with (
        patch.object(device, "get_rng_state", side_effect=AssertionError),
        patch.object(torch.accelerator, "set_device_index", side_effect=AssertionError),
    ):
        engine = lowtide.initialize(mlp(), {"device": "cpu", "optimizer": ADAMW})
        engine.train_step(vector_batch(0, 1))
        engine.save_checkpoint(tmp_path)
        engine.load_checkpoint(tmp_path)
        engine.close()
    assert torch.equal(device.get_rng_state(), untouched)
    assert torch.accelerator.memory_allocated() == held
