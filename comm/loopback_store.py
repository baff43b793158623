"""The rendezvous store of a job of one host, which nobody outside of that host can reach.

torch's own way (env://) has rank 0 listen on all interfaces, whatever MASTER_ADDR says, and whoever connects may read
and write every key.
"""

import errno
import os
import socket
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

# The address of the host itself, literally: a name may lead elsewhere on other hosts.
_LOOPBACK = {"127.0.0.1": "127.0.0.1", "localhost": "127.0.0.1", "::1": "::1"}


def loopback_store(timeout: timedelta) -> TCPStore | None:
    """The store that the launcher's variables describe; rank 0 listens at the loopback address alone.

    None where the job may have other hosts, or where torchrun's agent has the store already.
    """
    address = _LOOPBACK.get(os.environ["MASTER_ADDR"])
    is_one_host = os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]
    if address is None or not is_one_host or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return None
    port, is_master = int(os.environ["MASTER_PORT"]), int(os.environ["RANK"]) == 0
    return TCPStore(
        address,
        port,
        int(os.environ["WORLD_SIZE"]),
        is_master,
        timeout,
        # A store of this process that still lives at the port is taken again: `_listen` gives none then.
        multi_tenant=True,
        master_listen_fd=_listen(address, port) if is_master else None,
    )


def _listen(address: str, port: int) -> int | None:
    """A descriptor for torch to own; None where the port is taken: only torch knows whether by a store of its own."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family, backlog=1024).detach()
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        return None
