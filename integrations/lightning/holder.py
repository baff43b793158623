"""The engine that has a LightningModule: trainers come and go, and a later one finds it by the module."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..engine.engine import Engine

_NAME = "_lowtide_holder"


class _Holder:
    """An attribute of a module, of which copies of the module have an empty one."""

    def __init__(self, engine: Engine | None = None) -> None:
        self.engine = engine

    def __deepcopy__(self, memo: dict[int, Any]) -> _Holder:
        return _Holder()

    def __reduce__(self) -> tuple[type[_Holder], tuple[()]]:
        return _Holder, ()


def engine_of(module: nn.Module) -> Engine | None:
    """The open engine of an earlier call of a Trainer, of this one or another."""
    holder = module.__dict__.get(_NAME)
    if holder is None or holder.engine is None or not holder.engine.is_open:
        return None
    engine: Engine = holder.engine
    return engine


def hold(module: nn.Module, engine: Engine) -> None:
    module.__dict__[_NAME] = _Holder(engine)
