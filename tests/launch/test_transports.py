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
from collections.abc import Iterator
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
from lowtide.launch.wire.messages import Start, Welcome, encode
from tests.kit.ranks import reserved_port
from tests.launch import fakes
from tests.launch.jobs import Job
from tests.launch.scripts import SAVES_ON_SIGNAL, WRITES_ENVIRONMENT

NOTE = "two words, \"quotes\" and 'more',\na second line; $HOME `ls` \\ é"
QUICK = "--no-preflight"


def on_two_hosts(
    folder: Path, source: str, transport: str, *options: str, slots: int = 1, arguments: tuple[str, ...] = ()
) -> Job:
    variables = fakes.install(folder / "bin", transport, fakes.PROGRAMS[transport])
    options = ("--hosts", f"a:{slots},b:{slots}", "--transport", transport, *options)
    return Job(folder, source, *options, arguments=arguments, variables=variables)


@pytest.mark.parametrize("transport", fakes.PROGRAMS)
def test_ranks_have_hosts_and_environment(tmp_path: Path, transport: str) -> None:
    options, arguments = ("--env", f"NOTE={NOTE}", "--env", "EMPTY=", "--log-dir", "logs"), ("", "--nproc")
    source = WRITES_ENVIRONMENT + "print('line', os.environ['RANK'])"
    job = on_two_hosts(tmp_path, source, transport, *options, slots=2, arguments=arguments)
    status, out, err = job.finish()
    assert status == 0 and "hosts of the job:" in err, err
    found, given = zip(*(json.loads((tmp_path / f"rank{rank}").read_text()) for rank in range(4)), strict=True)
    assert given == (list(arguments),) * 4
    names = ("FAKE_HOST", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "WORLD_SIZE")
    places = [("a", "0", "2", "0"), ("a", "1", "2", "0"), ("b", "0", "2", "1"), ("b", "1", "2", "1")]
    assert [tuple(f[name] for name in names) for f in found] == [(*place, "4") for place in places]
    assert {(f["NOTE"], f["EMPTY"]) for f in found} == {(NOTE, "")} and len({f["MASTER_PORT"] for f in found}) == 1
    assert not any("LOWTIDE_TOKEN" in f for f in found)
    address = {f["MASTER_ADDR"] for f in found}.pop()
    socket.getaddrinfo(address, None)  # the names a and b do not exist here: an address was found instead
    # Prefixes name the host.
    assert sorted(out.splitlines()) == ["[a rank 1] line 1", "[b rank 2] line 2", "[b rank 3] line 3", "line 0"]
    assert [(tmp_path / f"logs/rank{rank}.log").read_text() for rank in range(4)] == [f"line {i}\n" for i in range(4)]


def test_a_signal_reaches_ranks_on_other_hosts(tmp_path: Path) -> None:
    """Of which `nvidia-smi` takes longer than a lost host may be silent."""
    fakes.install(tmp_path / "bin", "nvidia-smi", "import time; time.sleep(5)")
    job = on_two_hosts(tmp_path, SAVES_ON_SIGNAL, "ssh", QUICK, "--lost-after", "3")
    job.wait_for_files("ready0", "ready1")
    job.launcher.terminate()
    status, _, err = job.finish()
    assert status == 0, err
    assert (tmp_path / "saved0").read_text() == (tmp_path / "saved1").read_text() == str(int(signal.SIGTERM))


def test_the_first_failure_is_told_and_not_those_that_follow(tmp_path: Path) -> None:
    source = """
import os, pathlib, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
rank = os.environ["RANK"]
pathlib.Path("ready" + rank).touch()
while not all(pathlib.Path(f"ready{other}").exists() for other in range(4)):
    time.sleep(0.01)
if rank == "2":
    print("the cause", flush=True)
    os._exit(7)
time.sleep(3)
os._exit(30)
"""
    status, _, err = on_two_hosts(tmp_path, source, "ssh", QUICK, slots=2).finish()
    assert status == 7
    assert "rank 2 of 4 (host b, process " in err and "┌─ host b, rank 2 ─" in err and "│ the cause" in err
    assert err.count("failed with exit status") == 1


