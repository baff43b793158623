"""What a host finds out about itself: facts where they can be had, the system's words where not, and never late."""

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from lowtide.launch.hosts import facts as checks
from lowtide.launch.hosts.facts import CheckRequest, CheckResult, run_checks, source_digest, versions
from lowtide.launch.hosts.reach import HeldPort
from lowtide.launch.wire.messages import from_plain, to_plain


def request(folder: Path, **others: Any) -> CheckRequest:
    return CheckRequest(num_ranks=1, folder=str(folder), program="sh", **others)


def by_name(results: list[CheckResult]) -> dict[str, CheckResult]:
    return {result.name: result for result in results}


def test_every_fact_of_a_good_host_is_there(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print(1)")
    held = HeldPort()
    try:
        results = run_checks(
            request(
                tmp_path,
                script="train.py",
                write_folders=("state",),
                master_address="localhost",
                master_port=held.port,
            )
        )
    finally:
        held.release()
    assert [result for result in results if result.error] == []
    found = by_name(results)
    assert {name: found[name].value for name in ("python", "torch", "lowtide")} == versions()
    assert int(str(found["free_memory_bytes"].value)) > 1 << 20
    assert str(found["program"].value).endswith("/sh") and found["folder"].value == str(tmp_path)
    assert "127.0.0.1" in str(found["master_address"].value) and 0 < float(str(found["master_port"].value)) < 5
    assert float(str(found["clock_start"].value)) <= float(str(found["clock_end"].value))


def test_the_checks_take_less_than_a_second_of_a_processor(tmp_path: Path) -> None:
    start = time.process_time()
    run_checks(request(tmp_path, script="train.py", write_folders=("a", "b"), master_address="localhost"))
    assert time.process_time() - start < 1.0


def test_what_is_missing_is_said_in_the_words_of_the_system(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    results = by_name(
        run_checks(
            CheckRequest(
                num_ranks=1,
                folder=str(tmp_path / "none"),
                program="no-such-program",
                script="train.py",
                module="no_such_module.train",
                write_folders=(str(tmp_path / "no" / "state"), str(tmp_path / "file")),
            )
        )
    )
    assert {name: results[name].error for name in ("folder", "program", "script", "module")} == {
        "folder": "No such file or directory",
        "program": "no such program",
        "script": "No such file or directory",
        "module": "no such module",
    }
    assert results[f"write_folder {tmp_path}/no/state"].error == "No such file or directory"
    assert results[f"write_folder {tmp_path}/file"].error == "Not a directory"
    assert all(result.value is None for result in results.values() if result.error)


def test_a_check_leaves_no_file_behind(tmp_path: Path) -> None:
    run_checks(request(tmp_path, write_folders=(".", "missing")))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["train", "package.train"])
def test_a_module_is_found_in_the_folder_and_in_the_search_path(tmp_path: Path, name: str) -> None:
    (tmp_path / "train.py").write_text("")
    (tmp_path / "other" / "package").mkdir(parents=True)
    (tmp_path / "other" / "package" / "__init__.py").write_text("")
    found = by_name(run_checks(request(tmp_path, module=name, search_path=(str(tmp_path / "other"),))))
    assert str(found["module"].value).startswith(str(tmp_path))


def test_scripts_that_differ_have_different_hashes(tmp_path: Path) -> None:
    values = []
    for text in ("print(1)", "print(2)", "print(1)"):
        (tmp_path / "train.py").write_text(text)
        values.append(by_name(run_checks(request(tmp_path, script="train.py")))["script"].value)
    assert values[0] == values[2] != values[1]


def test_sources_that_differ_have_different_hashes(tmp_path: Path) -> None:
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


def test_a_silent_file_system_does_not_hold_the_other_checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    monkeypatch.setattr(checks, "_free_after_writing", lambda path: release.wait(60))
    start = time.monotonic()
    found = by_name(run_checks(request(tmp_path, write_folders=("/dead",), limit_seconds=0.3)))
    assert time.monotonic() - start < 30
    release.set()
    assert found["write_folder /dead"] == CheckResult("write_folder /dead", None, "no answer within 0.3 s")
    assert found["folder"].error == ""


def test_a_check_that_stumbles_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stumble() -> int:
        raise ValueError("odd line")

    monkeypatch.setattr(checks, "free_memory_bytes", stumble)
    assert by_name(run_checks(request(tmp_path)))["free_memory_bytes"].error == "ValueError: odd line"


def test_a_name_that_means_nothing_and_a_port_without_listener_are_told(tmp_path: Path) -> None:
    held = HeldPort()
    held.release()
    found = by_name(run_checks(request(tmp_path, master_address="127.0.0.1", master_port=held.port)))
    assert found["master_port"].error == "Connection refused"
    found = by_name(run_checks(request(tmp_path, master_address="no such name")))
    assert found["master_address"].value is None and found["master_address"].error


def test_a_folder_that_may_not_be_written_is_told(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        folder = "/proc"  # refuses root too
        words: tuple[str, ...] = ("No such file or directory", "Operation not permitted", "Permission denied")
    else:
        tmp_path.chmod(0o500)
        folder, words = str(tmp_path), ("Permission denied",)
    assert by_name(run_checks(request(tmp_path, write_folders=(folder,))))[f"write_folder {folder}"].error in words


def test_requests_and_results_travel_as_json(tmp_path: Path) -> None:
    asked = request(tmp_path, script="a.py", write_folders=("x", "y"), master_port=5)
    assert from_plain(CheckRequest, to_plain(asked)) == asked
    for result in (CheckResult("a", 1), CheckResult("a", 1.5), CheckResult("a", "x"), CheckResult("a", None, "e")):
        assert from_plain(CheckResult, to_plain(result)) == result
