"""What the strategy and the Trainer were given: the engine's config, and what it computes in."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from ..engine.config.config import Config
from ..engine.config.parallel import ParallelConfig
from ..engine.config.sections import BF16Config, FP16Config
from ..engine.config.zero import OffloadOptimizerConfig
from ..engine.engine import Engine

Source = str | os.PathLike[str] | Mapping[str, object] | Config

_NOT_OF_A_STEP = {
    "pipeline": "a training_step runs whole on each rank, and not in stages",
    "sequence": "a training_step computes a loss of whole sequences, of which a rank would have a part",
    "tensor_sequence": "a training_step is one function, and ranks would have a part of the tokens within it",
}
_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


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


def of_strategy(
    config: Source | None,
    stage: int | None,
    offload_optimizer: str | None,
    offload_parameters: str | None,
    nvme_path: str | None,
) -> Config:
    """The checked config of `LowtideStrategy`'s arguments. Raises ValueError, or ConfigError."""
    given = {
        "stage": stage,
        "offload_optimizer": offload_optimizer,
        "offload_parameters": offload_parameters,
        "nvme_path": nvme_path,
    }
    said = [name for name, value in given.items() if value is not None]
    if config is not None:
        if said:
            raise ValueError(
                f"LowtideStrategy: expected a config, or arguments in place of one, found both: config and {said[0]}; "
                "write it into the config"
            )
        checked = Config.load(config)
        _check(checked)
        return checked
    zero: dict[str, object] = {"stage": 2 if stage is None else stage}
    for key, device in (("offload_optimizer", offload_optimizer), ("offload_param", offload_parameters)):
        if device is not None:
            place = {"nvme_path": nvme_path or "/local_nvme"} if device == "nvme" else {}
            zero[key] = {"device": device, **place}
    return Config.load({"zero_optimization": zero})


def _check(config: Config) -> None:
    """Raises ValueError for keys whose place the Trainer has taken."""
    for key in _BATCH:
        if getattr(config, key) not in (None, 1 if key == "gradient_accumulation_steps" else None):
            raise ValueError(
                f'{key}: expected no batch sizes in the config of LowtideStrategy, or "auto", found '
                f"{getattr(config, key)}; the DataLoader has the microbatch, and Trainer(accumulate_grad_batches=...) "
                "says how many make a step"
            )
    alone = ParallelConfig()
    for axis, why in _NOT_OF_A_STEP.items():
        if (found := getattr(config.parallel, axis)) != getattr(alone, axis):
            raise ValueError(
                f"parallel.{axis}: expected {getattr(alone, axis)} in the config of LowtideStrategy, found {found}: "
                f"{why}; use lowtide.initialize, or parallel.tensor and parallel.expert"
            )
    if config.checkpoint.folder is not None:
        raise ValueError(
            "checkpoint.folder: expected none in the config of LowtideStrategy, where ModelCheckpoint says when to "
            f"save, found {config.checkpoint.folder}; what the engine would save there lacks the Trainer's own state"
        )


def for_training(
    config: Config, precision: EnginePrecision, device: str, clip_val: float | None, by_value: bool = False
) -> Config:
    """Raises ValueError where config and Trainer say different things."""
    clips = config.gradient_clipping
    if clips and clip_val is not None and (by_value or clip_val != clips):
        way = ', gradient_clip_algorithm="value"' if by_value else ""
        raise ValueError(
            f"gradient_clipping: found {clips:g} (of the norm) in the config and "
            f"Trainer(gradient_clip_val={clip_val:g}{way}); leave one of them out"
        )
    update: dict[str, object] = {"device": device, "gradient_accumulation_steps": 1}
    section, found = precision.mode.section, _section_of(config)
    if section != found:
        if found:
            raise ValueError(
                f'{found}: found it enabled in the config, and Trainer(precision="{precision.precision}"); expected '
                f'"{"bf16-mixed" if found == "bf16" else "16-mixed"}" beside it, or the section left out'
            )
        update[section] = BF16Config(enabled=True) if section == "bf16" else FP16Config(enabled=True)
    return config.model_copy(update=update)


def for_evaluation(config: Config) -> Config:
    """The same without what only a training has."""
    zero = config.zero_optimization.model_copy(
        update={"offload_optimizer": OffloadOptimizerConfig(), "update_in_backward": False}
    )
    without = {"optimizer": None, "scheduler": None, "gradient_clipping": 0.0, "zero_optimization": zero}
    return config.model_copy(update=without)


def _section_of(config: Config) -> str:
    return "bf16" if config.bf16.enabled else "fp16" if config.fp16.enabled else ""
