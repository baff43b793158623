"""Rendezvous of the processes of a job: the launcher's variables, a store, the process group.

[Note: one store, many groups]
A process may leave a group and make the next group while another rank is still in the first group. So all groups of
these variables share a store, and each group has its prefix: no rank reads the keys of an earlier group, and the first
rank waits for the rest. With a store for each group, an early rank would find the old store shortly before its owner
closes it. A store that torchrun keeps would hold addresses of the old group.

[Note: loopback alone]
With torch's env:// rank 0 listens on all interfaces, whatever MASTER_ADDR says, and every client may read and write
all keys. So the store of a job on a single host listens on the loopback address, which other hosts cannot reach.
"""

from __future__ import annotations

import errno
import os
import socket
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, TCPStore
from torch.distributed.rendezvous import rendezvous

from .errors import CollectiveError

# The launcher's variables -> their store, and the number of groups made in it. A single entry, global like the default
# process group: see [Note: one store, many groups].
_STORES: dict[tuple[str, ...], tuple[Any, int]] = {}

# Literal addresses: other hosts may resolve "localhost" differently.
_LOOPBACK = {"127.0.0.1": "127.0.0.1", "localhost": "127.0.0.1", "::1": "::1"}
_LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def num_started() -> int:
    """Return the size of the process group. Before the group exists, return WORLD_SIZE."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def is_launched() -> bool:
    return "RANK" in os.environ or "WORLD_SIZE" in os.environ


def launched_ranks() -> tuple[int, int]:
    """Read RANK and WORLD_SIZE from the environment. Raises ValueError if RANK is not in [0, WORLD_SIZE)."""
    found = {name: os.environ.get(name, default) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1"))}
    rank, size = (int(value) if value.isdecimal() else -1 for value in found.values())
    # Without WORLD_SIZE, `make_process_group` raises a better error: it names all missing variables.
    if not 0 <= rank < size and "WORLD_SIZE" in os.environ:
        raise ValueError(
            f"the launcher's environment: expected 0 <= RANK < WORLD_SIZE, found RANK={found['RANK']} and "
            f"WORLD_SIZE={found['WORLD_SIZE']}. Number the ranks of all hosts from 0 to WORLD_SIZE - 1."
        )
    return rank, size


def make_process_group(device: torch.device, timeout_seconds: float) -> None:
    """Make the default process group from the launcher's variables. Without them it has this process only.

    Raises ValueError if some variables are missing, CollectiveError if a rank does not arrive.
    """
    backend = backend_of(device)
    timeout = timedelta(seconds=timeout_seconds)
    if not is_launched():
        # A HashStore is memory of this process: a single rank takes no port, and works without a network.
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)
        return
    present = [name for name in _LAUNCHER_VARIABLES if name in os.environ]
    missing = [name for name in _LAUNCHER_VARIABLES if name not in present]
    if missing:
        raise ValueError(
            f"the launcher's environment is incomplete: found {', '.join(present)}; missing {', '.join(missing)}. "
            "Start the script with `lowtide launch` or torchrun, or set all four, or none to run a single process."
        )
    rank, size = launched_ranks()
    started = time.monotonic()
    try:
        store = _next_store(timeout)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
        # A rank that is ahead may fail and destroy the group while gloo still connects another rank to it.
        if store.add("connected", 1) == size:
            store.set("all connected", "")
        store.wait(["all connected"])
    except RuntimeError as error:  # a DistError of the store; and gloo's, if a rank dies while they connect
        place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise CollectiveError(
            f"rank {rank} of {size}: not all ranks connected to {place} within {time.monotonic() - started:.1f} s "
            f"({str(error).splitlines()[0]}). A rank died or has left, another program uses this port, or the ranks "
            "make different numbers of engines. A slow rank needs a larger communication.timeout_seconds."
        ) from error


def _next_store(timeout: timedelta) -> Any:
    """Return the store of the next process group. See [Note: one store, many groups]."""
    variables = tuple(os.environ[name] for name in _LAUNCHER_VARIABLES)
    if variables not in _STORES:
        # Different variables are a new job. Its rank 0 may need the port that the old store holds.
        _STORES.clear()
        _STORES[variables] = loopback_store(timeout) or next(rendezvous("env://", timeout=timeout))[0], 0
    store, number = _STORES[variables]
    _STORES[variables] = store, number + 1
    # An earlier engine may have made the store, with a different communication.timeout_seconds.
    store.set_timeout(timeout)
    return PrefixStore(f"lowtide/group{number}", store)


def backend_of(device: torch.device) -> str:
    """Return torch's default backend for a device. Raises ValueError if torch has none and there are several ranks."""
    try:
        return str(dist.get_default_backend_for_device(device))
    except ValueError:
        if is_launched() and os.environ.get("WORLD_SIZE") != "1":
            raise ValueError(
                f"device: torch knows no process group backend for {device.type}. Import the package that registers "
                "it, or call torch.distributed.init_process_group before lowtide.initialize."
            ) from None
        return "gloo"  # a single rank sends nothing


def loopback_store(timeout: timedelta) -> TCPStore | None:
    """Make the store that the launcher's variables describe. Rank 0 listens on loopback only.

    Returns None if the job may have several hosts, or if torchrun's agent already hosts the store.
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
        # Reuses a store that this process still has at the port. `_listen` returns None then.
        multi_tenant=True,
        master_listen_fd=_listen(address, port) if is_master else None,
    )


def _listen(address: str, port: int) -> int | None:
    """Open a listening socket for torch to own. Returns None if the port is taken.

    Only torch knows whether a store of this process has the port.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family, backlog=1024).detach()
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        return None
