"""The command line of `lowtide launch`: mistakes, options without effect, and what the script is given."""

import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from lowtide.bin.launch import main as launch
from tests.launch.jobs import Job

OF_A_RANK = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.fixture
def within_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in OF_A_RANK.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("--nproc 0 FILE", "--nproc must be at least 1, found 0"),
        ("--nproc 1 --grace -1 FILE", "--grace must not be negative, found -1"),
        ("--nproc 1 nothing.py", 'there is no script "nothing.py" in '),
        ("--nproc 1 -m no_such.module", 'no module "no_such" can be imported from '),
        ("--nproc two FILE", '--nproc: expected a number of ranks or "auto", found "two"'),
        ("--nporc 2 FILE", 'unknown option "--nporc"; did you mean "--nproc"?'),
        ("--num_gpus=2 FILE", 'unknown option "--num_gpus"; did you mean "--nproc"?'),
        ("--nnodes 2 FILE", 'unknown option "--nnodes"; did you mean "--num-hosts"?'),
        ("--islands host FILE", "--islands was removed; for ranks that train apart use torchft (https://"),
        ("--transport shh FILE", 'unknown --transport "shh"; did you mean "ssh"?'),
        ("--master-port 70000 FILE", "--master-port must be from 1 to 65535, found 70000"),
        ("--ssh-port 0 FILE", "--ssh-port must be from 1 to 65535, found 0"),
        ("--grace nan FILE", "argument --grace: invalid number value: 'nan'"),
        ("--max-hosts 0 FILE", "--max-hosts must be at least 1, found 0"),
        ("--lost-after 1 FILE", "--lost-after must be at least 2 seconds"),
        ("--min-hosts 3 --max-hosts 2 FILE", "--min-hosts (3) must not be more than --max-hosts (2)"),
        ("--hosts a:2 --hostfile b FILE", "remove either"),
        ("--nproc 1", "the following arguments are required: SCRIPT\n"),
    ],
)
def test_a_wrong_command_line_is_explained(arguments: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        launch(arguments.replace("FILE", __file__).split())
    assert caught.value.code == 2 and text in capsys.readouterr().err


def test_more_hosts_than_there_are_cannot_be_needed(capsys: pytest.CaptureFixture[str]) -> None:
    assert launch(["--transport", "local", "--max-restarts", "1", "--min-hosts", "5", __file__]) == 1
    assert "--min-hosts 5 is more than the 1 hosts of this machine. Lower it" in capsys.readouterr().err


@pytest.mark.usefixtures("within_a_rank")
def test_a_plan_inside_of_a_rank_is_that_rank(capsys: pytest.CaptureFixture[str]) -> None:
    assert launch(["--print-plan", "--env", "NOTE=two words", __file__, "--api-key", "abc"]) == 0
    shown = capsys.readouterr().out
    assert "note: this process is already rank 1 of 2: it runs the script itself" in shown
    assert f"{__file__} --api-key '(hidden)'" in shown and "  NOTE='two words'" in shown


def test_options_without_an_effect_are_named(tmp_path: Path) -> None:
    status, _, err = Job(tmp_path, "", "--nproc", "1", "--min-hosts", "1", arguments=["--grace", "1"]).finish()
    assert status == 0 and "--min-hosts has no effect without --max-restarts" in err
    assert "--grace was passed to the script, which runs as a single rank, " in err


@pytest.mark.parametrize(
    ("options", "arguments", "text"),
    [
        ("", "--nproc 2", "write it before the script: lowtide launch --nproc 2 "),
        ("", "--steps 1 --env=A=b", "--env was passed to the script, which runs as a single rank, "),
        ("--nproc 2", "--nproc 2", None),
        ("--transport local", "--transport ssh", None),
        ("", "--grace 1", None),  # the script has an option of this name itself
        ("", "--help --steps 1", None),
    ],
)
def test_an_option_of_the_launcher_behind_the_script_is_named(
    options: str, arguments: str, text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts = Mock()
    monkeypatch.setattr("lowtide.bin.launch.Attempts", attempts)
    (tmp_path / "train.py").write_text('"""lowtide launch --nproc 2 train.py"""\nprint(options.grace)')
    launch([*options.split(), str(tmp_path / "train.py"), *arguments.split()])
    notes = attempts.call_args.args[0].notes_of_one_rank
    assert notes == () if text is None else text in notes[0]


FOR_DEEPSPEED = """
import argparse, os
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
def add_config_arguments(parser): ...
add_config_arguments(parser)
print(os.environ["LOCAL_RANK"], parser.parse_args().local_rank)
"""


def test_a_script_for_deepspeeds_launcher_gets_its_local_rank(tmp_path: Path) -> None:
    status, out, err = Job(tmp_path, FOR_DEEPSPEED, "--nproc", "2").finish()
    assert status == 0 and sorted(out.split("\n")) == ["", "0 0", "[rank 1] 1 1"], err
    assert "script.py declares it and calls add_config_arguments; to omit it, use --no-pass-local-rank\n" in err


@pytest.mark.parametrize(
    ("source", "options", "arguments", "expected"),
    [
        (FOR_DEEPSPEED, "", "", "--local_rank=1"),
        (FOR_DEEPSPEED, "--no-pass-local-rank --log-dir logs --bind cores", "", ""),
        (FOR_DEEPSPEED, "", "--local_rank 7", "--local_rank 7"),
        ("", "--pass-local-rank", "--steps 1", "--local_rank=1 --steps 1"),
        ('parser.add_argument("--local_rank")', "", "", ""),
        ("no Python (", "", "", ""),
    ],
)
@pytest.mark.usefixtures("within_a_rank")
def test_which_scripts_get_a_local_rank(
    source: str,
    options: str,
    arguments: str,
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("os.execve", lambda path, command, environment: sys.exit(" ".join(command[2:])))
    (tmp_path / "train.py").write_text(source)
    with pytest.raises(SystemExit) as replaced:
        launch([*options.split(), str(tmp_path / "train.py"), *arguments.split()])
    assert replaced.value.code == expected
    said = capsys.readouterr().err
    assert ("calls add_config_arguments" in said) == (source == FOR_DEEPSPEED and expected == "--local_rank=1")
    without_effect = "no effect on a rank that was not started by lowtide: --bind, --log-dir\n"
    assert (without_effect in said) == ("--bind" in options)
