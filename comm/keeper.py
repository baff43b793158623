"""The store of a job whose islands outlive rank 0: a process of its own, started by `lowtide launch --islands`.

    python -P -m lowtide.comm.keeper PORT (local | any)

Lines of its input are words of the launcher, `ISLAND WHY`: nothing is to be expected of that island any more. Those
that wait for it look for that. It ends with its input.
"""

from __future__ import annotations

import socket
import sys
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

from .islands import gone_key

_BACKLOG = 1024


def main() -> int:
    """The command line above."""
    port, is_local = int(sys.argv[1]), sys.argv[2] == "local"
    listener = _listen(port, is_local)
    store = TCPStore(
        "127.0.0.1",
        port,
        None,
        True,
        timedelta(seconds=60),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    for line in sys.stdin:
        island, _, why = line.strip().partition(" ")
        store.set(gone_key(int(island)), why)
    return 0


def _listen(port: int, is_local: bool) -> socket.socket:
    if is_local:
        return socket.create_server(("127.0.0.1", port), backlog=_BACKLOG)
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True)
        except OSError:
            pass  # a machine without IPv6
    return socket.create_server(("", port), backlog=_BACKLOG)


if __name__ == "__main__":
    sys.exit(main())
