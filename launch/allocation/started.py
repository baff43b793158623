"""What the sources share whose processes are started by someone else: numbers, the meeting port, ranks' variables.

[Note: meeting port]
Launchers that someone else started on every host cannot tell each other a port that one of them has bound. It is
computed from the job's name instead, below the range from which the kernel gives ports to others (32768 and up), so
that two jobs on a host rarely meet, and MASTER_PORT overrules it.
"""

import zlib
from collections.abc import Mapping

from ..hosts.host import LaunchError

_FIRST_PORT, _NUM_PORTS = 20000, 10000


def number(environ: Mapping[str, str], name: str, source: str) -> int:
    """The value of a variable that `source` sets. Raises LaunchError where it is missing or no number."""
    value = environ.get(name, "")
    if not value.isascii() or not value.isdigit():
        found = f'"{value}"' if name in environ else "nothing"
        raise LaunchError(
            f"{source}: expected a number in the environment variable {name}, found {found}; "
            "say the hosts with --hosts, or use --transport local for this machine alone"
        )
    return int(value)


def meeting_port(identity: str, environ: Mapping[str, str]) -> int:
    """Where host 0 of the job `identity` listens: MASTER_PORT where it is set. See [Note: meeting port]."""
    if environ.get("MASTER_PORT"):
        return number(environ, "MASTER_PORT", identity)
    return _FIRST_PORT + zlib.crc32(identity.encode()) % _NUM_PORTS


def rank_variables(rank: int, size: int, local_rank: int, local_size: int, address: str, port: int) -> dict[str, str]:
    """What torchrun sets for a rank, from what another launcher said."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_size),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }
