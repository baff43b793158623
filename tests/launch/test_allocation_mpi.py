"""mpirun of Open MPI and of MPICH: a launcher a host, or a process a rank."""

import pytest

from lowtide.launch.allocation.allocation import AllocationRequest, find_allocation
from lowtide.launch.hosts.host import Allocation, LaunchError

SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]"}


def process(mpi: str, rank: int, size: int, local_rank: int, local_size: int) -> dict[str, str]:
    names = {
        "openmpi": ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"),
        "mpich": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    }[mpi]
    prefix = "OMPI_COMM_WORLD_" if mpi == "openmpi" else ""
    return {prefix + name: str(value) for name, value in zip(names, (rank, size, local_rank, local_size), strict=True)}


def find(environ: dict[str, str], **request: object) -> Allocation:
    return find_allocation(AllocationRequest(**request), environ, lambda: "x")  # type: ignore[arg-type]


@pytest.mark.parametrize("mpi", ["openmpi", "mpich"])
@pytest.mark.parametrize(("rank", "part"), [(0, "launcher"), (1, "agent")])
def test_one_process_a_host_joins(mpi: str, rank: int, part: str) -> None:
    found = find(process(mpi, rank, 2, 0, 1) | {"MASTER_ADDR": "head", "MASTER_PORT": "1234"})
    assert (found.part, found.transport) == (part, "join")
    assert [host.name for host in found.hosts] == ["head", "mpi-1"]
    assert found.rendezvous is not None
    assert (found.rendezvous.index, found.rendezvous.address, found.rendezvous.port) == (rank, "head", 1234)


@pytest.mark.parametrize("mpi", ["openmpi", "mpich"])
def test_a_process_a_rank_runs_the_script(mpi: str) -> None:
    found = find(process(mpi, 5, 8, 1, 4) | {"MASTER_ADDR": "head", "MASTER_PORT": "1234"})
    assert found.part == "rank"
    assert found.notes == ("mpirun has started 8 processes, and this is rank 5: it runs the script itself",)
    assert found.rank_environment == {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "head",
        "MASTER_PORT": "1234",
    }


def test_processes_of_one_host_meet_at_home_and_at_one_port() -> None:
    found = [find(process("openmpi", rank, 2, rank, 2) | {"PMIX_NAMESPACE": "prte-1@1"}) for rank in range(2)]
    assert {each.rank_environment["MASTER_ADDR"] for each in found} == {"127.0.0.1"}
    assert len({each.rank_environment["MASTER_PORT"] for each in found}) == 1


@pytest.mark.parametrize("manager", [SLURM, {"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "batch1 1 n1 40 n2 40"}])
def test_the_resource_manager_tells_where_rank_0_is(manager: dict[str, str]) -> None:
    found = find(process("openmpi", 1, 2, 0, 1) | manager)
    assert found.rendezvous is not None and found.rendezvous.address == "n1"
    assert [host.name for host in found.hosts] == ["n1", "n2"]


@pytest.mark.parametrize("mpi", ["openmpi", "mpich"])
def test_a_process_alone_is_no_part_of_anything(mpi: str) -> None:
    assert find(process(mpi, 0, 1, 0, 1)).source == "this machine"


def test_tasks_of_srun_that_speak_pmi_are_slurms() -> None:
    assert find(SLURM | {"PMI_RANK": "0", "PMI_SIZE": "2"}).source == "SLURM job 7"


@pytest.mark.parametrize(
    ("environ", "request_", "error"),
    [
        (
            process("openmpi", 0, 2, 0, 1),
            {},
            "MPI does not tell the host of rank 0 among several, and MASTER_ADDR is not set.",
        ),
        (
            process("mpich", 1, 4, 1, 2),
            {},
            "mpiexec -genv MASTER_ADDR node1), or start lowtide once, outside mpirun",
        ),
        (
            process("openmpi", 0, 2, 0, 3),
            {},
            "OMPI_COMM_WORLD_LOCAL_SIZE=3 is not between 1 and 2. Use --hosts instead",
        ),
        (process("mpich", 0, 2, 0, 2) | {"PMI_RANK": "x"}, {}, 'in the environment variable PMI_RANK, found "x"'),
        (process("mpich", 0, 2, 0, 2), {"nproc": 2}, "--nproc plans ranks, but this process is already a rank: MPICH"),
    ],
)
def test_what_cannot_be_is_explained(environ: dict[str, str], request_: dict[str, object], error: str) -> None:
    with pytest.raises(LaunchError) as caught:
        find(environ, **request_)
    assert error in str(caught.value)
