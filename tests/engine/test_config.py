"""Config.load takes a path, a preset's name, a dictionary or a Config, and reports every fault of form."""

import base64
import copy
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lowtide.engine.config.config import Config, ConfigError
from lowtide.engine.config.errors import Fault


def faults_of(source: Any) -> tuple[Fault, ...]:
    with pytest.raises(ConfigError) as caught:
        Config.load(source)
    return caught.value.faults


def message_of(source: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        Config.load(source)
    return str(caught.value)


def write(folder: Path, text: str) -> Path:
    path = folder / "run.json"
    path.write_text(text, encoding="utf-8")
    return path


def test_the_old_name_of_the_transport_is_read_with_a_note() -> None:
    old, new = (Config.load({"communication": {key: "sockets"}}) for key in ("route", "transport"))
    assert old == new and old.communication.transport == "sockets"
    assert (
        list(old.notes) == ['communication.route: read as "transport", the present name of this key'] and not new.notes
    )
    with pytest.raises(ConfigError, match=r'communication\.route: means the same as "transport", which is given too'):
        Config.load({"communication": {"route": "sockets", "transport": "native"}})


def test_an_empty_config_has_the_documented_defaults() -> None:
    config = Config.load({})
    assert config.device == "auto" and config.optimizer is None and config.scheduler is None
    assert config.gradient_clipping == 0.0 and config.steps_per_print == 10 and config.seed is None
    assert config.zero_optimization.stage == 0 and config.zero_optimization.units == "auto"
    assert config.zero_optimization.stage3_prefetch_bucket_size is None
    assert config.communication.transport == "auto" and config.communication.timeout_seconds == 300
    assert not config.bf16.enabled and not config.fp16.enabled and config.bf16.auto_cast
    assert config.activation_checkpointing.every == 0
    assert config.zero_optimization.offload_optimizer.device == config.zero_optimization.offload_param.device == "none"
    assert config.notes == ()


def test_a_config_is_returned_as_it_is() -> None:
    config = Config.load({"seed": 3})
    assert Config.load(config) is config


def test_a_file_a_string_path_and_a_dictionary_give_the_same(tmp_path: Path) -> None:
    values = {"zero_optimization": {"stage": 3, "units": ["layers.*"]}, "gradient_clipping": 1}
    path = write(tmp_path, json.dumps(values))
    assert Config.load(path).as_dict() == Config.load(str(path)).as_dict() == Config.load(values).as_dict()
    assert Config.load(values).zero_optimization.units == ("layers.*",)


def test_loading_does_not_change_the_dictionary() -> None:
    values = {"optimizer": {"type": "Adam", "params": {"lr": "auto"}}, "_note": 1}
    before = copy.deepcopy(values)
    Config.load(values)
    assert values == before


@pytest.mark.parametrize("kind", ["adam", "AdamW", "SGD", "Lion", "Adagrad"])
def test_as_dict_loads_to_an_equal_config(kind: str) -> None:
    params = {"lr": 0.1} | ({"adam_w_mode": False} if kind == "adam" else {})
    config = Config.load(
        {
            "optimizer": {"type": kind, "params": params},
            "scheduler": {"type": "cosine", "params": {"total_num_steps": 9}},
            "zero_optimization": {"units": ["a", "b"]},
        }
    )
    again = Config.load(json.loads(json.dumps(config.as_dict())))
    assert again == config and hash(again) == hash(config) and again.as_dict() == config.as_dict()
    assert again != Config.load({"seed": 3}) and again != config.as_dict()


def test_configs_that_ask_for_the_same_are_equal_whatever_their_notes(tmp_path: Path) -> None:
    values = {"gradient_clipping": "auto", "zero_optimization": {"overlap_comm": True}}
    config = Config.load(write(tmp_path, json.dumps(values)))
    assert config.notes and config == Config.load({}) == Config.load({}).resolve(1).model_copy(
        update=dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"))
    )


def test_notes_speak_of_nothing_that_is_as_it_would_be_anyway() -> None:
    """So the whole of a config, with every default, has none: the example trains with such a dictionary."""
    assert Config.load(Config.load({}).as_dict()).notes == ()


def test_a_config_survives_pickle() -> None:
    config = Config.load({"gradient_clipping": "auto"})
    again = pickle.loads(pickle.dumps(config))
    assert again == config and again.notes == config.notes


def test_an_error_survives_pickle() -> None:
    with pytest.raises(ConfigError) as caught:
        Config.load({"sede": 1})
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value) and again.faults == caught.value.faults


