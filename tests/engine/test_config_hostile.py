"""Whatever stands in a file, it is a Config or a ConfigError, soon."""

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lowtide.engine.config.config import Config, ConfigError
from lowtide.engine.config.errors import MAX_FAULTS
from lowtide.engine.config.read import MAX_BYTES, MAX_DEPTH, MAX_VALUES
from tests.kit.training import refusal

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


def load(path: Path) -> list[str]:
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
        faults = load(path)
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


def test_a_text_in_place_of_a_file_says_what_to_do() -> None:
    words = r"cannot be read: File name too long: .*pass JSON text as json.loads\(text\)"
    with pytest.raises(ConfigError, match=words):
        Config.load(json.dumps(keys('"no{}": 1', 1000)))


def test_a_dictionary_that_holds_itself_is_nested_too_deeply() -> None:
    values: dict[str, Any] = {"seed": 10**5000}
    values["fp16"] = values
    text = refusal(Config.load, values)
    assert "nested too deeply" in text
    assert "seed: expected an integer of at most 64 bits, found an integer of 16610 bits" in text
