"""The engine's config, of what the strategy and the Trainer were given."""

from __future__ import annotations

import os
from collections.abc import Mapping

from ..engine.config.config import Config
from ..engine.config.parallel import ParallelConfig
from ..engine.config.sections import BF16Config, FP16Config
from ..engine.config.zero import OffloadOptimizerConfig
from .precision import EnginePrecision

Source = str | os.PathLike[str] | Mapping[str, object] | Config

_NOT_OF_A_STEP = {
    "pipeline": "a training_step runs whole on each rank, and not in stages",
    "sequence": "a training_step computes a loss of whole sequences, of which a rank would have a part",
    "tensor_sequence": "a training_step is one function, and ranks would have a part of the tokens within it",
}
_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


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
