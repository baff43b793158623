"""Every transport gives the same job: ranks, environment, output, signals."""

import contextlib
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from lowtide.launch.agent.agent import TOKEN_VARIABLE
from lowtide.launch.hosts.host import LaunchError
from lowtide.launch.hosts.plan import HostPlan, RankPlan
from lowtide.launch.transports import remote
from lowtide.launch.transports.link import END_SECONDS, agent_command
from lowtide.launch.transports.remote import SshTransport, srun_command
from lowtide.launch.wire.handshake import ANSWER_BYTES, LauncherHandshake
from lowtide.launch.wire.loop import Loop
from lowtide.launch.wire.messages import Job as MessageOfJob
from lowtide.launch.wire.messages import Start, Welcome, encode
from tests.kit.ranks import free_port
from tests.launch import fakes
from tests.launch.jobs import Job
from tests.launch.test_local import HEARS_SIGTERM, SAVES_ON_SIGNAL, SLEEPS, WRITES_ENVIRONMENT

PROGRAMS = {"ssh": fakes.SSH, "srun": fakes.SRUN, "mpirun": fakes.MPIRUN}
NOTE = "two words, \"quotes\" and 'more',\na second line; $HOME `ls` \\ é"


def on_two_hosts(
    folder: Path, source: str, transport: str, *options: str, slots: int = 1, arguments: tuple[str, ...] = ()
) -> Job:
    variables = fakes.install(folder / "bin", transport, PROGRAMS[transport])
    where = ("--hosts", f"a:{slots},b:{slots}", "--transport", transport)
    return Job(folder, source, *where, *options, arguments=arguments, variables=variables)


@pytest.mark.parametrize("transport", PROGRAMS)
def test_ranks_have_hosts_and_environment(tmp_path: Path, transport: str) -> None:
    options, arguments = ("--env", f"NOTE={NOTE}", "--env", "EMPTY="), ("", "--nproc")
    job = on_two_hosts(tmp_path, WRITES_ENVIRONMENT, transport, *options, slots=2, arguments=arguments)
    status, _, err = job.finish()
    assert status == 0, err
    found, given = zip(*(json.loads((tmp_path / f"rank{rank}").read_text()) for rank in range(4)), strict=True)
    assert given == (list(arguments),) * 4
    assert [(f["FAKE_HOST"], f["LOCAL_RANK"], f["LOCAL_WORLD_SIZE"], f["GROUP_RANK"]) for f in found] == [
        ("a", "0", "2", "0"),
        ("a", "1", "2", "0"),
        ("b", "0", "2", "1"),
        ("b", "1", "2", "1"),
    ]
    assert {(f["NOTE"], f["EMPTY"]) for f in found} == {(NOTE, "")}
    assert {f["WORLD_SIZE"] for f in found} == {"4"} and len({f["MASTER_PORT"] for f in found}) == 1
    assert not any("LOWTIDE_TOKEN" in f for f in found)
    address = {f["MASTER_ADDR"] for f in found}.pop()
    socket.getaddrinfo(address, None)  # the names a and b do not exist here: an address was found instead
    assert "hosts of the job:" in err


@pytest.mark.parametrize(
    ("transport", "number"), [("ssh", signal.SIGINT), ("srun", signal.SIGTERM), ("mpirun", signal.SIGTERM)]
)
def test_a_signal_reaches_ranks_on_other_hosts(tmp_path: Path, transport: str, number: signal.Signals) -> None:
    job = on_two_hosts(tmp_path, SAVES_ON_SIGNAL.replace("SIGTERM", number.name), transport, "--no-preflight")
    job.wait_for_files("ready0", "ready1")
    job.process.send_signal(number)
    status, _, err = job.finish()
    assert status == 0, err
    assert (tmp_path / "saved0").read_text() == (tmp_path / "saved1").read_text() == str(int(number))


def test_a_second_interrupt_kills_at_once_on_other_hosts_too(tmp_path: Path) -> None:
    hears = HEARS_SIGTERM.replace("SIGTERM", "SIGINT")
    job = on_two_hosts(tmp_path, hears, "ssh", "--no-preflight", "--grace", "600")
    job.wait_for_files("ready0", "ready1")
    job.process.send_signal(signal.SIGINT)
    job.wait_for_files("heard0", "heard1")
    time.sleep(0.3)
    assert job.process.poll() is None
    job.process.send_signal(signal.SIGINT)
    assert job.finish(timeout=60)[0] == 128 + signal.SIGINT


def test_a_killed_launcher_leaves_nothing_on_the_hosts_of_srun(tmp_path: Path) -> None:
    job = on_two_hosts(tmp_path, SLEEPS, "srun", "--no-preflight")
    job.wait_for_files("ready0", "ready1")
    job.process.kill()
    job.process.communicate()
    assert job.survivors(wait=5.0) == []


