"""Bits of messages in the config, and the words of ZeRO++ for them."""

import re
from typing import Any

import pytest

from lowtide.engine.config.config import Config, ConfigError

ZERO = "zero_optimization"
PATHS = {name: f"{ZERO}.zero_quantized_{name}" for name in ("weights", "nontrainable_weights", "gradients")}
CLIP = {"gradient_clipping": 1.0}
ALL = {path.removeprefix(f"{ZERO}."): True for path in PATHS.values()}


def test_bits_are_kept() -> None:
    given = {"weight_bits": 4, "frozen_weight_bits": 8, "gradient_bits": 8, "ranks_of_host": 2}
    config = Config.load({ZERO: {"stage": 3}, "communication": given})
    assert config.notes == () and config.communication.gradient_bits_in_host == 8
    assert Config.load(config.as_dict()) == config


def test_switches_of_zero_plus_plus_are_bits_at_stage_3() -> None:
    config = Config.load({ZERO: {"stage": 3, **ALL}, **CLIP})
    found = config.communication
    assert (found.weight_bits, found.frozen_weight_bits, found.gradient_bits, found.gradient_bits_in_host) == (
        8,
        8,
        4,
        4,
    )
    assert config.notes == (
        f"{PATHS['weights']}: true is communication.weight_bits 8 here",
        f"{PATHS['nontrainable_weights']}: true is communication.frozen_weight_bits 8 here",
        f"{PATHS['gradients']}: true is communication.gradient_bits 4, communication.gradient_bits_in_host 4 here",
    )
    assert Config.load({ZERO: {"stage": 3, **dict.fromkeys(ALL, False)}}).communication.weight_bits is None


NOTES: list[tuple[dict[str, Any], str]] = [
    (
        {ZERO: {"stage": 2, "zero_quantized_gradients": True}, **CLIP},
        f"{PATHS['gradients']}: true has no effect here: it needs stage 3; communication.gradient_bits 4, "
        "communication.gradient_bits_in_host 4 acts at every stage",
    ),
    (
        {"communication": {"weight_bits": 8}},
        "communication.weight_bits: 8 has no effect here: stage 0 sends no weights, since every rank updates all",
    ),
    (
        {ZERO: {"stage": 1}, "communication": {"frozen_weight_bits": 8}},
        "communication.frozen_weight_bits: 8 has no effect here: stage 1 sends updated weights only, and "
        "frozen weights are not updated",
    ),
    (
        {"communication": {"gradient_bits_in_host": 4}},
        "communication.gradient_bits_in_host: 4 has no effect here: communication.gradient_bits is null",
    ),
]


@pytest.mark.parametrize(("config", "note"), NOTES)
def test_what_has_no_effect_is_said(config: dict[str, Any], note: str) -> None:
    assert Config.load(config).notes == (note,)


@pytest.mark.parametrize(
    ("config", "path", "words"),
    [
        (
            {"communication": {"weight_bits": 5}},
            "communication.weight_bits",
            "expected 8, 4 or null (bits of a value in a message)",
        ),
        (
            {"communication": {"gradient_bits": True}},
            "communication.gradient_bits",
            "expected 8, 4 or null (bits of a value in a message)",
        ),
        ({ZERO: {"stage": 3, "zero_quantized_weights": "maybe"}}, PATHS["weights"], "expected true or false"),
        (
            {ZERO: {"stage": 3, "zero_quantized_weights": True}, "communication": {"weight_bits": 4}},
            PATHS["weights"],
            "means communication.weight_bits 8, and communication.weight_bits is given too; keep one of them",
        ),
        (
            {ZERO: {"stage": 3, "zeropp_loco_param": {"err_beta": 0.8}}},
            f"{ZERO}.zeropp_loco_param",
            "not supported yet; quantized gradients use unbiased stochastic rounding without feedback",
        ),
    ],
)
def test_errors(config: dict[str, Any], path: str, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"{path}: {words}")):
        Config.load(config)
