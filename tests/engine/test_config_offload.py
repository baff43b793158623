"""Offload in the config: its sections, DeepSpeed's names for them, what they need, and what has no effect."""

import json
from typing import Any

import pytest

from lowtide.engine.config.config import Config, ConfigError

OPTIMIZER = "zero_optimization.offload_optimizer"
PARAM = "zero_optimization.offload_param"
ACTIVATIONS = "activation_checkpointing.offload"
SECTIONS = (OPTIMIZER, PARAM, ACTIVATIONS)


def at(path: str, value: object, stage: int = 3) -> dict[str, Any]:
    """{"a": {"b": value}} for the path a.b, at a stage of ZeRO."""
    for key in reversed(path.split(".")):
        value = {key: value}
    assert isinstance(value, dict)
    zero = {"stage": stage, **value.get("zero_optimization", {})}
    return {"gradient_clipping": 0, **value, "zero_optimization": zero}


def section_of(config: Config, path: str) -> Any:
    outer, _, inner = path.partition(".")
    return getattr(getattr(config, outer), inner)


def faults_of(values: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        Config.load(values)
    return [f"{fault.kind}: {fault}" for fault in caught.value.faults]


def sgd(**params: object) -> dict[str, Any]:
    return {"optimizer": {"type": "SGD", "params": params}}


# -- what is read ---------------------------------------------------------------------------------------------------


def test_nothing_is_offloaded_unless_it_is_asked_for() -> None:
    config = Config.load({})
    optimizer, aio = config.zero_optimization.offload_optimizer, config.aio
    assert all(
        section_of(config, path).device == "none" and section_of(config, path).nvme_path is None for path in SECTIONS
    )
    assert optimizer.ratio == 1.0 and optimizer.pin_memory and optimizer.overlap == "none" and not optimizer.is_used
    assert optimizer.delay_after_steps == 40
    assert config.zero_optimization.offload_param.pin_memory
    assert config.zero_optimization.stage3_max_live_parameters is None
    assert config.activation_checkpointing.offload.min_bytes == 1024 * 1024
    assert config.activation_checkpointing.offload.budget_bytes is None
    assert (aio.block_size, aio.thread_count, aio.verify) == (8388608, 4, True)


FULL: dict[str, Any] = {
    "zero_optimization": {
        "stage": 3,
        "stage3_max_live_parameters": 1e9,
        "offload_optimizer": {
            "device": "nvme",
            "nvme_path": "/drive",
            "ratio": 0.25,
            "pin_memory": False,
            "overlap": "delayed",
            "delay_after_steps": 7,
        },
        "offload_param": {"device": "cpu", "pin_memory": False},
    },
    "activation_checkpointing": {"every": 1, "offload": {"device": "cpu", "min_bytes": 1, "budget_bytes": 1e6}},
    "aio": {"block_size": 262144, "thread_count": 4, "verify": False},
    "optimizer": {"type": "AdamW", "params": {"state_dtype": "int8"}},
}


def test_every_key_is_read_and_written_back() -> None:
    config = Config.load(FULL)
    assert config.notes == ()
    for path in SECTIONS:
        given = FULL[path.split(".")[0]][path.split(".")[1]]
        assert section_of(config, path).model_dump() | given == section_of(config, path).model_dump()
    assert config.zero_optimization.stage3_max_live_parameters == 1_000_000_000
    assert config.aio.model_dump() == FULL["aio"] and config.optimizer is not None
    assert config.optimizer.state_dtype == "int8"
    again = Config.load(json.loads(json.dumps(config.as_dict())))
    assert again == config and again.notes == ()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_every_stage_may_offload_a_part_of_the_optimizer_state(stage: int, device: str) -> None:
    values = at(OPTIMIZER, {"device": device, "ratio": 0.5} | ({"nvme_path": "d"} if device == "nvme" else {}), stage)
    assert Config.load(values).resolve(2).zero_optimization.offload_optimizer.is_used


@pytest.mark.parametrize("path", [*SECTIONS, *(f"{section}.device" for section in SECTIONS), "aio"])
def test_null_is_the_default(path: str) -> None:
    assert Config.load(at(path, None)) == Config.load({"zero_optimization": {"stage": 3}})
    assert Config.load(at(path, None)).notes == ()


@pytest.mark.parametrize("kind", ["AdamW", "Adam", "Lion", "Adagrad", "SGD"])
@pytest.mark.parametrize("state_dtype", ["bf16", "int8"])
def test_every_optimizer_with_state_takes_a_type_for_it(kind: str, state_dtype: str) -> None:
    params = {"state_dtype": state_dtype} | ({"momentum": 0.9} if kind == "SGD" else {"weight_decay": 0.1})
    config = Config.load({"optimizer": {"type": kind, "params": params}})
    assert config.optimizer is not None and config.optimizer.state_dtype == state_dtype
    assert not any("state_dtype" in note for note in config.notes)


# -- names of DeepSpeed ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("switch", "path"),
    [
        ("zero_optimization.cpu_offload", OPTIMIZER),
        ("zero_optimization.cpu_offload_param", PARAM),
        ("zero_optimization.cpu_offload_params", PARAM),
        ("activation_checkpointing.cpu_checkpointing", ACTIVATIONS),
    ],
)
def test_a_switch_of_old_means_device_cpu(switch: str, path: str) -> None:
    assert Config.load(at(switch, True)) == Config.load(at(path, {"device": "cpu"}))
    for off in (False, None):
        config = Config.load(at(switch, off))
        assert config == Config.load(at(path, None)) and config.notes == ()
    assert faults_of(at(switch, "auto")) == [f'type: {switch}: expected true or false, found "auto"']
    name = path.rpartition(".")[2]
    both = at(switch, True)
    both[path.split(".")[0]][name] = {"device": "cpu"}
    assert faults_of(both) == [
        f'conflict: {switch}: means the same as "device": "cpu" in "{name}", which is given too; keep one of them'
    ]
    both[path.split(".")[0]][name] = None
    assert section_of(Config.load(both), path).device == "cpu"


