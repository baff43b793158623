"""What the section `tiles` makes of a model."""

from __future__ import annotations

from torch import nn

from ...comm import World
from ...model.ledger import Ledger
from ...parallel.tiles import Tiled, Tiles, TilesError
from ...watch.log import logger
from ..blueprint.blueprint import Blueprint
from ..config.config import Config
from ..config.errors import ConfigError, Fault


def tiles_of(config: Config) -> Tiles:
    """What the config asks for, as `parallel` takes it."""
    wanted, backend = config.tiles, config.kernels.backend_of("linear_cross_entropy")
    return Tiles(wanted.mlp, wanted.loss, wanted.modules, wanted.head, backend)


def tile_modules(module: nn.Module, config: Config, world: World, ledger: Ledger) -> Tiled:
    """Puts tiles on the model, and logs which on rank 0. Raises ConfigError where there is nothing of that kind."""

    def warn(text: str) -> None:
        if world.rank == 0:
            logger.warning("%s", text)

    try:
        tiled = tiles_of(config).apply(module, ledger, warn)
    except TilesError as error:
        raise ConfigError([Fault(f"tiles.{error.key}", "conflict", error.message)]) from error
    if world.rank == 0:
        for line in tiled.lines:
            logger.info("%s", line)
    return tiled


def check_units(tiled: Tiled, blueprint: Blueprint) -> None:
    """Raises ConfigError where a unit lies inside of what runs in tiles, or experts that ranks share do."""
    for block in () if blueprint.experts is None else blueprint.experts.blocks:
        if outer := next((name for name, module in tiled.modules if block in set(module.modules())), None):
            message = (
                f"'{outer}' holds experts that ranks share: it would exchange tokens once for each tile, and ranks may "
                "have other numbers of tiles; leave it out, or set parallel.expert to 1"
            )
            raise ConfigError([Fault("tiles.modules", "conflict", message)])
    if fault := tiled.fault([(unit.name, unit.module) for unit in blueprint.units if not unit.is_rest]):
        raise ConfigError([Fault("zero_optimization.units", "conflict", fault)])
