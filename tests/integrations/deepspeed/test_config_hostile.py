"""Whatever stands in a file for DeepSpeed: it is a Config, the same when it is written and read again, or an error."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings, strategies as st

from lowtide.deepspeed.rules import RULES
from lowtide.engine.config.config import Config, ConfigError

NUM_MUTATIONS = 250  # the same in each run; look for others with 20,000 and without `derandomize`
FILES = sorted((Path(__file__).parents[2] / "engine" / "data" / "real_configs").glob("*.json"))
REAL = [json.loads(path.read_text()) for path in FILES]
HUGE = "<an integer of 5,000 digits>"  # a stand-in: Python does not write one


def nested(depth: int, value: object = 1) -> object:
    for _ in range(depth):
        value = {"a": value}
    return value


ODD_TEXTS = [
    "",
    " ",
    "auto",
    "a.b",
    "\x00",
    "\x1b[31m",
    "\x85",
    "\u202e",
    "\ud800",
    "é",
    "x" * 3000,
    "_",
    "//",
    "enabled",
]
NUMBERS = [0, 1, -1, 3, 2**63, -(2**64), 10**400, 0.5, -0.0, 5e-324, 1e300, float("inf"), -float("inf"), float("nan")]
VALUES = st.sampled_from(
    [None, True, False, HUGE, "none", "cpu", "nvme", "Adam", "Lion", "OneCycle", "WarmupLR", *ODD_TEXTS, *NUMBERS]
    + [[], [0.9], [0.9, 0.999], [[]], ["a", "\x1b"], {}, {"": 1}, {"x\x00": 1}, {"enabled": True}, {"device": "nvme"}]
    + [{"type": "adamw"}, {"type": "\ud800"}, {"enabled": False, "x": 1}, nested(15), nested(300)]
)
WORDS = {word for path in RULES for word in path.split(".")} | set(Config.json_keys())
KEYS = st.sampled_from([*sorted(WORDS), *ODD_TEXTS, "zero_optimization.stage", "stgae"])
PIECES = st.sampled_from(
    ["", "{", "}", "[" * 2000, ",", '"', "\\u0000", "\\ud800", "NaN", "1e999", "\x00", "-", "9" * 5000]
)


@st.composite
def mutations(draw: st.DrawFn) -> str:
    """The text of a real file with some of its values, keys and characters changed."""
    values = copy.deepcopy(draw(st.sampled_from(REAL)))
    for _ in range(draw(st.integers(1, 3))):
        section: dict[str, Any] = values
        while (inner := [item for item in section.values() if isinstance(item, dict)]) and bool(draw(st.booleans())):
            section = draw(st.sampled_from(inner))
        key = draw(st.sampled_from(sorted(section)) if section and bool(draw(st.booleans())) else KEYS)
        section[key] = copy.deepcopy(draw(VALUES))
    text = json.dumps(values).replace(json.dumps(HUGE), "9" * 5000)
    if draw(st.integers(0, 3)) == 0:
        at = draw(st.integers(0, len(text)))
        text = text[:at] + draw(PIECES) + text[at + draw(st.integers(0, 4)) :]
    return text


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hostile") / "run.json"


@settings(max_examples=NUM_MUTATIONS, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@example(text='{"flops_profiler": {"enabled": false, "\\u0000": null}}')  # a section that is off
@given(text=mutations())
def test_a_mutated_file_loads_and_comes_back_or_has_faults(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    lines: list[str] = []
    try:
        config = Config.load(path)
        again = Config.load(json.loads(json.dumps(config.as_dict())))
        assert again == config and again.as_dict() == config.as_dict()
        lines += config.notes
        config.resolve(4)
    except ConfigError as error:
        assert error.faults and all(fault.message for fault in error.faults)
        lines += str(error).split("\n")
        lines += [part for fault in error.faults for part in (fault.path, fault.message)]
    assert all(line.isprintable() and len(line) < 2000 for line in lines)
