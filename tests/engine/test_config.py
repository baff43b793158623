"""Config.load takes a path, a preset's name, a dictionary or a Config, and reports every fault of form, soon."""

import base64
import copy
import inspect
import json
import math
import pickle
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lowtide.engine.config.config import Config, ConfigError
from lowtide.engine.config.errors import MAX_FAULTS
from lowtide.engine.config.explain import explain
from lowtide.engine.config.read import MAX_BYTES, MAX_DEPTH, MAX_VALUES
from lowtide.engine.config.translate import sections_of
from tests.kit.training import refusal

TABLE = Path(__file__).parent / "data" / "configs.txt"
SECTIONS = sections_of(Config)  # path -> class; the path of the whole is ""


def rows() -> list[tuple[str, list[str]]]:
    """(config, what it says) of each row of the table."""
    found: list[tuple[str, list[str]]] = []
    for line in re.sub(r"\n( {8}|  (?! ))", " ", TABLE.read_text()).splitlines():
        if line.startswith("    "):
            found[-1][1].append(line.strip())
        elif line and not line.startswith("#"):
            found.append((line, []))
    return found


def load(path: Path, text: str, num_ranks: int | None) -> tuple[Config | None, list[str]]:
    """The config of a file with that text, if it loads, and what it says."""
    path.write_text(text, encoding="utf-8")
    try:
        config = Config.load(path)
        config = config.resolve(num_ranks) if num_ranks else config
    except ConfigError as error:
        return None, [f"{fault.kind}: {fault}" for fault in error.faults]
    return config, [f"note: {note}" for note in config.notes]


def is_said(found: str, expected: str) -> bool:
    return re.fullmatch(re.escape(expected).replace(re.escape("..."), ".*"), found) is not None


@pytest.mark.parametrize(("row", "said"), rows(), ids=[config[:50] for config, _ in rows()])
def test_a_config_says_what_the_table_has(tmp_path: Path, row: str, said: list[str]) -> None:
    path, (num_ranks, text) = tmp_path / "run.json", row.split(" ranks ") if " ranks " in row else ("", row)
    config, found = load(path, text, int(num_ranks or 0))
    expected = [line for line in said if line[0] not in "=?"]
    assert len(found) == len(expected) and all(map(is_said, found, expected)), "\n".join(found)
    assert all(line.isprintable() and len(line) < 1000 for line in found)
    if config is not None:
        again = Config.load(json.loads(json.dumps(config.as_dict())))
        assert again == config and again.as_dict() == config.as_dict() != config
    for line in said:
        if line[0] == "=":
            assert load(tmp_path / "same.json", line[2:], int(num_ranks or 0))[0] == config is not None
        if line[0] == "?":
            explained = [str(key) for key in explain(path, int(num_ranks or 0) or None).keys]
            assert any(is_said(one, line[2:]) for one in explained), explained


WRONG = {
    bool: (2, "expected true or false, found 2"),
    int: ("x", 'expected an integer, found "x"'),
    float: ("x", 'expected a number, found "x"'),
}
IN_WORDS_OF_ITS_OWN = {
    "bf16.masters",
    "communication.gradient_bits_in_host",
    "elasticity.version",
    "parallel.tensor_sequence",
    "tiles.loss",
    "tiles.mlp",
    "zero_optimization.stage",
}


def at(path: str, value: object) -> Any:
    for key in reversed(path.split(".")):
        value = {key: value}
    return value


@pytest.mark.parametrize("section", SECTIONS)
def test_a_key_of_another_type_and_an_unknown_key_are_faults(section: str) -> None:
    for name, field in SECTIONS[section].model_fields.items():
        path = f"{section}.{field.alias or name}".removeprefix(".")
        if type(field.default) in WRONG:
            value, expected = WRONG[type(field.default)]
            text = refusal(Config.load, at(path, value))
            assert text.startswith(f"1 fault:\n  {path}: ")
            assert text.endswith(expected) or path in IN_WORDS_OF_ITS_OWN
    unknown = f"{section}.qqqq".removeprefix(".")
    assert f'{unknown}: unknown key "qqqq"; ' in refusal(Config.load, at(unknown, 1))
    if section not in ("", "zero_optimization", "tiles"):  # which take other values too
        assert f"  {section}: expected an object, found true" in refusal(Config.load, at(section, True))