def test_a_config_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Config.load({}).seed = 1


def test_comments_are_dropped_at_every_level() -> None:
    values = {"$schema": "x", "//": 1, "_a": float("nan"), "bf16": {"// why": "x", "_": [], "enabled": True}}
    assert Config.load(values).bf16.enabled


def test_comments_and_last_commas_of_hjson_are_dropped(tmp_path: Path) -> None:
    text = """// DeepSpeed
{ # which takes Hjson
  "seed": 3, /* two
  lines, with "quotes" */ "checkpoint": {"folder": "a//b,}#c", }, // and a comma
}"""
    config = Config.load(write(tmp_path, text))
    assert (config.seed, config.checkpoint.folder) == (3, "a//b,}#c")


def test_base64_text_is_a_config_and_a_file_of_that_name_comes_first(tmp_path: Path) -> None:
    text = base64.urlsafe_b64encode(b'{"seed": 3, "checkpoint": {"folder": "~~~???"}}').decode()
    assert Config.load(text).seed == 3
    wrong = base64.b64encode(b'{"sede": 3}').decode()
    assert message_of(wrong).startswith("1 fault in base64 text:\n  sede: unknown key")


def test_large_whole_floats_are_integers() -> None:
    assert Config.load({"zero_optimization": {"stage3_prefetch_bucket_size": 5e7}}).zero_optimization == (
        Config.load({"zero_optimization": {"prefetch_bucket_size": 50_000_000}}).zero_optimization
    )


def test_all_faults_are_reported_at_once_in_the_order_of_the_file(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        '{"sede": 1, "fp16": {"enabled": true}, "zero_optimization": {"stgae": 2, "cpu_offload": 2},'
        ' "bf16": {"enabled": true}, "gradient_clipping": "one"}',
    )
    assert message_of(path).splitlines() == [
        f"5 faults in {path}:",
        '  sede: unknown key "sede"; did you mean "seed"?',
        '  zero_optimization.stgae: unknown key "stgae"; did you mean "stage"?',
        "  zero_optimization.cpu_offload: expected true or false, found 2",
        "  bf16.enabled: bf16.enabled and fp16.enabled are both true; set one of them to false",
        '  gradient_clipping: expected a number, found "one"',
    ]


def test_a_missing_file_names_near_files_and_the_presets(tmp_path: Path) -> None:
    write(tmp_path, "{}")
    text = message_of(str(tmp_path / "runn.json"))
    assert f"no such file: {tmp_path}/runn.json; did you mean " in text and f"{tmp_path}/run.json" in text
    assert "the presets are auto, zero0, zero0-bf16, zero1" in text
    assert 'did you mean "zero3"' in message_of("zeroo3")
    assert "is a folder, not a file" in message_of(tmp_path)


