"""What the engine computes in, in the words of Lightning's `Trainer(precision=...)`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from ..engine.engine import Engine


@dataclass(frozen=True)
class Mode:
    """dtype: of the model's inputs. weights: the dtype that the module itself is turned to. section: of the config."""

    dtype: torch.dtype = torch.float32
    weights: torch.dtype | None = None
    section: str = ""


MODES: Mapping[str, Mode] = {
    "32-true": Mode(),
    "64-true": Mode(torch.float64, torch.float64),
    "bf16-true": Mode(torch.bfloat16, torch.bfloat16),
    "bf16-mixed": Mode(torch.bfloat16, section="bf16"),
    "16-mixed": Mode(torch.float16, section="fp16"),
}
"""What each precision means.

"...-mixed" computes in the narrow type with fp32 master weights in the optimizer, as the `bf16` and `fp16` sections of
a config do, float16 with a loss scale; there is no autocast. "...-true" turns the module itself to that type; of bf16
weights the engine has fp32 masters too.
"""

_NO_FLOAT16 = (
    "precision '16-true': expected a loss scale, without which small float16 gradients are 0, found none; use "
    "'16-mixed', which has one, and computes in float16 all the same"
)


class EnginePrecision:
    """A precision plugin whose backward, clipping and step are those of the strategy's engine.

    Mixed into the `Precision` of a Lightning package.
    """

    engine: Engine | None = None

    def __init__(self, precision: str = "32-true") -> None:
        """Raises ValueError for a precision that the engine does not have."""
        if precision == "16-true":
            raise ValueError(_NO_FLOAT16)
        if precision not in MODES:
            raise ValueError(f"precision: expected one of {', '.join(map(repr, MODES))}, found {precision!r}")
        super().__init__()
        self.precision: Any = precision
        self.mode = MODES[precision]

    @classmethod
    def like(cls, plugin: Any) -> EnginePrecision:
        """For what the Trainer has made of its argument. Raises ValueError for a plugin with ways of its own."""
        if isinstance(plugin, cls):
            return plugin
        known = {"Precision", "HalfPrecision", "DoublePrecision", "MixedPrecision"}
        name = type(plugin).__name__
        scaler = getattr(plugin, "scaler", None)
        if name not in known or (scaler is not None and type(scaler) is not torch.amp.GradScaler):
            found = name if name not in known else f"{name} with a {type(scaler).__name__}"
            raise ValueError(
                f"precision plugin: expected one of {', '.join(map(repr, MODES))} as Trainer(precision=...), found "
                f"{found}, whose casts and steps the engine would not make"
            )
        return cls("64-true" if name == "DoublePrecision" else str(plugin.precision))

    def needed_engine(self) -> Engine:
        """Raises RuntimeError outside of a fit."""
        if self.engine is None:
            raise RuntimeError(
                "LowtideStrategy: expected a call while Trainer.fit runs, found one without an engine; call it in a "
                "hook of the fit"
            )
        return self.engine

    # -- types ----------------------------------------------------------------------------------------------------

    def convert_module(self, module: nn.Module) -> nn.Module:
        return module if self.mode.weights is None else module.to(self.mode.weights)

    def convert_input(self, data: Any) -> Any:
        def cast(tensor: Tensor) -> Tensor:
            return tensor.to(self.mode.dtype) if tensor.is_floating_point() else tensor

        return apply_to_collection(data, function=cast, dtype=Tensor)

    def convert_output(self, data: Any) -> Any:
        return data

    def tensor_init_context(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.mode.weights is None else _default_dtype(self.mode.weights)

    def module_init_context(self) -> AbstractContextManager[Any]:
        return self.tensor_init_context()

    def forward_context(self) -> AbstractContextManager[Any]:
        return self.tensor_init_context()

    # -- steps ----------------------------------------------------------------------------------------------------

    def backward(self, tensor: Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """The LightningModule's own `backward`, of a loss of which the engine knows the value and sets the scale."""
        model.backward(self.needed_engine().scale(tensor), *args, **kwargs)

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """The closure makes forward and backward, clipping follows, and then the engine's step."""
        if kwargs:
            raise ValueError(
                f"optimizer.step(): expected no arguments, which the engine has no use for, found {', '.join(kwargs)}"
            )
        result = closure()
        self._after_closure(model, optimizer)  # type: ignore[attr-defined]  # of the package's class
        if result is not None or not model.automatic_optimization:  # training_step returned None: no step, as in DDP
            self.needed_engine().step()
        return result

    def clip_gradients(
        self, optimizer: Any, clip_val: float | None = 0.0, gradient_clip_algorithm: Any = "norm"
    ) -> None:
        """Of the mean over ranks: by its norm, or each element."""
        if not clip_val or clip_val <= 0:
            return
        engine = self.needed_engine()
        if str(getattr(gradient_clip_algorithm, "value", gradient_clip_algorithm)) == "value":
            engine.clip_grad_value_(float(clip_val))
        else:
            engine.clip_grad_norm_(float(clip_val))


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