def test_prefixes_name_the_host_and_logs_are_written(tmp_path: Path) -> None:
    source = "import os; print('line', os.environ['RANK'])"
    status, out, _ = on_two_hosts(tmp_path, source, "ssh", "--log-dir", "logs", "--no-preflight", slots=2).finish()
    assert status == 0
    assert sorted(out.splitlines()) == ["[a rank 1] line 1", "[b rank 2] line 2", "[b rank 3] line 3", "line 0"]
    assert [(tmp_path / f"logs/rank{rank}.log").read_text() for rank in range(4)] == [f"line {i}\n" for i in range(4)]


def test_a_host_that_cannot_be_reached_is_named_with_the_words_of_ssh(tmp_path: Path) -> None:
    variables = fakes.install(tmp_path / "bin", "ssh", fakes.SSH)
    options = ("--hosts", "a:1,gone:1", "--transport", "ssh")
    status, out, err = Job(tmp_path, "print('started')", *options, variables=variables).finish()
    assert status == 1 and out == ""
    assert "1 of 2 hosts cannot be used; nothing was started:\n  gone: ssh left with exit status 255" in err
    assert "No route to host" in err and "Try `ssh HOST true` by hand" in err


def test_a_step_that_cannot_start_is_explained(tmp_path: Path) -> None:
    source = "import sys; sys.exit('srun: error: Unable to allocate resources: Invalid node name specified')"
    variables = fakes.install(tmp_path / "bin", "srun", source)
    options = ("--hosts", "a:1,b:1", "--transport", "srun")
    status, _, err = Job(tmp_path, "", *options, variables=variables).finish()
    assert status == 1 and "2 of 2 hosts cannot be used" in err and "Invalid node name specified" in err


@pytest.mark.parametrize(("transport", "program"), [("srun", "srun"), ("ssh", "ssh")])
def test_a_program_that_is_not_there_is_named(tmp_path: Path, transport: str, program: str) -> None:
    options = ("--hosts", "a:1,b:1", "--transport", transport)
    status, _, err = Job(tmp_path, "", *options, variables={"PATH": str(tmp_path)}).finish()
    assert status == 1
    assert f"the program '{program}' is not on the PATH of this host. Install it, load its module" in err


def by_hand(
    folder: Path, source: str, index: int, port: int, *options: str, token: str = "", checks: bool = False
) -> Job:
    """The launcher of one of two hosts that somebody has started."""
    where = ("--num-hosts", "2", "--host-index", str(index), "--meet", f"127.0.0.1:{port}", "--nproc", "1")
    (folder / str(index)).mkdir()
    options = options if checks else (*options, "--no-preflight")
    return Job(folder / str(index), source, *where, *options, variables={TOKEN_VARIABLE: token})


def joined(folder: Path, source: str, *options: str, token: str = "", checks: bool = False) -> tuple[Job, Job]:
    """The first host's and the other's."""
    port = free_port()
    other = by_hand(folder, source, 1, port, *options, token=token, checks=checks)
    return by_hand(folder, source, 0, port, *options, token=token, checks=checks), other


def test_launchers_that_were_started_on_every_host_join(tmp_path: Path) -> None:
    source = """
import os, pathlib, time
rank = os.environ["RANK"]
os.write(1, f"rank {rank} of {os.environ['WORLD_SIZE']}\\n".encode())  # whole, between the lines of others
pathlib.Path("../said" + rank).touch()
while not pathlib.Path("../go").exists():
    time.sleep(0.01)
raise SystemExit(3 * int(rank))
"""
    port = free_port()
    other, first = (by_hand(tmp_path, source, index, port) for index in (1, 0))
    first.wait_for_files("../said0", "../said1")
    with socket.socket() as stranger:
        answer = stranger.connect_ex(("127.0.0.1", port))
    (tmp_path / "go").touch()
    status, out, err = first.finish()
    assert status == 3, err
    assert answer == errno.ECONNREFUSED  # all hosts are there: nobody else may come
    assert "rank 0 of 2" in out and "rank 1 of 2" in out
    assert other.finish()[0] == 3  # every launcher ends with the status of the job


def test_all_launchers_of_a_job_that_cannot_begin_have_its_exit_status(tmp_path: Path) -> None:
    first, other = joined(tmp_path, "", checks=True)  # hosts that have one address
    status, _, err = first.finish()
    assert (status, other.finish()[0]) == (1, 1)
    assert "nothing was started" in err


@pytest.mark.parametrize("token", ["", "secret"])
def test_launchers_tell_that_there_is_no_token_and_ranks_never_have_it(tmp_path: Path, token: str) -> None:
    source = "import os, sys; sys.exit('LOWTIDE_TOKEN' in os.environ)"
    for job in joined(tmp_path, source, token=token):
        status, _, err = job.finish()
        assert status == 0
        said = "LOWTIDE_TOKEN is not set: anyone who reaches 127.0.0.1:" in err
        assert said == (not token)


