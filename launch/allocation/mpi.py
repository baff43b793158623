"""This process as started by mpirun or torchrun: a launcher on its host, or a rank.

| MPI | rank | size | rank on its host | size there |
|---|---|---|---|---|
| Open MPI, jsrun | OMPI_COMM_WORLD_RANK | ..._SIZE | ..._LOCAL_RANK | ..._LOCAL_SIZE |
| MPICH, Intel MPI (Hydra) | PMI_RANK | PMI_SIZE | MPI_LOCALRANKID | MPI_LOCALNRANKS |

MPI does not tell rank 0's address by environment. With several hosts it comes from MASTER_ADDR (`mpirun -x
MASTER_ADDR`, `mpiexec -genv MASTER_ADDR ...`), or from mpirun's resource manager: its first host has rank 0.

Sources: Open MPI 5.0 documentation, 11.1; the variables of MPICH and Intel MPI as libfabric's psm3 reads them;
https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables.
"""

from collections.abc import Mapping

from ..hosts.host import Allocation, Host, LaunchError, Rendezvous
from .managers import host_names, node_names, number, rank_variables, rendezvous_port

_VARIABLES = {
    "Open MPI": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "MPICH": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}
_OF_A_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


# Variables that name a run of mpirun equally on all hosts.
_IDENTITIES = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_ess_jobid", "SLURM_JOB_ID", "LSB_JOBID")


def find_mpi(environ: Mapping[str, str]) -> Allocation | None:
    """Return this process's part in an MPI job; None outside a job, or if it is the only process.

    Raises LaunchError if rank 0's address is unknown.
    """
    for name, variables in _VARIABLES.items():
        # All four: SLURM's PMI-2 sets PMI_RANK and PMI_SIZE for tasks of srun, but no local ranks.
        if not all(environ.get(variable) for variable in variables):
            continue
        source = f"{name} ({variables[0]}={environ[variables[0]]}, {variables[1]}={environ[variables[1]]})"
        rank, size, local_rank, local_size = (number(environ, variable, source) for variable in variables)
        # A single process has no part to play: `mpirun -n 1 lowtide launch` starts its job like any shell.
        if size == 1:
            return None
        if not 0 < local_size <= size:
            raise LaunchError(f"{source}: {variables[3]}={local_size} is not between 1 and {size}. Use --hosts instead")
        return _part(name, source, (rank, size, local_rank, local_size), environ)
    return None


def _part(name: str, source: str, place: tuple[int, int, int, int], environ: Mapping[str, str]) -> Allocation:
    rank, size, local_rank, local_size = place
    # All processes are on this host, so the loopback suffices.
    address = "127.0.0.1" if local_size == size else _address(source, environ)
    # The port is a hash of this name, so it must be equal on all hosts and differ between two runs.
    job = next((environ[key] for key in _IDENTITIES if environ.get(key)), address)
    identity = f"{name} {job}"
    port = rendezvous_port(identity, environ)
    # A process alone on its host launches the host's ranks. More processes are ranks already.
    if local_size == 1:
        rendezvous = Rendezvous(rank, address, port, identity)
        hosts = tuple(Host(host) for host in _names(size, address, environ))
        return Allocation(source, "join", hosts, part="agent" if rank else "launcher", rendezvous=rendezvous)
    variables = rank_variables(rank, size, local_rank, local_size, address, port)
    note = f"mpirun has started {size} processes, and this is rank {rank}: it runs the script itself"
    hosts = (Host("localhost"),)
    return Allocation(source, "join", hosts, notes=(note,), part="rank", rank_environment=variables)


def _address(source: str, environ: Mapping[str, str]) -> str:
    given = environ.get("MASTER_ADDR")
    managed = node_names(environ) or host_names(environ)
    if not given and not managed:
        raise LaunchError(
            f"{source}: MPI does not tell the host of rank 0 among several, and MASTER_ADDR is not set. Pass it "
            "(mpirun -x MASTER_ADDR=node1, mpiexec -genv MASTER_ADDR node1), or start lowtide once, outside mpirun: "
            "lowtide launch --transport mpirun --hosts node1,node2"
        )
    return given or managed[0]


def _names(size: int, address: str, environ: Mapping[str, str]) -> list[str]:
    """Return names to show: the resource manager's if their number matches."""
    managed = node_names(environ) or host_names(environ)
    # The manager may list more hosts than mpirun uses.
    return managed if len(managed) == size else [address, *(f"mpi-{rank}" for rank in range(1, size))]


def find_torchrun(environ: Mapping[str, str]) -> Allocation | None:
    """Return this process as a rank of the running world, or None. Only LOCAL_RANK tells it from a pod."""
    if not all(environ.get(name) for name in _OF_A_RANK):
        return None
    starters = {"LOWTIDE_JOB_ID": "lowtide launch", "TORCHELASTIC_RUN_ID": "torchrun"}
    starter = next((starter for name, starter in starters.items() if name in environ), "the environment")
    source = f"{starter} (RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set)"
    rank, size = number(environ, "RANK", source), number(environ, "WORLD_SIZE", source)
    note = f"this process is already rank {rank} of {size}: it runs the script itself"
    return Allocation(source, "join", (Host("localhost"),), notes=(note,), part="rank")
