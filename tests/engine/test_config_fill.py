"""`fill` gives the keys that say "auto" a value, and no others; text that is wholly a value is this value."""

import json
import re
from typing import Any

import pytest

import lowtide
from lowtide.engine.config.config import Config, ConfigError
from lowtide.engine.config.explain import explain
from tests.kit import models

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
    fill = {path: value, "scheduler.params.total_num_steps": 40}
    config = Config.load(raw, fill=fill)
    found: Any = config.as_dict()
    name = path.replace("bfloat16", "bf16")
    for key in name.split("."):
        found = found[key]
    assert found == value
    given = f'{name}: "auto" is {str(value).lower()}: it was given as `fill`'
    assert given in config.notes and raw != config.as_dict()


def test_what_says_something_else_or_nothing_stays() -> None:
    raw = {"gradient_clipping": 0.5, "zero_optimization": {"reduce_bucket_size": "auto"}}
    fill = {"gradient_clipping": 1.0, "seed": 3, "zero_optimization.reduce_bucket_size": 4096}
    config = Config.load(raw, fill=fill)
    assert (config.gradient_clipping, config.seed) == (0.5, None)
    assert raw["zero_optimization"] == {"reduce_bucket_size": "auto"}
    assert any(note.startswith("zero_optimization.reduce_bucket_size: 4096 has no effect") for note in config.notes)


@pytest.mark.parametrize(
    ("raw", "fill", "expected"),
    [
        (
            {},
            {"scheduler.params.total_num_step": 3},
            'scheduler.params.total_num_step: fill: no config has such a key; did you mean "',
        ),
        ({"seed": "auto"}, {"seed": -1}, "seed: expected at least 0, found -1"),
        ({"scheduler": DECAY}, {}, f'or pass it to initialize: fill={{"{STEPS}": ...}}'),
    ],
)
def test_a_wrong_fill_is_an_error(raw: dict[str, Any], fill: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.load(raw, fill=fill)
    assert expected in str(caught.value)


def test_a_loaded_config_has_no_auto() -> None:
    with pytest.raises(
        ValueError, match='fill: expected a file or a dictionary, since a Config has no "auto", found a '
    ):
        Config.load(Config.load({}), fill={"seed": 3})


def test_initialize_takes_it() -> None:
    raw = {"optimizer": {"type": "sgd"}, "scheduler": DECAY, "steps_per_print": 0}
    fill = {STEPS: 4, "scheduler.params.warmup_num_steps": 2}
    with lowtide.initialize(models.mlp(), raw, fill=fill) as engine:
        scheduler = engine.config.as_dict()["scheduler"]["params"]
        assert (scheduler["total_num_steps"], scheduler["warmup_num_steps"]) == (4, 2)


@pytest.mark.parametrize(
    ("path", "text", "value"),
    [
        ("zero_optimization.stage", "3", 3),
        ("zero_optimization.prefetch_bucket_size", "5e7", 50_000_000),
        ("gradient_clipping", "1e-3", 0.001),
        ("optimizer.params.lr", "+.5E-1", 0.05),
        ("optimizer.params.betas[0]", "0.9", 0.9),
        ("optimizer.params.adam_w_mode", "false", False),
        ("scheduler.params.milestones[1]", "3.0", 3),
        ("bf16.masters", "false", False),
        ("tiles", "256", 256),
        ("communication.weight_bits", "8", 8),
        ("zero_optimization.cpu_offload", "true", True),  # from here on DeepSpeed's keys
        ("zero_optimization.mics_shard_size", "2", 2),
        ("zero_optimization.zero_quantized_weights", "true", True),
        ("zero_optimization.sub_group_size", "1_000", 1000),
        ("flops_profiler.profile_step", "4", 4),
        ("amp.enabled", "false", False),
    ],
)
def test_text_that_is_wholly_a_value_is_this_value(path: str, text: str, value: object) -> None:
    config, expected = Config.load(at(path, text)), Config.load(at(path, value))
    name = path.replace(".prefetch", ".stage3_prefetch").partition("[")[0]
    note = f'{name}: read "{text}" as {json.dumps(value)}'
    assert (config, config.notes) == (expected, (note, *expected.notes)) and config.short_notes[0] == note


def test_the_log_has_one_line_for_all_text_and_explain_says_it_at_each_key() -> None:
    raw: dict[str, Any] = {"seed": "3", "bf16": {"enabled": "true"}, "wandb": {"project": "2024", "group": "true"}}
    config = Config.load(raw)
    assert config.short_notes == ('seed: read "3" as 3; bf16.enabled: read "true" as true',)
    assert (config.wandb.project, config.wandb.group) == ("2024", "true")  # whose type is text
    for others in ({}, {"device": 1}):  # which is a fault
        assert 'seed = 3  (set: read "3" as 3)' in map(str, explain(raw | others).keys)


@pytest.mark.parametrize(
    ("path", "found", "message"),
    [
        ("seed", "3.5", "expected an integer, found 3.5"),
        ("seed", "1" * 20, "expected an integer of at most 64 bits, found 11111111111111110656"),
        ("gradient_clipping", "-1", "expected at least 0, found -1"),
        *(
            ("gradient_clipping", text, f'expected a number, found "{text}"')
            for text in ("", "1,0", "0x3", "nan", "inf")
        ),
        ("gradient_clipping", "true", 'expected a number, found "true"'),
        ("optimizer.params.lr", "1e-3x", 'expected a number, found "1e-3x"'),
        ("zero_optimization.sub_group_size", "all", 'expected an integer, found "all"'),
        *(("bf16.enabled", text, f'expected true or false, found "{text}"') for text in ("1", "yes", "on", "True")),
        *((key, 1, "expected true or false, found 1") for key in ("bf16.enabled", "zero_optimization.overlap_comm")),
        ("fp16.hysteresis", True, "expected an integer, found true"),
    ],
)
def test_all_else_is_refused(path: str, found: object, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"{path}: {message}")):
        Config.load(at(path, found))


def at(path: str, value: object) -> dict[str, Any]:
    """A config with this value at a key, or in a list of two there."""
    key, _, index = path.partition("[")
    found: Any = {"0]": [value, 0.99], "1]": [1, value]}.get(index, value)
    for part in reversed(key.split(".")):
        found = {part: found}
    for section, kind in (("optimizer", "Adam"), ("scheduler", "MultiStepLR")):
        if section in found:
            found[section]["type"] = kind
    return dict(found)