def test_the_old_pin_switch_goes_with_the_old_switches() -> None:
    old = {"stage": 3, "cpu_offload_use_pin_memory": False, "cpu_offload": True, "cpu_offload_params": True}
    zero = Config.load({"zero_optimization": old}).zero_optimization
    assert zero.offload_optimizer.device == zero.offload_param.device == "cpu"
    assert not zero.offload_optimizer.pin_memory and not zero.offload_param.pin_memory
    path = "zero_optimization.cpu_offload_use_pin_memory"
    assert Config.load(at(path, True)).notes == (
        f"{path}: true has no effect here: "
        "it needs cpu_offload or cpu_offload_params; offload_optimizer and offload_param have pin_memory",
    )
    assert Config.load(at(path, None)).notes == ()
    assert faults_of(at(path, 2)) == [f"type: {path}: expected true or false, found 2"]


def test_short_and_new_names_work() -> None:
    zero = {"stage": 3, "max_live_parameters": 5, "offload_param": {"device": "cpu"}}
    live = Config.load({"zero_optimization": zero})
    assert live.zero_optimization.stage3_max_live_parameters == 5 and live.notes == ()
    assert Config.load({"aio": {"intra_op_parallelism": 8}}).aio.thread_count == 8
    assert faults_of({"aio": {"intra_op_parallelism": 8, "thread_count": 8}}) == [
        'conflict: aio.intra_op_parallelism: means the same as "thread_count", which is given too; keep one of them'
    ]


