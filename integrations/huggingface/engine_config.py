"""A config on its way to an engine, and what a trainer's arguments say in the place of each "auto" (`fill`)."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..engine.config.config import Config
from ..engine.config.errors import ConfigError, Fault, shown
from ..engine.config.parallel import ParallelConfig
from ..engine.config.read import PRESETS, read
from ..engine.config.translate import filled, value_of

Source = str | os.PathLike[str] | Mapping[str, Any]
"""A preset's name, a path of a JSON file, or a dictionary."""

BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_OF_A_TRAINING = ("optimizer", "scheduler", "gradient_clipping")
_OF_DATA = ("scheduler.params.total_num_steps", "scheduler.params.warmup_num_steps")
_DEGREES = ("pipeline", "tensor", "sequence")


@dataclass(frozen=True)
class Said:
    """What an argument says of a key: "optimizer.params.lr", 5e-5, "learning_rate"."""

    key: str
    value: Any
    argument: str
    fills_missing: bool = False
    """Also where the key is not there, though its section is."""
    must_match: bool = True


class EngineConfig:
    """Values as the JSON file has them. Of a preset only how states are divided, kept and computed is taken.

    Its optimizer and its clipping are examples; in a trainer the arguments have these.
    """

    def __init__(self, source: Source) -> None:
        """Raises ConfigError where there is no such file, or it is no JSON object."""
        values, self.source = read(source)
        self.values: dict[str, Any] = copy.deepcopy(values)
        self.is_preset = self.source is not None and Path(self.source).parent == PRESETS
        if self.is_preset:
            for key in ("optimizer", "gradient_clipping"):
                self.values.pop(key, None)
        self.fill: dict[str, Any] = {}
        """Key -> its value where the file says "auto"."""
        self.faults: list[Fault] = []

    def has(self, section: str) -> bool:
        return self.values.get(section) is not None

    def is_on(self, section: str) -> bool:
        """Whether `section.enabled` is true: bf16, fp16."""
        return value_of(self.filled(), f"{section}.enabled") is True

    def filled(self) -> dict[str, Any]:
        """The values with those in the place of "auto" that are known by now."""
        return filled(self.values, self.fill, Config)[0]

    def found(self, key: str) -> Any:
        """What the file says of a key, which may be "auto"; None where it says nothing."""
        return value_of(filled(self.values, {}, Config)[0], key)

    def say(self, *said: Said) -> None:
        """Goes into `fill`, which `lowtide.initialize` gets; notes a fault where the file says something else."""
        for one in said:
            section, _, key = one.key.rpartition(".")
            found = self.found(one.key)
            if found is None and one.fills_missing:
                inside = value_of(self.values, section) if section else self.values
                if isinstance(inside, dict):
                    inside[key] = one.value
            elif found not in (None, "auto") and one.must_match and found != one.value:
                message = (
                    f'expected "auto" or {shown(one.value)}, which is what {one.argument} says, found {shown(found)}; '
                    "change one of them"
                )
                self.faults.append(Fault(one.key, "conflict", message))
            self.fill[one.key] = one.value

    def compute_in(self, precision: str, argument: str) -> None:
        """precision: "no", "bf16" or "fp16", as the trainer's argument says; "no" leaves it to the file."""
        for name in ("bf16", "fp16"):
            wanted = precision == name
            key = f"{name}.enabled"
            found = self.found(key)
            if found is None:
                self.values[name] = {**(self.values.get(name) or {}), "enabled": wanted}
            elif found == "auto":
                self.fill[key] = wanted
            elif found is not wanted and precision != "no":
                message = f"found {shown(found)}, and {argument}={precision!r}; there is one compute type, change one"
                self.faults.append(Fault(key, "conflict", message))

    def on_device(self, device: str) -> None:
        """device: "cpu", "cuda", ..., where the trainer puts its batches."""
        self.say(Said("device", device, "the trainer's device", fills_missing=True))

    def refuse_pipeline(self) -> None:
        """The loop outside of the engine calls forward and backward. A degree that is "auto" is 1."""
        parallel = self.values.get("parallel")
        if not isinstance(parallel, dict):
            return
        for key in _DEGREES:
            if parallel.get(key) == "auto":
                parallel[key] = 1
        if self.found("parallel.pipeline") not in (None, 1):
            message = (
                f"expected 1 under Hugging Face's trainers, found {shown(parallel['pipeline'])}: a loop that calls "
                "forward and backward itself has no stages; use lowtide.initialize, whose train_step runs the schedule"
            )
            self.faults.append(Fault("parallel.pipeline", "unsupported", message))

    @property
    def parallel(self) -> ParallelConfig:
        """Over how many ranks a model is split. Raises ConfigError as `check`."""
        return self.check().parallel

    def check(self) -> Config:
        """The config, as far as it is known. Raises ConfigError with all that was found and all that is wrong in it."""
        if self.faults:
            raise ConfigError(self.faults, self.source)
        unknown = dict.fromkeys(_OF_DATA, 1)  # known when the data are
        try:
            return Config.load(self.values, fill={**unknown, **self.fill})
        except ConfigError as error:
            raise ConfigError(error.faults, self.source) from None

    def of_training(self) -> dict[str, Any]:
        """What `lowtide.initialize` gets for a loop that weighs its losses and counts its microbatches itself."""
        values = copy.deepcopy(self.values)
        values.pop("train_batch_size", None)
        values["gradient_accumulation_steps"] = 1
        if isinstance(values.get("pipeline"), dict):
            values["pipeline"].pop("microbatches", None)
        values.setdefault("steps_per_print", 0)  # the trainer logs
        return values

    def of_evaluation(self) -> dict[str, Any]:
        """What `lowtide.initialize` gets for a model that is not trained."""
        values = {key: value for key, value in self.of_training().items() if key not in _OF_A_TRAINING}
        zero = values.get("zero_optimization")
        if isinstance(zero, dict):
            values["zero_optimization"] = {
                key: value for key, value in zero.items() if key not in ("offload_optimizer", "update_in_backward")
            }
        return values
