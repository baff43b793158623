"""DeepSpeed's keys have one of four outcomes: works, a note, not supported yet, unknown."""

import json
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import lowtide
from lowtide.deepspeed.rules import RULES, is_on
from lowtide.engine.config.batch import BATCH_KEYS
from lowtide.engine.config.config import Config, ConfigError
from lowtide.engine.config.errors import Fault
from lowtide.engine.config.translate import AUTO, deepspeed, own_keys, sections_of
from tests.integrations.deepspeed.scripts import DATA
from tests.test_public_api import in_fresh_python


def nested(path: str, value: object) -> dict[str, Any]:
    """{"a": {"b": value}} for the path a.b, in an optimizer or scheduler that can take it. Clipping is given."""
    for key in reversed(path.split(".")):
        value = {key: value}
    assert isinstance(value, dict)
    value.setdefault("gradient_clipping", 1.0)
    if "optimizer" in value:
        value["optimizer"]["type"] = "SGD" if path.endswith("momentum") else "AdamW"
        value["optimizer"].setdefault("params", {}).setdefault("weight_decay", 0.1)
    if "scheduler" in value:
        value["scheduler"]["type"] = "WarmupLR"
        if path.endswith("ratio"):
            value["scheduler"]["type"] = "WarmupCosineLR"
            value["scheduler"]["params"]["total_num_steps"] = 10
    return value


def faults(values: dict[str, Any]) -> list[Fault]:
    with pytest.raises(ConfigError) as caught:
        Config.load(values)
    return list(caught.value.faults)


SAMPLES = {
    "true or false": True,
    "an integer": 12345,
    "a number": 12345,
    "a string": "sum",
    "an object": {"enabled": True},
    "any value": "x",
}


@pytest.mark.parametrize("path", RULES)
def test_every_rule_gives_its_outcome(path: str) -> None:
    rule = RULES[path]
    samples = [SAMPLES[rule.expected], *([False] if rule.expected == "true or false" else [])]
    for value in [sample for sample in samples if sample not in rule.agrees]:
        if rule.outcome == "no_effect":
            config = Config.load(nested(path, value))
            assert any(note.startswith(f"{path}: ") and note.endswith(rule.reason) for note in config.notes)
        else:
            (fault,) = faults(nested(path, value))
            assert (fault.path, fault.kind) == (path, "unsupported")
            assert "not supported yet; " in fault.message and fault.message.endswith(rule.reason)


@pytest.mark.parametrize("path", [path for path, rule in RULES.items() if rule.agrees or rule.outcome == "section"])
def test_a_value_that_asks_for_what_happens_anyway_is_silent(path: str) -> None:
    for value in RULES[path].agrees or ({}, {"enabled": False}, None):
        assert Config.load(nested(path, value)).notes == ()


@pytest.mark.parametrize("path", [path for path, rule in RULES.items() if rule.expected != "any value"])
def test_a_value_of_the_wrong_type_is_an_error(path: str) -> None:
    wrong = 3 if RULES[path].expected in ("a string", "an object") else "many"
    with pytest.raises(ConfigError, match=f"expected {RULES[path].expected}, found {wrong}".replace("many", '"many"')):
        Config.load(nested(path, wrong))


@pytest.mark.parametrize("path", AUTO)
def test_auto_has_a_value_and_a_note(path: str) -> None:
    config = Config.load(nested(path, "auto"))
    (note,) = [note for note in config.notes if note.startswith(f"{path}: ")]
    assert note.startswith(f'{path}: "auto" is ') and note.endswith(AUTO[path])


def test_auto_batch_sizes_wait_for_the_world_size() -> None:
    config = Config.load({**dict.fromkeys(BATCH_KEYS, "auto"), "gradient_clipping": 1.0})
    assert config.notes == () and len(config.resolve(2).notes) == 3


