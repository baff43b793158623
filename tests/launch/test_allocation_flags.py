"""Where a job's hosts come from when the command line says so, or nobody does."""

from pathlib import Path

import pytest

from lowtide.launch.allocation.allocation import AllocationRequest, find_allocation
from lowtide.launch.hosts.host import Allocation, Host, LaunchError, Rendezvous

SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-3]"}
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "MASTER_ADDR": "h",
    "MASTER_PORT": "29500",
}


def find(environ: dict[str, str] | None = None, **request: object) -> Allocation:
    return find_allocation(AllocationRequest(**request), environ or {}, lambda: "me.example.org")  # type: ignore[arg-type]


def test_without_a_word_it_is_this_machine() -> None:
    assert find() == Allocation("this machine", "local", (Host("localhost"),))


def test_named_hosts_are_reached_by_ssh() -> None:
    assert find(hosts="a:2,b") == Allocation("--hosts a:2,b", "ssh", (Host("a", (0, 1)), Host("b")))


def test_a_hostfile_is_named_as_the_source(tmp_path: Path) -> None:
    path = tmp_path / "hosts.txt"
    path.write_text("a slots=2\nb slots=1\n")
    assert find(hostfile=path) == Allocation(f"hostfile {path}", "ssh", (Host("a", (0, 1)), Host("b", (0,))))


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", "me", "me.example.org"])
def test_this_machine_alone_needs_no_ssh(name: str) -> None:
    assert find(hosts=f"{name}:2").transport == "local"


def test_filters_and_nproc_apply_to_every_source() -> None:
    found = find(SLURM, include="n2:0,3@n3", exclude="n3:1", nproc=2)
    assert found.hosts == (Host("n2", (0, 3)), Host("n3", None, (1,))) and found.nproc == 2


@pytest.mark.parametrize("nproc", [None, "auto"])
def test_auto_is_one_rank_a_slot(nproc: str | None) -> None:
    assert find(hosts="a:4,b:4", nproc=nproc).nproc is None


@pytest.mark.parametrize("transport", ["ssh", "srun", "mpirun"])
def test_the_transport_can_be_chosen(transport: str) -> None:
    assert find(hosts="a,b", transport=transport).transport == transport
    assert find(SLURM, transport=transport).transport == transport


def test_flags_win_over_a_resource_manager_with_a_note() -> None:
    found = find(SLURM, hosts="n1,x:2")
    assert (found.source, found.transport) == ("--hosts n1,x:2", "ssh")
    assert found.notes == ("--hosts overrides SLURM job 7 with n1, n2, n3",)


def test_hosts_of_the_slurm_job_are_reached_by_srun() -> None:
    assert find(SLURM, hosts="n3,n1").transport == "srun"


def test_transport_local_is_this_machine_in_a_job_too() -> None:
    found = find(SLURM, transport="local", nproc=2)
    assert (found.hosts, found.transport, found.nproc) == ((Host("localhost"),), "local", 2)
    assert found.notes == ("--transport local overrides SLURM job 7 with n1, n2, n3",)


def test_a_rank_of_torchrun_runs_the_script() -> None:
    found = find(TORCHRUN)
    assert (found.part, found.rank_environment) == ("rank", {})
    assert found.notes == ("this process is already rank 3 of 4: it runs the script itself",)


def test_a_rank_of_lowtide_is_known_as_such() -> None:
    assert find(TORCHRUN | {"LOWTIDE_JOB_ID": "x"}).source.startswith("lowtide launch (RANK, LOCAL_RANK, WORLD_SIZE,")


def test_variables_of_a_rank_are_enough_without_torchrun() -> None:
    values = {name: value for name, value in TORCHRUN.items() if name != "TORCHELASTIC_RUN_ID"}
    assert find(values).source.startswith("the environment (RANK, LOCAL_RANK, WORLD_SIZE,")


