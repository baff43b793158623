"""`zero.Init`: models that no rank ever holds."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from ..comm import World
from . import comm
from .accelerator import get_accelerator
from .config import DeepSpeedConfig
from .divided import DividedParameters, dividing
from .messages import logger


class Init:
    """A context, or a call with a module, in which parameters are divided over the ranks as they are made.

    A part of each stays on each rank's host, and `initialize` takes it. The values are rank 0's, with the bits that
    they have without this context. Reading or changing a divided parameter opens it for a while, on all ranks together;
    what one rank alone does to it belongs into `GatheredParameters(..., modifier_rank=...)`. With a config whose stage
    is not 3 nothing is divided.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        zero_param_parallel_group: Any = None,
        zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False,
        sequence_data_parallel_group: Any = None,
        param_swapper: Any = None,
        tensor_overrides: Any = None,
    ) -> None:
        """module: one that is made already, whose parameters are divided now. config_dict_or_path, config: tells the
        stage; None: 3. dtype: of the parameters that are made; None: as they are.

        mem_efficient_linear, remote_device, pin_memory, zero_param_parallel_group and tensor_overrides have no effect:
        parts are where the parameters were made, and later where the config says. Raises NotImplementedError for groups
        of some of the ranks, quantized weights and a param_swapper.
        """
        self._context = ExitStack()
        self._dtype = dtype if enabled else None
        self._divides = False
        if not enabled:
            return
        comm.init_distributed()
        self._check_groups(data_parallel_group, sequence_data_parallel_group)
        _refuse("zero_quantized_weights", zero_quantized_weights)
        _refuse("zero_quantized_nontrainable_weights", zero_quantized_nontrainable_weights)
        _refuse("param_swapper", param_swapper)
        given = config if config is not None else config_dict_or_path
        self._divides = given is None or DeepSpeedConfig(given, mpu).stage == 3
        if not self._divides:
            logger.info("zero.Init: the config's stage is not 3, and nothing is divided")
        elif module is not None:
            table = _new_table()
            for param in module.parameters():
                table.add(param)
            table.divide_all()

    def _check_groups(self, *groups: Any) -> None:
        for group in groups:
            if group is not None and comm.get_world_size(group) != comm.get_world_size():
                raise NotImplementedError(
                    f"zero.Init: expected a data_parallel_group of all {comm.get_world_size()} ranks, found one of "
                    f"{comm.get_world_size(group)}; parameters are divided over all of them: leave it out"
                )

    def __enter__(self) -> Init:
        with ExitStack() as stack:
            if self._dtype is not None:
                stack.callback(torch.set_default_dtype, torch.get_default_dtype())
                torch.set_default_dtype(self._dtype)
            if self._divides:
                stack.enter_context(dividing(_new_table()))
            self._context = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)


def _new_table() -> DividedParameters:
    return DividedParameters(join_world())


def join_world() -> World:
    """This process among those of `comm.init_distributed`."""
    return World.join(get_accelerator().device_name(), comm.DEFAULT_TIMEOUT.total_seconds())


def _refuse(name: str, value: Any) -> None:
    if value:
        raise NotImplementedError(
            f"zero.Init: expected no {name}, found {value!r}: weights are divided as they are; leave it out"
        )
