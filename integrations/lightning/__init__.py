"""lowtide's strategies for Lightning's Trainer.

    import lowtide.lightning

    trainer = Trainer(strategy="lowtide_stage_3")  # or LowtideStrategy(config="ds_config.json")

The import registers the strategies of `NAMES` in `lightning.pytorch`, and in `pytorch_lightning` if that was imported
before. The two packages have separate classes. `LowtideStrategy` is the class for `lightning.pytorch`, unless only
`pytorch_lightning` was imported.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .checkpoints import consolidate
    from .for_lightning import LowtidePrecision, LowtideStrategy

__all__ = ["NAMES", "LowtidePrecision", "LowtideStrategy", "consolidate"]

_PACKAGES = {"lightning": "for_lightning", "pytorch_lightning": "for_pytorch_lightning"}

NAMES: dict[str, dict[str, Any]] = {
    "lowtide": {"stage": 2},
    "lowtide_stage_1": {"stage": 1},
    "lowtide_stage_2": {"stage": 2},
    "lowtide_stage_2_offload": {"stage": 2, "offload_optimizer": "cpu"},
    "lowtide_stage_3": {"stage": 3},
    "lowtide_stage_3_offload": {"stage": 3, "offload_optimizer": "cpu", "offload_parameters": "cpu"},
    "lowtide_stage_3_offload_nvme": {"stage": 3, "offload_optimizer": "nvme", "offload_parameters": "nvme"},
}
"""Strategy name, as for Lightning's DeepSpeed strategy -> arguments of `LowtideStrategy`."""


def register(strategy: Any) -> None:
    """Register the names. strategy: the class for a Lightning package."""
    registry = strategy.registry()
    for name, options in NAMES.items():
        if name not in registry:
            described = ", ".join(f"{key} {value}" for key, value in options.items())
            registry.register(name, strategy, description=f"lowtide: {described}", **options)


def _chosen() -> list[Any]:
    """Return our modules for the imported packages. The first has the public classes."""
    used = [package for package in _PACKAGES if package in sys.modules] or ["lightning"]
    try:
        return [import_module(f".{_PACKAGES[package]}", __name__) for package in used]
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in _PACKAGES:
            raise
        raise ModuleNotFoundError(
            "lowtide.lightning: expected the package lightning 2.6 or newer, found none. "
            'pip install "lowtide[lightning]", or import pytorch_lightning before lowtide.lightning',
            name=error.name,
        ) from error


_modules = _chosen()
for _module in _modules:
    register(_module.LowtideStrategy)


def __getattr__(name: str) -> Any:
    if name == "consolidate":
        return import_module(".checkpoints", __name__).consolidate
    if name in ("LowtideStrategy", "LowtidePrecision"):
        return getattr(_modules[0], name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
