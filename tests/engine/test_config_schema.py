"""The presets, the schema, files of real projects, where each value comes from, and what `fill` gives."""

import csv
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import lowtide
from lowtide.engine.config.config import Config, ConfigError
from lowtide.engine.config.explain import difference, explain
from lowtide.engine.config.read import PRESETS, preset_names, read
from lowtide.engine.config.schema import schema_text
from lowtide.engine.config.translate import deepspeed
from tests.kit import models
from tests.kit.training import refusal

OPTIMIZER, PARAM = "zero_optimization.offload_optimizer", "zero_optimization.offload_param"
ROOT = Path(__file__).resolve().parents[2]

RULES = deepspeed().REASONS


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


FILES = Path(__file__).parent / "data" / "real_configs"
INDEX = {row["file"]: row for row in csv.DictReader((FILES / "INDEX.tsv").read_text().splitlines(), delimiter="\t")}
LOADS = [name for name, row in INDEX.items() if not row["faults"]]
TRAINED = [name for name, row in INDEX.items() if row["faults"] in ("", "scheduler.params.total_num_steps missing")]
FILL = {"scheduler.params.total_num_steps": 10}
SIZES = {"train_batch_size": None, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}


def test_the_index_has_every_file() -> None:
    assert sorted(INDEX) == sorted(path.name for path in FILES.glob("*.json"))


@pytest.mark.parametrize("name", LOADS)
def test_it_loads_with_exactly_these_notes(name: str) -> None:
    config = Config.load(FILES / name)
    assert [note.split(": ")[0] for note in config.notes] == INDEX[name]["notes"].split()
    if config.train_batch_size is None:
        resolved = config.resolve(4)
        assert resolved.train_batch_size is not None and resolved.train_batch_size % 4 == 0


@pytest.mark.parametrize("name", [name for name in INDEX if name not in LOADS])
def test_it_has_exactly_these_faults(name: str) -> None:
    with pytest.raises(ConfigError, match=name) as caught:
        Config.load(FILES / name)
    assert ", ".join(f"{fault.path} {fault.kind}" for fault in caught.value.faults) == INDEX[name]["faults"]


def kind_of(value: Any) -> Any:
    """A value of a config without its numbers."""
    if isinstance(value, dict):
        return {key: kind_of(one) for key, one in value.items()}
    if isinstance(value, list):
        return [kind_of(one) for one in value]
    return "number" if type(value) in (int, float) else value


def trained(folder: Path) -> dict[str, float]:
    """Two steps with each file, with batches of one row. The loss of the second.

    One trains for all that differ in numbers alone, at the same stage.
    """
    losses, of_kind = {}, dict[str, float]()
    for name in TRAINED:
        config = Config.load(FILES / name, fill=FILL).as_dict() | SIZES
        kind = json.dumps([config["zero_optimization"]["stage"], kind_of(config)], sort_keys=True)
        if kind in of_kind:
            losses[name] = of_kind[kind]
            continue
        config["zero_optimization"]["offload_optimizer"]["nvme_path"] = str(folder)
        config["zero_optimization"]["offload_param"]["nvme_path"] = str(folder)
        optimizer = None if config["optimizer"] else torch.optim.AdamW
        torch.manual_seed(0)
        with lowtide.initialize(models.mlp(), config | {"device": "cpu"}, optimizer=optimizer) as engine:
            for step in range(2):
                result = engine.train_step(models.vector_batch(step, 1))
            losses[name] = of_kind[kind] = result.loss.item()
    return losses


def test_each_file_that_loads_trains(tmp_path: Path) -> None:
    losses = trained(tmp_path)
    assert list(losses) == TRAINED and all(math.isfinite(loss) for loss in losses.values())


DEFAULTS = {one.path: one.value for one in explain({}).keys}


