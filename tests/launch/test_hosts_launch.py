"""One command on one host, ranks on two others: where they run, what they are given, and what they print."""

import json
from pathlib import Path

from tests.launch.hosts_job import HostsJob
from tests.launch.network import Network

TWO_BY_TWO = ("--hosts", "n1:2,n2:2")

# Each rank leaves what it was given in a file, as JSON.
TELL = """
import json, os, platform, socket
told = {name: value for name, value in os.environ.items()}
told["host"] = platform.node()
told["folder"] = os.getcwd()
told["stdin"] = os.read(0, 10).decode()
with open(f"told{os.environ['RANK']}.json", "w") as file:
    json.dump(told, file)
print("rank", os.environ["RANK"], "was here")
"""


def told(folder: Path, rank: int) -> dict[str, str]:
    values: dict[str, str] = json.loads((folder / f"told{rank}.json").read_text(encoding="utf-8"))
    return values


def test_ranks_run_where_they_are_told_to_and_know_each_other(hosts: Network, tmp_path: Path) -> None:
    result = HostsJob(hosts, tmp_path, TELL, *TWO_BY_TWO).finish()
    assert result.status == 0, result
    found = [told(tmp_path, rank) for rank in range(4)]
    assert [rank["host"] for rank in found] == ["n1", "n1", "n2", "n2"]
    assert [rank["LOCAL_RANK"] for rank in found] == ["0", "1", "0", "1"]
    assert [rank["GROUP_RANK"] for rank in found] == ["0", "0", "1", "1"]
    assert {rank["WORLD_SIZE"] for rank in found} == {"4"} and {rank["LOCAL_WORLD_SIZE"] for rank in found} == {"2"}
    assert {rank["folder"] for rank in found} == {str(tmp_path)} and {rank["stdin"] for rank in found} == {""}
    assert len({(rank["MASTER_ADDR"], rank["MASTER_PORT"]) for rank in found}) == 1
    assert {rank["GLOO_SOCKET_IFNAME"] for rank in found} == {"eth0"}  # not that of 127.0.1.1, and not docker0


def test_the_launcher_may_stand_on_one_of_the_hosts(hosts: Network, tmp_path: Path) -> None:
    (tmp_path / "hosts.txt").write_text("# two of them\nn1 slots=2\nn2 slots=1\n")
    result = HostsJob(hosts, tmp_path, TELL, "--hostfile", str(tmp_path / "hosts.txt"), at="n1").finish()
    assert result.status == 0, result
    assert [told(tmp_path, rank)["host"] for rank in range(3)] == ["n1", "n1", "n2"]


def test_each_host_keeps_the_files_of_its_own_ranks(hosts: Network, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    with hosts["n1"].small_disk(logs), hosts["n2"].small_disk(logs):
        result = HostsJob(hosts, tmp_path, TELL, *TWO_BY_TWO, "--log-dir", str(logs)).finish()
        assert result.status == 0, result
        assert hosts["n1"].run("ls", str(logs)).split() == ["rank0.log", "rank1.log"]
        assert hosts["n2"].run("ls", str(logs)).split() == ["rank2.log", "rank3.log"]
        assert hosts["n2"].run("cat", str(logs / "rank3.log")) == "rank 3 was here\n"
    assert list(logs.iterdir()) == []
