"""`deepspeed.comm`: the collectives of torch.distributed, and `init_distributed`.

The process group is torch's default group, made here or by the caller. As in DeepSpeed, it lives until
`destroy_process_group`: closing an engine does not end it.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as torch_distributed
from torch.distributed import (
    P2POp as P2POp,
    ProcessGroup as ProcessGroup,
    ReduceOp as ReduceOp,
    all_gather as all_gather,
    all_gather_into_tensor as all_gather_into_tensor,
    all_gather_object as all_gather_object,
    all_reduce as all_reduce,
    all_reduce_coalesced as all_reduce_coalesced,
    all_to_all as all_to_all,
    all_to_all_single as all_to_all_single,
    barrier as barrier,
    batch_isend_irecv as batch_isend_irecv,
    broadcast as broadcast,
    broadcast_object_list as broadcast_object_list,
    destroy_process_group as destroy_process_group,
    gather as gather,
    get_backend as get_backend,
    irecv as irecv,
    is_available as is_available,
    isend as isend,
    monitored_barrier as monitored_barrier,
    new_group as new_group,
    recv as recv,
    reduce as reduce,
    reduce_scatter as reduce_scatter,
    reduce_scatter_tensor as reduce_scatter_tensor,
    scatter as scatter,
    send as send,
)

from ...comm import World
from ..accelerator import get_accelerator

DEFAULT_PORT = TORCH_DISTRIBUTED_DEFAULT_PORT = 29500
DEFAULT_TIMEOUT = timedelta(minutes=int(os.environ.get("DEEPSPEED_TIMEOUT", "30")))

dist = sys.modules[__name__]
allgather_fn = all_gather_into_tensor
reduce_scatter_fn = reduce_scatter_tensor
inference_all_reduce = all_reduce


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = DEFAULT_PORT,
    verbose: bool = True,
    timeout: timedelta = DEFAULT_TIMEOUT,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Make the default process group, unless it exists.

    dist_backend: "nccl", "gloo", ...; None: the accelerator's. init_method: as in torch; None: the launcher's
    environment variables, else those of Open MPI, else a world of a single process. Raises
    RuntimeError if `dist_init_required` is False and the group does not exist.
    """
    if is_initialized():
        return
    if dist_init_required is False:
        raise RuntimeError(
            "init_distributed: expected a process group with dist_init_required=False, found none. First call "
            "deepspeed.init_distributed() or torch.distributed.init_process_group, or leave the argument out"
        )
    own = get_accelerator().communication_backend_name()
    backend = dist_backend or own
    if backend == "nccl" and not torch.cuda.is_available():
        backend = "gloo"  # a script for GPUs on a machine without GPUs
    if init_method is None:
        _complete_environment(distributed_port, auto_mpi_discovery)
    if init_method is None and backend == own:
        World.join(get_accelerator().device_name(), timeout.total_seconds())  # the same group as an engine's
        return
    torch_distributed.init_process_group(
        backend, init_method=init_method, timeout=timeout, rank=rank, world_size=world_size
    )
    if get_accelerator().device_name() != "cpu":
        get_accelerator().set_device(get_local_rank())


def _complete_environment(port: int, auto_mpi_discovery: bool) -> None:
    """Set the variables that no launcher has set: from Open MPI's, or for a single process."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", str(port))
        # Without a launcher's word all ranks are taken to be on this host.
        os.environ.setdefault("LOCAL_RANK", os.environ["RANK"])
        return
    by_mpi = auto_mpi_discovery and "OMPI_COMM_WORLD_SIZE" in os.environ
    found = {
        "RANK": os.environ["OMPI_COMM_WORLD_RANK"] if by_mpi else "0",
        "WORLD_SIZE": os.environ["OMPI_COMM_WORLD_SIZE"] if by_mpi else "1",
        "LOCAL_RANK": os.environ["OMPI_COMM_WORLD_LOCAL_RANK"] if by_mpi else "0",
    }
    if by_mpi and found["WORLD_SIZE"] != "1" and "MASTER_ADDR" not in os.environ:
        raise RuntimeError(
            f"init_distributed: expected MASTER_ADDR with Open MPI's variables (rank {found['RANK']} of "
            f"{found['WORLD_SIZE']}), found none. Pass `mpirun -x MASTER_ADDR=HOST`, or start the script by "
            "`lowtide launch`"
        )
    os.environ.update(found)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    # Processes of mpirun must agree on the port. Scripts of a single process may run side by side.
    os.environ.setdefault("MASTER_PORT", str(port if by_mpi else _free_port()))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def is_initialized() -> bool:
    return torch_distributed.is_available() and torch_distributed.is_initialized()


def get_rank(group: ProcessGroup | None = None) -> int:
    """Return the rank in the group. Raises RuntimeError without a process group."""
    _check_initialized("get_rank")
    return torch_distributed.get_rank(group)


def get_world_size(group: ProcessGroup | None = None) -> int:
    """Return the size of the group. Raises RuntimeError without a process group."""
    _check_initialized("get_world_size")
    return torch_distributed.get_world_size(group)


def get_local_rank() -> int:
    """Return the rank on this host by LOCAL_RANK, 0 without a launcher."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def get_world_group() -> Any:
    _check_initialized("get_world_group")
    return torch_distributed.group.WORLD


def get_global_rank(group: ProcessGroup | None = None, group_rank: int = 0) -> int:
    if group is None:
        return group_rank
    return torch_distributed.get_global_rank(group, group_rank)


def get_all_ranks_from_group(group: ProcessGroup | None = None) -> list[int]:
    """Return the global ranks of a group."""
    return [get_global_rank(group, rank) for rank in range(get_world_size(group))]


def initialize_mesh_device(mesh_shape: Sequence[int], mesh_dim_names: Sequence[str]) -> Any:
    """Make a device mesh of torch."""
    device = get_accelerator().device_name()
    return torch_distributed.init_device_mesh(device, tuple(mesh_shape), mesh_dim_names=tuple(mesh_dim_names))


def has_all_gather_into_tensor() -> bool:
    return True


has_reduce_scatter_tensor = has_all_reduce_coalesced = has_coalescing_manager = has_all_gather_into_tensor


def _check_initialized(call: str) -> None:
    if not is_initialized():
        raise RuntimeError(
            f"deepspeed.comm.{call}(): expected a process group, found none. Call deepspeed.init_distributed() first"
        )


def __getattr__(name: str) -> Any:
    """Find a name of DeepSpeed that is not here: see `names.find`."""
    from ..names import find

    return find("comm", name)