def test_an_agent_obeys_nobody_who_listens_at_the_meeting_port_before_the_launcher(tmp_path: Path) -> None:
    heard = b""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        other = by_hand(tmp_path, "pass", 1, port)
        link, _ = listener.accept()
        with link:
            job = MessageOfJob("id", (sys.executable, "-c", f"open({str(tmp_path / 'owned')!r}, 'w')"), "/", {})
            start = encode(Start(HostPlan("h", 1, (RankPlan(1, 0, None, (), {}),)), job, {}, {}))
            link.sendall(LauncherHandshake("guess").greeting + encode(Welcome()) + b"\n" + start + b"\n")
            link.settimeout(10)
            with contextlib.suppress(ConnectionError):  # it closes what it has not read
                while said := link.recv(1 << 16):
                    heard += said
    first = by_hand(tmp_path, "pass", 0, port)
    assert first.finish()[0] == 0
    status, _, err = other.finish()
    assert status == 0 and f"ignoring the program at 127.0.0.1:{port} (it does not have this job's token)" in err
    assert len(heard) == ANSWER_BYTES and not (tmp_path / "owned").exists()


def test_an_agent_without_a_token_connects_to_nobody() -> None:
    environ = {name: value for name, value in os.environ.items() if name != TOKEN_VARIABLE}
    agent = agent_command("--connect", "127.0.0.1:1", "--wait", "0.5")
    done = subprocess.run(agent, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "LOWTIDE_TOKEN is not set. The command that starts the agents (srun, mpirun) must" in done.stderr


def test_the_plan_of_launchers_on_every_host_is_that_of_all(tmp_path: Path) -> None:
    first, other = joined(tmp_path, "raise SystemExit(1)", "--print-plan")
    status, out, err = first.finish()
    assert status == 0 and "2 hosts, 2 ranks; hosts from --host-index 0" in out, err
    assert other.finish()[:2] == (0, "")


def test_clients_of_ssh_that_hang_are_ended_together(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "ssh"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    loop, events = Loop(), Mock()
    transport = SshTransport(4.0)
    transport.start(loop, list("abcdefghij"), events)
    start = time.monotonic()
    transport.close()
    assert time.monotonic() - start < 5 * END_SECONDS  # of ten one after the other
    loop.close()
    for call in events.linked.call_args_list:
        os.close(call.args[0].read_fd)
        os.close(call.args[0].write_fd)


def test_an_agent_gives_up_where_no_launcher_listens() -> None:
    agent = agent_command("--connect", "127.0.0.1:1", "--wait", "0.5")
    environ = {**os.environ, TOKEN_VARIABLE: "token"}
    done = subprocess.run(agent, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "no launcher at 127.0.0.1:1 after 0.5 s" in done.stderr
    assert "Check that it runs on the first host" in done.stderr


def test_the_command_of_ssh_is_safe_for_any_host_and_path() -> None:
    transport = SshTransport(4.0, 2222, ("StrictHostKeyChecking=no", "-F my.conf"))
    command = transport.command("-oProxyCommand=x", ["/a path/python", "-m", "x"])
    assert command[:5] == ["ssh", "-o", "StrictHostKeyChecking=no", "-F", "my.conf"]
    assert command[-5:] == ["-p", "2222", "--", "-oProxyCommand=x", "'/a path/python' -m x"]


def test_srun_starts_one_task_a_node_with_all_its_cores() -> None:
    command = srun_command(["agent"], ["n1", "n2"])
    assert {"--nodes=2", "--ntasks-per-node=1", "--nodelist=n1,n2", "--cpu-bind=none", "--overlap"} <= set(command)
    assert command[-1] == "agent"


@pytest.mark.parametrize(
    ("version", "flags"),
    [
        ("mpirun (Open MPI) 4.1.4", "-np 2 --host a:1,b:1 --map-by ppr:1:node --bind-to none -x LOWTIDE_TOKEN"),
        ("HYDRA build details:\n Version: 4.0.2", "-n 2 -ppn 1 -hosts a,b -bind-to none -genvlist LOWTIDE_TOKEN"),
        ("Intel(R) MPI Library for Linux", "-n 2 -ppn 1 -hosts a,b -bind-to none -genvlist LOWTIDE_TOKEN"),
    ],
)
def test_mpirun_is_spoken_to_in_its_dialect(version: str, flags: str) -> None:
    assert " ".join(remote._flags(version, ["a", "b"])) == flags


def test_an_unknown_mpirun_is_named() -> None:
    with pytest.raises(LaunchError, match=r'found the version text "LAM 7"\. Use --transport ssh or srun'):
        remote._flags("LAM 7\n", ["a"])


def test_no_mpirun_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match="needs mpirun or mpiexec on the PATH, found neither"):
        remote.mpirun_command(["agent"], ["a"])
