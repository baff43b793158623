"""What an engine offers of the module that it trains, as a wrapper of torch's would."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

from torch import Tensor, nn


class ModuleFacade:
    """The module's own parameters, buffers and submodules, and any attribute that the engine has none of.

    Names are the module's, without a prefix. Values of parameters are there as `engine.module` has them: at stage 3 a
    parameter is released between uses, and `engine.full` and `engine.gathered` show it.
    """

    module: nn.Module

    @property
    def training(self) -> bool:
        """Whether the module is in training mode."""
        return self.module.training

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return self.module.parameters(recurse)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    def buffers(self, recurse: bool = True) -> Iterator[Tensor]:
        return self.module.buffers(recurse)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        return self.module.named_buffers(prefix, recurse, remove_duplicate)

    def modules(self) -> Iterator[nn.Module]:
        return self.module.modules()

    def named_modules(self, prefix: str = "", remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Module]]:
        found: Iterator[tuple[str, nn.Module]] = self.module.named_modules(None, prefix, remove_duplicate)
        return found

    def children(self) -> Iterator[nn.Module]:
        return self.module.children()

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        return self.module.named_children()

    def __getattr__(self, name: str) -> Any:
        """An attribute of the module: `generate`, `encode`. Asked for only where the engine has none of the name."""
        module = self.__dict__.get("_module")  # none, while the engine is made
        if module is None or name.startswith("__"):
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
        try:
            return getattr(module, name)
        except AttributeError:
            raise AttributeError(
                f"neither the engine nor its module has an attribute '{name}': expected one of lowtide.Engine or of "
                f"{type(module).__name__}"
            ) from None

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "an engine cannot be copied or pickled, since it holds connections to other ranks: save it with "
            "engine.save_checkpoint(folder), and take values out of it with engine.state_dict()"
        )
