"""What the launcher makes of the hosts' answers: nothing where they are alike and fit, else one text a fault."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lowtide.launch.hosts.facts import CheckResult
from lowtide.launch.hosts.host import Device, HostReport
from lowtide.launch.hosts.plan import HostPlan, JobPlan, RankPlan
from lowtide.launch.hosts.preflight import HostChecks, clock_offset, faults, folders_of_config, request_for, table

GIB = 1 << 30
GOOD: dict[str, Any] = {
    "clock_start": 100.0,
    "python": "3.11.7",
    "torch": "2.13.0",
    "lowtide": "0.1.0",
    "lowtide_source": "aaaa1111",
    "free_memory_bytes": 64 * GIB,
    "shared_memory_bytes": 32 * GIB,
    "free_shared_memory_bytes": 32 * GIB,
    "locked_memory_bytes": "unlimited",
    "rdma_devices": 0,
    "folder": "/work",
    "program": "/usr/bin/python",
    "script": "cccc2222",
    "write_folder /nvme": 512 * GIB,
    "master_address": "10.0.0.1",
    "master_port": 0.0003,
    "clock_end": 100.1,
}


def plan(*names: str, devices: bool = False, command: tuple[str, ...] = ("python", "train.py", "--lr", "1")) -> JobPlan:
    """Two ranks on each host."""
    ranks = tuple(
        RankPlan(number, number, str(number) if devices else None, (), {"PYTHONPATH": "/lib:/more"})
        for number in range(2)
    )
    return JobPlan(
        hosts=tuple(HostPlan(name, index, ranks) for index, name in enumerate(names)),
        source="hosts",
        transport="ssh",
        command=command,
        folder="/work",
        environment={},
        master_address=names[0],
    )


def host(name: str, *devices: str, **values: Any) -> HostChecks:
    """A good host but for these values, where an OSError is what a check says, with accelerators of these names."""
    checks = tuple(
        CheckResult(key, None, str(value)) if isinstance(value, OSError) else CheckResult(key, value)
        for key, value in (GOOD | values).items()
    )
    there = tuple(Device((str(index),), name) for index, name in enumerate(devices))
    return HostChecks(name, checks, HostReport("cuda" if devices else "none", there, ((0,), (1,))), 0.0)


def found(plan: JobPlan, *checked: HostChecks) -> list[tuple[str, bool]]:
    """Each fault, and whether nothing starts because of it."""
    return [(str(fault), fault.is_fatal) for fault in faults(plan, checked)]


MEMORY = "2 GiB of free memory for 2 ranks, found {}; end what takes it, or put fewer ranks there"
NO_FILE, DENIED = OSError("No such file or directory"), OSError("Permission denied")
NO_NAME, NO_ROUTE = OSError("Name or service not known"), OSError("No route to host")


@pytest.mark.parametrize(
    ("check", "value", "text", "is_fatal"),
    [
        ("torch", "2.12.1", "torch 2.13.0 as on a,c, found 2.12.1; install the same torch on all hosts", True),
        ("lowtide", "0.2.0", "lowtide 0.1.0 as on a,c, found 0.2.0; install the same lowtide on all hosts", True),
        ("python", "3.12.1", "python 3.11 as on a,c, found 3.12; use the same Python on all hosts", True),
        ("python", "3.11.9", "python 3.11.7 as on a,c, found 3.11.9; use the same Python on all hosts", False),
        (
            "lowtide_source",
            "bbbb",
            "lowtide sources aaaa1111 as on a,c, found bbbb; update it, so that all hosts run the same code",
            False,
        ),
        ("script", "dddd", "script cccc2222 as on a,c, found dddd; copy the same script to all hosts", False),
        (
            "torch",
            "",
            "torch for python, found none; install it there, or start the same environment on all hosts",
            True,
        ),
        ("free_memory_bytes", GIB, MEMORY.format("1 GiB"), False),
        ("free_memory_bytes", GIB // 4, MEMORY.format("256 MiB"), True),
        (
            "free_shared_memory_bytes",
            64 << 20,
            "128 MiB free in /dev/shm for 2 ranks, found 64 MiB; in Docker add --shm-size=8g, in Kubernetes an "
            "emptyDir with medium Memory at /dev/shm",
            False,
        ),
        (
            "master_address",
            "127.0.1.1",
            "an address of a on the network, found 127.0.1.1; a must mean the host a everywhere: use another name, or "
            "change /etc/hosts",
            True,
        ),
        (
            "folder",
            NO_FILE,
            f"the working folder /work, found {NO_FILE}; make it there: a shared file system, or a copy",
            True,
        ),
        (
            "program",
            OSError("no such program"),
            "the program python, found no such program; install it there, or name a path that all hosts have",
            True,
        ),
        (
            "script",
            NO_FILE,
            f"the script train.py, found {NO_FILE}; copy it there, or name a path on a shared file system",
            True,
        ),
        (
            "write_folder /nvme",
            DENIED,
            f"to write to the folder /nvme, found {DENIED}; make it there, or free it, and let this user write to it",
            True,
        ),
        (
            "master_address",
            NO_NAME,
            f"an address of a, found {NO_NAME}; add it to the name service or /etc/hosts, or name the hosts by "
            "addresses",
            True,
        ),
        (
            "master_port",
            NO_ROUTE,
            f"a way to the ranks' store at a on host a, found {NO_ROUTE}; open the ports between the hosts in the "
            "firewall, or use another address of a",
            True,
        ),
    ],
)
def test_a_host_that_is_other_or_unfit_is_named(check: str, value: Any, text: str, is_fatal: bool) -> None:
    hosts = host("a"), host("b", **{check: value}), host("c")
    assert found(plan("a", "b", "c"), *hosts) == [(f"host b: expected {text}", is_fatal)]


def test_equal_and_fit_hosts_have_no_fault() -> None:
    assert found(plan("a", "b", "c"), host("a"), host("b"), host("c")) == []


SLOWER = "host b: expected accelerators 2 x H100 as on a, found 1 x H100; the slowest"
LOCKED = (
    "host a: expected no limit of locked memory, found 64 KiB; raise `ulimit -l` (LimitMEMLOCK=infinity of sshd or "
    "slurmd), or NCCL cannot use InfiniBand"
)


@pytest.mark.parametrize(
    ("job", "checked", "expected"),
    [
        (
            plan("a", command=("python", "-m", "package.train")),
            [HostChecks("a", (CheckResult("module", None, "no such module"),))],
            ["host a: expected the module -m package.train, found no such module; install it there, or set PYTHON"],
        ),
        (
            plan("a", "b"),
            [host("a"), HostChecks("b", error="ssh: connect to host b port 22: Connection refused")],
            [
                "host b: expected an answer of its agent, found ssh: connect to host b port 22: Connection refused; "
                "`ssh b true` must work without a question, or leave it out"
            ],
        ),
        (
            plan("a", "b", devices=True),
            [host("a", "H100", "H100"), host("b", "H100")],
            ["host b: expected 2 accelerators, found 1; lower its slots, or look at `nvidia-smi` there", SLOWER],
        ),
        (
            plan("a", "b"),
            [host("a", "H100"), host("b")],
            ["host b: expected accelerators cuda as on a, found none; leave some hosts out with --include or --ex"],
        ),
        # Locked memory matters where RDMA serves accelerators.
        *(
            (
                plan("a", devices=devices),
                [host("a", "H100", "H100", rdma_devices=rdma, locked_memory_bytes=64 << 10)],
                [LOCKED] if rdma and devices else [],
            )
            for rdma, devices in ((1, True), (0, True), (1, False))
        ),
        (
            plan("n1", "n2", "n3", "n4"),
            [host("n1"), *(host(f"n{number}", script=NO_FILE) for number in (2, 3, 4))],
            ["hosts n[2-4]: expected the script train.py"],
        ),
        # The most frequent version is right, even where the first host has another one.
        (plan("a", "b", "c"), [host("a", torch="2.12"), host("b"), host("c")], ["host a: expected torch 2.13.0 as on"]),
    ],
)
def test_hosts_that_do_not_fit_are_named(job: JobPlan, checked: list[HostChecks], expected: list[str]) -> None:
    texts = [text for text, _ in found(job, *checked)]
    assert [text[: len(start)] for text, start in zip(texts, expected, strict=True)] == expected


@pytest.mark.parametrize(("offset", "is_fatal"), [(0.9, None), (1.5, False), (-29.0, False), (31.0, True)])
def test_a_clock_that_is_off_warns_and_then_refuses(offset: float, is_fatal: bool | None) -> None:
    side = "ahead" if offset > 0 else "behind"
    advice = "set it by NTP: `chronyc makestep`, or `timedatectl set-ntp true`"
    text = f"host a: expected a clock within 1 s of the launcher's, found it {abs(offset):.1f} s {side}; {advice}"
    expected = [] if is_fatal is None else [(text, is_fatal)]
    assert found(plan("a"), replace(host("a"), clock_offset_seconds=offset)) == expected


def test_fatal_faults_come_first() -> None:
    checked = replace(host("a"), clock_offset_seconds=2.0), HostChecks("b", error="gone")
    assert [is_fatal for _, is_fatal in found(plan("a", "b"), *checked)] == [True, False]


def test_the_table_has_a_row_a_host_and_says_what_is_wrong() -> None:
    checked = [
        host("a", "H100", "H100"),
        host("b", "H100", "H100", torch="2.12.1", **{"write_folder /nvme": DENIED}),
        HostChecks("c", error="Connection refused"),
        replace(host("d", "H100", "H100"), clock_offset_seconds=2.5),
    ]
    rows = """
