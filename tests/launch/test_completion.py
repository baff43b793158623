"""The completion scripts know all that the parsers know, and the shells offer it at the right place."""

import os
import pty
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lowtide.bin.command_tree import Command, command_tree
from lowtide.bin.completion import bash, fish, zsh
from lowtide.bin.main import COMMANDS, main


@pytest.fixture(scope="module")
def root() -> Command:
    return command_tree(COMMANDS)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the shells run: two files."""
    folder = tmp_path / "here"
    folder.mkdir()
    (folder / "my hosts.txt").write_text("")
    (folder / "train.py").write_text("")
    return folder


# What stands on the line -> what is offered for its last word. None: files.
CASES: dict[tuple[str, ...], set[str] | None] = {
    ("",): set(COMMANDS),
    ("sche",): {"schedule"},
    ("schedule", ""): {"show", "compare"},
    ("schedule", "show", "--mic"): {"--microbatches"},
    ("completion", ""): {"bash", "zsh", "fish"},
    ("launch", "--transport", "s"): {"ssh", "srun"},
    ("launch", "--nproc", "2", "--hostf"): {"--hostfile"},
    ("launch", "--hostfile", "my"): None,
    ("launch", "--env", "A=B", "--quiet"): {"--quiet-ranks"},
    ("launch", "train.py", "--quiet"): set(),
    ("config", "check", "--world"): {"--world-size"},
}


def test_the_tree_has_every_command_and_option_with_its_help(root: Command) -> None:
    assert [command.path for command in root.commands] == [(name,) for name in COMMANDS]
    places = {command.place: command for command in root.every()}
    assert {"lowtide schedule compare", "lowtide checkpoint show", "lowtide config schema"} <= set(places)
    grace = next(option for option in places["lowtide launch"].options if "--grace" in option.names)
    assert "(default: 15)" in grace.help and grace.takes_value
    module = next(option for option in places["lowtide launch"].options if "-m" in option.names)
    assert module.names == ("-m", "--module") and not module.takes_value


@pytest.mark.parametrize("make", [bash, fish, zsh])
def test_a_script_names_every_option_of_every_command(root: Command, make: Callable[[Command], str]) -> None:
    text = make(root)
    for command in root.every():
        for option in command.options:
            for name in option.names:
                assert (f"-l {name[2:]} " if make is fish and name.startswith("--") else name[2:]) in text, name


def test_an_unknown_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["completion", "fsh"])
    assert caught.value.code == 2 and 'unknown SHELL "fsh"; did you mean "fish"?' in capsys.readouterr().err


def needs(shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell} here")


@pytest.mark.parametrize("words", CASES, ids=" ".join)
def test_bash_offers_what_fits(root: Command, folder: Path, words: tuple[str, ...]) -> None:
    needs("bash")
    script = bash(root) + 'COMP_WORDS=(lowtide "$@"); COMP_CWORD=$#; _lowtide; printf "%s\\n" "${COMPREPLY[@]}"'
    done = subprocess.run(["bash", "-c", script, "bash", *words], cwd=folder, capture_output=True, text=True)
    expected = CASES[words]
    found = set(done.stdout.splitlines()) - {""}
    assert (found, done.stderr) == ({"my hosts.txt"} if expected is None else expected, "")


def test_bash_takes_a_value_behind_an_equals_sign(root: Command, folder: Path) -> None:
    needs("bash")
    script = bash(root) + 'COMP_WORDS=(lowtide "$@"); COMP_CWORD=$#; _lowtide; printf "%s\\n" "${COMPREPLY[@]}"'
    for words in (("launch", "--transport", "=", "sr"), ("launch", "--grace", "=", "5", "--transport", "sr")):
        done = subprocess.run(["bash", "-c", script, "bash", *words], cwd=folder, capture_output=True, text=True)
        assert done.stdout == "srun\n"


@pytest.mark.parametrize("words", CASES, ids=" ".join)
def test_fish_offers_what_fits(root: Command, folder: Path, words: tuple[str, ...]) -> None:
    needs("fish")
    line = " ".join(("lowtide", *words))
    environment = {**os.environ, "HOME": str(folder.parent)}
    command = ["fish", "--no-config", "-c", fish(root) + f"\ncomplete -C '{line}'"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment)
    expected = CASES[words]
    found = {line.split("\t")[0] for line in done.stdout.splitlines()}
    assert (found, done.stderr) == ({"my hosts.txt"} if expected is None else expected, "")


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("lowtide schedule show --micr", "--microbatches="),
        ("lowtide sche", "schedule "),
        ("lowtide launch --quie", "--quiet-ranks "),
        ("lowtide launch --transport mp", "mpirun "),
        ("lowtide launch --env A=B --env-f", "--env-file="),
        ("lowtide launch trai", "train.py "),
        ("lowtide completion fi", "fish "),
    ],
)
def test_zsh_completes_what_is_unique(root: Command, folder: Path, line: str, shown: str) -> None:
    needs("zsh")
    functions = folder.parent / "functions"
    functions.mkdir()
    (functions / "_lowtide").write_text(zsh(root))
    start = f"fpath=({functions} $fpath); autoload -U compinit; compinit -u -D; unsetopt zle_bracketed_paste; PS1="
    start += "; echo re''ady"  # so that the echo of the line itself is not taken for it
    found = typed(["zsh", "-f", "-i"], folder, start, line + "\t")
    assert found.replace("\x07", "").rstrip("\r\n").endswith(line.rpartition(" ")[0] + " " + shown)


def typed(command: list[str], folder: Path, start: str, keys: str) -> str:
    """What a terminal shows for `keys` after the line `start`, whose last output is "ready"."""
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(folder)
        os.execvpe(command[0], command, {**os.environ, "TERM": "dumb", "HOME": str(folder.parent)})
    try:
        read_until(terminal, None)
        os.write(terminal, f"{start}\n".encode())
        read_until(terminal, "ready")
        os.write(terminal, keys.encode())
        return read_until(terminal, None)
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        os.close(terminal)


def read_until(terminal: int, mark: str | None, quiet: float = 0.5) -> str:
    """What is shown until `mark` was, or else until nothing more has come for `quiet` seconds."""
    shown = ""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and (mark is None or mark not in shown):
        if select.select([terminal], [], [], quiet)[0]:
            shown += os.read(terminal, 1 << 16).decode(errors="replace")
        elif mark is None and shown:
            break
    return shown


def test_options_that_may_stand_often_are_offered_again_by_zsh(root: Command) -> None:
    assert "'*'--ssh-option=" in zsh(root)
