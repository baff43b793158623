"""A config with "auto" values from the trainer's arguments (`fill`), checked against them."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..engine.config.config import Config
from ..engine.config.errors import ConfigError, Fault, quoted
from ..engine.config.parallel import ParallelConfig
from ..engine.config.read import PRESETS, read
from ..engine.config.translate import filled, value_of

Source = str | os.PathLike[str] | Mapping[str, Any]  # a preset's name, a path of a JSON file, or a dictionary

BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_OF_A_TRAINING = ("optimizer", "scheduler", "gradient_clipping")
_OF_DATA = ("scheduler.params.total_num_steps", "scheduler.params.warmup_num_steps")
_DEGREES = ("pipeline", "tensor", "sequence")


class EngineConfig:
    """The values of a JSON file, to be completed by the trainer's arguments.

    The optimizer and the clipping of a preset are removed: they are examples, and the arguments have these values.
    """

    def __init__(self, source: Source) -> None:
        """Raises ConfigError if the file is missing or has no JSON object."""
        values, self.source = read(source)
        self.values: dict[str, Any] = copy.deepcopy(values)
        self.is_preset = self.source is not None and Path(self.source).parent == PRESETS
        if self.is_preset:
            for key in ("optimizer", "gradient_clipping"):
                self.values.pop(key, None)
        self.fill: dict[str, Any] = {}  # key -> value for "auto"
        self.faults: list[Fault] = []

    def has(self, section: str) -> bool:
        return self.values.get(section) is not None

    def is_on(self, section: str) -> bool:
        """Return whether `section.enabled` is true (bf16, fp16)."""
        return value_of(self.filled(), f"{section}.enabled") is True

    def filled(self) -> dict[str, Any]:
        """Return the values with every "auto" that is known by now."""
        return filled(self.values, self.fill, Config)[0]

    def found(self, key: str) -> Any:
        """Return the file's value of a key, maybe "auto", or None."""
        return value_of(filled(self.values, {}, Config)[0], key)

    def set_value(
        self, key: str, value: Any, argument: str, *, fills_missing: bool = False, must_match: bool = True
    ) -> None:
        """Put the value that `argument` gives to a key into `fill`, for `lowtide.initialize`.

        fills_missing: also set the key if it is missing in an existing section. must_match: note a fault if the file
        has another value.
        """
        section, _, last = key.rpartition(".")
        found = self.found(key)
        if found is None and fills_missing:
            inside = value_of(self.values, section) if section else self.values
            if isinstance(inside, dict):
                inside[last] = value
        elif found not in (None, "auto") and must_match and found != value:
            message = f'expected "auto" or {quoted(value)} ({argument}), found {quoted(found)}; change one of them'
            self.faults.append(Fault(key, "conflict", message))
        self.fill[key] = value

    def compute_in(self, precision: str, argument: str) -> None:
        """Set the compute dtype of the trainer's argument: "bf16", "fp16", or "no" to leave it to the file."""
        for name in ("bf16", "fp16"):
            wanted = precision == name
            key = f"{name}.enabled"
            found = self.found(key)
            if found is None:
                self.values[name] = {**(self.values.get(name) or {}), "enabled": wanted}
            elif found == "auto":
                self.fill[key] = wanted
            # "no" is also the default of the argument, so it does not contradict a file.
            elif found is not wanted and precision != "no":
                message = f"found {quoted(found)}, but {argument}={precision!r}; there is one compute dtype: change one"
                self.faults.append(Fault(key, "conflict", message))

    def on_device(self, device: str) -> None:
        """Set the device, "cpu", "cuda", ..., of the trainer's batches."""
        self.set_value("device", device, "the trainer's device", fills_missing=True)

    def refuse_pipeline(self) -> None:
        """Note a fault for a pipeline, impossible in a loop of forward and backward. "auto" degrees become 1."""
        parallel = self.values.get("parallel")
        if not isinstance(parallel, dict):
            return
        for key in _DEGREES:
            if parallel.get(key) == "auto":
                parallel[key] = 1
        if self.found("parallel.pipeline") not in (None, 1):
            message = (
                f"expected 1 with Hugging Face's trainers, found {quoted(parallel['pipeline'])}: their loop calls "
                "forward and backward itself. Use lowtide.initialize, whose train_step runs the schedule"
            )
            self.faults.append(Fault("parallel.pipeline", "unsupported", message))

    @property
    def parallel(self) -> ParallelConfig:
        """The axes that split the model. Raises ConfigError as `check`."""
        return self.check().parallel

    def check(self) -> Config:
        """Return the config as far as it is known. Raises ConfigError with all faults."""
        if self.faults:
            raise ConfigError(self.faults, self.source)
        unknown = dict.fromkeys(_OF_DATA, 1)  # known once the data are
        try:
            return Config.load(self.values, fill={**unknown, **self.fill})
        except ConfigError as error:
            raise ConfigError(error.faults, self.source) from None

    def of_training(self) -> dict[str, Any]:
        """Return the config for `lowtide.initialize`: the loop weighs losses and counts microbatches itself."""
        values = copy.deepcopy(self.values)
        values.pop("train_batch_size", None)
        values["gradient_accumulation_steps"] = 1
        if isinstance(values.get("pipeline"), dict):
            values["pipeline"].pop("microbatches", None)
        values.setdefault("steps_per_print", 0)  # the trainer logs
        return values

    def of_evaluation(self) -> dict[str, Any]:
        """Return the config for `lowtide.initialize` for a model that is not trained."""
        values = {key: value for key, value in self.of_training().items() if key not in _OF_A_TRAINING}
        zero = values.get("zero_optimization")
        if isinstance(zero, dict):
            values["zero_optimization"] = {
                key: value for key, value in zero.items() if key not in ("offload_optimizer", "update_in_backward")
            }
        return values