ALLOCATION = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NODELIST": "a,b",
    "SLURM_TASKS_PER_NODE": "28(x2)",
    "SLURM_GPUS_PER_NODE": "4",
    "CUDA_VISIBLE_DEVICES": "",
}


def test_notes_are_said_once(tmp_path: Path) -> None:
    """Of nodes with four accelerators each, none of which is there."""
    variables = ALLOCATION | fakes.install(tmp_path / "bin", "srun", fakes.SRUN)
    status, _, err = Job(tmp_path, "", QUICK, variables=variables).finish()
    note = "lowtide launch: {}: the resource manager gives the job 4 accelerators, but a process can use 0\n"
    assert status == 0 and [err.count(note.format(host)) for host in "ab"] == [1, 1], err


# -- what cannot start ----------------------------------------------------------------------------------------------

NO_STEP = "import sys; sys.exit('srun: error: Unable to allocate resources: Invalid node name specified')"
NOT_ON_PATH = "the program '{}' is not on the PATH of this host. Install it, load its module"


GONE = "1 of 2 hosts cannot be used; nothing was started:\n  gone: ssh ended with exit status 255"


@pytest.mark.parametrize(
    ("transport", "program", "told"),
    [
        ("ssh", fakes.SSH, [GONE, "No route to host", "Try `ssh HOST true` by hand"]),
        ("srun", NO_STEP, ["2 of 2 hosts cannot be used", "Invalid node name specified"]),
        ("ssh", None, [NOT_ON_PATH.format("ssh")]),
    ],
    ids=["gone", "no_step", "no_ssh"],
)
def test_hosts_that_cannot_be_reached_are_told(
    tmp_path: Path, transport: str, program: str | None, told: list[str]
) -> None:
    variables = fakes.install(tmp_path / "bin", transport, program) if program else {"PATH": str(tmp_path)}
    options = ("--hosts", "a:1,gone:1", "--transport", transport)
    status, out, err = Job(tmp_path, "print('started')", *options, variables=variables).finish()
    assert (status, out) == (1, "") and all(text in err for text in told), err


# -- launchers that somebody has started on every host ---------------------------------------------------------------


@pytest.fixture
def port() -> Iterator[int]:
    """At which they meet. Nobody else gets it before the launcher listens."""
    with reserved_port() as port:
        yield port


def by_hand(folder: Path, source: str, index: int, port: int, *options: str, token: str = "") -> Job:
    """The launcher of one of two hosts."""
    where = ("--num-hosts", "2", "--host-index", str(index), "--meet", f"127.0.0.1:{port}", "--nproc", "1")
    (folder / str(index)).mkdir()
    return Job(folder / str(index), source, *where, *options, variables={TOKEN_VARIABLE: token})


def joined(folder: Path, source: str, port: int, *options: str, token: str = "") -> tuple[Job, Job]:
    """The first host's and the other's."""
    other = by_hand(folder, source, 1, port, *options, token=token)
    return by_hand(folder, source, 0, port, *options, token=token), other


NO_TOKEN = "import os, pathlib, sys, time; assert 'LOWTIDE_TOKEN' not in os.environ"
MEETS = f"""
{NO_TOKEN}
rank = os.environ["RANK"]
os.write(1, f"rank {{rank}} of {{os.environ['WORLD_SIZE']}}\\n".encode())  # whole, between the lines of others
pathlib.Path("../said" + rank).touch()
while not pathlib.Path("../go").exists():
    time.sleep(0.01)
sys.exit(3 * int(rank))
"""


