"""What a host finds out about itself: facts where they can be had, the system's words where not, and never late."""

import importlib.metadata
import platform
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from lowtide.launch.hosts import facts
from lowtide.launch.hosts.facts import CheckRequest, CheckResult, run_checks, source_digest
from lowtide.launch.hosts.reach import HeldPort


def checked(folder: Path, **others: Any) -> dict[str, CheckResult]:
    """The results by their names."""
    request = CheckRequest(**{"num_ranks": 1, "folder": str(folder), "program": "sh", **others})
    return {result.name: result for result in run_checks(request)}


def test_every_fact_of_a_good_host_is_there_and_no_file_is_left(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print(1)")
    start = time.process_time()
    held = HeldPort()
    asked = {"script": "train.py", "write_folders": ("state", "."), "master_address": "localhost"}
    found = checked(tmp_path, **asked, master_port=held.port, limit_seconds=60.0)
    held.release()
    assert time.process_time() - start < 1.0
    assert [result for result in found.values() if result.error] == []
    expected = {name: importlib.metadata.version(name) for name in ("torch", "lowtide")}
    expected["python"] = platform.python_version()
    assert {name: found[name].value for name in expected} == expected
    assert int(str(found["free_memory_bytes"].value)) > 1 << 20
    assert str(found["program"].value).endswith("/sh") and found["folder"].value == str(tmp_path)
    assert "127.0.0.1" in str(found["master_address"].value) and 0 < float(str(found["master_port"].value)) < 5
    assert float(str(found["clock_start"].value)) <= float(str(found["clock_end"].value))
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_what_is_missing_is_said_in_the_words_of_the_system(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    held = HeldPort()
    held.release()
    found = checked(
        tmp_path / "none",
        program="no-such-program",
        script="train.py",
        module="no_such_module.train",
        write_folders=(str(tmp_path / "no" / "state"), str(tmp_path / "file")),
        master_address="127.0.0.1",
        master_port=held.port,
    )
    expected = {
        "folder": "No such file or directory",
        "program": "no such program",
        "script": "No such file or directory",
        "module": "no such module",
        f"write_folder {tmp_path}/no/state": "No such file or directory",
        f"write_folder {tmp_path}/file": "Not a directory",
        "master_port": "Connection refused",
    }
    assert {name: result.error for name, result in found.items() if result.error} == expected
    assert all(found[name].value is None for name in expected)
    address = checked(tmp_path, master_address="no such name")["master_address"]
    assert address.value is None and address.error


@pytest.mark.parametrize("name", ["train", "package.train"])
def test_a_module_is_found_in_the_folder_and_in_the_search_path(tmp_path: Path, name: str) -> None:
    (tmp_path / "train.py").write_text("")
    (tmp_path / "other" / "package").mkdir(parents=True)
    (tmp_path / "other" / "package" / "__init__.py").write_text("")
    found = checked(tmp_path, module=name, search_path=(str(tmp_path / "other"),))
    assert str(found["module"].value).startswith(str(tmp_path))


def test_scripts_and_sources_that_differ_have_different_hashes(tmp_path: Path) -> None:
    values = []
    for text in ("print(1)", "print(2)", "print(1)"):
        (tmp_path / "train.py").write_text(text)
        values.append(checked(tmp_path, script="train.py")["script"].value)
    assert values[0] == values[2] != values[1]
    for folder in ("launch", "tests", "lowtide"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").write_text("")
    (tmp_path / "launch" / "agent.py").write_text("a = 1")
    first = source_digest(tmp_path)
    (tmp_path / "tests" / "test.py").write_text("not installed")
    (tmp_path / "lowtide" / "other.py").write_text("elsewhere where it is installed")
    assert source_digest(tmp_path) == first
    (tmp_path / "launch" / "agent.py").write_text("a = 2")
    assert source_digest(tmp_path) != first


def test_a_check_that_is_silent_or_stumbles_does_not_hold_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stumble() -> int:
        raise ValueError("odd line")

    release = threading.Event()
    monkeypatch.setattr(facts, "_free_after_writing", lambda path: release.wait(60))
    monkeypatch.setattr(facts, "free_memory_bytes", stumble)
    start = time.monotonic()
    found = checked(tmp_path, write_folders=("/dead",), limit_seconds=0.3)
    assert time.monotonic() - start < 30
    release.set()
    assert found["write_folder /dead"] == CheckResult("write_folder /dead", None, "no answer within 0.3 s")
    assert found["free_memory_bytes"].error == "ValueError: odd line" and found["folder"].error == ""