def test_a_file_that_is_not_text_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_bytes(b"\xff\xfe\x00{")
    assert "cannot be read: 'utf-8' codec can't decode" in message_of(path)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"seed": 1,\n "device": "cpu"\n', "at line 3"),
        ('{"seed": 1 / no\n}', 'at line 1, column 12: "{\\"seed\\": 1 / no". Comments (// # /* */) and a comma behind'),
        ('{"seed": 1} /* not closed', "Extra data at line 1"),
        (
            "",
            "at line 1. Comments (// # /* */) and a comma behind the last item are allowed; names and text need",
        ),
        ("[1]", "expected a JSON object, found [1]"),
        ("[" * 10_000, "not valid here: nested too deeply"),
    ],
)
def test_bad_json_is_an_error_with_the_place(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in message_of(write(tmp_path, text))


def test_a_key_that_stands_twice_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path, '{"seed": 1, "fp16": {"enabled": true, "enabled": false}, "seed": 2, "//": 1, "//": 2}')
    assert [(fault.path, fault.kind) for fault in faults_of(path)] == [
        ("seed", "duplicate"),
        ("fp16.enabled", "duplicate"),
    ]
    assert "the key occurs twice in an object; remove one" in message_of(path)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_are_not_finite_are_errors(tmp_path: Path, number: str) -> None:
    path = write(tmp_path, f'{{"optimizer": {{"type": "AdamW", "params": {{"betas": [0.9, {number}]}}}}}}')
    assert "optimizer.params.betas[1]: expected a finite number, found " in message_of(path)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (3, "expected a path, the name of a preset or a dictionary, found int"),
        ({3: 1}, "expected a string as a key, found 3"),
        ({"seed": {1}}, "seed: expected a JSON value, found set {1}"),
        ({"seed": True}, "seed: expected an integer, found true"),
        ({"seed": 1.5}, "seed: expected an integer, found 1.5"),
        ({"seed": -1}, "seed: expected at least 0, found -1"),
        ({"seed": "auto"}, 'seed: "auto" has no meaning for this key here; write the value'),
        ({"bf16": True}, "bf16: expected an object, found true"),
        ({"bf16": {"enabled": 2}}, "bf16.enabled: expected true or false, found 2"),
        ({"device": "cuda:1"}, 'such as "cuda" or "xpu", found "cuda:1"'),
        ({"communication": {"transport": "mpi"}}, '"shared_memory", "sockets" or "native", found "mpi"'),
        ({"communication": {"timeout_seconds": 0}}, "expected more than 0, found 0"),
        ({"communication_data_type": "float"}, 'expected "fp32", "bf16" or "fp16", found "float"'),
        ({"train_batch_size": 0}, "train_batch_size: expected at least 1, found 0"),
        ({"fp16": {"initial_scale_power": 200}}, "expected at most 126, found 200"),
        ({"fp16": {"opt": 1}}, 'unknown key "opt"; the keys here are auto_cast, consecutive_hysteresis, enabled'),
        ({"train_batch_size": 1, "optimizer": {"type": []}}, "optimizer.type: expected one of adamw"),
        ({"train_batch_size": 1, "scheduler": {"type": {}}}, "scheduler.type: expected one of "),
        (
            {"train_batch_size": 1, "optimizer": {"type": "Lion", "params": {"lr": "auto", "eps": "auto"}}},
            'optimizer.params.eps: unknown key "eps"; the keys here are amsgrad, betas',
        ),
        (
            {"train_batch_size": 1, "scheduler": {"type": "OneCycle", "params": {"warmup_num_steps": "auto"}}},
            'scheduler.params.warmup_num_steps: unknown key "warmup_num_steps"',
        ),
        ({"quux": 1}, 'unknown key "quux"; docs/config.md lists the keys'),
        (
            {"outer": {"every": 50}},
            "outer: was removed; for DiLoCo use torchft",
        ),
        ({"zero_optimization": {"units": []}}, 'expected "auto" or a list of patterns of module names, found []'),
        ({"zero_optimization": {"Stage": 1}}, 'unknown key "Stage"; did you mean "stage"?'),
        (
            {"zero_optimization": {"prefetch_bucket_size": 1, "stage3_prefetch_bucket_size": 1}},
            'means the same as "stage3_prefetch_bucket_size", which is given too; keep one of them',
        ),
    ],
)
def test_each_fault_says_what_was_expected_and_found(source: Any, expected: str) -> None:
    assert expected in message_of(source)


