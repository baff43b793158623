"""From hosts and what they report to every rank's device, cores and environment; and the plan as it is printed."""

import json
import re

import pytest

from lowtide.launch.hosts.host import Allocation, Device, Host, HostReport, LaunchError, Rendezvous
from lowtide.launch.hosts.plan import MAX_SHOWN_RANKS, HostPlan, JobPlan, make_plan, printed_plan
from lowtide.launch.wire.messages import from_plain, to_plain

CPU = HostReport("none", (), ((0,), (1,), (2,), (3,)), None, {0: (0, 1, 2, 3)})
GPUS = HostReport(
    "cuda",
    tuple(Device((str(index), f"GPU-{index}"), "H100", index // 2) for index in range(4)),
    tuple((core, core + 8) for core in range(8)),
    None,
    {0: (0, 1, 2, 3, 8, 9, 10, 11), 1: (4, 5, 6, 7, 12, 13, 14, 15)},
)


def masked(mask: str) -> HostReport:
    return HostReport(GPUS.kind, GPUS.devices, GPUS.cores, GPUS.core_limit, GPUS.nodes, {"CUDA_VISIBLE_DEVICES": mask})


def plan(
    *hosts: Host,
    report: HostReport = CPU,
    nproc: int | None = None,
    environment: dict[str, str] | None = None,
    **more: object,
) -> JobPlan:
    allocation = Allocation("a test", "ssh" if len(hosts) > 1 else "local", hosts, nproc)
    return make_plan(allocation, [report] * len(hosts), ["python", "x.py"], "/home", environment or {}, **more)  # type: ignore[arg-type]


def devices(made: JobPlan) -> list[list[str | None]]:
    return [[rank.device for rank in host.ranks] for host in made.hosts]


def variable(made: JobPlan, name: str) -> list[str | None]:
    return [rank.environment.get(name) for host in made.hosts for rank in host.ranks]


def cores(made: JobPlan) -> list[tuple[int, ...]]:
    return [rank.cores for host in made.hosts for rank in host.ranks]


def test_ranks_are_numbered_over_hosts_as_torchrun_does() -> None:
    made = plan(Host("a", (0, 1)), Host("root@b", (0,)))
    assert made.world_size == 3
    assert [[rank.rank for rank in host.ranks] for host in made.hosts] == [[0, 1], [2]]
    assert variable(made, "RANK") == ["0", "1", "2"]
    assert variable(made, "LOCAL_RANK") == ["0", "1", "0"]
    assert variable(made, "WORLD_SIZE") == ["3"] * 3
    assert variable(made, "LOCAL_WORLD_SIZE") == ["2", "2", "1"]
    assert variable(made, "GROUP_RANK") == ["0", "0", "1"]
    assert variable(made, "GROUP_WORLD_SIZE") == ["2"] * 3
    assert variable(made, "MASTER_ADDR") == ["a"] * 3
    assert variable(made, "MASTER_PORT") == [None] * 3


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
    ("host", "report", "nproc", "expected"),
    [
        (Host("h"), CPU, None, [None]),
        (Host("h"), CPU, 3, [None] * 3),
        (Host("h", (0, 1)), CPU, None, [None, None]),
        (Host("h"), GPUS, None, ["0", "1", "2", "3"]),
        (Host("h"), GPUS, 2, ["0", "1"]),
        (Host("h"), masked("3,1"), None, ["3", "1"]),
        (Host("h"), masked("GPU-2,GPU-0"), 1, ["GPU-2"]),
        (Host("h", (1,)), masked("3,1"), None, ["1"]),
        (Host("h", (2, 0)), GPUS, None, ["2", "0"]),
        (Host("h", (0, 1, 2, 3)), GPUS, 2, ["0", "1"]),
        (Host("h", None, (0, 2)), GPUS, None, ["1", "3"]),
        (Host("h"), masked(""), 6, [None] * 6),
    ],
)
def test_slots_pick_within_the_hosts_own_mask(
    host: Host, report: HostReport, nproc: int | None, expected: list[str | None]
) -> None:
    assert devices(plan(host, report=report, nproc=nproc)) == [expected]


@pytest.mark.parametrize(
    ("host", "report", "mask"),
    [
        (Host("h"), GPUS, None),
        (Host("h"), masked("3,1"), None),
        (Host("h", (2, 0)), GPUS, "2,0"),
        (Host("h", (1, 0)), masked("GPU-3,GPU-1"), "GPU-1,GPU-3"),
        (Host("h", None, (0,)), GPUS, "1,2,3"),
        (Host("h", (0, 1)), CPU, None),
    ],
)
def test_all_ranks_see_the_chosen_devices_and_local_rank_picks(
    host: Host, report: HostReport, mask: str | None
) -> None:
    assert set(variable(plan(host, report=report), "CUDA_VISIBLE_DEVICES")) == {mask}


def test_a_mask_that_the_user_gives_goes_over_the_hosts() -> None:
    given = {"CUDA_VISIBLE_DEVICES": "1,2"}
    assert devices(plan(Host("h"), report=masked("3"), environment=given)) == [["1", "2"]]


def test_an_empty_mask_frees_ranks_from_the_number_of_devices() -> None:
    given = {"CUDA_VISIBLE_DEVICES": ""}
    assert devices(plan(Host("h"), report=GPUS, nproc=6, environment=given)) == [[None] * 6]


def test_devices_of_amd_are_chosen_by_its_own_mask() -> None:
    report = HostReport("hip", (Device(("0",), "AMD"), Device(("1",), "AMD")), ((0,), (1,)))
    made = plan(Host("h", (1,)), report=report)
    assert variable(made, "HIP_VISIBLE_DEVICES") == ["1"] and variable(made, "CUDA_VISIBLE_DEVICES") == [None]


@pytest.mark.parametrize(
    ("report", "nproc", "bind", "threads"),
    [
        (CPU, 1, "auto", ["4"]),
        (CPU, 3, "auto", ["1"] * 3),
        (CPU, 8, "auto", ["1"] * 8),
        (HostReport("none", (), CPU.cores, 2), 2, "auto", ["1"] * 2),
        (GPUS, 4, "auto", ["4"] * 4),
        (CPU, 3, "cores", ["2", "1", "1"]),
        (HostReport("none", (), CPU.cores, 2), 2, "cores", ["1"] * 2),
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
        (GPUS, {"CUDA_VISIBLE_DEVICES": ""}, None),
        (GPUS, {"PYTORCH_ALLOC_CONF": "backend:native"}, None),
        (GPUS, {"PYTORCH_CUDA_ALLOC_CONF": ""}, None),
        (HostReport("hip", (Device(("0",), "AMD"),), ((0,),)), {}, None),
        (CPU, {}, None),
    ],
)
def test_segments_grow_on_cuda_devices_unless_the_user_says_otherwise(
    report: HostReport, given: dict[str, str], expected: str | None
) -> None:
    made = plan(Host("h"), report=report, environment=given)
    assert set(variable(made, "PYTORCH_ALLOC_CONF")) == {expected}
    assert any("expandable_segments" in note for note in made.notes) == (expected is not None)


LOW, HIGH = GPUS.nodes[0], GPUS.nodes[1]


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
        (HostReport("none", (), CPU.cores), "cores", 2, [(0, 1), (2, 3)]),
        (HostReport("none", (), GPUS.cores, None, GPUS.nodes), "numa", 2, [LOW, HIGH]),
    ],
)
def test_ranks_are_bound_as_asked(
    report: HostReport, bind: str, nproc: int | None, expected: list[tuple[int, ...]]
) -> None:
    assert cores(plan(Host("h"), report=report, nproc=nproc, bind=bind)) == expected


