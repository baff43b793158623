"""Free memory is what the system has left, or less where a control group says so."""

from pathlib import Path

import psutil
import pytest

from lowtide.launch.hosts.facts import free_memory_bytes


@pytest.fixture
def plenty(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system has 1000 bytes left."""
    memory = psutil.virtual_memory()._replace(available=1000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def group(path: str, limit: str, usage: int, cache: int) -> dict[str, str]:
    stat = f"anon 5\ninactive_file {cache}\nactive_file 7\n"
    return {f"{path}/memory.max": limit, f"{path}/memory.current": str(usage), f"{path}/memory.stat": stat}


@pytest.mark.usefixtures("plenty")
def test_without_control_groups_it_is_the_systems(tmp_path: Path) -> None:
    assert free_memory_bytes(tmp_path) == 1000


@pytest.mark.usefixtures("plenty")
def test_the_tightest_group_on_the_way_up_counts(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/job/step\n"}
    files |= group("sys/fs/cgroup/job", "900", 500, 100) | group("sys/fs/cgroup/job/step", "max", 300, 0)
    assert free_memory_bytes(write(tmp_path, files)) == 900 - 500 + 100


@pytest.mark.usefixtures("plenty")
def test_in_a_container_the_mounted_root_is_its_group(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/outer/container\n"} | group("sys/fs/cgroup", "300", 200, 0)
    assert free_memory_bytes(write(tmp_path, files)) == 100


@pytest.mark.usefixtures("plenty")
def test_the_first_version_of_control_groups_counts_too(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "5:cpu,cpuacct:/job\n4:memory:/job\n"}
    files |= {
        "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "700",
        "sys/fs/cgroup/memory/job/memory.usage_in_bytes": "650",
        "sys/fs/cgroup/memory/job/memory.stat": "cache 9\ntotal_inactive_file 20\n",
    }
    assert free_memory_bytes(write(tmp_path, files)) == 70


@pytest.mark.usefixtures("plenty")
def test_an_exceeded_limit_leaves_nothing(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/\n"} | group("sys/fs/cgroup", "100", 200, 0)
    assert free_memory_bytes(write(tmp_path, files)) == 0
