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


def rank(number: int, device: str | None) -> RankPlan:
    return RankPlan(rank=number, local_rank=number, device=device, cores=(), environment={"PYTHONPATH": "/lib:/more"})


def plan(*names: str, ranks: int = 2, devices: bool = False, **others: Any) -> JobPlan:
    hosts = tuple(
        HostPlan(name, index, tuple(rank(number, str(number) if devices else None) for number in range(ranks)))
        for index, name in enumerate(names)
    )
    values: dict[str, Any] = {
        "source": "hosts",
        "transport": "ssh",
        "command": ("python", "train.py", "--lr", "1"),
        "folder": "/work",
        "environment": {},
        "master_address": names[0],
    }
    return JobPlan(hosts=hosts, **(values | others))


def host(name: str, errors: dict[str, str] | None = None, **values: Any) -> HostChecks:
    changed = GOOD | {key.replace("__", " "): value for key, value in values.items()}
    wrong = errors or {}
    return HostChecks(
        name,
        tuple(CheckResult(key, None if key in wrong else changed[key], wrong.get(key, "")) for key in changed),
        HostReport("none", (), ((0,), (1,))),
        0.0,
    )


def with_devices(checked: HostChecks, *names: str) -> HostChecks:
    devices = tuple(Device((str(index),), name) for index, name in enumerate(names))
    return replace(checked, report=HostReport("cuda" if names else "none", devices, ((0,),)))


def texts(plan: JobPlan, *checked: HostChecks) -> list[str]:
    return [str(fault) for fault in faults(plan, checked)]


def test_equal_and_fit_hosts_have_no_fault() -> None:
    assert texts(plan("a", "b", "c"), host("a"), host("b"), host("c")) == []