@pytest.mark.parametrize("missing", ["RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_a_part_of_the_variables_of_a_rank_makes_none(missing: str) -> None:
    assert find({name: value for name, value in TORCHRUN.items() if name != missing}).part == "launcher"


def test_a_job_within_a_rank_says_so() -> None:
    found = find(TORCHRUN, transport="local", nproc=2)
    assert found.part == "launcher" and found.notes[0].startswith("--transport local overrides torchrun (RANK, LOCAL_")


@pytest.mark.parametrize(("index", "part"), [(0, "launcher"), (1, "agent"), (2, "agent")])
def test_launchers_started_by_hand_join(index: int, part: str) -> None:
    found = find(num_hosts=3, host_index=index, meet="node1:23456", nproc=4)
    assert found.hosts == (Host("node1"), Host("host-1"), Host("host-2")) and found.nproc == 4
    assert found.rendezvous == Rendezvous(index, "node1", 23456, "by hand node1:23456")
    assert (found.part, found.transport) == (part, "join")


def test_an_ipv6_address_can_be_where_they_meet() -> None:
    rendezvous = find(num_hosts=2, host_index=0, meet="[fe80::1]:23456").rendezvous
    assert rendezvous is not None and (rendezvous.address, rendezvous.port) == ("fe80::1", 23456)


def test_one_host_by_hand_is_local() -> None:
    assert find(num_hosts=1, host_index=0, meet="x:1").transport == "local"


@pytest.mark.parametrize(
    ("environ", "request_", "error"),
    [
        ({}, {"hosts": "a", "hostfile": Path("h")}, "--hosts a and --hostfile h both name hosts: remove either"),
        ({}, {"nproc": 0}, "--nproc must be at least 1, found 0"),
        ({}, {"num_hosts": -1}, "--num-hosts must be at least 1, found -1"),
        ({}, {"num_hosts": 2}, "--num-hosts 2 contradicts the 1 hosts of this machine: remove it"),
        (SLURM, {"num_hosts": 2}, "--num-hosts 2 contradicts the 3 hosts of SLURM job 7: remove it"),
        (
            {},
            {"host_index": 1},
            "--host-index needs --num-hosts and --meet HOST:PORT, found no --num-hosts and",
        ),
        ({}, {"num_hosts": 2, "meet": "a:1"}, "found no --host-index. These options are for a launcher that you"),
        (
            {},
            {"num_hosts": 2, "host_index": 2, "meet": "a:1"},
            "--host-index 2 is not between 0 and 1, for --num-hosts 2",
        ),
        (
            {},
            {"num_hosts": 2, "host_index": 0, "meet": "a"},
            '--meet: expected HOST:PORT, for example node1:23456, found "a"',
        ),
        ({}, {"num_hosts": 2, "host_index": 0, "meet": "a:99999"}, 'found "a:99999"'),
        ({}, {"num_hosts": 2, "host_index": 0, "meet": "a:1", "hosts": "a,b"}, "remove --hosts and --hostfile"),
        ({}, {"hosts": "localhost:2,b:2"}, 'other hosts cannot reach "localhost" by that name'),
        ({}, {"transport": "ssh"}, "--transport ssh needs hosts, found none. Name them with --hosts or --hostfile"),
        (
            {},
            {"hosts": "a,b", "transport": "local"},
            "--transport local is for a single host, found 2 (a, b): leave it out",
        ),
        ({}, {"hosts": "a,b", "transport": "join"}, "--transport join is for launchers that are started on every host"),
        ({}, {"include": "b"}, '--include b: no host "b": there are localhost'),
        (
            TORCHRUN,
            {"nproc": 2},
            "--nproc plans ranks, but this process is already a rank: torchrun (RANK, LOCAL_RANK,",
        ),
        (TORCHRUN, {"include": "a"}, "--include plans ranks, but this process is already a rank"),
        (TORCHRUN | {"RANK": "x"}, {}, 'expected a number in the environment variable RANK, found "x"'),
    ],
)
def test_contradictions_are_explained(environ: dict[str, str], request_: dict[str, object], error: str) -> None:
    with pytest.raises(LaunchError) as caught:
        find(environ, **request_)
    assert error in str(caught.value)
