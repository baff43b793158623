"""Prepares the user's model for a blueprint: values, checks, fused modules and tiles."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import nn

from ...comm import World
from ...kernels.dispatch import Backend, has_triton, is_interpreted, why_not_started
from ...kernels.fuse import NOT_FOUND, lines_of, replace_modules
from ...model.blocks import find_blocks
from ...model.compiled import Compiled
from ...model.float8 import MULTIPLE, linear_layers, use_float8, why_impossible
from ...model.patches import ModelPatches
from ...parallel.tiles import Tiles, TilesError
from ...watch.log import logger
from ..blueprint.blueprint import Blueprint
from ..config.config import Config
from ..config.errors import ConfigError, Fault
from ..config.kernels import FUSION_NAMES, KERNEL_NAMES
from .given_model import Model, Values, check_model, check_ranks_agree, module_and_values, refuse_max_norm, take
from .model_flops import ModelFlops
from .sequences import check_sequences

NamedModules = Sequence[tuple[str, nn.Module]]


def check_kernels(config: Config, device: torch.device) -> None:
    """Raise ConfigError for each kernel that is wanted in Triton but cannot run."""
    problem = None
    if not has_triton():
        problem = "needs the package triton, which is not installed"
    elif device.type != "cuda" and not is_interpreted():
        problem = f"needs a GPU, and the model is on the device {device.type}"
    kernels = config.kernels
    asking = [key for key in ("backend", *KERNEL_NAMES) if getattr(kernels, key) == "triton"]
    if problem is not None and asking:
        message = f'"triton" {problem}; set "auto", which uses Triton if it can run'
        raise ConfigError([Fault(f"kernels.{key}", "conflict", message) for key in asking])


def fuse_modules(
    module: nn.Module, config: Config, world: World, patches: ModelPatches, compiled: Collection[nn.Module] = ()
) -> None:
    """Replace the modules of kernels.fuse_modules, and log it on rank 0."""
    wanted = config.kernels.fuse_modules
    backends: dict[str, Backend] = {name: config.kernels.backend_of(name) for name in FUSION_NAMES}
    names = [name for name in FUSION_NAMES if wanted is True or (isinstance(wanted, tuple) and name in wanted)]
    lines = []
    if config.parallel.tensor > 1:
        names = _beside_splits(wanted, names)
    if wanted == "auto":
        reason, found = where_triton_runs(world.device, backends)
        names = _beside_splits(wanted, found) if config.parallel.tensor > 1 else found
        # A user who has not written the key need not read how it was decided.
        if "fuse_modules" in config.kernels.model_fields_set:
            lines.append(f'config: kernels.fuse_modules: "auto" is {str(bool(names)).lower()}: {reason}')
        if compiled and names:
            lines.append('config: kernels.fuse_modules: "auto" leaves the layers of compiled blocks to torch.compile')
    # Both replace the head and the loss of the same forward.
    if config.tiles.loss and "linear_cross_entropy" in names:
        names.remove("linear_cross_entropy")
        lines.append("config: kernels.linear_cross_entropy: no effect here: tiles.loss computes head and loss")
    fused, missing = replace_modules(
        module,
        names,
        backends,
        always_fuses_loss=isinstance(wanted, tuple),
        exchange=patches.exchange_class,
        compiled=compiled if wanted == "auto" else (),
    )
    lines += lines_of(fused)
    if isinstance(wanted, tuple):
        lines += [f"config: kernels.fuse_modules: {name} has no effect here: {NOT_FOUND}" for name in missing]
    if world.rank == 0:
        for line in lines:
            logger.info("%s", line)


def _beside_splits(wanted: object, names: list[str]) -> list[str]:
    """Drop the fusions that compute several layers at once, since ranks exchange between split layers."""
    refused = [name for name in names if name in _OVER_LAYERS]
    if refused and isinstance(wanted, tuple):
        what = ", ".join(refused)
        message = f"{what} fuses layers, but the ranks of parallel.tensor exchange between them; leave it out"
        raise ConfigError([Fault("kernels.fuse_modules", "conflict", message)])
    return [name for name in names if name not in _OVER_LAYERS]


_OVER_LAYERS = ("gated_mlp", "cross_entropy", "linear_cross_entropy")


def where_triton_runs(device: torch.device, backends: Mapping[str, Backend]) -> tuple[str, list[str]]:
    """Return the reason and the fusions that run in Triton. Eager forms are left out: they equal the original."""
    if device.type != "cuda":
        return f"the device is {device.type}", []
    if why := why_not_started():
        return why, []
    names = [name for name, backend in backends.items() if backend != "reference"]
    return ("Triton runs on this device" if names else "the backend of all fusions is reference"), names


def multiply_in_float8(module: nn.Module, config: Config, world: World, patches: ModelPatches) -> None:
    """Let the linear layers of blocks multiply in float8, and log it on rank 0. Raises ConfigError if none can."""
    section = config.fp8
    if problem := why_impossible(world.device):
        raise ConfigError([Fault("fp8.enabled", "conflict", problem)])
    layers = linear_layers(find_blocks(module), section.min_features)
    excluded = set[str]()
    for pattern in section.exclude:
        matching = {name for name in layers if fnmatchcase(name, pattern)}
        if not matching:
            message = f'"{pattern}" excludes no layer that fp8 would compute; leave it out, or correct the pattern'
            raise ConfigError([Fault("fp8.exclude", "conflict", message)])
        excluded |= matching
    layers = {name: layer for name, layer in layers.items() if name not in excluded}
    if not layers:
        message = (
            f"{section.min_features}: expected linear layers in repeated blocks with so many input and output "
            f"features, both multiples of {MULTIPLE}, found none outside of fp8.exclude; lower it, or leave fp8 out"
        )
        raise ConfigError([Fault("fp8.min_features", "conflict", message)])
    emulates = world.device.type != "cuda"
    use_float8(layers.values(), section.recipe, emulates, patches)
    if world.rank == 0:
        how = f", emulated on {world.device.type}, which is slow" if emulates else ""
        logger.info("fp8: %d linear layers multiply in float8 (%s)%s", len(layers), section.recipe, how)


def tiles_of(config: Config) -> Tiles:
    """Return the section `tiles` in the form of `parallel`."""
    wanted, backend = config.tiles, config.kernels.backend_of("linear_cross_entropy")
    return Tiles(wanted.mlp, wanted.loss, wanted.modules, wanted.head, backend)


def tile_modules(module: nn.Module, config: Config, world: World, patches: ModelPatches) -> NamedModules:
    """Put tiles on the model, and log them on rank 0. Raises ConfigError if the model has nothing to tile.

    Returns the modules in tiles, with their names.
    """

    def warn(text: str) -> None:
        if world.rank == 0:
            logger.warning("%s", text)

    try:
        tiled, lines = tiles_of(config).apply(module, patches, warn)
    except TilesError as error:
        raise ConfigError([Fault(f"tiles.{error.key}", "conflict", error.message)]) from error
    if world.rank == 0:
        for line in lines:
            logger.info("%s", line)
    return tiled


def check_units(tiled: NamedModules, blueprint: Blueprint) -> None:
    """Raise ConfigError if a unit, or experts that ranks share, lie inside a tiled module."""
    for block in () if blueprint.experts is None else blueprint.experts.blocks:
        if outer := next((name for name, module in tiled if block in set(module.modules())), None):
            message = (
                f"'{outer}' holds experts that ranks share: it would exchange tokens for each tile, but numbers of "
                "tiles may differ between ranks; leave it out, or set parallel.expert to 1"
            )
            raise ConfigError([Fault("tiles.modules", "conflict", message)])
    for name, module in tiled:
        inner = {id(part) for part in module.modules() if part is not module}
        if unit := next((one for one in blueprint.units if not one.is_root and id(one.module) in inner), None):
            message = f"unit '{unit.name}' lies in '{name}', which runs once for each tile; make '{name}' the unit"
            raise ConfigError([Fault("zero_optimization.units", "conflict", message)])


@dataclass(frozen=True)
class PreparedModel:
    """A model that is ready for a blueprint.

    values: of the parameters, to replace those of the module. patches: all changes to the module. compiled: the parts
    to compile. tiled: the parts in tiles. flops: None if no monitor needs it.
    """

    module: nn.Module
    values: Values
    patches: ModelPatches
    compiled: Compiled
    tiled: NamedModules
    flops: ModelFlops | None

    @classmethod
    def of(cls, model: Model, config: Config, world: World, patches: ModelPatches) -> PreparedModel:
        """Prepare a model. A collective. Raises ValueError if the config cannot be applied to the model, or ranks
        differ.
        """
        module, values = module_and_values(model, world)
        # Before anything is put on the module: an open engine may have it.
        take(module, patches)
        compiled = Compiled(module, patches, loads=config.compile.blocks)
        # Without torch's wrappers, since they put "_orig_mod" before names of parameters.
        module = compiled.module
        check_model(module)
        check_ranks_agree(world, config, module)
        refuse_max_norm(module)
        check_kernels(config, world.device)
        check_sequences(config, module)
        blocks = [block for _, block in find_blocks(module)] if config.compile.blocks else []
        fuse_modules(module, config, world, patches, [*compiled.wanted, *blocks])
        if config.fp8.enabled:
            multiply_in_float8(module, config, world, patches)
        tiled = tile_modules(module, config, world, patches)
        if config.parallel.tensor > 1 and (compiled.wanted or config.compile.blocks):
            found = "torch.compile on it" if compiled.wanted else "compile.blocks"
            raise ValueError(
                f"parallel.tensor: expected a model without torch.compile, found {found}: collectives of split layers "
                f"cannot be traced; remove {found.removesuffix(' on it')}"
            )
        flops = ModelFlops.of(module) if config.has_monitors else None
        return cls(module, values, patches, compiled, tiled, flops)