def leaves(values: dict[str, Any], path: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        here = f"{path}.{name}" if path else name
        found |= leaves(value, here) if isinstance(value, dict) and value else {here: value}
    return found


def test_the_batch_is_explained_for_so_many_ranks() -> None:
    (said,) = explain({"train_batch_size": 3}, 2).faults
    assert "train_batch_size" in said.message


def test_every_key_of_ours_is_there_with_its_value_and_what_it_does() -> None:
    found = {one.path: one.value for one in explain("zero3_offload_nvme").keys}
    expected = leaves(Config.load("zero3_offload_nvme").as_dict())
    assert {path: found[path] for path in expected} == expected
    both = {"optimizer": {"type": "sgd"}, "scheduler": {"type": "StepLR", "params": {"step_size": 3}}}
    assert all(one.effect for one in explain(both).keys)


@pytest.mark.parametrize("path", sorted(FILES.glob("*.json")), ids=lambda path: path.stem)
def test_no_key_of_a_real_file_is_passed_over(path: Path) -> None:
    """A value that was written is the engine's, or it says why not."""
    found = {one.path: one for one in explain(path).keys}
    for name, value in leaves(read(path)[0]).items():
        if value is None or name not in found:
            continue
        one = found[name]
        is_taken = one.origin == "set" and (one.value == value or isinstance(value, str))
        assert is_taken or one.why or one.origin == "no effect", one
    assert len(found) > 60
    defaults = {path: one.value for path, one in found.items() if one.origin == "default" and path in DEFAULTS}
    assert defaults == {path: DEFAULTS[path] for path in defaults}


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        ({}, {"zero_optimization": {"stage": 0}}, []),
        ({"bfloat16": {"enabled": True}}, {"bf16": {"enabled": True}, "wall_clock_breakdown": True}, []),
        ({"gradient_clipping": 1.0}, {"gradient_clipping": "auto"}, ["gradient_clipping: 1.0 (set) -> 0.0 (auto)"]),
        (
            {"optimizer": {"type": "AdamW"}},
            {"optimizer": {"type": "sgd", "params": {"lr": 1e-3}}},
            [
                'optimizer.type: "adamw" (set) -> "sgd" (set)',
                "optimizer.params.betas: [0.9, 0.999] (default) -> absent",
            ],
        ),
    ],
)
def test_a_difference_is_one_of_meaning(first: Any, second: Any, said: list[str]) -> None:
    found = [f"{one.path}: {one.sides[0]} -> {one.sides[1]}" for one in difference(first, second)]
    assert set(said) <= set(found) and bool(said) == bool(found)


DECAY = {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_num_steps": "auto"}}
STEPS = "scheduler.params.total_num_steps"


@pytest.mark.parametrize(
    ("raw", "path", "value"),
    [
        ({"scheduler": DECAY}, STEPS, 40),
        ({"optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": 0.1}}}, "optimizer.params.lr", 0.5),
        ({"train_batch_size": "auto"}, "train_batch_size", 8),
        ({"bfloat16": {"enabled": "auto"}, "gradient_clipping": 0.0}, "bf16.enabled", True),
        ({"bf16": {"enabled": "auto"}, "gradient_clipping": 0.0}, "bfloat16.enabled", True),
        ({"seed": "auto"}, "seed", 3),
    ],
)
def test_an_auto_has_the_value_that_is_given(raw: dict[str, Any], path: str, value: object) -> None:
    config = Config.load(raw, fill={path: value, STEPS: 40})
    name = path.replace("bfloat16", "bf16")
    assert {one.path: one.value for one in explain(config.as_dict()).keys}[name] == value
    assert f'{name}: "auto" is {str(value).lower()}: it was given as `fill`' in config.notes


def test_what_says_something_else_or_nothing_stays() -> None:
    raw = {"gradient_clipping": 0.5, "zero_optimization": {"reduce_bucket_size": "auto"}}
    fill = {"gradient_clipping": 1.0, "seed": 3, "zero_optimization.reduce_bucket_size": 4096}
    config = Config.load(raw, fill=fill)
    assert (config.gradient_clipping, config.seed) == (0.5, None)
    assert raw["zero_optimization"] == {"reduce_bucket_size": "auto"}
    assert any(note.startswith("zero_optimization.reduce_bucket_size: 4096 has no effect") for note in config.notes)


@pytest.mark.parametrize(
    ("source", "fill", "expected"),
    [
        ({}, {f"{STEPS[:-1]}": 3}, f'{STEPS[:-1]}: fill: no config has such a key; did you mean "'),
        ({"seed": "auto"}, {"seed": -1}, "seed: expected at least 0, found -1"),
        ({"scheduler": DECAY}, {}, f'or pass it to initialize: fill={{"{STEPS}": ...}}'),
        (
            Config.load({}),
            {"seed": 3},
            'fill: expected a file or a dictionary, since a Config has no "auto", found a ',
        ),
    ],
)
def test_a_wrong_fill_is_an_error(source: Any, fill: dict[str, Any], expected: str) -> None:
    assert expected in refusal(Config.load, source, fill=fill)


def test_initialize_takes_it() -> None:
    raw = {"optimizer": {"type": "sgd"}, "scheduler": DECAY, "steps_per_print": 0}
    with lowtide.initialize(models.mlp(), raw, fill={STEPS: 4, "scheduler.params.warmup_num_steps": 2}) as engine:
        scheduler = engine.config.as_dict()["scheduler"]["params"]
        assert (scheduler["total_num_steps"], scheduler["warmup_num_steps"]) == (4, 2)


def test_the_log_has_one_line_for_all_text_that_is_a_value() -> None:
    config = Config.load({"seed": "3", "bf16": {"enabled": "true"}, "wandb": {"enabled": True, "project": "2024"}})
    assert config.short_notes == ('seed: read "3" as 3; bf16.enabled: read "true" as true',)
    assert config.wandb.project == "2024"  # whose type is text
