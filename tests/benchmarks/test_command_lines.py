"""What a benchmark's command line cannot mean ends the program with what was expected, what was found, and where."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from tests.benchmarks import Helper

# What each script cannot do without.
NEEDED = {"pipeline": ["--mode", "work"], "largest": ["--budget-mib", "200"]}
COUNTS = {
    "compare": ["rounds", "steps", "ranks", "threads", "microbatch", "accumulation", "memory-steps"],
    "offload_io": ["size", "unit", "rounds"],
    "host_time": ["ranks", "rounds", "steps"],
    "predicted": ["steps", "ranks"],
}
REFUSED = [
    ("compare", "--warmup -1", "--warmup: expected at least 0, found -1"),
    ("compare", "--size 11M", "argument --size: invalid choice: '11M'"),
    ("pipeline", "--ranks 2 1", "--ranks: expected at least 2, found 1"),
    ("pipeline", "--warmup 0", "--warmup: expected at least 1, the step in which shapes are learned; found 0"),
    ("largest", "--start-layers 9 --max-layers 8", "--max-layers: expected at least --start-layers (9), found 8"),
    ("offload_io", "--size 96 --unit 32", "--size: expected more than 3 pieces of --unit, found 96 of 32"),
    ("gpu", "modles --rehearse", "PART: expected some of language_models, checks, training, found modles"),
    ("gpu", "--out /dev/null", "--out: expected a folder that can be written to, found /dev/null (File exists)"),
    ("gpu", "--seconds 0", "--seconds: expected more than 0, found 0"),
    ("host_time", "--depths 8 8", "--depths: expected two numbers of blocks, the larger one last, found [8, 8]"),
]


def error_of(module: ModuleType, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The last line of what the script says when it refuses its command line."""
    with pytest.raises(SystemExit, match=r"^2$"):
        module.parse_arguments(arguments)
    return re.sub(r"'(\w+)'(?=[,)])", r"\1", capsys.readouterr().err.splitlines()[-1])  # Python 3.11 quotes choices


@pytest.mark.parametrize("name", COUNTS)
def test_counts_are_at_least_one(helper: Helper, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    loaded = helper(name)
    for count in COUNTS[name]:
        said = error_of(loaded, [*NEEDED.get(name, []), f"--{count}", "0"], capsys)
        assert said.endswith(f"error: --{count}: expected at least 1, found 0")


@pytest.mark.parametrize(("name", "arguments", "expected"), REFUSED)
def test_what_is_impossible_is_said(
    helper: Helper, name: str, arguments: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert f"error: {expected}" in error_of(helper(name), [*NEEDED.get(name, []), *arguments.split()], capsys)


def test_an_unknown_contender_is_named_beside_those_there_are(
    helper: Helper, capsys: pytest.CaptureFixture[str]
) -> None:
    said = error_of(helper("compare"), ["--contenders", "dpp"], capsys).replace("'", "")
    assert re.search(r"--contenders: expected some of \S.*lowtide-3.*; found dpp$", said)


def test_deepspeed_needs_an_interpreter_that_has_it(
    helper: Helper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded = helper("compare")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    said = error_of(loaded, ["--contenders", "deepspeed-3"], capsys)
    assert "--contenders: " in said and "--deepspeed-python" in said
    said = error_of(loaded, ["--deepspeed-python", str(tmp_path / "python")], capsys)
    assert said.endswith(f"--deepspeed-python: expected an interpreter, found nothing to run at {tmp_path / 'python'}")


def test_a_system_that_does_not_tell_its_memory_is_refused(
    helper: Helper, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compare, largest = helper("compare"), helper("largest")
    monkeypatch.setattr(helper("_worker"), "supported", lambda: False)
    needs = "/proc/self/smaps_rollup with Pss_Shmem (Linux 5.0 or newer)"
    said = error_of(compare, [], capsys)
    assert needs in said and said.endswith("use --memory none")
    assert compare.parse_arguments(["--memory", "none"]).memory == "none"
    assert needs in error_of(largest, NEEDED["largest"], capsys)


def test_names_may_end_in_a_star(helper: Helper) -> None:
    options = helper("compare").parse_arguments(["--contenders", "lowtide-3-n*", "ddp", "--memory", "none"])
    assert [one.name for one in options.contenders] == ["ddp", "lowtide-3-nvme", "lowtide-3-nvme-overlap"]
    options = helper("pipeline").parse_arguments(["--mode", "sleep", "--contenders", "torch-*b*", "zb-v"])
    assert [one.name for one in options.contenders] == ["torch-1f1b", "torch-interleaved-zb", "torch-zb-v", "zb-v"]


def test_a_disk_that_is_too_small_is_said(helper: Helper, tmp_path: Path) -> None:
    said = r"expected 1000000000.0 GB of free space, found [\d.]+; name another place with"
    with pytest.raises(OSError, match=said), helper("checkpoint").scratch_folder(tmp_path, 10**18):
        pass


def test_a_folder_that_offload_cannot_use_is_said(
    helper: Helper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    offload_io = helper("offload_io")
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setattr("sys.argv", ["offload_io.py", "--folder", str(file)])
    monkeypatch.setattr(offload_io.shutil, "which", lambda name: None)
    assert offload_io.main() == 2
    said = capsys.readouterr()
    assert said.err.startswith("offload_io.py: ") and str(file) in said.err
    assert "fio is not installed (Debian: apt install fio)" in said.out
