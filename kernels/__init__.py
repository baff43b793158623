"""Fused kernels for the layers of a model, its loss, and flat buffers. docs/kernels.md lists them.

Names are imported on first use. Each kernel runs on any device: in Triton on a GPU, as eager torch elsewhere.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # "as" exports a name
    from .cross_entropy import cross_entropy as cross_entropy
    from .fuse import Fused as Fused, fuse_model as fuse_model
    from .fused_loss import loss_only as loss_only
    from .gated_mlp import (
        geglu as geglu,
        geglu_packed as geglu_packed,
        swiglu as swiglu,
        swiglu_packed as swiglu_packed,
    )
    from .linear_cross_entropy import linear_cross_entropy as linear_cross_entropy
    from .optimizer_step import update_runs as update_runs, update_shard as update_shard
    from .rotary import rotary_embedding as rotary_embedding
    from .row_norm import add_rms_norm as add_rms_norm, rms_norm as rms_norm
    from .sum_of_squares import squares_by_block as squares_by_block, squares_of_each as squares_of_each

_HOME = {
    "Fused": ".fuse",
    "add_rms_norm": ".row_norm",
    "cross_entropy": ".cross_entropy",
    "fuse_model": ".fuse",
    "geglu": ".gated_mlp",
    "geglu_packed": ".gated_mlp",
    "linear_cross_entropy": ".linear_cross_entropy",
    "loss_only": ".fused_loss",
    "rms_norm": ".row_norm",
    "rotary_embedding": ".rotary",
    "squares_by_block": ".sum_of_squares",
    "squares_of_each": ".sum_of_squares",
    "swiglu": ".gated_mlp",
    "swiglu_packed": ".gated_mlp",
    "update_runs": ".optimizer_step",
    "update_shard": ".optimizer_step",
}
__all__ = list(_HOME)


class _Package(ModuleType):
    """Imports public names on first use."""

    def __setattr__(self, name: str, value: object) -> None:
        # The import of the file cross_entropy.py must not replace the function of that name by the module.
        if not (name in _HOME and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __getattr__(self, name: str) -> object:
        """Import the public object `name` from its module, and keep it here."""
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
        value: object = getattr(import_module(_HOME[name], __name__), name)
        setattr(self, name, value)
        return value

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *__all__})


# A class, as a module of its own kind: PEP 562 has `__getattr__` of a module, but no `__setattr__`.
sys.modules[__name__].__class__ = _Package
