"""What keeps a job from starting: each is noticed in time, told with the host's name, and nothing is started."""

import sys
from collections.abc import Sequence
from pathlib import Path

import psutil

from tests.launch.hosts_job import HostsJob, Result
from tests.launch.network import Network

TWO_BY_TWO = ("--hosts", "n1:2,n2:2")
STARTED = "import os, pathlib; pathlib.Path('started' + os.environ['RANK']).touch()"


def refused(hosts: Network, folder: Path, *options: str, besides: Sequence[psutil.Process] = ()) -> Result:
    """What the user is told; no rank has run, on no host is a process left."""
    job = HostsJob(hosts, folder, STARTED, *options)
    result = job.finish()
    job.wait_until_gone(besides=besides)
    assert result.status != 0, result
    assert list(folder.glob("started*")) == []
    return result


def test_a_host_that_takes_another_key_is_named_with_what_ssh_says(hosts: Network, tmp_path: Path) -> None:
    with hosts["n2"].home_file(".ssh/authorized_keys", ""):
        result = refused(hosts, tmp_path, *TWO_BY_TWO)
    assert "n2" in result.err and "Permission denied (publickey)" in result.err
    assert result.seconds < 25


def test_a_host_with_another_key_than_is_known_is_not_trusted(hosts: Network, tmp_path: Path) -> None:
    known = (hosts["login"].home / ".ssh/known_hosts").read_text()
    first, second = (next(line.split()[2] for line in known.splitlines() if line.startswith(n)) for n in ("n1", "n2"))
    with hosts["login"].home_file(".ssh/known_hosts", known.replace(second, first)):
        result = refused(hosts, tmp_path, *TWO_BY_TWO)
    assert "n2" in result.err and "Host key verification failed" in result.err


def test_an_unknown_host_key_is_refused_and_nobody_is_asked(hosts: Network, tmp_path: Path) -> None:
    with hosts["login"].home_file(".ssh/known_hosts", ""):
        result = refused(hosts, tmp_path, *TWO_BY_TWO)
    assert "Host key verification failed" in result.err
    assert result.seconds < 25


def test_an_unknown_name_is_told_at_once(hosts: Network, tmp_path: Path) -> None:
    result = refused(hosts, tmp_path, "--hosts", "n1:2,n7:2")
    assert "n7" in result.err and "Could not resolve hostname n7" in result.err


def test_a_host_that_cannot_be_reached_is_given_up_in_time(hosts: Network, tmp_path: Path) -> None:
    hosts["n2"].cut()
    result = refused(hosts, tmp_path, *TWO_BY_TWO, "--ssh-option", "ConnectTimeout=2")
    assert "n2" in result.err and "Connection timed out" in result.err
    assert result.seconds < 25


def test_a_host_without_this_python_is_named(hosts: Network, tmp_path: Path) -> None:
    with hosts["n2"].small_disk(Path(sys.prefix)):
        result = refused(hosts, tmp_path, *TWO_BY_TWO)
    assert "n2" in result.err and "No such file or directory" in result.err and sys.executable in result.err


def test_a_port_that_is_taken_on_another_host_does_not_matter(hosts: Network, tmp_path: Path) -> None:
    listen = "import socket, sys; s = socket.create_server(('10.77.0.3', 29577)); print(flush=True); sys.stdin.read()"
    with hosts["n2"].popen([sys.executable, "-c", listen], stdin=-1, stdout=-1) as owner:
        assert owner.stdin is not None and owner.stdout is not None
        owner.stdout.readline()
        result = HostsJob(hosts, tmp_path, STARTED, *TWO_BY_TWO, "--master-port", "29577").finish()
        owner.stdin.close()
    assert result.status == 0, result
