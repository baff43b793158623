"""Which engine has a parameter: what DeepSpeed hangs on the parameters themselves.

Functions such as `safe_get_full_fp32_param(param)` are given a parameter alone. The engines are found by weak
references to both, as global as the parameters are.
"""

from __future__ import annotations

import weakref

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from ..engine.engine import Engine
from .marks import mark, unmark

_OWNERS: WeakIdKeyDictionary = WeakIdKeyDictionary()


def own(module: nn.Module, engine: Engine) -> None:
    for param in module.parameters():
        _OWNERS[param] = weakref.ref(engine)
        if engine.config.zero_optimization.stage == 3:
            mark(param)
        else:
            unmark(param)


def own_no_more(module: nn.Module) -> None:
    for param in module.parameters():
        if param in _OWNERS:
            del _OWNERS[param]
            unmark(param)


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
