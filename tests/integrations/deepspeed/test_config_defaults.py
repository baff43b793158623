"""A file that was written for DeepSpeed says where DeepSpeed's defaults would train with other numbers."""

import json
from pathlib import Path
from typing import Any

import pytest

from lowtide.deepspeed.rules import RULES
from lowtide.engine.config.config import Config, _known_keys
from lowtide.engine.config.translate import OWN_KEYS


def note(key: str, ours: str, theirs: str) -> str:
    return f"{key}: missing, so it is {ours} here; in DeepSpeed 0.19 it is {theirs}. Write the value that you want"


CLIPPING, DECAY = note("gradient_clipping", "0.0", "1.0"), note("optimizer.params.weight_decay", "0.01", "0.0")


def others(values: dict[str, Any]) -> list[str]:
    """The keys whose other defaults have a note."""
    return [note.split(": ")[0] for note in Config.load(values).notes if ": missing, " in note]


def test_each_such_key_has_one_note_when_the_file_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps({"train_batch_size": 8, "fp16": {"enabled": True}, "optimizer": {"type": "AdamW"}}))
    config = Config.load(path)
    assert config.notes == config.resolve(4).notes == (CLIPPING, note("fp16.auto_cast", "true", "false"), DECAY)
    assert config.gradient_clipping == 0 and config.optimizer is not None
    assert config.optimizer.options["weight_decay"] == 0.01


def test_a_decaying_schedule_that_leaves_its_peak_out_has_a_note() -> None:
    """It would go to 50 times a configured 2e-5 in DeepSpeed, and goes to that here."""
    params: dict[str, Any] = {"total_num_steps": 9}
    values = {"train_batch_size": 8, "gradient_clipping": 1.0, "scheduler": {"type": "warmupdecaylr", "params": params}}
    assert Config.load(values).notes == (note("scheduler.params.warmup_max_lr", "null", "0.001"),)
    params["warmup_max_lr"] = "auto"
    assert not others(values)


@pytest.mark.parametrize(
    "values",
    [
        {"train_batch_size": 8},
        {"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 2}},
        {"zero_optimization": {"stage": 3, "overlap_comm": True}},
        {"zero_optimization": {"cpu_offload": True}},
        {"wall_clock_breakdown": False, "seed": 3, "kernels": {"backend": "auto"}},
    ],
)
def test_a_config_is_deepspeeds_by_a_key_of_its_own_or_where_it_could_run_it(values: dict[str, Any]) -> None:
    assert others(values) == ["gradient_clipping"]


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"zero_optimization": {"stage": 3}},
        {"train_batch_size": 8, "device": "cpu"},
        {"train_batch_size": 8, "zero_optimization": {"stage": 3, "units": ["layers.*"]}},
        {"train_batch_size": 8, "optimizer": {"type": "adamw"}},
        {"train_batch_size": 8, "scheduler": {"type": "cosine", "params": {"total_num_steps": 9}}},
        {"train_batch_size": 8, "gradient_clipping": 0},
    ],
)
def test_a_config_of_ours_and_one_that_says_the_values_have_no_note(values: dict[str, Any]) -> None:
    assert others(values) == [] and others(Config.load(values).as_dict()) == []


@pytest.mark.parametrize(
    ("kind", "params", "keys"),
    [
        ("AdamW", {}, ["weight_decay"]),
        ("AdamW", {"weight_decay": 0}, []),
        ("AdamW", {"torch_adam": True}, []),  # torch's own there, with 0.01
        ("Adam", {}, []),
        ("Adam", {"torch_adam": True}, ["weight_decay"]),
        ("Adam", {"adam_w_mode": False, "torch_adam": True}, []),
        ("Lion", {}, ["lr", "betas"]),
        ("Lion", {"lr": 1e-3, "betas": [0.9, 0.99]}, []),
        ("Adagrad", {}, []),
        ("SGD", {}, []),
    ],
)
def test_the_defaults_of_each_optimizer(kind: str, params: dict[str, Any], keys: list[str]) -> None:
    values = {"train_batch_size": 8, "gradient_clipping": 1.0, "optimizer": {"type": kind, "params": params}}
    assert others(values) == [f"optimizer.params.{key}" for key in keys]


def test_a_default_that_auto_chose_has_the_note_of_auto_alone() -> None:
    optimizer = {"type": "AdamW", "params": {"weight_decay": "auto"}}
    values = {"train_batch_size": "auto", "gradient_clipping": "auto", "optimizer": optimizer}
    assert others(values) == [] and len(Config.load(values).notes) == 2


@pytest.mark.parametrize("path", sorted(OWN_KEYS))
def test_every_own_key_is_a_key_and_none_of_deepspeeds(path: str) -> None:
    *_, key = loc = tuple(path.split("."))
    assert key in _known_keys(loc, "adamw") and path not in RULES
