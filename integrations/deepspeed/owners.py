"""Which engine has a parameter: what DeepSpeed hangs on the parameters themselves.

Functions such as `safe_get_full_fp32_param(param)` are given a parameter alone. The engines are found by weak
references to both, as global as the parameters are.
"""

from __future__ import annotations

import weakref

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from ..engine.engine import Engine
from ..zero.released import mark_present
from .marks import mark, unmark
from .messages import logger

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
