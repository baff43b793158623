"""Jobs that go on when a host is lost: on which hosts, how often, and when not. Training itself is in another file."""

from pathlib import Path

from tests.launch.hosts_job import HostsJob
from tests.launch.network import Network

# The first attempt waits for its end, the second leaves word of where it ran.
TWICE = """
import os, pathlib, platform, time
rank, attempt = os.environ["RANK"], os.environ["LOWTIDE_RESTART_COUNT"]
if attempt == "0":
    pathlib.Path(f"ready{rank}").touch()
    while not pathlib.Path(f"fail{rank}").exists():
        time.sleep(0.02)
    raise SystemExit(3)
pathlib.Path(f"again{rank}").write_text(f"{platform.node()} of {os.environ['WORLD_SIZE']}")
"""
QUICK = ("--lost-after", "2", "--no-preflight")


def test_a_reserve_takes_the_place_of_a_host_that_is_lost(hosts: Network, tmp_path: Path) -> None:
    job = HostsJob(hosts, tmp_path, TWICE, "--hosts", "n1,n2", "--max-hosts", "1", "--max-restarts", "1", *QUICK)
    job.wait_for_files("ready0")
    assert hosts["n2"].processes() == []
    hosts["n1"].kill()
    result = job.finish()
    assert result.status == 0, result
    assert "lost host n1" in result.err and "restart 1 of 1 on n2" in result.err
    assert (tmp_path / "again0").read_text().startswith("n2 of 1")


def test_a_rank_that_fails_once_does_not_cost_its_host(hosts: Network, tmp_path: Path) -> None:
    job = HostsJob(hosts, tmp_path, TWICE, "--hosts", "n1,n2", "--min-hosts", "1", "--max-restarts", "1", *QUICK)
    job.wait_for_files("ready0", "ready1")
    (tmp_path / "fail1").touch()
    result = job.finish()
    assert result.status == 0, result
    assert "rank 1 of 2 (host n2" in result.err and "restart 1 of 1 on n1, n2" in result.err
    assert [(tmp_path / f"again{rank}").read_text()[:7] for rank in range(2)] == ["n1 of 2", "n2 of 2"]
