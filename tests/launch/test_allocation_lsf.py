"""LSF: its three lists of hosts, and the host that only runs the script."""

from pathlib import Path

import pytest

from lowtide.launch.allocation.allocation import AllocationRequest, find_allocation
from lowtide.launch.hosts.host import Allocation, LaunchError


def find(environ: dict[str, str]) -> Allocation:
    return find_allocation(AllocationRequest(), environ, lambda: "x")


def names(environ: dict[str, str]) -> list[str]:
    return [host.name for host in find({"LSB_JOBID": "12"} | environ).hosts]


def test_hosts_with_counts_are_read() -> None:
    assert names({"LSB_MCPU_HOSTS": "hostA 4 hostB 2"}) == ["hostA", "hostB"]


def test_a_host_for_each_slot_is_read() -> None:
    assert names({"LSB_HOSTS": "hostA hostA hostB"}) == ["hostA", "hostB"]


def test_the_file_of_hosts_is_read(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("hostA\nhostA\nhostB\nhostA\n")
    assert names({"LSB_DJOB_HOSTFILE": str(tmp_path / "hosts"), "LSB_HOSTS": "short"}) == ["hostA", "hostB"]


def test_slots_count_processors_so_they_make_no_ranks() -> None:
    found = find({"LSB_JOBID": "12", "LSB_MCPU_HOSTS": "hostA 40 hostB 40"})
    assert (found.source, found.transport) == ("LSF job 12", "ssh")
    assert [host.slots for host in found.hosts] == [None, None]
    assert found.notes == (
        "LSF gives up to 40 slots a host, which count processors; --nproc sets the ranks on each host",
    )


@pytest.mark.parametrize(
    ("hosts", "left"),
    [
        ("batch5 1 h01 42 h02 42", ["h01", "h02"]),
        ("login2 1 h01 42", ["h01"]),
        ("batch5 1 h01 1", ["batch5", "h01"]),
        ("h00 1 h01 42", ["h00", "h01"]),
        ("batch5 4 h01 42", ["batch5", "h01"]),
        ("batch5 1", ["batch5"]),
    ],
)
def test_the_host_that_only_runs_the_script_is_left_out(hosts: str, left: list[str]) -> None:
    assert names({"LSB_MCPU_HOSTS": hosts}) == left


def test_what_is_left_out_is_noted_and_is_not_here() -> None:
    found = find({"LSB_JOBID": "12", "LSB_MCPU_HOSTS": "batch5 1 h01 42"})
    assert found.notes[0] == "batch5 is left out: its only slot is for the script"
    assert found.transport == "ssh"


def test_a_batch_host_of_any_name_is_left_out_where_the_system_has_them() -> None:
    assert names({"LSB_MCPU_HOSTS": "x 1 h01 42", "CSM_ALLOCATION_ID": "9"}) == ["h01"]


def test_one_host_is_local() -> None:
    assert find({"LSB_JOBID": "12", "LSB_MCPU_HOSTS": "hostA 4"}).transport == "local"


def test_a_job_without_hosts_is_this_machine() -> None:
    assert find({"LSB_JOBID": "12"}).source == "this machine"


@pytest.mark.parametrize(
    ("environ", "error"),
    [
        ({"LSB_MCPU_HOSTS": "a 4 b"}, 'LSB_MCPU_HOSTS: expected "hostA 4 hostB 4", found "a 4 b". Use --hosts instead'),
        ({"LSB_MCPU_HOSTS": "a b"}, 'expected "hostA 4 hostB 4", found "a b"'),
        ({"LSB_DJOB_HOSTFILE": "/no/such"}, "cannot read LSB_DJOB_HOSTFILE=/no/such: "),
    ],
)
def test_lists_that_cannot_be_read_are_explained(environ: dict[str, str], error: str) -> None:
    with pytest.raises(LaunchError) as caught:
        names(environ)
    assert error in str(caught.value)
