"""The command line: `lowtide`, `lowtide launch`, and what they say about mistakes."""

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from lowtide.bin.launch import main as launch
from lowtide.bin.main import COMMANDS, main

CHECKOUT = Path(__file__).parents[2]


def test_help_lists_every_command_with_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {name}" in text and line in text for name, line in COMMANDS.items())
    assert "example:\n  lowtide launch --nproc 2 examples/train_gpt.py" in text


def test_no_command_shows_the_help_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2 and "commands:" in capsys.readouterr().out


def test_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0 and capsys.readouterr().out == f"lowtide {version('lowtide')}\n"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("lunch", 'did you mean "launch"?'),
        ("zzz", "the commands are launch, config, plan, schedule, export, checkpoint"),
    ],
)
def test_an_unknown_command_is_named(name: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name]) == 2
    assert capsys.readouterr().err == f'lowtide: unknown command "{name}"; {hint}\n'


def test_launch_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["launch", "--help"])
    assert caught.value.code == 0
    assert "lowtide launch --nproc 2 examples/train_gpt.py --steps 100" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--nproc", "0", __file__], "--nproc must be at least 1, found 0"),
        (["--nproc", "1", "--grace", "-1", __file__], "--grace must not be negative, found -1"),
        (["--nproc", "1", "nothing.py"], 'there is no script "nothing.py" in '),
        (["--nproc", "1", "-m", "no_such.module"], 'no module "no_such" can be imported from '),
        ([__file__], "the following arguments are required: --nproc"),
        (["--nproc", "1"], "the following arguments are required: SCRIPT"),
    ],
)
def test_a_wrong_command_line_is_explained(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        launch(arguments)
    assert caught.value.code == 2 and text in capsys.readouterr().err


def test_the_executable_runs_a_module_from_any_folder(tmp_path: Path) -> None:
    (tmp_path / "my_job.py").write_text("import os, sys; print(os.environ['WORLD_SIZE'], sys.argv[1:])")
    command = [str(CHECKOUT / "bin/lowtide"), "launch", "--nproc", "1", "-m", "my_job", "--steps", "3"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (0, "1 ['--steps', '3']\n"), done.stderr


def test_the_executable_says_when_lowtide_is_not_installed(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    executable = tmp_path / "bin/lowtide"
    executable.write_bytes((CHECKOUT / "bin/lowtide").read_bytes())
    executable.chmod(0o755)
    (tmp_path / "path").mkdir()
    bare = tmp_path / "path/python3"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    bare.chmod(0o755)
    path = f"{tmp_path}/path:/usr/bin:/bin"
    done = subprocess.run([executable], capture_output=True, text=True, cwd=tmp_path, env={"PATH": path}, timeout=30)
    assert done.returncode == 1
    assert "lowtide: not installed for " in done.stderr and "run ./bin/quickstart, or pip install -e ." in done.stderr
