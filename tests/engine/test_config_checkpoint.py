"""The section `checkpoint`: its defaults, its one key with another name in Python, and what it needs."""

import json
from typing import Any

import pytest

from lowtide.engine.config.config import Config, ConfigError
from lowtide.engine.config.schema import json_schema

FULL = {
    "folder": "runs/a",
    "every_steps": 100,
    "keep_last": 3,
    "async": True,
    "exclude_frozen_parameters": True,
    "on_sigterm": True,
}


def faults_of(section: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        Config.load({"checkpoint": section})
    return [f"{fault.kind}: {fault}" for fault in caught.value.faults]


def test_nothing_is_saved_unless_it_is_asked_for() -> None:
    config = Config.load({"checkpoint": {}})
    assert config == Config.load({}) and config.notes == ()
    section = config.checkpoint
    assert section.folder is None and section.every_steps == 0 and section.keep_last is None
    assert section.asynchronous is False and section.on_sigterm is False


def test_every_key_is_read() -> None:
    config = Config.load({"checkpoint": FULL})
    section = config.checkpoint
    assert section.folder == "runs/a" and section.every_steps == 100 and section.keep_last == 3
    assert section.asynchronous is True and section.on_sigterm is True and section.exclude_frozen_parameters is True
    assert config.notes == ()


def test_async_is_written_back_under_its_name_in_the_file() -> None:
    config = Config.load({"checkpoint": FULL})
    assert config.as_dict()["checkpoint"] == config.model_dump()["checkpoint"] == config.checkpoint.model_dump() == FULL
    assert json.loads(config.model_dump_json())["checkpoint"] == FULL
    assert Config.load(json.loads(json.dumps(config.as_dict()))).checkpoint == config.checkpoint
    assert Config.model_validate(config.model_dump()).checkpoint == config.checkpoint
    assert config.resolve(2).as_dict()["checkpoint"] == FULL


def test_the_name_in_python_is_no_key() -> None:
    (fault,) = faults_of({"asynchronous": True})
    assert fault.startswith(
        'unknown: checkpoint.asynchronous: unknown key "asynchronous"; the keys here are async, checkpoint_'
    )


def test_the_section_is_closed_and_knows_the_keys_of_both_kinds() -> None:
    assert faults_of({"tag_validatoin": "Warn"}) == [
        'unknown: checkpoint.tag_validatoin: unknown key "tag_validatoin"; did you mean "tag_validation"?'
    ]
    assert faults_of({"every_step": 5}) == [
        'unknown: checkpoint.every_step: unknown key "every_step"; did you mean "every_steps"?'
    ]
    assert faults_of({"qqq": 1}) == [
        'unknown: checkpoint.qqq: unknown key "qqq"; the keys here are async, checkpoint_serialization, every_steps, '
        "exclude_frozen_parameters, folder, keep_last, load_universal, on_sigterm, parallel_write, tag_validation, "
        "use_node_local_storage, writer"
    ]


@pytest.mark.parametrize(
    ("section", "users"),
    [
        ({"every_steps": 100}, "every_steps 100"),
        ({"on_sigterm": True}, "on_sigterm true"),
        ({"every_steps": 1, "on_sigterm": True, "folder": None}, "every_steps 1 and on_sigterm true"),
    ],
)
def test_saving_without_a_call_needs_a_folder(section: dict[str, Any], users: str) -> None:
    assert faults_of(section) == [f"missing: checkpoint.folder: must be given, for the checkpoints of {users}"]
    assert Config.load({"checkpoint": {**section, "folder": "runs"}}).checkpoint.folder == "runs"


@pytest.mark.parametrize("section", [{"keep_last": 2}, {"async": True}, {"every_steps": 0}])
def test_settings_of_save_checkpoint_need_no_folder(section: dict[str, Any]) -> None:
    config = Config.load({"checkpoint": section})
    assert config.notes == () and config.as_dict()["checkpoint"] | section == config.as_dict()["checkpoint"]


def test_a_folder_that_nothing_uses_gives_a_note() -> None:
    reason = "every_steps is 0 and on_sigterm is false; save_checkpoint takes its folder as an argument"
    note = f'checkpoint.folder: "runs" has no effect here: {reason}'
    assert Config.load({"checkpoint": {"folder": "runs"}}).notes == (note,)
    assert Config.load({"checkpoint": {"folder": "runs", "every_steps": 5}}).notes == ()


def test_a_missing_folder_is_reported_at_the_section_among_the_other_faults() -> None:
    with pytest.raises(ConfigError) as caught:
        Config.load({"sede": 1, "checkpoint": {"every_steps": 5}, "bf16": True})
    assert [fault.path for fault in caught.value.faults] == ["sede", "checkpoint.folder", "bf16"]


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        (3, "type: checkpoint: expected an object, found 3"),
        (None, "type: checkpoint: expected an object, found null"),
        ({"folder": ""}, 'value: checkpoint.folder: expected the path of a folder or null, found ""'),
        ({"folder": " "}, 'value: checkpoint.folder: expected the path of a folder or null, found " "'),
        ({"folder": "", "every_steps": 5}, 'value: checkpoint.folder: expected the path of a folder or null, found ""'),
        ({"folder": 3}, "type: checkpoint.folder: expected the path of a folder or null, found 3"),
        (
            {"folder": "auto"},
            'missing: checkpoint.folder: "auto" has no meaning for this key here; write the value, or pass it to '
            'initialize: fill={"checkpoint.folder": ...}',
        ),
        ({"every_steps": -1}, "value: checkpoint.every_steps: expected at least 0, found -1"),
        ({"every_steps": True}, "type: checkpoint.every_steps: expected an integer, found true"),
        ({"every_steps": 0.5}, "type: checkpoint.every_steps: expected an integer, found 0.5"),
        ({"keep_last": 0}, "value: checkpoint.keep_last: expected at least 1, found 0"),
        ({"keep_last": "all"}, 'type: checkpoint.keep_last: expected an integer, found "all"'),
        ({"async": 1}, "type: checkpoint.async: expected true or false, found 1"),
        ({"on_sigterm": "yes"}, 'type: checkpoint.on_sigterm: expected true or false, found "yes"'),
    ],
)
def test_each_fault_says_what_was_expected_and_found(section: Any, expected: str) -> None:
    assert faults_of(section) == [expected]


def test_the_schema_has_the_key_of_the_file() -> None:
    properties = json_schema()["$defs"]["CheckpointConfig"]["properties"]
    assert properties["async"]["type"] == "boolean" and "asynchronous" not in properties
    assert set(FULL) < set(properties) and properties["folder"]["minLength"] == 1