@pytest.mark.parametrize(
    ("path", "value", "why"),
    [
        (f"{OPTIMIZER}.buffer_count", 4, "host buffers have exactly the sizes that are needed"),
        (f"{OPTIMIZER}.fast_init", True, "there is one way to start the state"),
        (
            f"{OPTIMIZER}.pipeline_read",
            False,
            "reading the next unit, updating this unit and writing the last unit always overlap",
        ),
        (f"{OPTIMIZER}.super_offload", True, '`overlap` "speculative" is the key for that here'),
        (
            f"{OPTIMIZER}.cpuadam_cores_perc",
            0.8,
            "the update uses torch's own threads (torch.set_num_threads)",
        ),
        (
            f"{PARAM}.max_in_cpu",
            1e9,
            "stage3_max_live_parameters limits how many parameters are held beside the files",
        ),
        ("aio.queue_depth", 32, "each thread has one request in flight; thread_count says how many"),
        ("aio.single_submit", False, "each thread has one request in flight"),
        ("aio.overlap_events", True, "reads, writes and updates always overlap"),
    ],
)
def test_keys_of_deepspeed_that_change_nothing_say_why(path: str, value: object, why: str) -> None:
    shown = {1e9: "1000000000"}.get(value, json.dumps(value)) if isinstance(value, float) else json.dumps(value)
    assert Config.load(at(path, value)).notes == (f"{path}: {shown} has no effect here: {why}",)


@pytest.mark.parametrize(
    ("path", "value", "fault"),
    [
        ("aio.use_gds", True, "true is not supported yet; a drive is read and written through host memory; set false"),
        (
            f"{PARAM}.nvme_path_per_local_rank",
            ["a", "b"],
            '["a", "b"] is not supported yet; set nvme_path: every rank has separate files in it',
        ),
        (
            "zero_optimization.zenflow",
            {"topk_ratio": 0.1},
            "not supported yet; set offload_optimizer.overlap instead and remove the section",
        ),
    ],
)
def test_keys_of_deepspeed_that_are_not_done_say_what_to_do(path: str, value: object, fault: str) -> None:
    assert faults_of(at(path, value)) == [f"unsupported: {path}: {fault}"]


# -- what is wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", SECTIONS)
def test_each_section_is_closed_and_says_what_it_expects(path: str) -> None:
    assert faults_of(at(path, True)) == [f"type: {path}: expected an object, found true"]
    assert faults_of(at(f"{path}.device", "disk")) == [
        f'value: {path}.device: expected "none", "cpu" or "nvme", found "disk"'
    ]
    assert faults_of(at(f"{path}.nvme_paht", "x")) == [
        f'unknown: {path}.nvme_paht: unknown key "nvme_paht"; did you mean "nvme_path"?'
    ]
    for blank in ("", " "):
        assert faults_of(at(f"{path}.nvme_path", blank)) == [
            f'value: {path}.nvme_path: expected the path of a folder or null, found "{blank}"'
        ]


@pytest.mark.parametrize(
    ("path", "value", "fault"),
    [
        (f"{OPTIMIZER}.ratio", 1.5, "value: {}: expected at most 1, found 1.5"),
        (f"{OPTIMIZER}.ratio", -0.5, "value: {}: expected at least 0, found -0.5"),
        (f"{OPTIMIZER}.pin_memory", 2, "type: {}: expected true or false, found 2"),
        (f"{OPTIMIZER}.overlap", "yes", 'value: {}: expected "none", "speculative" or "delayed", found "yes"'),
        (f"{OPTIMIZER}.delay_after_steps", -1, "value: {}: expected at least 0, found -1"),
        (f"{OPTIMIZER}.ratio", "auto", 'missing: {}: "auto" has no meaning for this key here; write the value'),
        (f"{ACTIVATIONS}.min_bytes", 0, "value: {}: expected at least 1, found 0"),
        (f"{ACTIVATIONS}.budget_bytes", 0, "value: {}: expected at least 1, found 0"),
        (f"{ACTIVATIONS}.budget_bytes", 0.5, "type: {}: expected an integer, found 0.5"),
        (f"{ACTIVATIONS}.pin_memory", True, 'unknown: {}: unknown key "pin_memory"; the keys here are '),
        ("zero_optimization.stage3_max_live_parameters", -1, "value: {}: expected at least 0, found -1"),
        ("aio", 3, "type: {}: expected an object, found 3"),
        ("aio.block_size", 0, "value: {}: expected at least 4096, found 0"),
        ("aio.block_size", 5000, "value: {}: expected a multiple of 4096, found 5000"),
        ("aio.thread_count", 0, "value: {}: expected at least 1, found 0"),
        ("aio.verfy", True, 'unknown: {}: unknown key "verfy"; did you mean "verify"?'),
    ],
)
def test_each_fault_says_what_was_expected_and_found(path: str, value: object, fault: str) -> None:
    (found,) = faults_of(at(path, value))
    assert found.startswith(fault.format(path))


