"""`lowtide` and its commands: help, version, what is said of mistakes; each command imports only its own module."""

import argparse
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import pytest

from lowtide.bin.arguments import Parser, output_file
from lowtide.bin.main import COMMANDS, main
from lowtide.launch.agent import agent
from tests.test_public_api import in_fresh_python

CHECKOUT = Path(__file__).parents[2]


def error_of(parser: Parser, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as caught:
        parser.parse_args(arguments)
    assert caught.value.code == 2
    error, place = capsys.readouterr().err.splitlines()
    assert place == f"see `{error.split(': error: ')[0]} --help`"
    return error


@pytest.fixture
def parser() -> Parser:
    result = Parser(prog="tide")
    result.add_argument("--level", required=True)
    result.add_argument("-v", "--verbose", action="store_true")
    result.add_argument("--unit", choices=("metre", "foot"))
    actions = result.add_subparsers(metavar="ACTION")
    actions.add_parser("measure").add_argument("--station", type=int)
    actions.add_parser("predict")
    return result


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("--level 1 --verbos2", 'tide: error: unknown option "--verbos2"; did you mean "--verbose"?'),
        ("--level 1 --xyz=4", 'tide: error: unknown option "--xyz"'),
        ("--levle 1", 'tide: error: unknown option "--levle"; did you mean "--level"?'),
        ("--verbose", "tide: error: the following arguments are required: --level"),
        ("-- --levle", "tide: error: the following arguments are required: --level"),  # no slip behind two dashes
        ("--level 1 mesure --statoin", 'tide: error: unknown ACTION "mesure"; did you mean "measure"?'),
        ("--level 1 --unit fot", 'tide: error: unknown --unit "fot"; did you mean "foot"?'),
        ("--level 1 --unit xyz", 'tide: error: unknown --unit "xyz"; expected one of metre, foot'),
        ("--level 1 mesure", 'tide: error: unknown ACTION "mesure"; did you mean "measure"?'),
        ("--level 1 measure --statoin 4", 'tide measure: error: unknown option "--statoin"; did you mean "--station"?'),
        ("--level 1 measure more", 'tide measure: error: expected nothing more, found "more"'),
    ],
)
def test_a_slip_is_named(parser: Parser, arguments: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    if arguments.startswith("-- "):
        parser = Parser(prog="tide")
        parser.add_argument("--level", required=True)
        parser.add_argument("words", nargs="*")
    assert error_of(parser, arguments.split(), capsys) == text


def test_what_is_right_is_parsed_as_ever(parser: Parser) -> None:
    options = parser.parse_args(["--lev", "-1", "--unit=foot", "measure", "--station", "-3"])
    assert (options.level, options.unit, options.station) == ("-1", "foot", -3)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_such_a_parser_and_help_with_examples(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = import_module(f"lowtide.bin.{name}").parser()
    assert isinstance(command, Parser) and command.prog == f"lowtide {name}"
    assert 'unknown option "--hlep"; did you mean "--help"?' in error_of(command, ["--hlep"], capsys)
    with pytest.raises(SystemExit) as caught:
        main([name, "--help"])
    assert caught.value.code == 0 and f"\nexamples:\n  lowtide {name}" in capsys.readouterr().out
    actions = [one.choices or () for one in command._actions if one.dest in ("action", "command")]
    for action in [action for choices in actions for action in choices]:
        with pytest.raises(SystemExit):
            main([name, action, "--help"])
        assert f"\n  lowtide {name} {action}" in capsys.readouterr().out


def test_help_lists_every_command_with_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {name}" in text and line in text for name, line in COMMANDS.items())
    assert "example:\n  lowtide launch --nproc 2 examples/train_gpt.py" in text
    assert main([]) == 2 and "commands:" in capsys.readouterr().out
    assert main(["checkpoint"]) == 2 and "usage: lowtide checkpoint" in capsys.readouterr().out
    assert main(["--version"]) == 0 and capsys.readouterr().out == f"lowtide {version('lowtide')}\n"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["lunch"], 'unknown command "lunch"; did you mean "launch"?'),
        (["zzz"], f'unknown command "zzz"; the commands are {", ".join(COMMANDS)}'),
        (
            ["ssh", "--hosts", "a,b", "--", "uptime"],
            'the command "ssh" was removed; run a command on all hosts with ClusterShell, `clush -bw '
            "'node[1-4]' COMMAND`, or pdsh; in a SLURM job with `srun --ntasks-per-node=1 COMMAND`",
        ),
        (["completion", "bash"], 'the command "completion" was removed; `lowtide COMMAND --help` lists the'),
    ],
)
def test_a_command_that_is_none_is_named(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    out, error = capsys.readouterr()
    assert out == "" and error.startswith(f"lowtide: {text}")


@pytest.mark.parametrize(
    ("module", "called", "run"),
    [
        ("lowtide.bin.main", "_run", lambda: main(["plan"])),
        ("lowtide.launch.agent.agent", "connected", lambda: agent.main(["--connect", "127.0.0.1:1"])),
    ],
)
def test_ctrl_c_ends_a_command_without_a_stack(
    module: str, called: str, run: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(import_module(module), called, interrupted)
    assert run() == 128 + signal.SIGINT


def test_a_command_starts_without_torch() -> None:
    code = """
import contextlib, sys
from lowtide.bin.main import main
for arguments in (["--help"], ["launch", "--help"], ["config", "--help"]):
    with contextlib.suppress(SystemExit):
        main(arguments)
    assert "torch" not in sys.modules, arguments
"""
    said = in_fresh_python(code)
    assert all(f"usage: lowtide{name}" in said for name in ("", " launch", " config"))


def test_the_executable_runs_a_module_from_any_folder(tmp_path: Path) -> None:
    (tmp_path / "my_job.py").write_text("import os, sys; print(os.environ['WORLD_SIZE'], sys.argv[1:])")
    command = [str(CHECKOUT / "bin/lowtide"), "launch", "--nproc", "1", "-m", "my_job", "--steps", "3"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "1 ['--steps', '3']\n"), done.stderr


def test_the_executable_says_when_lowtide_is_not_installed(tmp_path: Path) -> None:
    bare = f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n'
    for name, text in (("bin/lowtide", (CHECKOUT / "bin/lowtide").read_text()), ("path/python3", bare)):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}/path:/usr/bin:/bin"}
    done = subprocess.run([tmp_path / "bin/lowtide"], capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 1
    assert "lowtide: not installed for " in done.stderr and "run ./bin/quickstart, or pip install -e ." in done.stderr


PLAN = "plan zero3 --layers 2 --hidden 64 --heads 2 --vocab 100"
SHOW = "schedule show 1f1b --ranks 2 --microbatches 2"
THREE_TIMES = "expected three times F,I,W, for example 1,1.2,0.8, found "


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (f"{PLAN} --write no/best.json", 'argument --write: expected a file in an existing folder, found "no/best.'),
        (f"{PLAN} --png folder", 'argument --png: expected the name of a file, found the folder "folder"'),
        (f"{SHOW} --save no/s.txt", "argument --save: expected a file in an"),
        (f"{SHOW} --png no/s.png", "argument --png: expected a file in an"),
        (f"{SHOW} --costs 1,2", f'{THREE_TIMES}"1,2"'),
        (f"{SHOW} --costs 1,-1,1", f'{THREE_TIMES}"1,-1,1"'),
        (f"{SHOW} --costs 0,0,0", f'{THREE_TIMES}"0,0,0"'),
        (f"{SHOW} --send soon", 'expected a time of 0 or more, found "soon"'),
        (f"{SHOW} --send nan", 'expected a time of 0 or more, found "nan"'),
        (f"{SHOW} --activation-bytes apples", 'expected a size, for example 80GB, 1.5GiB or 450e12, found "apples"'),
        (f"{SHOW} --ranks 0", 'expected a whole number of at least 1, found "0"'),
        ("config check zero3 --world-size 0", 'expected a whole number of at least 1, found "0"'),
        ("export in out --dtype int8", 'unknown --dtype "int8"; expected one of fp32,'),
        ("export in out --shard-bytes many", "expected a positive number"),
        ("report folder --png no/s.png", "argument --png: expected a file in an existing folder"),
        ("report folder --html a.html --json", "argument --json: not allowed with argument --html"),
        ("report folder --html a.html --rank 0", "--rank: expected none with --html, whose page shows all ranks"),
        (f"{PLAN} --png front", "argument --png: expected a name that ends with one of ."),
        (f"{PLAN} --png front.pgn", 'found "front.pgn"'),
        ("plan --params 7b --gpus 8 --tokens 1T", "found --gpus, --tokens without CONFIG: --params takes no CONFIG"),
        ("tune zero3 --launch --quiet-ranks x.py", 'expected one argument; if its value begins with "-", write OPT'),
        ("env --quick", "--quick was removed; nothing is measured without --measure, so leave it out"),
        ("env --measure folder", 'argument --measure: expected the name of a file, found the folder "folder"'),
        ("env --measure --json", "--json: expected none with --measure"),
        ("env --measure --folder no", "--folder: expected an existing folder that you may write, found no"),
        (f"{PLAN} --ranks 8", "found --ranks with CONFIG: --params takes no CONFIG"),
        ("plan zero3 --params 7b", "found --params with CONFIG: --params takes no CONFIG, only --ranks and --fp32"),
    ],
)
def test_wrong_options_are_errors_before_the_work(
    arguments: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    with pytest.raises(SystemExit):
        main(arguments.split())
    assert text in capsys.readouterr().err


def test_a_file_that_may_not_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)  # for root every file can be written
    with pytest.raises(argparse.ArgumentTypeError, match="expected a file that you may write, found "):
        output_file(str(tmp_path / "best.json"))
