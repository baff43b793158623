"""Where a training stands, beside the values of its tensors: a checkpoint has it, and goes on with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...zero.loss_scale import LossScaler
from ...zero.optimizer import ShardedOptimizer
from ..config.config import Config
from .learning_rates import LearningRates


class TrainingState:
    """What all ranks of an engine have alike, but for the caller's own part."""

    def __init__(
        self, config: Config, optimizer: ShardedOptimizer, learning_rates: LearningRates, loss_scaler: LossScaler
    ) -> None:
        self.global_step = 0
        self.client_state: dict[str, Any] = {}
        self.learning_rates = learning_rates
        self._config = config
        self._optimizer = optimizer
        self._loss_scaler = loss_scaler

    def described(self) -> dict[str, Any]:
        """Of a checkpoint, beside what each rank has of its own."""
        averages = self._optimizer.averages
        return {
            "global_step": self.global_step,
            "num_steps": self._optimizer.num_steps,
            "optimizer": self._optimizer.kind,
            "learning_rates": self.learning_rates.state_dict(),
            "loss_scaler": self._loss_scaler.state_dict(),
            "averages": None if averages is None else {"decay": averages.decay, "num_updates": averages.num_updates},
        }

    def restore(self, saved: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        """saved: as `described`, of a training with that config. The optimizer, and what has a state, are as saved."""
        self.global_step = saved["global_step"]
        self._loss_scaler.load_state_dict(saved["loss_scaler"])
        then, now = ((values.get("optimizer") or {}).get("params", {}) for values in (config, self._config.as_dict()))
        self.learning_rates.load_state_dict(saved["learning_rates"], then, now)

    def restore_client_state(self, saved: Mapping[str, Any]) -> None:
        """What the caller has put there, in place; not what loads its own state."""
        for key, value in saved.items():
            if key in self.client_state and not hasattr(self.client_state[key], "load_state_dict"):
                self.client_state[key] = value
