"""What the section `kernels` makes of a model: whether it can be, and the modules that are replaced."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from ...comm import World
from ...kernels.dispatch import Backend, has_triton, is_interpreted
from ...kernels.fuse import NOT_FOUND, lines_of, replace_modules
from ...model.ledger import Ledger
from ...watch.log import logger
from ..config.config import Config
from ..config.errors import ConfigError, Fault
from ..config.kernels import FUSION_NAMES, KERNEL_NAMES


def check_kernels(config: Config, device: torch.device) -> None:
    """Raises ConfigError for each kernel that is to run its Triton form where that cannot be."""
    problem = None
    if not has_triton():
        problem = "needs the package triton, which is not installed"
    elif device.type != "cuda" and not is_interpreted():
        problem = f"needs a GPU, and the model is on the device {device.type}"
    kernels = config.kernels
    asking = [key for key in ("backend", *KERNEL_NAMES) if getattr(kernels, key) == "triton"]
    if problem is not None and asking:
        message = f'"triton" {problem}; "auto" is Triton where it can be'
        raise ConfigError([Fault(f"kernels.{key}", "conflict", message) for key in asking])


def fuse_modules(module: nn.Module, config: Config, world: World, ledger: Ledger) -> None:
    """Replaces what kernels.fuse_modules asks for, and logs it on rank 0."""
    wanted = config.kernels.fuse_modules
    backends: dict[str, Backend] = {name: config.kernels.backend_of(name) for name in FUSION_NAMES}
    names = [name for name in FUSION_NAMES if wanted is True or (isinstance(wanted, tuple) and name in wanted)]
    lines = []
    if config.parallel.tensor > 1:
        names = _beside_splits(wanted, names)
    if wanted == "auto":
        reason, found = where_triton_runs(world.device, backends)
        names = _beside_splits(wanted, found) if config.parallel.tensor > 1 else found
        if "fuse_modules" in config.kernels.model_fields_set:
            lines.append(f'config: kernels.fuse_modules: "auto" is {str(bool(names)).lower()}: {reason}')
    if config.tiles.loss and "linear_cross_entropy" in names:
        names.remove("linear_cross_entropy")
        lines.append("config: kernels.linear_cross_entropy: its head and loss are computed by tiles.loss here")
    fused, missing = replace_modules(
        module, names, backends, always_fuses_loss=isinstance(wanted, tuple), exchange=ledger.exchange_class
    )
    lines += lines_of(fused)
    if isinstance(wanted, tuple):
        lines += [f"config: kernels.fuse_modules: {name} has no effect here: {NOT_FOUND}" for name in missing]
    if world.rank == 0:
        for line in lines:
            logger.info("%s", line)


def _beside_splits(wanted: object, names: list[str]) -> list[str]:
    """Without the fusions that compute several layers at once, between which ranks exchange where layers are split."""
    refused = [name for name in names if name in _OVER_LAYERS]
    if refused and isinstance(wanted, tuple):
        what = ", ".join(refused)
        message = f"{what} computes layers at once, between which the ranks of parallel.tensor exchange; leave it out"
        raise ConfigError([Fault("kernels.fuse_modules", "conflict", message)])
    return [name for name in names if name not in _OVER_LAYERS]


_OVER_LAYERS = ("gated_mlp", "cross_entropy", "linear_cross_entropy")


def where_triton_runs(device: torch.device, backends: Mapping[str, Backend]) -> tuple[str, list[str]]:
    """Why, and the fusions whose Triton form runs on the device: a module's own forward is eager torch already."""
    if device.type != "cuda":
        return f"the device is {device.type}", []
    if not has_triton():
        return "the package triton is not installed", []
    names = [name for name, backend in backends.items() if backend != "reference"]
    return ("Triton runs on this device" if names else "the backend of all fusions is reference"), names