host  python  torch   lowtide  devices   free memory  /dev/shm  locked     clock     store   free in /nvme  state
a     3.11.7  2.13.0  0.1.0    2 x H100  64 GiB       32 GiB    unlimited  +0.000 s  0.3 ms  512 GiB        ok
b     3.11.7  2.12.1  0.1.0    2 x H100  64 GiB       32 GiB    unlimited  +0.000 s  0.3 ms  -              TORCH
c     -       -       -        -         -            -         -          -         -       -              no answer
d     3.11.7  2.13.0  0.1.0    2 x H100  64 GiB       32 GiB    unlimited  +2.500 s  0.3 ms  512 GiB        (clock)
"""
    expected = rows.replace("TORCH", "torch, write folder").strip().splitlines()
    assert table(checked, faults(plan("a", "b", "c", "d"), checked)).splitlines() == expected


def test_a_request_asks_for_what_the_plan_needs() -> None:
    job = plan("a", "b")
    asked = request_for(job, job.hosts[1], ["/nvme", "/logs", "/nvme"], 4711)
    assert (asked.program, asked.script, asked.module) == ("python", "train.py", None)
    assert (asked.num_ranks, asked.folder, asked.search_path) == (2, "/work", ("/lib", "/more"))
    assert (asked.write_folders, asked.master_address, asked.master_port) == (("/nvme", "/logs"), "a", 4711)
    job = plan("a", command=("python", "-m", "package.train", "-m", "other"))
    assert (request_for(job, job.hosts[0]).script, request_for(job, job.hosts[0]).module) == (None, "package.train")


def test_the_folders_of_a_config_among_the_arguments_are_found(tmp_path: Path) -> None:
    config = {
        "zero_optimization": {
            "offload_param": {"device": "nvme", "nvme_path": "/nvme/a"},
            "offload_optimizer": {"device": "cpu", "nvme_path": "/unused"},
        },
        "more": [{"device": "nvme", "nvme_path": "/nvme/b"}, {"device": "nvme", "nvme_path": 7}],
    }
    large = config | {"text": "x" * (1 << 20)}
    texts = {
        "train": json.dumps(config),
        "again": json.dumps(config),
        "commented": f"\ufeff// the job\n{json.dumps(config)}",
        "broken": "{",
        "large": json.dumps(large),
    }
    for name, text in texts.items():
        (tmp_path / f"{name}.json").write_text(text)
    arguments = ["--lr", "1", "broken.json", "missing.json", "large.json"]
    assert folders_of_config(arguments, tmp_path) == ()
    assert folders_of_config(["commented.json"], tmp_path) == ("/nvme/a", "/nvme/b")
    for argument in ("train.json", "--config=train.json", str(tmp_path / "train.json")):
        assert folders_of_config([*arguments, argument, "again.json"], tmp_path) == ("/nvme/a", "/nvme/b")


def test_the_clock_is_compared_without_the_time_that_the_checks_took() -> None:
    # Host 7 s ahead; the request takes 0.2 s there, the checks 3 s, and the answer 0.2 s back.
    results = [CheckResult("clock_start", 107.2), CheckResult("clock_end", 110.2)]
    assert clock_offset(results, sent=100.0, received=103.4) == pytest.approx(7.0)
    assert clock_offset([], 1.0, 2.0) is None