@pytest.mark.parametrize("stage", [4, -1, 1.5, "three"])
def test_another_stage_is_an_error_that_lists_the_stages(stage: Any) -> None:
    text = message_of({"zero_optimization": {"stage": stage}})
    assert (
        "expected a stage from 0 to 3: 0 shards nothing (plain data parallelism), 1 shards the optimizer state, "
        in text
    )
    assert f"2 also the gradients, 3 also the parameters, found {json.dumps(stage)}" in text


def test_update_in_backward_says_what_it_needs() -> None:
    values: dict[str, Any] = {"zero_optimization": {"update_in_backward": True, "stage": 2}}
    assert Config.load(values).resolve(4).zero_optimization.update_in_backward
    values |= {"gradient_clipping": 1.0, "gradient_accumulation_steps": 2, "fp16": {"enabled": True}}
    text = message_of(values)
    assert "needs gradient_clipping 0 (found 1.0: the norm is known after all gradients)" in text
    assert "needs gradient_accumulation_steps 1 (found 2: gradients are complete after the last microbatch)" in text
    assert "needs fp16.enabled false (an overflow in a later unit skips the whole step; bf16 needs no scaling)" in text


def test_a_removed_section_that_is_off_is_a_note() -> None:
    """As `Config.as_dict` of an earlier version has it."""
    (note,) = Config.load({"outer": {"every": None, "optimizer": "nesterov"}}).notes
    assert note.startswith('outer: {"every": null, "optimizer": "nesterov"} has no effect here: it was removed; for')


IDLE_BELOW_3 = {"zero_hpz_partition_size": 8, "stage3_prefetch_bucket_size": 5}


def test_settings_that_are_idle_at_this_stage_give_notes() -> None:
    config = Config.load({"zero_optimization": {"stage": 0, "shard_size": 2, **IDLE_BELOW_3}})
    assert config.notes == (
        "zero_optimization.shard_size: 2 has no effect here: stage 0 shards nothing",
        "zero_optimization.zero_hpz_partition_size: 8 has no effect here: "
        "stage 0 never releases parameters, every rank holds all of them",
        "zero_optimization.stage3_prefetch_bucket_size: 5 has no effect here: "
        "stage 0 never releases parameters, so nothing is gathered ahead",
    )


@pytest.mark.parametrize(
    ("values", "notes"),
    [
        ({"fp16": {"enabled": False, "loss_scale": 128}}, ["fp16.loss_scale: 128.0 # fp16.enabled is false"]),
        (
            {"fp16": {"loss_scale_window": 9, "hysteresis": 2, "auto_cast": False}, "bf16": {"auto_cast": False}},
            [
                "bf16.auto_cast: false # bf16.enabled is false",
                "fp16.auto_cast: false # fp16.enabled is false",
                "fp16.loss_scale_window: 9 # fp16.enabled is false",
            ],
        ),
        ({"fp16": {"enabled": True, "loss_scale_window": 9, "auto_cast": False}}, []),
        (
            {"fp16": {"enabled": True, "loss_scale": 1024, "initial_scale_power": 8, "auto_cast": False}},
            ["fp16.initial_scale_power: 8 # fp16.loss_scale is fixed at 1024"],
        ),
    ],
)
def test_settings_of_a_type_that_is_not_in_use_give_notes(values: dict[str, Any], notes: list[str]) -> None:
    assert Config.load(values).notes == tuple(note.replace("#", "has no effect here:") for note in notes)


def test_a_predivide_factor_beside_prescale_gradients_gives_a_note() -> None:
    config = Config.load({"prescale_gradients": True, "gradient_predivide_factor": 2})
    reason = "prescale_gradients divides by the ranks before the sum"
    assert config.notes == (f"gradient_predivide_factor: 2.0 has no effect here: {reason}",)


def test_the_config_layer_does_not_import_torch() -> None:
    code = "import sys, lowtide.engine.config.config; raise SystemExit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
