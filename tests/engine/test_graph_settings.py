"""Settings beside `compile.graphs`: what it refuses, and what it says."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide import ConfigError
from lowtide.engine.blueprint.blueprint import Blueprint
from lowtide.engine.config.config import Config
from lowtide.engine.step.graphs import are_possible

OFFLOAD = {"device": "cpu"}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "zero_optimization.offload_optimizer.device": ({"stage": 1, "offload_optimizer": OFFLOAD}, '"none", found "cpu"'),
    "zero_optimization.offload_param.device": ({"stage": 3, "offload_param": OFFLOAD}, '"none", found "cpu"'),
    "zero_optimization.update_in_backward": ({"stage": 3, "update_in_backward": True}, "false, found true"),
    "zero_optimization.layered_gradient_accumulation": ({"layered_gradient_accumulation": True}, "false, found true"),
    "activation_checkpointing.offload.device": ({"offload": OFFLOAD}, '"none", found "cpu"'),
    **{f"parallel.{axis}": ({axis: 2}, "1, found 2") for axis in ("pipeline", "tensor", "sequence", "expert")},
    "communication.weight_bits": ({"weight_bits": 8}, "null, found 8"),
    "communication.gradient_bits": ({"gradient_bits": 4}, "null, found 4"),
    "communication.power_sgd.rank": ({"power_sgd": {"rank": 2}}, "0, found 2"),
    "fp8.enabled": ({"enabled": True}, "false, found true"),
    "compile.mode": ({"mode": "reduce-overhead"}, '"max-autotune-no-cudagraphs", found "reduce-overhead"'),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_a_graph_could_not_repeat_is_refused(what: str) -> None:
    section, text = REFUSED[what]
    config: dict[str, dict[str, Any]] = {"compile": {"graphs": True}}
    config.setdefault(what.split(".")[0], {}).update(section)
    with pytest.raises(ConfigError, match=rf"{re.escape(what)}: compile.graphs needs .*{re.escape(text)}"):
        Config.load(config)


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


def test_the_number_of_graphs_has_no_effect_without_them() -> None:
    notes = Config.load({"compile": {"max_graphs": 3}}).notes
    assert "compile.max_graphs: 3 has no effect here: compile.graphs is false" in notes
