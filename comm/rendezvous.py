"""How the processes of a job find each other: the launcher's variables, a store, the process group.

[Note: one store, many groups]
A process may make a group, leave it and make the next while another rank has not left the first one. So the store in
which ranks find each other is kept from group to group, and each group has a part of it to itself: nobody reads what an
earlier group has written, and whoever is first waits for the others. With a store for each group, the early rank finds
the old one, whose owner is about to close it; a store that torchrun keeps would have the addresses of the old group.

[Note: loopback alone]
torch's own way (env://) has rank 0 listen on all interfaces, whatever MASTER_ADDR says, and whoever connects may read
and write every key. So the store of a job of one host listens at the loopback address, which nobody outside reaches.
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

# The launcher's variables -> the store that they lead to, and how many groups were made in it. One entry, as global as
# the default process group; see [Note: one store, many groups].
_STORES: dict[tuple[str, ...], tuple[Any, int]] = {}

# The address of the host itself, literally: a name may lead elsewhere on other hosts.
_LOOPBACK = {"127.0.0.1": "127.0.0.1", "localhost": "127.0.0.1", "::1": "::1"}
_LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def num_started() -> int:
    """Of the process group, or, before it is made, those that a launcher has started."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def is_launched() -> bool:
    return "RANK" in os.environ or "WORLD_SIZE" in os.environ


def launched_ranks() -> tuple[int, int]:
    """RANK and WORLD_SIZE of the environment. Raises ValueError where they do not fit."""
    found = {name: os.environ.get(name, default) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1"))}
    rank, size = (int(value) if value.isdecimal() else -1 for value in found.values())
    if not 0 <= rank < size and "WORLD_SIZE" in os.environ:
        raise ValueError(
            f"the launcher's environment: expected 0 <= RANK < WORLD_SIZE, found RANK={found['RANK']} and "
            f"WORLD_SIZE={found['WORLD_SIZE']}; ranks are numbered from 0 to WORLD_SIZE - 1, over all hosts"
        )
    return rank, size


def make_process_group(device: torch.device, timeout_seconds: float) -> None:
    backend = backend_of(device)
    timeout = timedelta(seconds=timeout_seconds)
    if not is_launched():
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)
        return
    present = [name for name in _LAUNCHER_VARIABLES if name in os.environ]
    missing = [name for name in _LAUNCHER_VARIABLES if name not in present]
    if missing:
        raise ValueError(
            f"the launcher's environment is incomplete: found {', '.join(present)}; missing {', '.join(missing)}. "
            "Start the script with `lowtide launch` or torchrun, or set all four, or none for a world of one."
        )
    rank, size = launched_ranks()
    started = time.monotonic()
    try:
        dist.init_process_group(backend, store=_next_store(timeout), rank=rank, world_size=size, timeout=timeout)
    except dist.DistError as error:
        place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise CollectiveError(
            f"rank {rank} of {size}: not all ranks came to {place}, in {time.monotonic() - started:.1f} s "
            f"({str(error).splitlines()[0]}). A rank died or has left, another program listens there, or the ranks "
            "make different numbers of engines; a slow rank needs a larger communication.timeout_seconds."
        ) from error


def _next_store(timeout: timedelta) -> Any:
    """Where the ranks of the next process group find each other: see [Note: one store, many groups]."""
    variables = tuple(os.environ[name] for name in _LAUNCHER_VARIABLES)
    if variables not in _STORES:
        _STORES.clear()
        _STORES[variables] = loopback_store(timeout) or next(rendezvous("env://", timeout=timeout))[0], 0
    store, number = _STORES[variables]
    _STORES[variables] = store, number + 1
    store.set_timeout(timeout)
    return PrefixStore(f"lowtide/group{number}", store)


def backend_of(device: torch.device) -> str:
    """The process group that torch has for a device. Raises ValueError where it knows none, and ranks need one."""
    try:
        return str(dist.get_default_backend_for_device(device))
    except ValueError:
        if is_launched() and os.environ.get("WORLD_SIZE") != "1":
            raise ValueError(
                f"device: expected one for which torch knows a process group, found {device.type}; import what "
                "registers it, or call torch.distributed.init_process_group before lowtide.initialize"
            ) from None
        return "gloo"  # nobody to speak to


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
