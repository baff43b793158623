"""The attributes `ds_id`, `ds_shape`, `ds_numel`, `ds_status` and `ds_persist` of parameters that are divided.

Scripts ask for them to know which parameters they must gather: `hasattr(param, "ds_id")`, and then whether its values
are there. They say nothing that the engine reads.
"""

from __future__ import annotations

from enum import Enum
from itertools import count

from torch import nn

from ..zero.released import ReleasedParameter

_NAMES = ("ds_id", "ds_shape", "ds_numel", "ds_status", "ds_persist")
_IDS = count()


class ZeroParamStatus(Enum):
    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


def mark(param: nn.Parameter) -> None:
    """As a parameter that is divided, whether its values are there now or not."""
    if "ds_id" not in param.__dict__:
        # The status of one whose values are not there is its class's: see below.
        values = (next(_IDS), param.shape, param.numel(), ZeroParamStatus.AVAILABLE, False)
        param.__dict__.update(zip(_NAMES, values, strict=True))


def unmark(param: nn.Parameter) -> None:
    for name in _NAMES:
        param.__dict__.pop(name, None)


def _not_available(param: ReleasedParameter) -> ZeroParamStatus:
    return ZeroParamStatus.NOT_AVAILABLE


ReleasedParameter.ds_status = property(_not_available)  # type: ignore[attr-defined]  # it comes before the parameter's own
