"""The presets and the schema."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from lowtide.engine.config.config import Config
from lowtide.engine.config.read import PRESETS, preset_names
from lowtide.engine.config.schema import schema_text
from lowtide.engine.config.translate import deepspeed

OPTIMIZER, PARAM = "zero_optimization.offload_optimizer", "zero_optimization.offload_param"
ROOT = Path(__file__).resolve().parents[2]

RULES = deepspeed().reasons


@pytest.mark.parametrize("name", [name for name in preset_names() if name != "auto"])
def test_every_preset_is_ready_to_use(name: str) -> None:
    config = Config.load(name)
    assert config.notes == () and config.optimizer is not None
    # 4 ranks with a row each; or 2 pipelines of 2 ranks, with 8 microbatches of a row each
    assert config.resolve(4).train_batch_size == (16 if "pipeline2" in name else 4)
    assert config.parallel.pipeline == (2 if "pipeline2" in name else 1)
    assert config.zero_optimization.stage == int(name.removeprefix("zero")[0])
    assert config.bf16.enabled == name.endswith("bf16") and config.fp16.enabled == name.endswith("fp16")
    assert (config.zero_optimization.shard_size is not None) == ("hybrid" in name)
    device = name.rpartition("_offload_")[2] if "_offload_" in name else "none"
    assert config.zero_optimization.offload_optimizer.device == device
    assert config.zero_optimization.offload_param.device == (device if name.startswith("zero3") else "none")


def test_the_promised_presets_are_there() -> None:
    promised = {"zero0", "zero1", "zero2", "zero3", "zero3-hybrid", "zero3-bf16", "zero3-fp16"}
    promised |= {"zero2_offload_cpu", "zero3_offload_cpu", "zero3_offload_nvme", "zero1-pipeline2"}
    assert promised <= set(preset_names()) and "schema" not in preset_names()


@pytest.mark.parametrize("name", ["zero3_bf16", "zero3-hybrid_bf16", "zero3_offload_nvme", "zero3-offload-nvme"])
def test_the_words_of_a_preset_name_are_joined_by_either_sign(name: str) -> None:
    real = next(other for other in preset_names() if other.replace("_", "-") == name.replace("_", "-"))
    assert Config.load(name).as_dict() == Config.load(PRESETS / f"{real}.json").as_dict()


@pytest.fixture(scope="module")
def text() -> str:
    return schema_text()


def test_the_schema_file_is_fresh(text: str) -> None:
    assert text == (PRESETS / "schema.json").read_text(encoding="utf-8")


def test_the_schema_knows_every_key(text: str) -> None:
    schema = json.loads(text)
    zero = schema["$defs"]["ZeroConfig"]
    assert {path.split(".")[0] for path in RULES} <= set(schema["properties"])
    assert {path.split(".")[1] for path in RULES if path.startswith("zero_optimization.")} <= set(zero["properties"])
    assert {"prefetch_bucket_size", "max_live_parameters", "cpu_offload_use_pin_memory"} <= set(zero["properties"])
    sections = {"OffloadOptimizerConfig": OPTIMIZER, "OffloadParamConfig": PARAM, "AioConfig": "aio"}
    for name, path in sections.items():
        keys = {rule.removeprefix(f"{path}.") for rule in RULES if rule.startswith(f"{path}.")}
        assert keys and keys < set(schema["$defs"][name]["properties"])
    assert schema["properties"]["aio"]["anyOf"] == [{"$ref": "#/$defs/AioConfig"}, {"type": "null"}]
    assert zero["additionalProperties"] is False and zero["properties"]["stage"]["anyOf"][0]["enum"] == [0, 1, 2, 3]
    checkpoint = schema["$defs"]["CheckpointConfig"]["properties"]
    assert checkpoint["async"]["type"] == "boolean" and "asynchronous" not in checkpoint
    assert schema["properties"]["seed"]["anyOf"] == [{"minimum": 0, "type": "integer"}, {"type": "null"}]
    assert {"const": "auto"} in schema["properties"]["train_batch_size"]["anyOf"]


def _property_names(schema: Any) -> set[str]:
    if isinstance(schema, dict):
        own = set(schema["properties"]) if isinstance(schema.get("properties"), dict) else set()
        return own.union(*(_property_names(value) for value in schema.values()))
    return set().union(*(_property_names(item) for item in schema)) if isinstance(schema, list) else set()


def test_the_documentation_names_every_key(text: str) -> None:
    """Alone, or at the end of its path, as the tables of keys without an effect name it."""
    named = re.findall(r"`(?:[\w.]+\.)?(\w+)`", (ROOT / "docs" / "config.md").read_text(encoding="utf-8"))
    assert _property_names(json.loads(text)) - set(named) == set()