@pytest.mark.parametrize(
    ("host", "report", "more", "error"),
    [
        (
            Host("h"),
            GPUS,
            {"nproc": 5},
            "h: --nproc 5 is more than the host's 4 usable accelerators",
        ),
        (
            Host("h"),
            masked("1"),
            {"nproc": 2},
            "1 usable accelerators. Lower --nproc, raise the slots, or use no accelerators with",
        ),
        (
            Host("h", (0, 1)),
            CPU,
            {"nproc": 3},
            "--nproc 3 is more than the host's 2 slots. Lower --nproc",
        ),
        (
            Host("h", (0, 4)),
            GPUS,
            {},
            "h: slot 4 needs 5 accelerators, found 4 usable. Lower the slots",
        ),
        (Host("h", (0, 1)), masked("2"), {}, "h: slot 1 needs 2 accelerators, found 1"),
        (Host("h", None, (0,)), CPU, {}, "h: --exclude leaves none of 1 slots: exclude the whole host instead"),
        (
            Host("h"),
            HostReport("none", (), CPU.cores),
            {"bind": "numa"},
            "h: --bind numa needs NUMA nodes, but the host",
        ),
    ],
)
def test_what_a_host_does_not_have_is_named(
    host: Host, report: HostReport, more: dict[str, object], error: str
) -> None:
    with pytest.raises(LaunchError) as caught:
        plan(host, report=report, **more)  # type: ignore[arg-type]
    assert error in str(caught.value)


def test_every_host_must_report() -> None:
    with pytest.raises(LaunchError, match="a test has 2 hosts, 1 have reported"):
        make_plan(Allocation("a test", "ssh", (Host("a"), Host("b"))), [CPU], [], "/", {})


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


def test_a_host_of_a_plan_travels_as_json() -> None:
    host = plan(Host("h", (1,)), report=GPUS).hosts[0]
    assert from_plain(HostPlan, json.loads(json.dumps(to_plain(host)))) == host


def test_a_report_travels_as_json() -> None:
    assert from_plain(HostReport, json.loads(json.dumps(to_plain(GPUS)))) == GPUS


def test_the_plan_is_printed() -> None:
    allocation = Allocation("hostfile h.txt", "ssh", (Host("n1", (1, 3)), Host("n2")), notes=("--hostfile wins",))
    command = ["python", "a b.py", "--hf-token=abc", "--api-key", "abc", "--lr", "1"]
    environment = {"HF_TOKEN": "abc", "TEXT": "two\nlines'", "A": "x y"}
    assert printed_plan(make_plan(allocation, [GPUS, CPU], command, "/home", environment)) == (
        """2 hosts, 3 ranks; hosts from hostfile h.txt; transport ssh
note: --hostfile wins
note: n2: no usable accelerator, while other hosts have some
note: PYTORCH_ALLOC_CONF=expandable_segments:True is set for ranks with a CUDA device, since it was unset

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


def test_one_rank_is_not_called_ranks() -> None:
    assert printed_plan(plan(Host("h"))).startswith("1 host, 1 rank; hosts from a test; transport local\n")


def test_a_large_plan_has_a_row_a_host() -> None:
    count = MAX_SHOWN_RANKS // 4 + 1
    text = printed_plan(plan(*(Host(f"n{index:02}") for index in range(count)), report=GPUS))
    assert f"n{count - 1:02}   {4 * count - 4}-{4 * count - 1}  0-3    0,1,2,3  0-15" in text
    assert len([line for line in text.splitlines() if re.match(r"n\d", line)]) == count
