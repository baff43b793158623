"""What scripts import as `deepspeed.utils.groups`: all ranks are data-parallel ones to them."""

from __future__ import annotations

from typing import Any

from . import comm


def get_data_parallel_group() -> Any:
    return comm.get_world_group()


def get_data_parallel_world_size() -> int:
    return comm.get_world_size()


def get_data_parallel_rank() -> int:
    return comm.get_rank()


def get_model_parallel_group() -> None:
    return None


def get_model_parallel_world_size() -> int:
    return 1


def get_model_parallel_rank() -> int:
    return 0


get_tensor_model_parallel_group = get_model_parallel_group
get_tensor_model_parallel_world_size = get_model_parallel_world_size
get_tensor_model_parallel_rank = get_model_parallel_rank
