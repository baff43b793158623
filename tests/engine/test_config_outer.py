"""The section `outer`: what it takes, what contradicts it, and what of it has no effect."""

from typing import Any

import pytest

from lowtide.engine.config.config import Config, ConfigError


@pytest.mark.parametrize(
    ("outer", "text"),
    [
        ({"every": 4, "overlap": 4}, "outer.overlap: must be less than outer.every (4), found 4: the next exchange"),
        ({"every": 2, "fragments": 3}, "outer.fragments: must be at most outer.every (2), found 3: each is exchanged"),
        ({"every": 2, "optimizer": "average", "lr": 0.5}, 'outer.lr: has no meaning with outer.optimizer "average"'),
        ({"every": 2, "optimizer": "average", "momentum": 0.5}, "outer.momentum: has no meaning with outer.optimizer"),
        ({"every": 0}, "outer.every: expected at least 1, found 0"),
        ({"every": 2, "alpha": 1.0}, "outer.alpha: expected less than 1, found 1.0"),
        ({"every": 2, "dtype": "fp16"}, 'outer.dtype: expected "fp32", "bf16", "int8" or "int4", found "fp16"'),
        ({"every": 2, "optimiser": "sgd"}, 'unknown key "optimiser"; did you mean "optimizer"?'),
    ],
)
def test_what_contradicts_itself(outer: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.load({"outer": outer})
    assert text in str(caught.value)


@pytest.mark.parametrize("masters", ["kahan", "int8"])
def test_remainders_are_not_exchanged(masters: str) -> None:
    with pytest.raises(ConfigError, match=rf'needs bf16\.masters true or false, found "{masters}"'):
        Config.load({"outer": {"every": 2}, "bf16": {"enabled": True, "masters": masters}})


@pytest.mark.parametrize(
    ("outer", "note"),
    [
        ({"lr": 0.5}, "outer.lr: 0.5 has no effect here: outer.every is null"),
        ({"every": 1, "optimizer": "average"}, "is data parallelism, so all ranks train together"),
    ],
)
def test_what_has_no_effect_is_noted(outer: dict[str, Any], note: str) -> None:
    config = Config.load({"outer": outer})
    assert not config.outer.has_islands and any(note in one for one in config.notes)


@pytest.mark.parametrize("change", [{"every": 2}, {"optimizer": "sgd"}, {"alpha": 0.5}, {"dtype": "bf16"}])
def test_anything_else_has_islands(change: dict[str, Any]) -> None:
    assert Config.load({"outer": {"every": 1, "optimizer": "average", **change}}).outer.has_islands


def test_the_global_batch_is_of_all_islands() -> None:
    config = Config.load({"train_batch_size": 24, "gradient_accumulation_steps": 2, "outer": {"every": 2}})
    assert config.resolve(2, num_islands=3).train_micro_batch_size_per_gpu == 2
    with pytest.raises(ConfigError, match=r"data-parallel ranks\(10\)"):
        config.resolve(2, num_islands=5)


def test_with_overlap_the_half_of_an_islands_own_stays() -> None:
    mixing = [
        Config.load({"outer": {"every": 4, **more}}).outer.mixing for more in ({}, {"overlap": 1}, {"alpha": 0.25})
    ]
    assert mixing == [0.0, 0.5, 0.25]
