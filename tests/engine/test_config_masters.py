"""bf16.masters, and DeepSpeed's words for it."""

import re
from typing import Any

import pytest

from lowtide.engine.config.config import Config, ConfigError

ADAM: dict[str, Any] = {"optimizer": {"type": "AdamW", "params": {"weight_decay": 0.1}}, "gradient_clipping": 1.0}
THEIRS = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}


@pytest.mark.parametrize("value", [True, False, "kahan", "int8"])
def test_there_are_four_forms(value: bool | str) -> None:
    config = Config.load({"bf16": {"enabled": True, "masters": value}})
    assert config.bf16.masters == value and config.notes == ()
    assert Config.load(config.as_dict()) == config


def test_without_bf16_it_has_no_effect() -> None:
    (note,) = Config.load({"bf16": {"masters": False}}).notes
    assert note == "bf16.masters: false has no effect here: bf16.enabled is false"


def test_words_of_deepspeed_are_parameters_sums_and_states_of_bf16() -> None:
    config = Config.load({**ADAM, "bf16": {"enabled": True, **THEIRS}})
    assert config.bf16.masters is False and config.data_types.grad_accum_dtype == "bf16"
    assert config.optimizer is not None and config.optimizer.state_dtype == "bf16"
    path = "bf16.bf16_master_weights_and_grads"
    assert config.notes == (f"{path}: true is bf16.masters false here, with stochastic rounding of updates",)
    wide = Config.load({**ADAM, "bf16": {"enabled": True, **THEIRS}, "data_types": {"grad_accum_dtype": "fp32"}})
    assert wide.data_types.grad_accum_dtype == "fp32"


@pytest.mark.parametrize(
    ("config", "path", "words"),
    [
        ({"bf16": {"masters": "none"}}, "bf16.masters", 'expected true, false, "kahan" or "int8", found "none"'),
        ({"bf16": {"masters": 0}}, "bf16.masters", 'expected true, false, "kahan" or "int8", found 0'),
        (
            {"bf16": {"enabled": True, "bf16_master_weights_and_grads": 2}},
            "bf16.bf16_master_weights_and_grads",
            "expected true or false, found 2",
        ),
        (
            {"bf16": {"enabled": True, "masters": "kahan", "bf16_master_weights_and_grads": True}},
            "bf16.bf16_master_weights_and_grads",
            'means "masters": false; keep one of them',
        ),
        (
            {**ADAM, "bf16": {"enabled": True, "bf16_optimizer_states": True}},
            "bf16.bf16_optimizer_states",
            "needs bf16_master_weights_and_grads true, as in DeepSpeed; or set optimizer.params.state_dtype",
        ),
        (
            {"bf16": {"enabled": True, **THEIRS}},
            "bf16.bf16_optimizer_states",
            "sets state_dtype of the optimizer in the file, which has none; an optimizer passed in keeps its own",
        ),
    ],
)
def test_errors(config: dict[str, Any], path: str, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"{path}: {words}")):
        Config.load(config)
