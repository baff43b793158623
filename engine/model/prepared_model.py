"""The user's model, with all that is put on it before a blueprint is made of it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from ...comm import World
from ...model.compiled import Compiled
from ...model.ledger import Ledger
from ...parallel.tiles import Tiled
from ..config.config import Config
from .fusing import check_kernels, fuse_modules
from .given_model import Model, Values, check_model, check_ranks_agree, module_and_values, take
from .model_flops import ModelFlops
from .sequences import check_sequences
from .tiling import tile_modules


@dataclass(frozen=True)
class PreparedModel:
    """values: of the parameters, which take the place of what the module has. ledger: of what is put on the module.

    compiled: what of it is to be. tiled: what is in tiles already. flops: None where nobody asks for them.
    """

    module: nn.Module
    values: Values
    ledger: Ledger
    compiled: Compiled
    tiled: Tiled
    flops: ModelFlops | None

    @classmethod
    def of(cls, model: Model, config: Config, world: World, ledger: Ledger) -> PreparedModel:
        """A collective. Raises ValueError for what the config cannot do with the model, and where ranks differ."""
        module, values = module_and_values(model, world)
        take(module, ledger)
        compiled = Compiled(module, ledger, loads=config.compile.blocks)
        module = compiled.module
        check_model(module)
        check_ranks_agree(world, config, module)
        check_kernels(config, world.device)
        check_sequences(config, module)
        fuse_modules(module, config, world, ledger)
        tiled = tile_modules(module, config, world, ledger)
        if config.parallel.tensor > 1 and (compiled.is_wanted or config.compile.blocks):
            found = "torch.compile on it" if compiled.is_wanted else "compile.blocks"
            raise ValueError(
                f"parallel.tensor: expected a model that is not compiled, found {found}: what split layers exchange "
                f"cannot be traced; leave {found.removesuffix(' on it')} out"
            )
        flops = ModelFlops.of(module) if config.has_monitors else None
        return cls(module, values, ledger, compiled, tiled, flops)