def test_another_type_of_state_is_a_fault() -> None:
    (fault,) = faults_of({"optimizer": {"type": "AdamW", "params": {"state_dtype": "fp8"}}})
    assert fault == 'value: optimizer.params.state_dtype: expected "fp32", "bf16" or "int8", found "fp8"'


@pytest.mark.parametrize("path", SECTIONS)
@pytest.mark.parametrize("section", [{"device": "nvme"}, {"device": "nvme", "nvme_path": "auto"}])
def test_nvme_needs_a_folder(path: str, section: dict[str, Any]) -> None:
    assert faults_of(at(path, section)) == [
        f'missing: {path}.nvme_path: must be given with device "nvme": '
        "the folder on the drive in which the files are kept"
    ]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_parameters_are_offloaded_at_stage_3_alone(stage: int) -> None:
    reason = "has no effect here: below stage 3 every rank holds all parameters at all times"
    for section in ({"device": "cpu"}, {"device": "nvme"}):  # as in DeepSpeed, where it is for stage 3 too
        config = Config.load(at(PARAM, section, stage))
        assert config.notes == (f'{PARAM}.device: "{section["device"]}" {reason}',)
        assert not config.zero_optimization.offloads_parameters
    assert Config.load(at(PARAM, {"device": "cpu"})).zero_optimization.offloads_parameters
    assert Config.load(at(PARAM, {"device": "none"}, stage)).notes == ()


def test_offloaded_parameters_are_gathered_from_the_whole_shard_group() -> None:
    section = {"stage": 3, "zero_hpz_partition_size": 2, "offload_param": {"device": "cpu"}}
    assert faults_of({"zero_optimization": section}) == [
        f"conflict: {PARAM}.device: needs zero_optimization.zero_hpz_partition_size 1, found 2: offloaded "
        "shards are gathered from the whole shard group; set it to 1 or the device to "
        '"none"; offload_optimizer works with both'
    ]


def test_a_delayed_update_and_parameters_on_a_drive_exclude_each_other() -> None:
    zero: dict[str, Any] = {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "overlap": "delayed"},
        "offload_param": {"device": "nvme", "nvme_path": "d"},
    }
    assert faults_of({"zero_optimization": zero}) == [
        f'conflict: {OPTIMIZER}.overlap: "delayed" needs {PARAM}.device "none" or "cpu", found "nvme": updated '
        "parameters stay in memory during the whole next step; "
        'set overlap to "speculative" or "none"'
    ]
    for section, other in (("offload_param", {"device": "cpu"}), ("offload_optimizer", {"overlap": "delayed"})):
        Config.load({"zero_optimization": {**zero, section: other}})


@pytest.mark.parametrize(
    ("overlap", "why"),
    [
        ("speculative", "it also updates in the backward, and repeats an update after clipping or an overflow"),
        ("delayed", "it updates during the next step"),
    ],
)
def test_update_in_backward_is_an_overlap_of_its_own(overlap: str, why: str) -> None:
    zero = {"update_in_backward": True, "offload_optimizer": {"device": "cpu", "overlap": overlap}}
    assert faults_of({"zero_optimization": zero}) == [
        "conflict: zero_optimization.update_in_backward: "
        f'needs offload_optimizer.overlap "none" (found "{overlap}": {why})'
    ]
    zero["offload_optimizer"] = {"device": "cpu"}
    assert Config.load({"zero_optimization": zero}).notes == ()


