"""Find the engine of a parameter, and set `ds_id`, `ds_shape`, ... on parameters as DeepSpeed does.

Functions such as `safe_get_full_fp32_param(param)` get only a parameter. A global table of weak references maps it to
its engine. Scripts read the attributes to decide which parameters to gather (`hasattr(param, "ds_id")`, `ds_status`).
lowtide's engine does not read them.
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


ZeroParamStatus = Enum("ZeroParamStatus", ["AVAILABLE", "NOT_AVAILABLE", "INFLIGHT"])
"""DeepSpeed's states of a parameter's values."""


def set_ds_attributes(param: nn.Parameter) -> None:
    """Set the attributes of a divided parameter, whether its values are present now or not."""
    if "ds_id" not in param.__dict__:
        # While the values are away, `ReleasedParameter.ds_status` below says NOT_AVAILABLE.
        values = (next(_IDS), param.shape, param.numel(), ZeroParamStatus.AVAILABLE, False)
        param.__dict__.update(zip(_NAMES, values, strict=True))


def remove_ds_attributes(param: nn.Parameter) -> None:
    """Remove the attributes."""
    for name in _NAMES:
        param.__dict__.pop(name, None)


def _not_available(param: ReleasedParameter) -> ZeroParamStatus:
    return ZeroParamStatus.NOT_AVAILABLE


# A property of the class goes before the attribute of the parameter.
ReleasedParameter.ds_status = property(_not_available)  # type: ignore[attr-defined]


_OWNERS: WeakIdKeyDictionary = WeakIdKeyDictionary()


def set_owner(module: nn.Module, engine: Engine) -> None:
    """Record the engine of a module's parameters, and mark them at stage 3."""
    for param in module.parameters():
        _OWNERS[param] = weakref.ref(engine)
        if engine.config.zero_optimization.stage == 3:
            set_ds_attributes(param)
        else:
            remove_ds_attributes(param)


def forget_owner(module: nn.Module, engine: Engine) -> None:
    """Forget the engine, unless a later engine has the module."""
    for param in module.parameters():
        if owner_of(param) is engine:
            del _OWNERS[param]
            remove_ds_attributes(param)


def take_from_owner(module: nn.Module) -> None:
    """Close the engine of the module, if it is open; parameters are whole then. A collective."""
    params = list(module.parameters())
    engines = {id(found): found for param in params if (found := owner_of(param)) is not None}
    for engine in engines.values():
        if engine.module is not module or not engine.is_open:
            continue
        logger.warning("deepspeed.initialize: the model already has an engine, which is destroyed now")
        forget_owner(module, engine)
        with engine.gathered():
            # At stage 3 closing leaves shards, and the next engine needs whole parameters.
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
    """Return the engine of a parameter; None if it has none, or if that engine is gone."""
    try:
        found: weakref.ref[Engine] = _OWNERS[param]
    except KeyError:
        return None
    return found()


def owner_or_error(param: nn.Parameter, call: str) -> Engine:
    """Return the engine of a parameter. Raises ValueError without an engine."""
    found = owner_of(param)
    if found is None:
        raise ValueError(
            f"{call}: expected a parameter of a model given to deepspeed.initialize, found a parameter of shape "
            f"{tuple(param.shape)} without an engine"
        )
    return found
