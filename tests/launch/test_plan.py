"""From hosts and what they report to every rank's device, cores and environment; and the plan as it is printed."""

import re
from dataclasses import replace
from typing import Any

import pytest

from lowtide.launch.hosts.host import Allocation, Device, Host, HostReport, LaunchError, Rendezvous
from lowtide.launch.hosts.plan import MAX_SHOWN_RANKS, JobPlan, make_plan, printed_plan
from tests.kit.training import refusal

CPU = HostReport("none", (), ((0,), (1,), (2,), (3,)), None, {0: (0, 1, 2, 3)})
GPUS = HostReport(
    "cuda",
    tuple(Device((str(index), f"GPU-{index}"), "H100", index // 2) for index in range(4)),
    tuple((core, core + 8) for core in range(8)),
    None,
    {0: (0, 1, 2, 3, 8, 9, 10, 11), 1: (4, 5, 6, 7, 12, 13, 14, 15)},
)
LOW, HIGH = GPUS.nodes[0], GPUS.nodes[1]
CPU_WITHOUT_NODES = replace(CPU, nodes={})
CPU_OF_TWO = replace(CPU_WITHOUT_NODES, core_limit=2)
HIP = HostReport("hip", (Device(("0",), "AMD"), Device(("1",), "AMD")), ((0,), (1,)))
MASK = "CUDA_VISIBLE_DEVICES"


def masked(mask: str) -> HostReport:
    return replace(GPUS, environment={MASK: mask})


def plan(
    *hosts: Host,
    report: HostReport = CPU,
    nproc: int | None = None,
    environment: dict[str, str] | None = None,
    **more: Any,
) -> JobPlan:
    allocation = Allocation("a test", "ssh" if len(hosts) > 1 else "local", hosts, nproc)
    return make_plan(allocation, [report] * len(hosts), ["python", "x.py"], "/home", environment or {}, **more)


def devices(made: JobPlan) -> list[str | None]:
    return [rank.device for host in made.hosts for rank in host.ranks]


def variable(made: JobPlan, name: str) -> list[str | None]:
    return [rank.environment.get(name) for host in made.hosts for rank in host.ranks]


def test_ranks_are_numbered_over_hosts_as_torchrun_does() -> None:
    made = plan(Host("a", (0, 1)), Host("root@b", (0,)))
    assert made.world_size == 3
    assert [[rank.rank for rank in host.ranks] for host in made.hosts] == [[0, 1], [2]]
    expected = {
        "RANK": ["0", "1", "2"],
        "LOCAL_RANK": ["0", "1", "0"],
        "WORLD_SIZE": ["3"] * 3,
        "LOCAL_WORLD_SIZE": ["2", "2", "1"],
        "GROUP_RANK": ["0", "0", "1"],
        "GROUP_WORLD_SIZE": ["2"] * 3,
        "MASTER_ADDR": ["a"] * 3,
        "MASTER_PORT": [None] * 3,
    }
    assert {name: variable(made, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("allocation", "given", "address"),
    [
        (Allocation("x", "local", (Host("a"),)), None, "127.0.0.1"),
        (Allocation("x", "ssh", (Host("root@a"), Host("b"))), None, "a"),
        (Allocation("x", "ssh", (Host("a"), Host("b"))), "10.0.0.1", "10.0.0.1"),
        (Allocation("x", "join", (Host("a"), Host("b")), rendezvous=Rendezvous(0, "a.svc", 1, "x")), None, "a.svc"),
    ],
)
def test_the_store_is_where_the_others_reach_the_first_host(
    allocation: Allocation, given: str | None, address: str
) -> None:
    made = make_plan(allocation, [CPU] * len(allocation.hosts), [], "/", {}, master_address=given)
    assert made.master_address == address and set(variable(made, "MASTER_ADDR")) == {address}


@pytest.mark.parametrize(
    ("host", "report", "more", "chosen", "mask"),
    [
        (Host("h"), CPU, {}, [None], None),
        (Host("h"), CPU, {"nproc": 3}, [None] * 3, None),
        (Host("h", (0, 1)), CPU, {}, [None, None], None),
        (Host("h"), GPUS, {}, ["0", "1", "2", "3"], None),
        (Host("h"), GPUS, {"nproc": 2}, ["0", "1"], None),
        (Host("h"), masked("3,1"), {}, ["3", "1"], None),
        (Host("h"), masked("GPU-2,GPU-0"), {"nproc": 1}, ["GPU-2"], None),
        (Host("h", (1,)), masked("3,1"), {}, ["1"], "1"),
        (Host("h", (2, 0)), GPUS, {}, ["2", "0"], "2,0"),
        (Host("h", (1, 0)), masked("GPU-3,GPU-1"), {}, ["GPU-1", "GPU-3"], "GPU-1,GPU-3"),
        (Host("h", (0, 1, 2, 3)), GPUS, {"nproc": 2}, ["0", "1"], "0,1"),
        (Host("h", None, (0, 2)), GPUS, {}, ["1", "3"], "1,3"),
        (Host("h"), masked(""), {"nproc": 6}, [None] * 6, None),
        # A mask that the user gives goes over the host's.
        (Host("h"), masked("3"), {"environment": {MASK: "1,2"}}, ["1", "2"], None),
        (Host("h"), GPUS, {"environment": {MASK: ""}, "nproc": 6}, [None] * 6, None),
    ],
)
def test_slots_pick_within_the_hosts_own_mask_and_all_ranks_see_the_chosen_devices(
    host: Host, report: HostReport, more: dict[str, Any], chosen: list[str | None], mask: str | None
) -> None:
    made = plan(host, report=report, **more)
    assert devices(made) == chosen and set(variable(made, MASK)) == {mask}


def test_devices_of_amd_are_chosen_by_its_own_mask() -> None:
    made = plan(Host("h", (1,)), report=HIP)
    assert variable(made, "HIP_VISIBLE_DEVICES") == ["1"] and variable(made, MASK) == [None]


@pytest.mark.parametrize(
    ("report", "nproc", "bind", "threads"),
    [
        (CPU, 1, "auto", ["4"]),
        (CPU, 3, "auto", ["1"] * 3),
        (CPU, 8, "auto", ["1"] * 8),
        (CPU_OF_TWO, 2, "auto", ["1"] * 2),
        (GPUS, 4, "auto", ["4"] * 4),
        (CPU, 3, "cores", ["2", "1", "1"]),
        (CPU_OF_TWO, 2, "cores", ["1"] * 2),
    ],
)
def test_threads_are_the_cores_that_a_rank_gets(report: HostReport, nproc: int, bind: str, threads: list[str]) -> None:
    assert variable(plan(Host("h"), report=report, nproc=nproc, bind=bind), "OMP_NUM_THREADS") == threads


def test_what_is_set_is_left_as_it_is() -> None:
    there = HostReport("none", (), CPU.cores, environment={"OMP_NUM_THREADS": "7"})
    made = plan(Host("h"), report=there, environment={"PYTHONUNBUFFERED": ""})
    assert variable(made, "OMP_NUM_THREADS") == [None] and variable(made, "PYTHONUNBUFFERED") == [None]
    assert variable(made, "PYTHONFAULTHANDLER") == ["1"]


@pytest.mark.parametrize(
    ("report", "given", "expected"),
    [
        (GPUS, {}, "expandable_segments:True"),
        (GPUS, {MASK: ""}, None),
        (GPUS, {"PYTORCH_ALLOC_CONF": "backend:native"}, None),
        (GPUS, {"PYTORCH_CUDA_ALLOC_CONF": ""}, None),
        (HIP, {}, None),
        (CPU, {}, None),
    ],
)
def test_segments_grow_on_cuda_devices_unless_the_user_says_otherwise(
    report: HostReport, given: dict[str, str], expected: str | None
) -> None:
    made = plan(Host("h"), report=report, environment=given)
    assert set(variable(made, "PYTORCH_ALLOC_CONF")) == {expected}
    assert any("expandable_segments" in note for note in made.notes) == (expected is not None)


@pytest.mark.parametrize(
    ("report", "bind", "nproc", "expected"),
    [
        (GPUS, "auto", None, [LOW, LOW, HIGH, HIGH]),
        (GPUS, "none", None, [()] * 4),
        (GPUS, "numa", 3, [LOW, LOW, HIGH]),
        (GPUS, "cores", None, [(0, 1, 8, 9), (2, 3, 10, 11), (4, 5, 12, 13), (6, 7, 14, 15)]),
        (masked("3"), "auto", None, [HIGH]),
        (CPU, "auto", 2, [(), ()]),
        (CPU, "numa", 2, [(0, 1, 2, 3)] * 2),
        (CPU, "cores", 2, [(0, 1), (2, 3)]),
        (CPU, "cores", 5, [()] * 5),
        (CPU_WITHOUT_NODES, "cores", 2, [(0, 1), (2, 3)]),
        (replace(GPUS, kind="none", devices=()), "numa", 2, [LOW, HIGH]),
    ],
)
def test_ranks_are_bound_as_asked(
    report: HostReport, bind: str, nproc: int | None, expected: list[tuple[int, ...]]
) -> None:
    made = plan(Host("h"), report=report, nproc=nproc, bind=bind)
    assert [rank.cores for rank in made.hosts[0].ranks] == expected


@pytest.mark.parametrize(
    ("host", "report", "more", "error"),
    [
        (Host("h"), GPUS, {"nproc": 5}, "h: --nproc 5 is more than the host's 4 usable accelerators"),
        (Host("h"), masked("1"), {"nproc": 2}, "1 usable accelerators. Lower --nproc, raise the slots, or use no"),
        (Host("h", (0, 1)), CPU, {"nproc": 3}, "--nproc 3 is more than the host's 2 slots. Lower --nproc"),
        (Host("h", (0, 4)), GPUS, {}, "h: slot 4 needs 5 accelerators, found 4 usable. Lower the slots"),
        (Host("h", (0, 1)), masked("2"), {}, "h: slot 1 needs 2 accelerators, found 1"),
        (Host("h", None, (0,)), CPU, {}, "h: --exclude leaves none of 1 slots: exclude the whole host instead"),
        (Host("h"), CPU_WITHOUT_NODES, {"bind": "numa"}, "h: --bind numa needs NUMA nodes, but the host"),
    ],
)
def test_what_a_host_does_not_have_is_named(host: Host, report: HostReport, more: dict[str, Any], error: str) -> None:
    assert error in refusal(plan, host, report=report, kind=LaunchError, **more)


def test_every_host_must_report() -> None:
    allocation = Allocation("a test", "ssh", (Host("a"), Host("b")))
    text = refusal(make_plan, allocation, [CPU], [], "/", {}, kind=LaunchError)
    assert "a test has 2 hosts, 1 have reported" in text


SEGMENTS = "PYTORCH_ALLOC_CONF=expandable_segments:True is set for ranks with a CUDA device, since it was unset"


def test_notes_name_hosts_that_are_not_as_expected() -> None:
    hosts = (Host("a", expected_devices=8), Host("b", expected_devices=4), Host("c"))
    allocation = Allocation("x", "srun", hosts, notes=("before",))
    assert make_plan(allocation, [GPUS, GPUS, CPU], [], "/", {}).notes == (
        "before",
        "a: the resource manager gives the job 8 accelerators, but a process can use 4",
        "c: no usable accelerator, while other hosts have some",
        SEGMENTS,
    )


def test_the_plan_is_printed() -> None:
    allocation = Allocation("hostfile h.txt", "ssh", (Host("n1", (1, 3)), Host("n2")), notes=("--hostfile wins",))
    command = ["python", "a b.py", "--hf-token=abc", "--api-key", "abc", "--lr", "1"]
    environment = {"HF_TOKEN": "abc", "TEXT": "two\nlines'", "A": "x y"}
    assert printed_plan(make_plan(allocation, [GPUS, CPU], command, "/home", environment)) == (
        f"""2 hosts, 3 ranks; hosts from hostfile h.txt; transport ssh
note: --hostfile wins
note: n2: no usable accelerator, while other hosts have some
note: {SEGMENTS}

host  ranks  local  device  cores
n1    0      0      1       0-3,8-11
n1    1      1      3       4-7,12-15
n2    2      0      -       any

folder:   /home
command:  python 'a b.py' '--hf-token=(hidden)' --api-key '(hidden)' --lr 1
each rank has RANK, LOCAL_RANK, WORLD_SIZE=3, LOCAL_WORLD_SIZE, GROUP_RANK, GROUP_WORLD_SIZE=2, MASTER_ADDR=n1, """
        """MASTER_PORT (bound at the start)
environment of every rank:
  A='x y'
  HF_TOKEN='(hidden)'
  TEXT=$'two\\nlines\\''
environment of ranks 0-1:
  CUDA_VISIBLE_DEVICES=1,3
  OMP_NUM_THREADS=8
  PYTHONFAULTHANDLER=1
  PYTHONUNBUFFERED=1
  PYTORCH_ALLOC_CONF=expandable_segments:True
environment of rank 2:
  OMP_NUM_THREADS=4
  PYTHONFAULTHANDLER=1
  PYTHONUNBUFFERED=1"""
    )


def test_one_rank_is_not_called_ranks_and_a_large_plan_has_a_row_a_host() -> None:
    assert printed_plan(plan(Host("h"))).startswith("1 host, 1 rank; hosts from a test; transport local\n")
    count = MAX_SHOWN_RANKS // 4 + 1
    text = printed_plan(plan(*(Host(f"n{index:02}") for index in range(count)), report=GPUS))
    assert f"n{count - 1:02}   {4 * count - 4}-{4 * count - 1}  0-3    0,1,2,3  0-15" in text
    assert len([line for line in text.splitlines() if re.match(r"n\d", line)]) == count
