"""`lowtide ssh` with real OpenSSH servers: what arrives, what comes back, and what stays behind."""

from pathlib import Path

import psutil

from tests.launch.hosts_job import HostsJob
from tests.launch.jobs import LAUNCH
from tests.launch.network import Network

SSH = [*LAUNCH[:-1], "ssh"]


def test_words_arrive_unchanged_on_every_host(hosts: Network, tmp_path: Path) -> None:
    words = ["two  words", "it's", '"', "$HOME `id` \\", "", "*", "line\nline"]
    command = [*SSH, "--hosts", "n1,n2", "--", "python3", "-c", "import sys; print(sys.argv[1:])", *words]
    result = HostsJob.of_command(hosts, tmp_path, command).finish()
    assert result.status == 0 and str(words) in result.out, result


def test_a_command_that_takes_too_long_is_ended_on_the_hosts(hosts: Network, tmp_path: Path) -> None:
    command = [*SSH, "--hosts", "n1,n2", "--timeout", "2", "--", "sleep", "371"]
    result = HostsJob.of_command(hosts, tmp_path, command).finish()
    assert result.status == 124, result
    sleeping = [process for name in ("n1", "n2") for process in hosts[name].processes() if _is_sleep(process)]
    assert sleeping == []


def _is_sleep(process: psutil.Process) -> bool:
    try:
        return process.cmdline() == ["sleep", "371"]
    except psutil.Error:
        return False
