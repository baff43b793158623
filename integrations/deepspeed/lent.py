"""States that leave the device between steps, in DeepSpeed's words."""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum

from ..engine.engine import Engine
from .parameters import OffloadDeviceEnum


class OffloadStateTypeEnum(StrEnum):
    """What `offload_states` may take."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


_KINDS = {
    OffloadStateTypeEnum.optim_states: "optimizer",
    OffloadStateTypeEnum.hp_params: "optimizer",
    OffloadStateTypeEnum.lp_params: "parameters",
    OffloadStateTypeEnum.lp_grads: "gradients",
    OffloadStateTypeEnum.contiguous_grad_buffer: "gradients",
}


class LendsStates:
    """What DeepSpeed's engine and its optimizer both have."""

    @property
    def _lender(self) -> Engine:
        raise NotImplementedError

    def offload_states(
        self,
        include: Collection[OffloadStateTypeEnum] | None = None,
        device: OffloadDeviceEnum = OffloadDeviceEnum.cpu,
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """States leave the device until `reload_states`: the optimizer's with master weights, whichever is named.

        device: "none" takes nothing. non_blocking: of no effect; the copies are waited for, since the memory is to be
        free.
        """
        if OffloadDeviceEnum(device) is OffloadDeviceEnum.none:
            return
        if OffloadDeviceEnum(device) is not OffloadDeviceEnum.cpu:
            raise ValueError(
                f"offload_states: expected device 'cpu', found {device.value!r}; what is always to rest in files is "
                "named by offload_optimizer and offload_param in the config"
            )
        kinds = None if include is None else {_KINDS[OffloadStateTypeEnum(one)] for one in include}
        self._lender.offload_states(kinds, pin_memory)

    def reload_states(self, non_blocking: bool = False) -> None:
        self._lender.reload_states()
