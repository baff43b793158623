"""The C++ kernel is built once and kept; where that fails, torch's kernels do the work and the log says why."""

import logging
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lowtide.kernels import cpu_build
from lowtide.kernels.cpu_build import BuildError, cache_folder, find_compiler, load_library
from lowtide.kernels.optimizer_states import new_states
from lowtide.kernels.optimizer_step import cpu_kernel, update_shard
from lowtide.optimizers import OPTIMIZERS
from tests.kernels.cpu_kernel import ADAM, needs_compiler
from tests.kit.ranks import RankPool


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache folder of this test's own, and no kernel loaded yet."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("LOWTIDE_CACHE", str(folder))
    monkeypatch.delenv("LOWTIDE_CPU_KERNEL", raising=False)
    cpu_kernel.cache_clear()
    yield folder
    cpu_kernel.cache_clear()


def program(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def step() -> torch.Tensor:
    weight = torch.ones(2000)
    states = list(new_states(OPTIMIZERS["adamw"], weight, ADAM).values())
    update_shard(OPTIMIZERS["adamw"], weight, torch.ones(2000), states, 1, ADAM, 1.0, None)
    return weight


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A small library, quick to build."""
    path = tmp_path / "answer.cpp"
    path.write_text('extern "C" int answer() { return 42; }\n')
    return path


@needs_compiler
def test_a_kept_library_is_not_built_again(
    cache: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = find_compiler()[0]
    calls = tmp_path / "calls"
    monkeypatch.setenv("CXX", str(program(tmp_path / "compiler", f'echo "$@" >> {calls}\nexec {real} "$@"')))
    assert [load_library(source).answer(), load_library(source).answer()] == [42, 42]
    assert len(list(cache.iterdir())) == 1
    assert [line.split()[0] for line in calls.read_text().splitlines()] == ["--version", "-O2", "--version"]


@needs_compiler
def test_source_compiler_flags_and_processor_have_libraries_of_their_own(
    cache: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_library(source)
    load_library(source, ())
    assert len(list(cache.iterdir())) == 2
    source.write_text(source.read_text().replace("42", "43"))
    assert load_library(source, ()).answer() == 43
    assert len(list(cache.iterdir())) == 3
    monkeypatch.setattr(cpu_build, "_processor", lambda: "another processor")
    load_library(source, ())
    assert len(list(cache.iterdir())) == 4
    compiler = program(tmp_path / "compiler", f'[ "$1" = --version ] && echo 99 || exec {find_compiler()[0]} "$@"')
    monkeypatch.setenv("CXX", str(compiler))
    load_library(source, ())
    assert len(list(cache.iterdir())) == 5


def test_the_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOWTIDE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache_folder() == Path("/home/someone/.cache/lowtide")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert cache_folder() == Path("/caches/lowtide")
    monkeypatch.setenv("LOWTIDE_CACHE", "~/kernels")
    assert cache_folder() == Path("/home/someone/kernels")


def build_in(cache: Path, source: Path) -> int:
    os.environ["LOWTIDE_CACHE"] = str(cache)
    return int(load_library(source).answer())


@needs_compiler
def test_processes_that_build_at_the_same_time(ranks: RankPool, cache: Path, source: Path) -> None:
    assert ranks(2, build_in, cache, source, process_group=False) == [42] * 2
    assert len(list(cache.iterdir())) == 1  # and no temporary file


@needs_compiler
def test_a_damaged_library_is_built_again(cache: Path, source: Path, tmp_path: Path) -> None:
    load_library(source)
    (kept,) = cache.iterdir()
    other = cache.with_name("other cache")  # a file that is loaded may not change under its process
    other.mkdir()
    damaged = b"\x7fELF half a library"
    (other / kept.name).write_bytes(damaged)
    with pytest.MonkeyPatch.context() as patch, (other / kept.name).open("rb") as opened:
        patch.setenv("LOWTIDE_CACHE", str(other))
        assert load_library(source).answer() == 42
        assert opened.read() == damaged  # who has the file open never sees it change: the new one takes its place
    assert (other / kept.name).read_bytes() == kept.read_bytes()


@needs_compiler
def test_nothing_is_at_the_path_before_the_library_is_whole(
    cache: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = tmp_path / "seen"
    text = f'{find_compiler()[0]} "$@" && case "$*" in *-o*) ls {cache} >> {seen};; esac'
    monkeypatch.setenv("CXX", str(program(tmp_path / "compiler", text)))
    load_library(source)
    (kept,) = cache.iterdir()
    (made,) = seen.read_text().split()  # when the compiler had ended
    assert made != kept.name and made.startswith(kept.name)


@needs_compiler
def test_a_cache_that_cannot_be_written_does_not_matter(cache: Path, source: Path) -> None:
    cache.write_text("a file where the folder should be")  # as unwritable, for root too
    assert load_library(source).answer() == 42
    assert cache.is_file()


FAILS = '[ "$1" = --version ] && exit 0\necho "In file a.h" >&2\necho "a.h:1: error: too old" >&2\nexit 3'
REASONS: dict[str, tuple[str | None, str]] = {  # a compiler's name or its text, None for an empty path
    "no compiler": (
        None,
        r"found no C\+\+ compiler among c\+\+, g\+\+, clang\+\+; install a compiler, or name it in CXX",
    ),
    "not there": ("no-such-compiler -O3", "CXX is 'no-such-compiler -O3', and this program does not exist"),
    "fails": (FAILS, "`.*/compiler -O2 .*` failed with exit code 3: a.h:1: error: too old"),
    "writes no library": ("exit 0", "the library cannot be written or loaded: .*"),
}


@pytest.mark.parametrize("name", REASONS)
def test_without_a_library_torch_works_and_the_log_says_why(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    text, reason = REASONS[name]
    if text is None:
        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.setenv("PATH", str(tmp_path))
    else:
        monkeypatch.setenv("CXX", str(program(tmp_path / "compiler", text)) if "exit" in text else text)
    caplog.set_level(logging.INFO, "lowtide")
    found = step()
    step()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert re.fullmatch(f"CPU optimizer: torch's kernels, chunk by chunk, because {reason}", record.getMessage())
    torch.testing.assert_close(found, torch.full((2000,), 1 - 1e-2 * 0.1 - 1e-2), rtol=1e-6, atol=1e-6)
    assert not list(cache.glob("*.so.*"))  # what was begun


def test_a_compiler_that_does_not_end(
    cache: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_build, "_TIMEOUT_SECONDS", 0.2)
    monkeypatch.setenv("CXX", str(program(tmp_path / "compiler", "exec sleep 60")))
    with pytest.raises(BuildError, match=r"`.*compiler --version` took longer than 0.2 s"):
        load_library(source)


@needs_compiler
def test_a_compiler_that_does_not_know_the_processor(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "lowtide")
    text = (
        'case "$*" in *native*) echo "error: unknown value native" >&2; exit 1;; esac\n'
        f'exec {find_compiler()[0]} "$@" -O0'  # a third less time
    )
    monkeypatch.setenv("CXX", str(program(tmp_path / "compiler", text)))
    step()
    (record,) = caplog.records
    assert record.getMessage() == "CPU optimizer: a C++ pass per shard, with portable instructions"