def test_the_log_has_one_line_for_all_keys_without_an_effect(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    zero = {"stage": 1, "overlap_comm": True, "allgather_bucket_size": 5e8, "stage3_prefetch_bucket_size": "auto"}
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"optimizer": {"type": "sgd"}, "zero_optimization": zero, "gradient_clipping": 1.0}))
    with caplog.at_level("INFO", logger="lowtide"):
        lowtide.initialize(nn.Linear(2, 2), str(file)).close()
    said = [record.getMessage() for record in caplog.records if record.getMessage().startswith("config: ")]
    assert said == [
        "config: 2 keys of DeepSpeed have no effect here: zero_optimization.overlap_comm, "
        f"zero_optimization.allgather_bucket_size; `lowtide config explain {file} --given` says why",
        'config: zero_optimization.stage3_prefetch_bucket_size: "auto" is null: two units are gathered ahead',
    ]
    one = Config.load({"zero_optimization": {"stage": 1, "overlap_comm": True}})
    assert len(one.short_notes) == 2 and one.short_notes == one.notes


@pytest.mark.parametrize("path", ["train_batch_size", "bf16.enabled", "zero_optimization.overlap_comm"])
def test_auto_with_a_fault_elsewhere_is_no_second_fault(path: str) -> None:
    assert [fault.path for fault in faults({**nested(path, "auto"), "sede": 1})] == ["sede"]


@pytest.mark.parametrize(
    ("section", "on"),
    [
        ({}, False),
        ({"enabled": False, "detailed": True}, False),
        ({"enabled": True}, True),
        ({"enabled": "auto"}, True),
        ({"stages": 2}, True),
        ({"deepcompile": False}, False),
        ({"disable": True, "backend": "inductor"}, False),
        ({"autotp_size": 1}, False),
        ({"autotp_size": 4}, True),
        ({"pruning": {"shared": {"enabled": False}}, "layers": {"enabled": False, "x": {"enabled": True}}}, False),
        ({"pruning": {"shared": {"enabled": True}}, "layers": {"enabled": False}}, True),
    ],
)
def test_a_section_asks_for_something_only_when_it_is_on(section: dict[str, object], on: bool) -> None:
    assert is_on(section) is on


OFF = {"enabled": False}
SLIPS: dict[str, tuple[str, dict[str, Any]]] = {  # path -> what was meant, and the section that is off
    "tensorboard.job_nmae": ("job_name", {"tensorboard": {**OFF, "job_nmae": "x"}}),
    "flops_profiler.enabeld": ("enabled", {"flops_profiler": {"enabeld": False}}),
    "fp16.loss_scael": ("loss_scale", {"fp16": {**OFF, "loss_scael": 1}}),
}


@pytest.mark.parametrize("path", SLIPS)
def test_a_slip_in_a_section_that_is_off_is_an_error(path: str) -> None:
    meant, section = SLIPS[path]
    slip = path.rpartition(".")[2]
    assert [str(fault) for fault in faults(section)] == [f'{path}: unknown key "{slip}"; did you mean "{meant}"?']


@pytest.mark.parametrize("path", sorted(path for path, rule in RULES.items() if rule.outcome == "section"))
def test_a_section_without_effect_may_have_any_words_while_it_is_off(path: str) -> None:
    def with_section(section: dict[str, Any]) -> dict[str, Any]:
        outer, _, name = path.rpartition(".")
        return {outer: {name: section}} if outer else {name: section}

    off = Config.load(with_section({**OFF, "of_its_own": {"deep": 1}}))
    assert off == Config.load({}) and not any(path in note for note in off.notes)
    assert [fault.kind for fault in faults(with_section({"enabled": True, "of_its_own": 1}))] == ["unsupported"]


def test_deepspeeds_own_defaults_load() -> None:
    config = Config.load(json.loads((DATA / "defaults.json").read_text()))
    assert config.steps_per_print == 0 and config.zero_optimization.stage == 0
    assert not any(": null " in note for note in config.notes)