def test_a_file_a_string_path_a_dictionary_and_a_config_give_the_same(tmp_path: Path) -> None:
    values = {"zero_optimization": {"stage": 3, "units": ["layers.*"]}, "optimizer": {"type": "Adam"}, "_note": 1}
    before = copy.deepcopy(values)
    config = Config.load(values)
    assert values == before and config.zero_optimization.units == ("layers.*",)
    path = tmp_path / "run.json"
    path.write_text(json.dumps(values))
    assert Config.load(path).as_dict() == Config.load(str(path)).as_dict() == config.as_dict()
    assert Config.load(config) is config


def test_async_is_written_under_its_name_in_the_file() -> None:
    config = Config.load({"checkpoint": {"async": True}})
    assert config.checkpoint.asynchronous and Config.model_validate(config.model_dump()) == config
    for written in (config.model_dump(), json.loads(config.model_dump_json()), config.resolve(2).as_dict()):
        assert written["checkpoint"]["async"] is True and "asynchronous" not in written["checkpoint"]


def test_configs_that_ask_for_the_same_are_equal_whatever_their_notes() -> None:
    config = Config.load({"gradient_clipping": "auto", "zero_optimization": {"overlap_comm": True}})
    assert config.notes and config == Config.load({}) != Config.load({"seed": 3})
    assert hash(config) == hash(Config.load({}))


def test_notes_speak_of_nothing_that_is_as_it_would_be_anyway() -> None:
    """So the whole of a config, with every default, has none: the example trains with such a dictionary."""
    for config in ({}, {"zero_optimization": {"stage": 3}, "gradient_clipping": 0}):
        assert Config.load(Config.load(config).as_dict()).notes == ()


def test_configs_and_their_errors_survive_pickle_and_are_frozen() -> None:
    config = Config.load({"gradient_clipping": "auto"})
    again = pickle.loads(pickle.dumps(config))
    assert again == config and again.notes == config.notes
    assert again.kernels.model_fields_set == set()  # a written fuse_modules "auto" is told, the default is not
    with pytest.raises(ConfigError) as caught:
        Config.load({"sede": 1})
    error = pickle.loads(pickle.dumps(caught.value))
    assert str(error) == str(caught.value) and error.faults == caught.value.faults
    with pytest.raises(ValueError, match="frozen"):
        config.seed = 1


def test_comments_and_last_commas_of_hjson_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text("""// DeepSpeed
{ # which takes Hjson
  "seed": 3, /* two
  lines, with "quotes" */ "checkpoint": {"folder": "a//b,}#c", }, // and a comma
}""")
    config = Config.load(path)
    assert (config.seed, config.checkpoint.folder) == (3, "a//b,}#c")


def test_base64_text_is_a_config() -> None:
    text = base64.urlsafe_b64encode(b'{"seed": 3, "checkpoint": {"folder": "~~~???"}}').decode()
    assert Config.load(text).seed == 3
    wrong = base64.b64encode(b'{"sede": 3}').decode()
    assert refusal(Config.load, wrong).startswith("1 fault in base64 text:\n  sede: unknown key")


def test_a_missing_file_names_near_files_and_the_presets(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 20)
    folder.mkdir()
    (folder / "run.json").touch()
    text = refusal(Config.load, str(folder / "runn.json"))
    assert f'no such file: {folder}/runn.json; did you mean "{folder}/run.json"' in text
    assert "the presets are auto, zero0, zero0-bf16, zero1" in text
    assert 'did you mean "zero3"' in refusal(Config.load, "zeroo3")
    assert "is a folder, not a file" in refusal(Config.load, tmp_path)
    assert refusal(Config.load, "").startswith('1 fault in "":\n  no such file: ""')


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"\xff\xfe\x00{", "expected text in UTF-8: 'utf-8' codec can't decode byte 0xff"),
        (b'{"seed": 1,\n "device": "cpu"\n', "at line 3"),
        (b"", "at line 1. Comments (// # /* */) and a comma behind the last item are allowed; names and text need"),
        (b"[" * 10_000, "not valid here: nested too deeply"),
    ],
)
def test_a_file_that_is_no_json_is_an_error_with_the_place(tmp_path: Path, text: bytes, expected: str) -> None:
    path = tmp_path / "run.json"
    path.write_bytes(text)
    assert expected in refusal(Config.load, path)


