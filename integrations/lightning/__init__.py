"""lowtide as strategies of Lightning's Trainer.

    import lowtide.lightning

    trainer = Trainer(strategy="lowtide_stage_3")  # or LowtideStrategy(config="ds_config.json")

The import registers the names of `NAMES`, in `lightning.pytorch`, and in `pytorch_lightning` where that was imported
before: the two packages have classes of their own. `LowtideStrategy` is that of `lightning.pytorch`, unless
`pytorch_lightning` alone was imported.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from .names import NAMES, register

if TYPE_CHECKING:
    from .for_lightning import LowtidePrecision, LowtideStrategy
    from .single_file import consolidate

__all__ = ["NAMES", "LowtidePrecision", "LowtideStrategy", "consolidate"]

_PACKAGES = {"lightning": "for_lightning", "pytorch_lightning": "for_pytorch_lightning"}


def _chosen() -> list[Any]:
    """The modules with our classes of the packages that are in use; those of the first are the public ones."""
    used = [package for package in _PACKAGES if package in sys.modules] or ["lightning"]
    try:
        return [import_module(f".{_PACKAGES[package]}", __name__) for package in used]
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in _PACKAGES:
            raise
        raise ModuleNotFoundError(
            "lowtide.lightning: expected the package lightning 2.6 or newer, found none; "
            'pip install "lowtide[lightning]". With pytorch_lightning, import that before lowtide.lightning',
            name=error.name,
        ) from error


_modules = _chosen()
for _module in _modules:
    register(_module.LowtideStrategy)


def __getattr__(name: str) -> Any:
    if name == "consolidate":
        return import_module(".single_file", __name__).consolidate
    if name in ("LowtideStrategy", "LowtidePrecision"):
        return getattr(_modules[0], name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