# -- what has no effect ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "value", "shown"),
    [
        (f"{OPTIMIZER}.nvme_path", "/drive", '"/drive"'),
        (f"{OPTIMIZER}.ratio", 0.5, "0.5"),
        (f"{OPTIMIZER}.pin_memory", False, "false"),
        (f"{OPTIMIZER}.overlap", "delayed", '"delayed"'),
        (f"{OPTIMIZER}.delay_after_steps", 3, "3"),
        (f"{PARAM}.nvme_path", "/drive", '"/drive"'),
        (f"{PARAM}.pin_memory", False, "false"),
        (f"{ACTIVATIONS}.nvme_path", "/drive", '"/drive"'),
        (f"{ACTIVATIONS}.min_bytes", 5, "5"),
        (f"{ACTIVATIONS}.budget_bytes", 5, "5"),
    ],
)
def test_settings_of_a_section_that_offloads_nothing_give_notes(path: str, value: object, shown: str) -> None:
    note = f'{path}: {shown} has no effect here: nothing is offloaded with device "none"'
    assert Config.load(at(path, value)).notes == (note,)


@pytest.mark.parametrize("path", SECTIONS)
def test_a_folder_beside_device_cpu_gives_a_note(path: str) -> None:
    note = f'{path}.nvme_path: "/drive" has no effect here: the device is "cpu"'
    assert Config.load(at(path, {"device": "cpu", "nvme_path": "/drive"})).notes == (note,)


def test_a_ratio_of_0_offloads_nothing() -> None:
    config = Config.load(at(OPTIMIZER, {"device": "cpu", "ratio": 0, "overlap": "speculative"}))
    assert not config.zero_optimization.offload_optimizer.is_used
    assert config.notes == (
        f'{OPTIMIZER}.device: "cpu" has no effect here: nothing is offloaded with ratio 0',
        f'{OPTIMIZER}.overlap: "speculative" has no effect here: nothing is offloaded with ratio 0',
    )


@pytest.mark.parametrize("overlap", ["none", "speculative"])
def test_steps_before_a_delay_without_a_delay_give_a_note(overlap: str) -> None:
    section = {"device": "cpu", "overlap": overlap, "delay_after_steps": 3}
    path = f"{OPTIMIZER}.delay_after_steps"
    why = f'overlap is "{overlap}", not "delayed"'
    assert Config.load(at(OPTIMIZER, section)).notes == (f"{path}: 3 has no effect here: {why}",)


def test_a_limit_of_live_parameters_without_offload_gives_a_note() -> None:
    path = "zero_optimization.stage3_max_live_parameters"
    why = "it is for offload_param; without it a unit is released after each use"
    assert Config.load(at(path, 1e9)).notes == (f"{path}: 1000000000 has no effect here: {why}",)


def test_aio_without_a_drive_gives_a_note() -> None:
    note = 'aio: the section has no effect here: nothing is offloaded to "nvme"'
    values = {"aio": {"block_size": 1048576}}
    assert Config.load(values).notes == Config.load({**values, **at(OPTIMIZER, {"device": "cpu"})}).notes == (note,)
    assert Config.load({"aio": {}}).notes == Config.load({"aio": {"verify": True}}).notes == ()
    for path in SECTIONS:
        assert Config.load({**values, **at(path, {"device": "nvme", "nvme_path": "d"})}).notes == ()


@pytest.mark.parametrize("state_dtype", ["bf16", "int8"])
def test_sgd_without_momentum_has_no_state(state_dtype: str) -> None:
    why = "SGD without momentum has no state"
    note = f'optimizer.params.state_dtype: "{state_dtype}" has no effect here: {why}'
    assert Config.load(sgd(state_dtype=state_dtype)).notes == (note,)
    assert Config.load(sgd(state_dtype=state_dtype, momentum=0.9)).notes == Config.load(sgd()).notes == ()


def test_a_whole_config_that_is_shown_has_no_notes_of_offload() -> None:
    notes = Config.load(Config.load({"zero_optimization": {"stage": 3}}).as_dict()).notes
    assert [note for note in notes if "offload" in note or "aio" in note or "live" in note] == []