@pytest.mark.parametrize(
    ("values", "text", "is_fatal"),
    [
        (
            {"torch": "2.12.1"},
            "host b: expected torch 2.13.0 as on a,c, found 2.12.1; install the same torch on all hosts",
            True,
        ),
        (
            {"lowtide": "0.2.0"},
            "host b: expected lowtide 0.1.0 as on a,c, found 0.2.0; install the same lowtide on all hosts",
            True,
        ),
        (
            {"python": "3.12.1"},
            "host b: expected python 3.11 as on a,c, found 3.12; use the same Python on all hosts",
            True,
        ),
        (
            {"python": "3.11.9"},
            "host b: expected python 3.11.7 as on a,c, found 3.11.9; use the same Python on all hosts",
            False,
        ),
        (
            {"lowtide_source": "bbbb"},
            "host b: expected lowtide sources aaaa1111 as on a,c, found bbbb; update it, so that all hosts run the "
            "same code",
            False,
        ),
        (
            {"script": "dddd"},
            "host b: expected script cccc2222 as on a,c, found dddd; copy the same script to all hosts",
            False,
        ),
        (
            {"torch": ""},
            "host b: expected torch for python, found none; install it there, or start the same environment on all "
            "hosts",
            True,
        ),
        (
            {"free_memory_bytes": GIB},
            "host b: expected 2 GiB of free memory for 2 ranks, found 1 GiB; end what takes it, or put fewer ranks "
            "there",
            False,
        ),
        (
            {"free_memory_bytes": GIB // 4},
            "host b: expected 2 GiB of free memory for 2 ranks, found 256 MiB; end what takes it, or put fewer ranks "
            "there",
            True,
        ),
        (
            {"free_shared_memory_bytes": 64 << 20},
            "host b: expected 128 MiB free in /dev/shm for 2 ranks, found 64 MiB; in Docker add --shm-size=8g, in "
            "Kubernetes an emptyDir with medium Memory at /dev/shm",
            False,
        ),
        (
            {"master_address": "127.0.1.1"},
            "host b: expected an address of a on the network, found 127.0.1.1; a must mean the host a everywhere: "
            "use another name, or change /etc/hosts",
            True,
        ),
    ],
)
def test_a_host_that_is_other_or_unfit_is_named(values: dict[str, Any], text: str, is_fatal: bool) -> None:
    found = faults(plan("a", "b", "c"), [host("a"), host("b", **values), host("c")])
    assert [(str(fault), fault.is_fatal) for fault in found] == [(text, is_fatal)]


@pytest.mark.parametrize(
    ("name", "error", "text"),
    [
        (
            "folder",
            "No such file or directory",
            "expected the working folder /work, found No such file or directory; make it there: a shared file system, "
            "or a copy",
        ),
        (
            "program",
            "no such program",
            "expected the program python, found no such program; install it there, or name a path that all hosts have",
        ),
        (
            "script",
            "No such file or directory",
            "expected the script train.py, found No such file or directory; copy it there, or name a path on a shared "
            "file system",
        ),
        (
            "write_folder /nvme",
            "Permission denied",
            "expected to write to the folder /nvme, found Permission denied; make it there, or free it, and let this "
            "user write to it",
        ),
        (
            "master_address",
            "Name or service not known",
            "expected an address of a, found Name or service not known; add it to the name service or /etc/hosts, or "
            "name the hosts by addresses",
        ),
        (
            "master_port",
            "No route to host",
            "expected a way to the ranks' store at a on host a, found No route to host; open the ports between the "
            "hosts in the firewall, or use another address of a",
        ),
    ],
)
def test_what_a_host_does_not_have_is_fatal(name: str, error: str, text: str) -> None:
    found = faults(plan("a", "b"), [host("a"), host("b", errors={name: error})])
    assert [(str(fault), fault.is_fatal) for fault in found] == [(f"host b: {text}", True)]


def test_a_module_is_named_as_it_was_given() -> None:
    job = plan("a", command=("python", "-m", "package.train"))
    checked = HostChecks("a", (CheckResult("module", None, "no such module"),))
    assert texts(job, checked) == [
        "host a: expected the module -m package.train, found no such module; install it there, or set PYTHONPATH with "
        "--env"
    ]


@pytest.mark.parametrize(("offset", "is_fatal"), [(0.9, None), (1.5, False), (-29.0, False), (31.0, True)])
def test_a_clock_that_is_off_warns_and_then_refuses(offset: float, is_fatal: bool | None) -> None:
    found = faults(plan("a"), [replace(host("a"), clock_offset_seconds=offset)])
    assert [fault.is_fatal for fault in found] == ([] if is_fatal is None else [is_fatal])
    side = "ahead" if offset > 0 else "behind"
    advice = "set it by NTP: `chronyc makestep`, or `timedatectl set-ntp true`"
    expected = f"host a: expected a clock within 1 s of the launcher's, found it {abs(offset):.1f} s {side}; {advice}"
    assert [str(fault) for fault in found] == [expected] * len(found)


def test_a_host_without_answer_is_said_in_the_words_of_the_transport() -> None:
    silent = HostChecks("b", error="ssh: connect to host b port 22: Connection refused")
    assert texts(plan("a", "b"), host("a"), silent) == [
        "host b: expected an answer of its agent, found ssh: connect to host b port 22: Connection refused; `ssh b "
        "true` must work without a question, or leave it out"
    ]


def test_fewer_accelerators_than_ranks_that_need_one_are_refused() -> None:
    job = plan("a", "b", devices=True)
    found = texts(job, with_devices(host("a"), "H100", "H100"), with_devices(host("b"), "H100"))
    assert found[0] == (
        "host b: expected 2 accelerators, found 1; lower its slots, or look at `nvidia-smi` there"
    ) and found[1].startswith("host b: expected accelerators 2 x H100 as on a, found 1 x H100; the slowest")


def test_hosts_with_and_without_accelerators_do_not_mix() -> None:
    found = texts(plan("a", "b"), with_devices(host("a"), "H100"), with_devices(host("b")))
    assert found == [
        "host b: expected accelerators cuda as on a, found none; leave some hosts out with --include or --exclude"
    ]


@pytest.mark.parametrize(("rdma", "devices", "count"), [(1, True, 1), (0, True, 0), (1, False, 0)])
def test_locked_memory_matters_where_rdma_serves_accelerators(rdma: int, devices: bool, count: int) -> None:
    checked = with_devices(host("a", rdma_devices=rdma, locked_memory_bytes=64 << 10), "H100", "H100")
    assert (
        texts(plan("a", devices=devices), checked)
        == [
            "host a: expected no limit of locked memory, found 64 KiB; raise `ulimit -l` (LimitMEMLOCK=infinity of "
            "sshd or slurmd), or NCCL cannot use InfiniBand"
        ]
        * count
    )


def test_the_same_fault_on_many_hosts_is_one_text() -> None:
    names = [f"n{number}" for number in range(1, 6)]
    wrong = {"script": "No such file or directory"}
    found = texts(plan(*names), host("n1"), *(host(name, errors=wrong) for name in names[1:]))
    assert len(found) == 1 and found[0].startswith("hosts n[2-5]: expected the script train.py")


def test_the_most_frequent_version_is_right_even_where_the_first_host_has_another() -> None:
    found = faults(plan("a", "b", "c"), [host("a", torch="2.12"), host("b"), host("c")])
    assert [fault.hosts for fault in found] == [("a",)]


def test_fatal_faults_come_first() -> None:
    found = faults(plan("a", "b"), [replace(host("a"), clock_offset_seconds=2.0), HostChecks("b", error="gone")])
    assert [fault.is_fatal for fault in found] == [True, False]


def test_the_table_has_a_row_a_host_and_says_what_is_wrong() -> None:
    checked = [
        with_devices(host("a"), "H100", "H100"),
        with_devices(host("b", torch="2.12.1", errors={"write_folder /nvme": "Permission denied"}), "H100", "H100"),
        HostChecks("c", error="Connection refused"),
        replace(with_devices(host("d"), "H100", "H100"), clock_offset_seconds=2.5),
    ]
    found = faults(plan("a", "b", "c", "d"), checked)
    assert table(checked, found).splitlines() == [
        "host  python  torch   lowtide  devices   free memory  /dev/shm  locked     clock     store   free in /nvme  "
        "state",
        "a     3.11.7  2.13.0  0.1.0    2 x H100  64 GiB       32 GiB    unlimited  +0.000 s  0.3 ms  512 GiB        "
        "ok",
        "b     3.11.7  2.12.1  0.1.0    2 x H100  64 GiB       32 GiB    unlimited  +0.000 s  0.3 ms  -              "
        "torch, write folder",
        "c     -       -       -        -         -            -         -          -         -       -              "
        "no answer",
        "d     3.11.7  2.13.0  0.1.0    2 x H100  64 GiB       32 GiB    unlimited  +2.500 s  0.3 ms  512 GiB        "
        "(clock)",
    ]


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
    (tmp_path / "train.json").write_text(json.dumps(config))
    (tmp_path / "again.json").write_text(json.dumps(config))
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "large.json").write_text(json.dumps(config | {"text": "x" * (1 << 20)}))
    arguments = ["--lr", "1", "broken.json", "missing.json", "large.json"]
    assert folders_of_config(arguments, tmp_path) == ()
    for argument in ("train.json", "--config=train.json", str(tmp_path / "train.json")):
        assert folders_of_config([*arguments, argument, "again.json"], tmp_path) == ("/nvme/a", "/nvme/b")


def test_the_clock_is_compared_without_the_time_that_the_checks_took() -> None:
    # Host 7 s ahead; the request takes 0.2 s there, the checks 3 s, and the answer 0.2 s back.
    results = [CheckResult("clock_start", 107.2), CheckResult("clock_end", 110.2)]
    assert clock_offset(results, sent=100.0, received=103.4) == pytest.approx(7.0)
    assert clock_offset([], 1.0, 2.0) is None
