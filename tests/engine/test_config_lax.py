"""What DeepSpeed converts: as pydantic does it, and for its keys alone."""

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from lowtide.engine.config.config import Config, ConfigError
from lowtide.engine.config.lax import converted

VALUES: list[Any] = [
    "1",
    "3",
    "1.0",
    "2.5",
    "5e8",
    "1e-5",
    "inf",
    "true",
    "False",
    "YES",
    "off",
    "T",
    "n",
    " 7 ",
    " true ",
    "1_000",
]
VALUES += ["", "x", 1, 0, 1.0, 0.5, 2, True, False]


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("zero_optimization.overlap_comm", bool),
        ("zero_optimization.sub_group_size", int),
        ("zero_optimization.offload_optimizer.ratio", float),
    ],
)
@pytest.mark.parametrize("value", VALUES)
def test_a_value_is_converted_as_pydantic_does(path: str, kind: type, value: Any) -> None:
    expected: Any
    try:
        expected = TypeAdapter(kind).validate_python(value)
    except ValidationError:
        assert converted(path, value) is value
    else:
        assert converted(path, value) == (value if value == "inf" else expected)  # no config has that


def test_a_file_with_strings_is_that_with_values() -> None:
    zero = {"stage": "2", "reduce_bucket_size": "500000000", "cpu_offload": "true", "overlap_comm": 0}
    as_strings: dict[str, Any] = {
        "bfloat16": {"enabled": "false"},
        "fp16": {"enabled": "True", "loss_scale": "1e3", "hysteresis": "4"},
        "zero_optimization": zero,
        "tensorboard": {"enabled": "false"},
        "comms_logger": {"enabled": "off"},
        "prescale_gradients": 1,
        "zero_allow_untested_optimizer": 1,
    }
    as_values: dict[str, Any] = {
        "bfloat16": {"enabled": False},
        "fp16": {"enabled": True, "loss_scale": 1e3, "hysteresis": 4},
        "zero_optimization": {
            "stage": 2,
            "reduce_bucket_size": 500000000,
            "cpu_offload": True,
            "overlap_comm": False,
        },
        "prescale_gradients": True,
        "zero_allow_untested_optimizer": True,
    }
    found, expected = Config.load(as_strings), Config.load(as_values)
    assert (found, found.notes) == (expected, expected.notes)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ({"gradient_clipping": "1.0"}, 'gradient_clipping: expected a number, found "1.0"'),
        ({"train_batch_size": "8"}, 'train_batch_size: expected an integer, found "8"'),
        (
            {"optimizer": {"type": "Adam", "params": {"lr": "1e-5"}}},
            'optimizer.params.lr: expected a number, found "1e-5"',
        ),
        ({"zero_optimization": {"sub_group_size": "1e9"}}, 'sub_group_size: expected an integer, found "1e9"'),
        ({"prescale_gradients": "true"}, 'prescale_gradients: expected true or false, found "true"'),
        ({"flops_profiler": {"enabled": "true"}}, 'flops_profiler.enabled: expected true or false, found "true"'),
    ],
)
def test_what_deepspeed_does_not_convert_is_an_error(source: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Config.load(source)
