"""What ranks have started in sessions of their own dies with the job, also where none of ours is left to do it."""

from pathlib import Path

from tests.launch.hosts_job import HostsJob
from tests.launch.network import Network
from tests.launch.test_hosts_failures import GONE_SECONDS, agents, waiting


def kill_both(job: HostsJob, *hosts: str) -> None:
    """SIGKILL to guard and agent of each host, and none of them sees another one die."""
    processes = [process for host in hosts for process in agents(job, host)]
    assert len(processes) == 2 * len(hosts)
    for process in processes:
        process.suspend()
    for process in processes:
        process.kill()


def records(hosts: Network, host: str) -> list[str]:
    """The record folders of ranks on a host."""
    return [name for name in hosts[host].run("ls", "/dev/shm").split() if name.startswith("lowtide-")]


def test_agent_and_guard_that_are_killed_together_leave_nothing(hosts: Network, tmp_path: Path) -> None:
    job = waiting(hosts, tmp_path)
    orphans = [process.pid for process in hosts["n2"].processes() if process.name() == "sleep"]
    assert len(orphans) == 2 and len(records(hosts, "n2")) == 1
    kill_both(job, "n2")
    job.wait_until_gone(GONE_SECONDS)
    result = job.finish()
    assert result.status == 1 and "lost host n2: " in result.err
    assert "n2: killed what the job had left there: sleep (process " in result.err
    assert result.err.count("sleep (process ") == 2 and "could not look" not in result.err
    assert records(hosts, "n1") == records(hosts, "n2") == []


def test_both_hosts_are_swept_at_the_same_time(hosts: Network, tmp_path: Path) -> None:
    job = waiting(hosts, tmp_path)
    kill_both(job, "n1", "n2")
    job.wait_until_gone(GONE_SECONDS)
    result = job.finish()
    assert result.status == 1
    assert all(f"{host}: killed what the job had left there: " in result.err for host in ("n1", "n2"))
