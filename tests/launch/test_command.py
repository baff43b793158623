"""The command line: `lowtide`, `lowtide launch`, and what they say about mistakes."""

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from lowtide.bin.launch import main as launch
from lowtide.bin.main import COMMANDS, main
from tests.launch.jobs import Job

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
    [("lunch", 'did you mean "launch"?'), ("zzz", f"the commands are {', '.join(COMMANDS)}")],
)
def test_an_unknown_command_is_named(name: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name]) == 2
    assert capsys.readouterr().err == f'lowtide: unknown command "{name}"; {hint}\n'


def test_a_command_that_was_removed_names_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ssh", "--hosts", "a,b", "--", "uptime"]) == 2
    assert capsys.readouterr() == (
        "",
        'lowtide: the command "ssh" was removed; run a command on all hosts with ClusterShell, `clush -bw '
        "'node[1-4]' COMMAND`, or pdsh; in a SLURM job with `srun --ntasks-per-node=1 COMMAND`\n",
    )
    assert main(["completion", "bash"]) == 2
    assert 'the command "completion" was removed; `lowtide COMMAND --help` lists the' in capsys.readouterr().err


def test_launch_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["launch", "--help"])
    assert caught.value.code == 0
    assert "lowtide launch --nproc 2 examples/train_gpt.py --steps 100" in capsys.readouterr().out


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_each_command_has_examples(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([name, "--help"])
    assert caught.value.code == 0 and f"\nexamples:\n  lowtide {name}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--nproc", "0", __file__], "--nproc must be at least 1, found 0"),
        (["--nproc", "1", "--grace", "-1", __file__], "--grace must not be negative, found -1"),
        (["--nproc", "1", "nothing.py"], 'there is no script "nothing.py" in '),
        (["--nproc", "1", "-m", "no_such.module"], 'no module "no_such" can be imported from '),
        (["--nproc", "two", __file__], "argument --nproc: invalid number value: 'two'"),
        (["--nporc", "2", __file__], 'unknown option "--nporc"; did you mean "--nproc"?'),
        (["--islands", "host", __file__], "--islands was removed; for ranks that train apart use torchft (https://"),
        (["--transport", "shh", __file__], 'unknown --transport "shh"; did you mean "ssh"?'),
        (["--master-port", "70000", __file__], "--master-port must be from 1 to 65535, found 70000"),
        (["--ssh-port", "0", __file__], "--ssh-port must be from 1 to 65535, found 0"),
        (["--grace", "nan", __file__], "argument --grace: invalid number value: 'nan'"),
        (["--max-hosts", "0", __file__], "--max-hosts must be at least 1, found 0"),
        (["--lost-after", "1", __file__], "--lost-after must be at least 2 seconds"),
        (["--min-hosts", "3", "--max-hosts", "2", __file__], "--min-hosts (3) must not be more than --max-hosts (2)"),
        (["--hosts", "a:2", "--hostfile", "b", __file__], "remove either"),
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


def test_more_hosts_than_there_are_cannot_be_needed(capsys: pytest.CaptureFixture[str]) -> None:
    assert launch(["--transport", "local", "--max-restarts", "1", "--min-hosts", "5", __file__]) == 1
    assert "--min-hosts 5 is more than the 1 hosts of this machine. Lower it" in capsys.readouterr().err


OF_A_RANK = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def test_a_plan_inside_of_a_rank_is_that_rank(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in OF_A_RANK.items():
        monkeypatch.setenv(name, value)
    assert launch(["--print-plan", "--env", "NOTE=two words", __file__, "--api-key", "abc"]) == 0
    shown = capsys.readouterr().out
    assert "note: this process is already rank 1 of 2: it runs the script itself" in shown
    assert f"{__file__} --api-key '(hidden)'" in shown and "  NOTE='two words'" in shown


def test_options_without_an_effect_are_named(tmp_path: Path) -> None:
    job = Job(tmp_path, "print('ran')", "--log-dir", "logs", "--bind", "cores", variables=OF_A_RANK)
    status, out, err = job.finish()
    assert status == 0 and out == "ran\n"
    assert "no effect on a rank that was not started by lowtide: --bind, --log-dir" in err
    status, _, err = Job(tmp_path, "", "--nproc", "1", "--min-hosts", "1").finish()
    assert status == 0 and "--min-hosts has no effect without --max-restarts" in err


FOR_DEEPSPEED = """
import argparse, os
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
def add_config_arguments(parser): ...
add_config_arguments(parser)
print(os.environ["LOCAL_RANK"], parser.parse_args().local_rank)
"""


@pytest.mark.parametrize(
    ("options", "arguments", "text"),
    [
        ([], ["--nproc", "2"], "write it before the script: lowtide launch --nproc 2 "),
        (
            [],
            ["--steps", "1", "--env=A=b"],
            "note: --env was passed to the script, which runs as a single rank, ",
        ),
        (["--nproc", "2"], ["--nproc", "2"], None),
        (["--transport", "local"], ["--transport", "ssh"], None),
        ([], ["--grace", "1"], None),  # the script has an option of this name itself
        ([], ["--help", "--steps", "1"], None),
    ],
)
def test_an_option_of_the_launcher_behind_the_script_is_named(
    options: list[str], arguments: list[str], text: str | None, tmp_path: Path
) -> None:
    source = '"""lowtide launch --nproc 2 train.py"""\nprint(options.grace)'
    status, out, err = Job(tmp_path, source, "--print-plan", *options, arguments=tuple(arguments)).finish()
    assert status == 0 and ("note:" not in out if text is None else text in out), out + err


def test_a_script_for_deepspeeds_launcher_gets_its_local_rank(tmp_path: Path) -> None:
    status, out, err = Job(tmp_path, FOR_DEEPSPEED, "--nproc", "2").finish()
    assert status == 0 and sorted(out.split("\n")) == ["", "0 0", "[rank 1] 1 1"], err
    assert "script.py declares it and calls add_config_arguments; to omit it, use --no-pass-local-rank\n" in err
    _, out, err = Job(tmp_path, FOR_DEEPSPEED, "--no-pass-local-rank", variables=OF_A_RANK).finish()
    assert out == "1 -1\n" and "local_rank" not in err


@pytest.mark.parametrize(
    ("source", "options", "arguments", "expected"),
    [
        (FOR_DEEPSPEED, [], [], "--local_rank=1"),
        (FOR_DEEPSPEED, [], ["--local_rank", "7"], "--local_rank 7"),
        ("", ["--pass-local-rank"], ["--steps", "1"], "--local_rank=1 --steps 1"),
        ('parser.add_argument("--local_rank")', [], [], ""),
        ("no Python (", [], [], ""),
    ],
)
def test_which_scripts_get_a_local_rank(
    source: str,
    options: list[str],
    arguments: list[str],
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in OF_A_RANK.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("os.execve", lambda path, command, environment: sys.exit(" ".join(command[2:])))
    (tmp_path / "train.py").write_text(source)
    with pytest.raises(SystemExit) as replaced:
        launch([*options, str(tmp_path / "train.py"), *arguments])
    assert replaced.value.code == expected