NOTES: list[tuple[str, object, str]] = [  # "" where DeepSpeed's default is what happens
    ("steps_per_print", None, ""),
    ("steps_per_print", float("inf"), ""),  # Accelerate
    ("zero_optimization.overlap_comm", None, ""),
    ("zero_optimization.sub_group_size", None, ""),
    ("pipeline.pipe_partitioned", False, ""),
    ("data_types.keep_in_fp32_modules", "auto", ""),
    ("compile", {"deepcompile": False, "double_buffer": True}, ""),
    ("pipeline.grad_partitioned", True, "true | stages send whole tensors, not divided over tensor-parallel ranks"),
    ("data_types.keep_in_fp32_modules", ["bias"], '["bias"] | buffers keep their types'),
    (
        "checkpoint.parallel_write",
        {"pipeline_stage": True},
        '{"pipeline_stage": true} | every rank writes its part in parallel',
    ),
    (
        "zero_optimization.reduce_bucket_size",
        5e8,
        "500000000 | gradients and parameters travel unit by unit in flat buffers, there are no buckets to size",
    ),
]


@pytest.mark.parametrize(("path", "value", "note"), NOTES)
def test_a_value_is_what_happens_or_has_a_note(path: str, value: object, note: str) -> None:
    found, _, reason = note.partition(" | ")
    expected = (f"{path}: {found} has no effect here: {reason}",) if note else ()
    assert Config.load(nested(path, value)).notes == expected


def test_a_line_is_never_logged_with_null_and_infinity(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    for text in ("0", "null", "Infinity"):
        path.write_text(f'{{"steps_per_print": {text}}}')
        assert Config.load(path).steps_per_print == 0
    for text in ("-Infinity", "NaN"):
        path.write_text(f'{{"steps_per_print": {text}}}')
        with pytest.raises(ConfigError, match="steps_per_print: expected a finite number, found "):
            Config.load(path)


def test_old_names_work() -> None:
    assert Config.load({"bfloat16": {"enabled": True}}).bf16.enabled
    with pytest.raises(ConfigError, match='means the same as "bf16", which is given too; keep one of them'):
        Config.load({"bfloat16": {"enabled": True}, "bf16": {"enabled": True}})


@pytest.mark.parametrize(
    ("words", "ours"),
    [
        ({"data_types": {"grad_accum_dtype": "bfloat16"}}, {"data_types": {"grad_accum_dtype": "bf16"}}),
        ({"data_types": {"grad_accum_dtype": "torch.float32"}}, {"data_types": {"grad_accum_dtype": "fp32"}}),
        ({"tensor_parallel": {"autotp_size": 1}}, {}),
        ({"gradient_allreduce_op": "SUM"}, {"gradient_allreduce_op": "sum"}),
    ],
)
def test_words_that_deepspeed_takes_are_taken(words: dict[str, Any], ours: dict[str, Any]) -> None:
    assert Config.load(words) == Config.load(ours)


def test_the_dialect_has_no_key_of_ours() -> None:
    # So a file with our keys alone stays as it is, whether the dialect reads it or not.
    ours = own_keys(Config).keys() | sections_of(Config).keys()
    assert deepspeed().keys().keys() & ours == {"zero_optimization"}  # which may be true or false in DeepSpeed
    assert not deepspeed().REASONS.keys() & ours


def test_the_dialect_is_imported_for_files_that_need_it() -> None:
    files: list[tuple[Any, bool]] = [
        ("zero3", False),
        ({"train_batch_size": 8, "parallel": {"tensor": 2}, "optimizer": {"type": "Adam", "params": {}}}, False),
        ({"bfloat16": {"enabled": True}, "aio": {"intra_op_parallelism": 2}, "gradient_clipping": "auto"}, False),
        ({"seed": 0, "bf16": {}, "tensor_parallel": {"plan": {"blocks.*": "column"}}}, False),
        ({"zero_optimization": {"stage": 2, "overlap_comm": True}}, True),
        ({"train_batch_size": 8}, True),  # which DeepSpeed takes too, with other defaults
        ({"zero_optimization": {"stge": 2}}, True),  # a near key may be one of DeepSpeed's
    ]
    code = f"""
import contextlib, os, sys, lowtide
lowtide.Config
assert "lowtide.deepspeed" not in sys.modules
for config, is_imported in {files!r}:
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0, config
        continue
    with contextlib.suppress(lowtide.ConfigError):
        lowtide.Config.load(config).resolve(8).short_notes
    os._exit(("lowtide.deepspeed" in sys.modules) != is_imported)
"""
    in_fresh_python(code)
