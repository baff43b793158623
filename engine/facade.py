"""The interface of the wrapped module on an engine, as wrappers of torch have it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn

_TARGETS: dict[str, Any] = {
    "cpu": "cpu",
    "cuda": "cuda",
    "xpu": "xpu",
    "ipu": "ipu",
    "mtia": "mtia",
    "float": torch.float32,
    "double": torch.float64,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "type": "a type",
    "to_empty": "memory without values",
    "share_memory": "shared memory",
}
"""Methods that cast or move a module -> their target."""
_DEVICES = ("cpu", "cuda", "xpu", "ipu", "mtia")


class ModuleFacade:
    """Shows the module's parameters, buffers and submodules, and any further attribute that the engine lacks.

    Names are the module's, without a prefix. Values of parameters are those of `engine.module`: at stage 3 a parameter
    is released between uses, and `engine.full` and `engine.gathered` show it.
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
        """Return an attribute of the module, for example `generate`, if the engine has no attribute of this name."""
        # `self._module` would call this method again without end.
        module = self.__dict__.get("_module")  # missing while the engine is made
        if module is None or name.startswith("__"):
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
        # These would replace the engine's memory: the module's methods are not passed on.
        if name in _TARGETS:
            return partial(self._moved, name)
        try:
            return getattr(module, name)
        except AttributeError:
            raise AttributeError(
                f"neither the engine nor its module has an attribute '{name}': expected an attribute of lowtide.Engine "
                f"or {type(module).__name__}"
            ) from None

    def apply(self, fn: Callable[[nn.Module], None]) -> Self:
        """Call the module's `apply`. Values of parameters may change in it only inside of `gathered(modify=True)`."""
        self.module.apply(fn)
        return self

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Call the module's `requires_grad_`."""
        self.module.requires_grad_(requires_grad)
        return self

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Return the engine unchanged. Raise ValueError for another device or dtype.

        The same holds for `cpu`, `cuda`, `float`, `double`, `half`, `bfloat16`, `type`, `to_empty` and `share_memory`.
        """
        # The parser of `nn.Module.to`, so the same calls are understood.
        device, dtype, _, memory_format = torch._C._nn._parse_to(*args, **kwargs)
        if memory_format is not None:
            raise ValueError(
                f"engine.to(): expected no memory_format, found {memory_format}, which would move parameters out of "
                "the engine's memory; call it on the model before lowtide.initialize, and on its inputs"
            )
        return self._stay("to", device, dtype)

    def _moved(self, call: str, *args: Any, **kwargs: Any) -> Self:
        """Answer a method of the module that casts or moves it."""
        given = (*args, *kwargs.values())
        # `to_empty` names a device, but the fault is that it drops the values.
        is_said = given and given[0] is not None and call != "to_empty"
        found = given[0] if is_said else _TARGETS[call]
        if call in _DEVICES:
            return self._stay(call, torch.device(call, found) if isinstance(found, int) else torch.device(found), None)
        return self._stay(call, None, found)

    def _stay(self, call: str, device: torch.device | None, dtype: Any) -> Self:
        own: torch.device = self.device  # of the engine
        # An index of None is the current device, which is the engine's: `World.join` has set it.
        is_here = device is None or (device.type == own.type and device.index in (None, own.index))
        tensors = (*self.module.parameters(), *self.module.buffers())
        # A module's casts change floating-point tensors alone. If all have the dtype, the call changes nothing.
        is_cast = dtype is not None and any(one.is_floating_point() and one.dtype != dtype for one in tensors)
        if not is_here or is_cast:
            raise ValueError(
                f"engine.{call}(): expected the engine's device, {own}, and the dtypes of its module, found "
                f"{dtype if is_here else device}; set device and compute dtype in the config: device, bf16, fp16"
            )
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "an engine cannot be copied or pickled, since it is connected to remote ranks: save it with "
            "engine.save_checkpoint(folder), and get its values by engine.state_dict(). An average of its weights "
            "(AveragedModel) is engine.ema(decay)"
        )