WITHIN_ITSELF: dict[str, Any] = {"seed": 10**5000}
WITHIN_ITSELF["fp16"] = WITHIN_ITSELF


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (3, ("expected a path, the name of a preset or a dictionary, found int",)),
        ({3: 1}, ("expected a string as a key, found 3",)),
        ({"seed": {1}}, ("seed: expected a JSON value, found set {1}",)),
        (
            WITHIN_ITSELF,
            ("nested too deeply", "seed: expected an integer of at most 64 bits, found an integer of 16610 bits"),
        ),
        ("{" * 1000, ("cannot be read: File name too long: ", "pass JSON text as json.loads(text)")),
    ],
    ids=["a number", "a key that is none", "a set", "itself", "text"],
)
def test_what_no_file_has_is_an_error_too(source: Any, words: tuple[str, ...]) -> None:
    text = refusal(Config.load, source)
    assert all(one in text for one in words), text


@pytest.mark.parametrize(
    ("kind", "params", "twin"),
    [
        ("AdamW", {}, torch.optim.AdamW),
        ("Adam", {"adam_w_mode": False}, torch.optim.Adam),
        ("SGD", {}, torch.optim.SGD),
        ("Adagrad", {}, torch.optim.Adagrad),
    ],
)
def test_defaults_of_optimizers_are_torch_s(kind: str, params: Any, twin: type[torch.optim.Optimizer]) -> None:
    optimizer = Config.load({"optimizer": {"type": kind, "params": params}}).optimizer
    assert optimizer is not None and optimizer.type == kind.lower()
    signature = inspect.signature(twin).parameters
    dump = optimizer.params.model_dump(exclude={"state_dtype", "bias_correction"})
    assert dump == {key: signature[key].default for key in dump}
    twin([torch.nn.Parameter(torch.zeros(1))], **dump)


def test_lion_has_the_defaults_of_its_paper() -> None:
    optimizer = Config.load({"optimizer": {"type": "Lion"}}).optimizer
    assert optimizer is not None
    expected = {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0, "state_dtype": "fp32"}
    assert optimizer.params.model_dump() == expected


def test_a_config_made_of_words_is_checked_too() -> None:
    words: list[Any] = [{"type": "sgd"}, {"type": "AdamW", "params": {}}, {"params": {}}, {"type": 3}]
    made = Config(train_batch_size=8, optimizer=words[0])
    assert made.optimizer is not None and made.optimizer.options["lr"] == 1e-3
    for section in words[1:]:
        with pytest.raises(ValueError, match=r"optimizer\.type"):
            Config(train_batch_size=8, optimizer=section)


def test_the_config_layer_does_not_import_torch() -> None:
    code = "import sys, lowtide.engine.config.config; raise SystemExit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


