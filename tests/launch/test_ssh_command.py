"""`lowtide ssh`: words arrive unchanged, equal outputs are shown once, failures are listed, nothing is left running."""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from lowtide.bin.main import main

LOWTIDE = [sys.executable, "-c", "import sys; from lowtide.bin.main import main; sys.exit(main())"]
# Stands for ssh and sshd: runs the last word in the shell, in a session of its own that outlives the client.
FAKE = f"""#!{sys.executable} -S
import os, subprocess, sys
host, line = sys.argv[-2:]
assert sys.argv[-3] == "--", sys.argv
if host.startswith("down"):
    sys.exit(print(f"ssh: connect to host {{host}} port 22: Connection refused", file=sys.stderr) or 255)
environment = {{**os.environ, "FAKE_HOST": host}}
status = subprocess.call(["sh", "-c", line], start_new_session=True, env=environment)
sys.exit(128 - status if status < 0 else status)
"""


@pytest.fixture(autouse=True)
def fake_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "path"
    folder.mkdir()
    (folder / "ssh").write_text(FAKE)
    (folder / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


@pytest.fixture
def alive(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """The commands of all processes that this test has started, besides guards in their last seconds."""
    mark = f"LOWTIDE_TEST_{uuid.uuid4().hex}"
    monkeypatch.setenv(mark, "1")

    def commands() -> list[str]:
        found = []
        for process in psutil.process_iter():
            try:
                if mark in process.environ() and "sleep" in process.name() and process.cmdline()[1:] == ["371"]:
                    found.append(" ".join(process.cmdline()))
            except psutil.Error:
                continue
        return found

    return commands


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([*LOWTIDE, "ssh", *arguments], capture_output=True, text=True, timeout=60)


def test_words_arrive_unchanged_and_equal_outputs_are_one() -> None:
    words = ["two  words", "it's", '"', "$HOME `id` \\", "", "*", "line\nline", "--hosts"]
    done = run("--hosts", "n[1-3]", "--", sys.executable, "-c", "import sys; print(sys.argv[1:])", *words)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"[n[1-3]] {words}\n", "")


def test_outputs_that_differ_stay_apart_in_the_order_of_the_hosts() -> None:
    done = run("--hosts", "c,a,b", "--", "sh", "-c", 'test $FAKE_HOST = a && echo one && echo two || echo "other"')
    assert done.stdout == "[c,b] other\n[a] one\n[a] two\n"


def test_the_status_is_that_of_the_first_host_that_failed_and_all_are_listed() -> None:
    script = "case $FAKE_HOST in b) echo why >&2; exit 3;; c) exit 4;; *) echo fine;; esac"
    done = run("--hosts", "a,b,c,down", "--", "sh", "-c", script)
    assert (done.returncode, done.stdout) == (3, "[a] fine\n")
    assert done.stderr == (
        "[b] why\n"
        "[down] ssh: connect to host down port 22: Connection refused\n"
        "lowtide ssh: 3 of 4 hosts failed:\n"
        "  b     exit status 3    why\n"
        "  c     exit status 4    it said nothing\n"
        "  down  no connection    ssh: connect to host down port 22: Connection refused\n"
    )


def test_streamed_lines_carry_their_host() -> None:
    done = run("--hosts", "a,b", "--stream", "--", "sh", "-c", "echo $FAKE_HOST; echo err >&2")
    assert sorted(done.stdout.splitlines()) == ["[a] a", "[b] b"]
    assert sorted(done.stderr.splitlines()) == ["[a] err", "[b] err"]


def test_output_without_an_end_of_line_and_with_odd_bytes_is_kept() -> None:
    done = subprocess.run(
        [*LOWTIDE, "ssh", "--hosts", "a", "--", "printf", "one\\n\\n\\377two"], capture_output=True, timeout=60
    )
    assert done.stdout == b"[a] one\n[a] \n[a] \xfftwo\n"


def test_a_command_has_no_input_and_ends_on_its_own() -> None:
    assert run("--hosts", "a", "--", "cat").returncode == 0


def test_hosts_come_from_a_hostfile_less_those_left_out(tmp_path: Path) -> None:
    (tmp_path / "hosts.txt").write_text("n1 slots=8\nn2 slots=8  # comment\nn3\n")
    done = run("--hostfile", str(tmp_path / "hosts.txt"), "--exclude", "n2", "--at-once", "1", "--", "echo", "hi")
    assert done.stdout == "[n1,n3] hi\n"


def test_hosts_come_from_a_job_of_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "g[1-2]")
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", "8(x2)")
    assert run("--", "echo", "hi").stdout == "[g[1-2]] hi\n"


def test_a_command_that_takes_too_long_is_ended_on_the_host(alive: Callable[[], list[str]]) -> None:
    done = run("--hosts", "a,b", "--timeout", "1", "--", "sleep", "371")
    assert done.returncode == 124 and "[a,b] no end within 1 s" in done.stderr
    assert alive() == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_runs_on_when_the_command_line_is_ended(alive: Callable[[], list[str]], number: signal.Signals) -> None:
    process = subprocess.Popen(
        [*LOWTIDE, "ssh", "--hosts", "a,b", "--", "sh", "-c", "echo begun; sleep 371"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for(lambda: len(alive()) == 2)
    process.send_signal(number)
    out, err = process.communicate(timeout=120)
    wait_for(lambda: alive() == [])
    if number == signal.SIGINT:
        assert process.returncode == 130 and out == "[a,b] begun\n"
        assert "lowtide ssh: stopped by Ctrl-C before the end on a,b" in err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--hosts", "a"], "expected a command after --, found none; such as: lowtide ssh --hosts a,b -- uptime"),
        (["--", "ls"], "expected hosts, found none; name them with --hosts or --hostfile"),
        (["--hosts", "a", "--strem", "--", "ls"], 'unknown option "--strem"; did you mean "--stream"?'),
        (["--hosts", "a,a", "--", "ls"], 'host "a" stands there twice'),
        (["--hosts", "a", "--timeout", "0", "--", "ls"], 'expected a number of seconds above 0, found "0"'),
        (["--hosts", "a", "--at-once", "0", "--", "ls"], 'expected a whole number of at least 1, found "0"'),
    ],
)
def test_a_wrong_command_line_is_explained(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["ssh", *arguments])
    assert caught.value.code == 2 and text in capsys.readouterr().err


def test_a_machine_without_ssh_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SystemExit):
        main(["ssh", "--hosts", "a,b", "--", "ls"])
    assert "expected OpenSSH's client `ssh` in the path, found none; install it" in capsys.readouterr().err
