"""Where each value of a config comes from (more of it in the table), and where two configs differ in meaning."""

from pathlib import Path
from typing import Any

import pytest

from lowtide.engine.config.config import Config
from lowtide.engine.config.explain import difference, explain
from lowtide.engine.config.read import read
from tests.engine.test_config_real_files import FILES

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