MEGABYTE = 1_000_000
PLAIN = json.dumps([123_456] * (MEGABYTE // 8))  # 9 ms on an idle core, and as much slower on a loaded core as a config
MAX_COST = 5  # times the CPU time of `json` for PLAIN
FAR_TOO_MANY = f"expected at most {MAX_VALUES:,} values, found many more; is it a config?"


def keys(form: str, count: int) -> str:
    return "{" + ", ".join(form.format(number) for number in range(count)) + "}"


def of_keys(form: str, count: int, around: str = "{}") -> Callable[[], str]:
    return lambda: around.replace("{}", keys(form, count))


def of_one(text: str, times: int, around: str) -> Callable[[], str]:
    return lambda: around.replace("TEXT", text * times)


SLOW: dict[str, tuple[Callable[[], str], str]] = {  # what took long, or crashed: the text, and its first fault
    "1,000 unknown keys": (of_keys('"no{}": 1', 1000), f"{MAX_FAULTS} of 1,000 faults are listed here"),
    "near known keys": (
        of_keys('"stage3_param_persistence_threshol{}": 1', 1900, '{"zero_optimization": {}}'),
        f"{MAX_FAULTS} of 1,900 faults are listed here",
    ),
    "keys of an optimizer without a type": (
        of_keys('"tipe{}": 1', 1900, '{"optimizer": {}}'),
        "optimizer.type: expected one of adamw",
    ),
    "5,000 unknown keys": (
        of_keys('"no{}": 1', 5000),
        f"expected at most {MAX_VALUES:,} values, found more; is it a config?",
    ),
    "unknown keys": (of_keys('"no{}": 1', MEGABYTE // 12), FAR_TOO_MANY),
    "objects": (of_one("{}, ", MEGABYTE // 4, '{"seed": [TEXT{}]}'), FAR_TOO_MANY),
    "chains of lists": (of_one("[" * 900 + "]" * 900 + ", ", 500, '{"seed": [TEXT1]}'), FAR_TOO_MANY),
    "the same key": (of_one('"seed": 1, ', 1900, '{TEXT"seed": 1}'), "seed: the key occurs twice in an object"),
    "one value": (of_one("x", MEGABYTE, '{"device": "TEXT"}'), 'device: expected "auto", "cpu" or the name of an acc'),
    "one key": (of_one("x", MEGABYTE, '{"TEXT": 1}'), '"xxx'),
    "one type": (of_one("adam", MEGABYTE // 4, '{"optimizer": {"type": "TEXT"}}'), "optimizer.type: unknown optim"),
    "one integer": (of_one("9", MEGABYTE, '{"seed": TEXT}'), "seed: expected an integer of at most 64 bits, found an "),
    "one fraction": (of_one("9", MEGABYTE, '{"gradient_clipping": 0.TEXT}'), ""),
    "a comment": (of_one("x", MEGABYTE, '{"_": "TEXT"}'), ""),
    "lines before a fault": (
        of_one("\n", MEGABYTE, "TEXTx"),
        "not valid JSON: Expecting value at line 1000001, column 1",
    ),
    "480 levels": (
        lambda: '{"a": ' * 480 + "1" + "}" * 480,
        ".".join("a" * (MAX_DEPTH + 1)) + ": nested too deeply: expected at ",
    ),
    "another file": (
        of_one("x", MAX_BYTES + 1, "TEXT"),
        f"expected at most {MAX_BYTES:,} bytes, found {MAX_BYTES + 1:,}; is ",
    ),
}


def faults_of(path: Path) -> list[str]:
    """The faults of a file; [] if it loads."""
    try:
        Config.load(path)
    except ConfigError as error:
        return [str(fault) for fault in error.faults]
    return []


@pytest.mark.parametrize("name", SLOW)
def test_a_file_of_a_megabyte_is_read_or_refused_in_50_ms(tmp_path: Path, name: str) -> None:
    make, fault = SLOW[name]
    path, cost = tmp_path / "run.json", math.inf
    path.write_text(make(), newline="")
    for _ in range(10):  # the first imports the dialect
        start = time.process_time()
        json.loads(PLAIN)
        middle = time.process_time()
        faults = faults_of(path)
        cost = min(cost, (time.process_time() - middle) / (middle - start))
        if cost <= MAX_COST:
            break
    assert (faults or [""])[0].startswith(fault)
    assert all(len(line) < 1000 for line in faults)
    assert cost <= MAX_COST


def test_names_are_printed_without_their_control_characters(tmp_path: Path) -> None:
    name = tmp_path / "\x1b[31m.json"
    with pytest.raises(ConfigError, match=r"no such file: .*\\x1b\[31m.json"):
        Config.load(name)
    name.write_text("x")
    with pytest.raises(ConfigError, match=r"1 fault in .*\\x1b\[31m.json:\n  not valid JSON"):
        Config.load(str(name))
    for schedule in ("\x1b[31m", "a\x00b", "/a\x07.txt", "/a\x00.txt", "\x85" * 3000):
        config = Config.load({"parallel": {"pipeline": 2}, "pipeline": {"schedule": schedule}})
        text = refusal(config.resolve, 2)
        assert "pipeline.schedule: " in text and all(line.isprintable() for line in text.split("\n"))
