"""`fill` gives the keys that say "auto" a value, and no others."""

from typing import Any

import pytest

import lowtide
from lowtide.engine.config.config import Config
from lowtide.engine.config.explain import explain
from tests.kit import models
from tests.kit.training import refusal

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
    config = Config.load({"seed": "3", "bf16": {"enabled": "true"}, "wandb": {"project": "2024"}})
    assert config.short_notes == ('seed: read "3" as 3; bf16.enabled: read "true" as true',)
    assert config.wandb.project == "2024"  # whose type is text