def test_launchers_that_were_started_on_every_host_join(tmp_path: Path, port: int) -> None:
    other, first = (by_hand(tmp_path, MEETS, index, port, QUICK) for index in (1, 0))
    first.wait_for_files("../said0", "../said1")
    with socket.socket() as stranger:
        answer = stranger.connect_ex(("127.0.0.1", port))
    (tmp_path / "go").touch()
    results = first.finish(), other.finish()
    assert answer == errno.ECONNREFUSED  # all hosts are there: nobody else may come
    assert "rank 0 of 2" in results[0].out and "rank 1 of 2" in results[0].out
    for result in results:  # every launcher ends with the status of the job
        assert result.status == 3 and "LOWTIDE_TOKEN is not set: anyone who reaches 127.0.0.1:" in result.err, result


def test_all_launchers_of_a_job_that_cannot_begin_have_its_exit_status(tmp_path: Path, port: int) -> None:
    first, other = joined(tmp_path, "", port)  # hosts that have one address
    status, _, err = first.finish()
    assert (status, other.finish().status) == (1, 1) and "nothing was started" in err


def test_the_meeting_port_is_taken(tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        status, out, err = by_hand(tmp_path, "print('started')", 0, port).finish()
    assert (status, out) == (1, "")
    assert f"cannot listen for agents at port {port}: " in err
    assert "Address already in use. End the program that has the port, or choose another port for all hosts" in err
    assert "(MASTER_PORT, or --meet HOST:PORT)" in err


def test_the_plan_of_launchers_on_every_host_is_that_of_all(tmp_path: Path, port: int) -> None:
    """With a token, of which nothing is said then."""
    first, other = joined(tmp_path, "raise SystemExit(1)", port, QUICK, "--print-plan", token="secret")
    status, out, err = first.finish()
    assert status == 0 and "2 hosts, 2 ranks; hosts from --host-index 0" in out, err
    status, out, err = other.finish()
    assert (status, out) == (0, "") and "LOWTIDE_TOKEN" not in err, err


def test_an_agent_obeys_nobody_who_listens_at_the_meeting_port_before_the_launcher(tmp_path: Path) -> None:
    heard = b""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        other = by_hand(tmp_path, "pass", 1, port, QUICK)
        link, _ = listener.accept()
        with link:
            command = (sys.executable, "-c", f"open({str(tmp_path / 'owned')!r}, 'w')")
            start = encode(Start(HostPlan("h", 1, (RankPlan(1, 0, None, (), {}),)), "id", command, "/", {}))
            link.sendall(LauncherHandshake("guess").greeting + encode(Welcome()) + b"\n" + start + b"\n")
            link.settimeout(10)
            with contextlib.suppress(ConnectionError):  # it closes what it has not read
                while said := link.recv(1 << 16):
                    heard += said
    first = by_hand(tmp_path, "pass", 0, port, QUICK)
    assert first.finish().status == 0
    status, _, err = other.finish()
    assert status == 0 and f"ignoring the program at 127.0.0.1:{port} (it does not have this job's token)" in err
    assert len(heard) == ANSWER_BYTES and not (tmp_path / "owned").exists()


@pytest.mark.parametrize(
    ("token", "told"),
    [
        ("", ["LOWTIDE_TOKEN is not set. The command that starts the agents (srun, mpirun) must"]),
        ("token", ["no launcher at 127.0.0.1:1 after 0.5 s", "Check that it runs on the first host"]),
    ],
)
def test_an_agent_without_a_token_or_a_launcher_gives_up(token: str, told: list[str]) -> None:
    environ = {name: value for name, value in os.environ.items() if name != TOKEN_VARIABLE}
    environ |= {TOKEN_VARIABLE: token} if token else {}
    agent = agent_command("--connect", "127.0.0.1:1", "--wait", "0.5")
    done = subprocess.run(agent, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and all(text in done.stderr for text in told), done.stderr


# -- commands -------------------------------------------------------------------------------------------------------


def test_clients_of_ssh_that_hang_are_ended_together(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fakes.install(tmp_path, "ssh", "import time; time.sleep(60)")
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


def test_an_unknown_mpirun_or_none_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r'found the version text "LAM 7"\. Use --transport ssh or srun'):
        remote._flags("LAM 7\n", ["a"])
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match="needs mpirun or mpiexec on the PATH, found neither"):
        remote.mpirun_command(["agent"], ["a"])
