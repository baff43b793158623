"""Transport "mpirun": an MPI's own starter starts the agents; no MPI library is needed for more."""

import shutil
import subprocess
from collections.abc import Sequence

from ..agent.agent import TOKEN_VARIABLE
from ..hosts.host import LaunchError

_VERSION_SECONDS = 20.0


def mpirun_command(agent: Sequence[str], hosts: Sequence[str]) -> list[str]:
    """One agent a host, not bound to cores. Raises LaunchError where there is no mpirun, or one that is not known."""
    program = shutil.which("mpirun") or shutil.which("mpiexec")
    if program is None:
        raise LaunchError(
            "--transport mpirun needs mpirun or mpiexec in the path, found neither; load the MPI module of your "
            "cluster, or use --transport ssh"
        )
    return [program, *_flags(_version(program), hosts), *agent]


def _version(program: str) -> str:
    try:
        done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=_VERSION_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"`{program} --version` does not work: {error}") from error
    return done.stdout + done.stderr


def _flags(version: str, hosts: Sequence[str]) -> list[str]:
    """Sources: mpirun(1) of Open MPI 4 and 5; the Hydra manual of MPICH; Intel MPI's mpiexec.hydra is the latter's."""
    count = str(len(hosts))
    if "Open MPI" in version or "OpenRTE" in version:
        places = ",".join(f"{host}:1" for host in hosts)
        return ["-np", count, "--host", places, "--map-by", "ppr:1:node", "--bind-to", "none", "-x", TOKEN_VARIABLE]
    if "HYDRA" in version or "Intel(R) MPI" in version:
        names = ",".join(hosts)
        return ["-n", count, "-ppn", "1", "-hosts", names, "-bind-to", "none", "-genvlist", TOKEN_VARIABLE]
    first = version.strip().splitlines()[0] if version.strip() else "nothing"
    raise LaunchError(
        f'expected the mpirun of Open MPI, MPICH (Hydra) or Intel MPI, found one that says "{first}" about its '
        "version; use --transport ssh or srun"
    )
