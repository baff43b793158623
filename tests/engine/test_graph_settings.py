"""Settings beside `compile.graphs`: what it refuses, and what it says."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.engine.blueprint.blueprint import Blueprint
from lowtide.engine.config.config import Config
from lowtide.engine.step.graphs import are_possible


def test_a_cpu_has_no_graphs(caplog: pytest.LogCaptureFixture) -> None:
    config = {"compile": {"graphs": True}, "device": "cpu", "optimizer": {"type": "adamw"}}
    with caplog.at_level("INFO"), lowtide.initialize(nn.Linear(3, 1), config) as engine:
        assert not hasattr(engine._runner, "graphs")
    assert "compile.graphs: true has no effect here: the CPU launches nothing" in caplog.text


def refusal(device: str, config: dict[str, Any], **world: Any) -> str:
    found: Any = SimpleNamespace(**{"device": torch.device(device), "size": 1, "waits_on_host": False, **world})
    with pytest.raises(ValueError, match=r"^compile\.graphs: expected") as error:
        are_possible(Blueprint.of(Config.load(config).resolve(1), nn.Linear(3, 1), 1), found)
    return str(error.value)


def test_what_a_device_or_an_update_does_not_repeat_is_refused() -> None:
    assert "a device with torch.cuda's graphs, found xpu; leave it out" in refusal("xpu", {})
    text = refusal("cuda", {}, size=2, waits_on_host=True, backend="gloo")
    assert "collectives a graph can hold (NCCL), found gloo, for which the host waits" in text
    signs = {"optimizer": {"type": "onebitadam", "params": {"freeze_step": 2}}}
    assert "gradients that each step sums alike, found the optimizer 'onebitadam'" in refusal("cuda", signs)
