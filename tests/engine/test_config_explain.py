"""Where each value of a config comes from, and where two configs differ in meaning."""

from pathlib import Path
from typing import Any

import pytest

from lowtide.engine.config.config import Config
from lowtide.engine.config.explain import Explained, difference, explain
from lowtide.engine.config.read import read
from tests.engine.test_config_real_files import FILES

DEFAULTS = {one.path: one.value for one in explain({}).keys}


def key(config: Any, path: str, world_size: int | None = None) -> Explained:
    return {one.path: one for one in explain(config, world_size).keys}[path]


def leaves(values: dict[str, Any], path: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        here = f"{path}.{name}" if path else name
        found |= leaves(value, here) if isinstance(value, dict) and value else {here: value}
    return found


@pytest.mark.parametrize(
    ("config", "path", "said"),
    [
        ({}, "zero_optimization.stage", "zero_optimization.stage = 0  (default)"),
        ({"zero_optimization": {"stage": 2}}, "zero_optimization.stage", "zero_optimization.stage = 2  (set)"),
        ({"bfloat16": {"enabled": True}}, "bf16.enabled", "bf16.enabled = true  (set)"),
        (
            {"gradient_clipping": "auto"},
            "gradient_clipping",
            "gradient_clipping = 0.0  (auto: gradients are clipped only if a number is given)",
        ),
        (
            {"zero_optimization": {"cpu_offload": True}},
            "zero_optimization.offload_optimizer.device",
            'zero_optimization.offload_optimizer.device = "cpu"  (set: by zero_optimization.cpu_offload)',
        ),
        (
            {"zero_optimization": {"overlap_comm": True}},
            "zero_optimization.overlap_comm",
            "zero_optimization.overlap_comm = true  (no effect: the engine chooses whether communication overlaps with "
            "computation)",
        ),
        (
            {"zero_optimization": {"cpu_offload": True}},
            "zero_optimization.cpu_offload",
            'zero_optimization.cpu_offload = true  (set: zero_optimization.offload_optimizer.device "cpu")',
        ),
        (
            {"zero_optimization": {"stage": 2, "cpu_offload_params": True}},
            "zero_optimization.offload_param.device",
            "(no effect: below stage 3 every rank holds all parameters at all times)",
        ),
        (
            {"zero_optimization": {"stage": 3, "zero_quantized_weights": True}},
            "communication.weight_bits",
            "communication.weight_bits = 8  (set: by zero_optimization.zero_quantized_weights)",
        ),
        (
            {"zero_optimization": {"stage": 3, "mics_shard_size": 2}},
            "zero_optimization.mics_shard_size",
            "zero_optimization.mics_shard_size = 2  (set: zero_optimization.shard_size 2)",
        ),
        ({"zero_optimization": True}, "zero_optimization.stage", "stage = 1  (set: by zero_optimization)"),
        (
            {"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}},
            "optimizer.params.adam_w_mode",
            'adam_w_mode = false  (set: optimizer.type "adam")',
        ),
        (
            {"flops_profiler": {"enabled": True}, "comms_logger": {"enabled": True}},
            "profile.enabled",
            "profile.enabled = true  (set: by flops_profiler.enabled and comms_logger.enabled)",
        ),
        (
            {"parallel": {"tensor": 2}, "tensor_parallel": {"plan": {"layers.*.up": "column"}}},
            "tensor_parallel.plan",
            'tensor_parallel.plan = {"layers.*.up": "column"}  (set)',
        ),
        (
            {"optimizer": {"type": "AdamW", "params": {"lr": 0.1}}, "zero_optimization": {"stage": 9}},
            "optimizer.params.lr",
            "optimizer.params.lr = 0.1  (set)",
        ),
        (
            {"optimizer": {"type": "AdamW", "params": {"lr": 0.1, "ls": 1}}},
            "optimizer.params.lr",
            "optimizer.params.lr = 0.1  (set)",
        ),
        (
            {"fp16": {"hysteresis": 4}},
            "fp16.hysteresis",
            "fp16.hysteresis = 4  (no effect: fp16.enabled is false)",
        ),
        (
            {"fp16": {"hysteresis": "x"}},
            "fp16.hysteresis",
            'fp16.hysteresis = "x"  (fault: expected an integer, found "x")',
        ),
        (
            {"zero_optimization": {"stgae": 1}},
            "zero_optimization.stgae",
            'fault: unknown key "stgae"; did you mean "stage"?',
        ),
        ({"mine": {"deep": 1}}, "mine.deep", 'mine.deep = 1  (fault: unknown key "mine"'),
        (
            {},
            "train_batch_size",
            "train_batch_size = null  (derived: follows from the number of ranks: --world-size N)",
        ),
        ("auto", "parallel.pipeline", 'parallel.pipeline = "auto"  (auto: chosen from the model and the machine'),
        (
            {"train_batch_size": 8, "bf16": {"enabled": "auto"}, "zero_force_ds_cpu_optimizer": True},
            "gradient_clipping",
            "gradient_clipping = 0.0  (default: missing, so it is 0.0 here; in DeepSpeed 0.19 it is 1.0.",
        ),
    ],
)
def test_a_key_says_where_its_value_comes_from(config: Any, path: str, said: str) -> None:
    assert said in str(key(config, path))


def test_the_batch_is_explained_for_so_many_ranks() -> None:
    found = key({"train_batch_size": 16, "gradient_accumulation_steps": "auto"}, "gradient_accumulation_steps", 4)
    assert (found.value, found.origin) == (1, "auto") and found.why.endswith("= 4 x 1 x 4 ranks")
    said = explain({"train_batch_size": 3}, 2).faults
    assert len(said) == 1 and "train_batch_size" in said[0].message


def test_every_key_of_ours_is_there_with_its_value_and_what_it_does() -> None:
    config = Config.load("zero3_offload_nvme")
    found = {one.path: one.value for one in explain("zero3_offload_nvme").keys}
    expected = leaves(config.as_dict())
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
    assert not [
        path for path, one in found.items() if one.origin == "default" and one.value != DEFAULTS.get(path, one.value)
    ]


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        ({}, {"zero_optimization": {"stage": 0}}, []),
        ({"bfloat16": {"enabled": True}}, {"bf16": {"enabled": True}, "wall_clock_breakdown": True}, []),
        (
            {"zero_optimization": {"cpu_offload": True}},
            {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
            [],
        ),
        (
            {"gradient_clipping": 1.0},
            {"gradient_clipping": "auto"},
            ["gradient_clipping: 1.0 (set) -> 0.0 (auto)"],
        ),
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
