"""`fill` gives the keys that say "auto" a value, and no others."""

from typing import Any

import pytest

import lowtide
from lowtide.engine.config.config import Config, ConfigError
from tests import models

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
    with pytest.raises(ValueError, match='fill: expected a file or a dictionary that says "auto" beside it, found a '):
        Config.load(Config.load({}), fill={"seed": 3})


def test_initialize_takes_it() -> None:
    raw = {"optimizer": {"type": "sgd"}, "scheduler": DECAY, "steps_per_print": 0}
    fill = {STEPS: 4, "scheduler.params.warmup_num_steps": 2}
    with lowtide.initialize(models.mlp(), raw, fill=fill) as engine:
        scheduler = engine.config.as_dict()["scheduler"]["params"]
        assert (scheduler["total_num_steps"], scheduler["warmup_num_steps"]) == (4, 2)
