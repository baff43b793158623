"""Config and precision from the arguments of the strategy and the Trainer."""

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
    "pipeline": "each rank runs a whole training_step, not a stage of it",
    "sequence": "a training_step computes its loss from whole sequences",
    "tensor_sequence": "a training_step computes its loss from all tokens",
}
_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


@dataclass(frozen=True)
class Mode:
    """A precision of the Trainer.

    dtype: of the model's inputs. weights: dtype to convert the module to. section: of the config to enable.
    """

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
"""What each precision does.

"...-mixed" computes in the narrow dtype with fp32 master weights, as the sections `bf16` and `fp16` of a config, with a
loss scale for float16 and without autocast. "...-true" converts the module itself; for bf16 weights the engine has fp32
master weights too.
"""

_NO_FLOAT16 = (
    "precision '16-true': without a loss scale, small float16 gradients become 0. Use '16-mixed', which computes in "
    "float16 with a loss scale"
)

_NO_LAST_LOSS = (
    "training_step: expected a loss for batch {}, the last of an accumulation window, found None. The step needs its "
    "backward, else the gradients of {} earlier microbatches are lost. Return 0 times a finite output of the model, or "
    "use Trainer(accumulate_grad_batches=1), where a batch without a loss is skipped"
)


class EnginePrecision:
    """A precision plugin with the engine's backward, clipping and step.

    A mixin for the `Precision` of a Lightning package.
    """

    engine: Engine | None = None

    def __init__(self, precision: str = "32-true") -> None:
        """Raises ValueError for an unknown precision."""
        if precision == "16-true":
            raise ValueError(_NO_FLOAT16)
        if precision not in MODES:
            raise ValueError(f"precision: expected one of {', '.join(map(repr, MODES))}, found {precision!r}")
        super().__init__()
        self.precision: Any = precision
        self.mode = MODES[precision]

    @classmethod
    def like(cls, plugin: Any) -> EnginePrecision:
        """Return the plugin for the Trainer's `precision`. Raises ValueError for a plugin with custom behaviour."""
        if isinstance(plugin, cls):
            return plugin
        known = {"Precision", "HalfPrecision", "DoublePrecision", "MixedPrecision"}
        name = type(plugin).__name__
        scaler = getattr(plugin, "scaler", None)
        if name not in known or (scaler is not None and type(scaler) is not torch.amp.GradScaler):
            found = name if name not in known else f"{name} with a {type(scaler).__name__}"
            raise ValueError(
                f"precision plugin: expected one of {', '.join(map(repr, MODES))} as Trainer(precision=...), found "
                f"{found}. The engine would not run its casts and steps"
            )
        return cls("64-true" if name == "DoublePrecision" else str(plugin.precision))

    def needed_engine(self) -> Engine:
        """Return the engine. Raises RuntimeError outside a fit."""
        if self.engine is None:
            raise RuntimeError(
                "LowtideStrategy: this call needs an engine. The engine exists only while Trainer.fit runs: call it in "
                "a hook of the fit"
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
        """Call the LightningModule's `backward` with the loss times the engine's scale."""
        model.backward(self.needed_engine().scale(tensor), *args, **kwargs)

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Run the closure (forward and backward), then clip, then the engine's step."""
        if kwargs:
            raise ValueError(
                f"optimizer.step(): expected no arguments, found {', '.join(kwargs)}: the engine ignores them"
            )
        result = closure()
        engine = self.needed_engine()
        has_step = result is not None or not model.automatic_optimization
        if not has_step and engine.microbatches_done:  # the engine ends a step in its last backward: there is none
            raise ValueError(_NO_LAST_LOSS.format(model.trainer.fit_loop.batch_idx, engine.microbatches_done))
        # Lightning's hooks and clipping act here, on gradients that the closure has made.
        self._after_closure(model, optimizer)  # type: ignore[attr-defined]  # of the package's class
        if has_step:
            engine.step()
        return result  # None: training_step asked for no step, as in DDP

    def clip_gradients(
        self, optimizer: Any, clip_val: float | None = 0.0, gradient_clip_algorithm: Any = "norm"
    ) -> None:
        """Clip the gradients averaged over ranks, by norm or by value."""
        engine = self.needed_engine()
        if not clip_val or clip_val <= 0 or not engine.microbatches_done:  # training_step may have returned None
            return
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
    """Make the checked config from `LowtideStrategy`'s arguments. Raises ValueError or ConfigError."""
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
                f"LowtideStrategy: expected either config or further arguments, found both: config and {said[0]}. "
                f"Write {said[0]} into the config"
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
    """Raise ValueError for keys that the Trainer replaces."""
    for key in _BATCH:
        if getattr(config, key) not in (None, 1 if key == "gradient_accumulation_steps" else None):
            raise ValueError(
                f"{key}: expected no batch sizes in the config of LowtideStrategy, found {getattr(config, key)}. The "
                'DataLoader sets the microbatch, and Trainer(accumulate_grad_batches=...) the accumulation; "auto" is '
                "legal too"
            )
    alone = ParallelConfig()
    for axis, why in _NOT_OF_A_STEP.items():
        if (found := getattr(config.parallel, axis)) != getattr(alone, axis):
            raise ValueError(
                f"parallel.{axis}: expected {getattr(alone, axis)} in the config of LowtideStrategy, found {found}: "
                f"{why}. Use lowtide.initialize, or parallel.tensor and parallel.expert"
            )
    if config.checkpoint.folder is not None:
        raise ValueError(
            f"checkpoint.folder: expected none in the config of LowtideStrategy, found {config.checkpoint.folder}. "
            "ModelCheckpoint decides when to save, together with the Trainer's state"
        )


def for_training(
    config: Config, precision: EnginePrecision, device: str, clip_val: float | None, by_value: bool = False
) -> Config:
    """Return the config completed by the Trainer's arguments. Raises ValueError for a contradiction."""
    clips = config.gradient_clipping
    if clips and clip_val is not None and (by_value or clip_val != clips):
        way = ', gradient_clip_algorithm="value"' if by_value else ""
        raise ValueError(
            f"gradient_clipping: found both {clips:g} (by norm) in the config and "
            f"Trainer(gradient_clip_val={clip_val:g}{way}). Remove either"
        )
    # Lightning divides the loss and blocks the synchronization itself, so the engine must not divide again.
    update: dict[str, object] = {"device": device, "gradient_accumulation_steps": 1}
    section, found = precision.mode.section, _section_of(config)
    if section != found:
        if found:
            raise ValueError(
                f'{found}: enabled in the config, but Trainer(precision="{precision.precision}"). Set '
                f'precision="{"bf16-mixed" if found == "bf16" else "16-mixed"}", or remove the section'
            )
        update[section] = BF16Config(enabled=True) if section == "bf16" else FP16Config(enabled=True)
    return config.model_copy(update=update)


def for_evaluation(config: Config) -> Config:
    """Return the config without the parts that only a training has."""
    zero = config.zero_optimization.model_copy(
        update={"offload_optimizer": OffloadOptimizerConfig(), "update_in_backward": False}
    )
    without = {"optimizer": None, "scheduler": None, "gradient_clipping": 0.0, "zero_optimization": zero}
    return config.model_copy(update=without)


def _section_of(config: Config) -> str:
    return "bf16" if config.bf16.enabled else "fp16" if config.fp16.enabled else ""
