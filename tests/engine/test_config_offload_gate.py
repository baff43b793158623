"""Settings of offload that the engine does not do yet: each is refused where it is asked for, and nowhere else."""

from typing import Any

import pytest

from lowtide.engine import config_offload_checks
from lowtide.engine.config import Config, ConfigError

OPTIMIZER = "zero_optimization.offload_optimizer"
PARAM = "zero_optimization.offload_param"
ACTIVATIONS = "activation_checkpointing.offload"
ASKING: list[tuple[str, dict[str, Any]]] = [  # a name that may stand in UNSUPPORTED, and a config that asks for it
    (f"{OPTIMIZER}.device.cpu", {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}),
    (f"{OPTIMIZER}.device.nvme", {"zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": "d"}}}),
    (f"{OPTIMIZER}.ratio", {"zero_optimization": {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}}),
    (
        f"{OPTIMIZER}.overlap.speculative",
        {"zero_optimization": {"offload_optimizer": {"device": "cpu", "overlap": "speculative"}}},
    ),
    (
        f"{OPTIMIZER}.overlap.delayed",
        {"zero_optimization": {"offload_optimizer": {"device": "cpu", "overlap": "delayed"}}},
    ),
    (f"{PARAM}.device.cpu", {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}),
    (
        f"{PARAM}.device.nvme",
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "d"}}},
    ),
    (f"{ACTIVATIONS}.device.cpu", {"activation_checkpointing": {"offload": {"device": "cpu"}}}),
    (f"{ACTIVATIONS}.device.nvme", {"activation_checkpointing": {"offload": {"device": "nvme", "nvme_path": "d"}}}),
    ("optimizer.params.state_dtype.bf16", {"optimizer": {"type": "Lion", "params": {"state_dtype": "bf16"}}}),
    ("optimizer.params.state_dtype.int8", {"optimizer": {"type": "AdamW", "params": {"state_dtype": "int8"}}}),
]


def refuse(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    monkeypatch.setattr(config_offload_checks, "UNSUPPORTED", frozenset(names))


def test_every_name_of_the_gate_is_one_of_these() -> None:
    assert {name for name, _ in ASKING} >= config_offload_checks.UNSUPPORTED


@pytest.mark.parametrize(("name", "values"), ASKING)
def test_what_is_named_is_refused_and_the_rest_loads(
    name: str, values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(monkeypatch)
    assert Config.load(values).notes == ()
    refuse(monkeypatch, name)
    path = name if name.endswith("ratio") else name.rpartition(".")[0]
    value = "0.5" if name.endswith("ratio") else f'"{name.rpartition(".")[2]}"'
    instead = {"ratio": "1.0", "state_dtype": '"fp32"'}.get(path.rpartition(".")[2], '"none"')
    with pytest.raises(ConfigError) as caught:
        Config.load(values)
    (fault,) = caught.value.faults
    assert fault.kind == "unsupported" and str(fault) == f"{path}: {value} is not supported yet; set {instead}"


def test_another_value_of_the_same_key_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch, f"{OPTIMIZER}.device.nvme", f"{OPTIMIZER}.overlap.delayed")
    section = {"device": "cpu", "overlap": "speculative", "ratio": 0.5}
    assert Config.load({"zero_optimization": {"offload_optimizer": section}}).notes == ()


def test_what_has_no_effect_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch, *(name for name, _ in ASKING))
    zero = {"offload_optimizer": {"overlap": "delayed", "ratio": 0.5}}
    optimizer = {"type": "SGD", "params": {"state_dtype": "int8"}}
    assert len(Config.load({"zero_optimization": zero, "optimizer": optimizer}).notes) == 3
