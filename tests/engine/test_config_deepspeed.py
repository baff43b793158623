"""DeepSpeed's keys have one of four outcomes: works, a note, not supported yet, unknown."""

from typing import Any

import pytest

from lowtide.engine.config import Config, ConfigError
from lowtide.engine.config_deepspeed import RULES, is_on
from lowtide.engine.config_translate import AUTO, BATCH_KEYS


def nested(path: str, value: object) -> dict[str, Any]:
    """{"a": {"b": value}} for the path a.b, in an optimizer or scheduler that can take it."""
    for key in reversed(path.split(".")):
        value = {key: value}
    assert isinstance(value, dict)
    if "optimizer" in value:
        value["optimizer"]["type"] = "SGD" if path.endswith("momentum") else "AdamW"
    if "scheduler" in value:
        cosine = path.endswith("ratio")
        value["scheduler"]["type"] = "WarmupCosineLR" if cosine else "WarmupLR"
        if cosine:
            value["scheduler"]["params"]["total_num_steps"] = 10
    return value


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
            with pytest.raises(ConfigError) as caught:
                Config.load(nested(path, value))
            (fault,) = caught.value.faults
            assert (fault.path, fault.kind) == (path, "unsupported")
            assert "not supported yet; " in fault.message and fault.message.endswith(rule.reason)


@pytest.mark.parametrize("path", [path for path, rule in RULES.items() if rule.agrees or rule.outcome == "section"])
def test_a_value_that_asks_for_what_happens_anyway_is_silent(path: str) -> None:
    for value in RULES[path].agrees or ({}, {"enabled": False, "x": 1}, None):
        assert Config.load(nested(path, value)).notes == ()


@pytest.mark.parametrize("path", [path for path, rule in RULES.items() if rule.expected != "any value"])
def test_a_value_of_the_wrong_type_is_an_error(path: str) -> None:
    wrong = 3 if RULES[path].expected in ("a string", "an object") else "yes"
    with pytest.raises(ConfigError, match=f"expected {RULES[path].expected}, found {wrong}".replace("yes", '"yes"')):
        Config.load(nested(path, wrong))


@pytest.mark.parametrize("path", AUTO)
def test_auto_has_a_value_and_a_note(path: str) -> None:
    config = Config.load(nested(path, "auto"))
    (note,) = [note for note in config.notes if note.startswith(f"{path}: ")]
    assert note.startswith(f'{path}: "auto" is ') and note.endswith(AUTO[path])


def test_auto_batch_sizes_wait_for_the_world_size() -> None:
    config = Config.load(dict.fromkeys(BATCH_KEYS, "auto"))
    assert config.notes == () and len(config.resolve(2).notes) == 3


@pytest.mark.parametrize("path", ["train_batch_size", "bf16.enabled", "zero_optimization.overlap_comm"])
def test_auto_with_a_fault_elsewhere_is_no_second_fault(path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.load({**nested(path, "auto"), "sede": 1})
    assert [fault.path for fault in caught.value.faults] == ["sede"]


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


CHECKPOINT_OUTCOMES: list[tuple[str, object, str]] = [
    ("checkpoint.tag_validation", "Fail", '"Fail" has no effect here: every rank uses the tag of rank 0'),
    (
        "checkpoint.load_universal",
        True,
        "true has no effect here: every checkpoint loads at every number of ranks and every stage",
    ),
    (
        "checkpoint.parallel_write",
        {"pipeline_stage": True},
        '{"pipeline_stage": true} has no effect here: every rank writes its own part, all at the same time',
    ),
    (
        "zero_optimization.load_from_fp32_weights",
        False,
        "false has no effect here: the fp32 master weights are what is saved and loaded",
    ),
    (
        "zero_optimization.pipeline_loading_checkpoint",
        True,
        "true has no effect here: each rank reads only what it needs of a checkpoint",
    ),
    (
        "zero_optimization.stage3_gather_16bit_weights_on_model_save",
        True,
        "true has no effect here: engine.export() writes full weights and never gathers the model; "
        "engine.state_dict() always gives them",
    ),
]


@pytest.mark.parametrize(("path", "value", "note"), CHECKPOINT_OUTCOMES)
def test_checkpoint_keys_that_ask_for_what_happens_are_explained(path: str, value: object, note: str) -> None:
    assert Config.load(nested(path, value)).notes == (f"{path}: {note}",)


def test_checkpoint_keys_that_ask_for_another_place_say_what_to_do() -> None:
    with pytest.raises(ConfigError) as caught:
        Config.load({"checkpoint": {"use_node_local_storage": True}, "nebula": {"enabled": True}})
    assert [str(fault) for fault in caught.value.faults] == [
        "checkpoint.use_node_local_storage: true is not supported yet; every rank must see one folder; set false",
        "nebula: not supported yet; remove the section; checkpoint.async writes in the background",
    ]


def test_old_names_work() -> None:
    assert Config.load({"bfloat16": {"enabled": True}}).bf16.enabled
    assert Config.load({"bf16": {"enabled": True}}) == Config.load({"bf16": {"enabled": True}})
    with pytest.raises(ConfigError, match='means the same as "bf16", which is given too; keep one of them'):
        Config.load({"bfloat16": {"enabled": True}, "bf16": {"enabled": True}})


def test_reduce_scatter_bucket_note_has_its_text() -> None:
    assert Config.load({"zero_optimization": {"reduce_bucket_size": 5e8}}).notes == (
        "zero_optimization.reduce_bucket_size: 500000000 has no effect here: "
        "gradients and parameters travel unit by unit in flat buffers, there are no buckets to size",
    )
