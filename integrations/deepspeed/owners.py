"""Which engine has a parameter, and the attributes `ds_id`, `ds_shape`, ... that DeepSpeed hangs on it.

Functions such as `safe_get_full_fp32_param(param)` are given a parameter alone. The engines are found by weak
references to both, as global as the parameters are. Scripts ask for the attributes to know which parameters they must
gather: `hasattr(param, "ds_id")`, and then whether its values are there. They say nothing that the engine reads.
"""

from __future__ import annotations

import weakref
from enum import Enum
from itertools import count

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from ..engine.engine import Engine
from ..zero.released import ReleasedParameter, mark_present
from .messages import logger

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


_OWNERS: WeakIdKeyDictionary = WeakIdKeyDictionary()


def own(module: nn.Module, engine: Engine) -> None:
    for param in module.parameters():
        _OWNERS[param] = weakref.ref(engine)
        if engine.config.zero_optimization.stage == 3:
            mark(param)
        else:
            unmark(param)


def own_no_more(module: nn.Module, engine: Engine) -> None:
    """Of a later engine of the same module they stay."""
    for param in module.parameters():
        if owner_of(param) is engine:
            del _OWNERS[param]
            unmark(param)


def take_from_owner(module: nn.Module) -> None:
    """Ends the engine that the module was given to, if it is open; parameters are whole then. A collective."""
    params = list(module.parameters())
    engines = {id(found): found for param in params if (found := owner_of(param)) is not None}
    for engine in engines.values():
        if engine.module is not module or not engine.is_open:
            continue
        logger.warning("deepspeed.initialize: the model has an engine already, which is destroyed now")
        own_no_more(module, engine)
        with engine.gathered():
            values = (
                [param.detach().to("cpu", copy=True) for param in params]
                if engine.config.zero_optimization.stage == 3
                else []
            )
        engine.close()
        mark_present(params)
        for param, value in zip(params, values, strict=False):
            param.data = value


def owner_of(param: nn.Parameter) -> Engine | None:
    """None where it has none, or one that nobody else has any more."""
    try:
        found: weakref.ref[Engine] = _OWNERS[param]
    except KeyError:
        return None
    return found()


def owner_or_error(param: nn.Parameter, call: str) -> Engine:
    """Raises ValueError for a parameter of no engine."""
    found = owner_of(param)
    if found is None:
        raise ValueError(
            f"{call}: expected a parameter of a model that was given to deepspeed.initialize, found one of none, of "
            f"shape {tuple(param.shape)}"
        )
    return found
