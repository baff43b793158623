"""Loss scaling for float16: keeps small gradients above zero, and backs off when they overflow."""

from __future__ import annotations

from collections.abc import Mapping


class LossScaleError(RuntimeError):
    """Gradients overflow even at the smallest loss scale that the config allows."""


class LossScaler:
    """The factor that the loss is multiplied by before backward.

    Dynamic: the scale doubles after `window` steps in a row without overflow. On an overflow it halves, after
    `hysteresis` overflows, down to `minimum`. Static: never changes. Source: Micikevicius et al., Mixed Precision
    Training, arXiv 1710.03740, section 3.2.
    """

    def __init__(
        self,
        scale: float = 1.0,
        dynamic: bool = False,
        window: int = 1000,
        hysteresis: int = 2,
        consecutive_hysteresis: bool = False,
        minimum: float = 1.0,
    ) -> None:
        self.scale = scale
        self._dynamic = dynamic
        self._window = window
        self._hysteresis = hysteresis
        self._refills_hysteresis = consecutive_hysteresis
        self._minimum = minimum
        self._overflows_left = hysteresis
        self._steps_without_overflow = 0

    def state_dict(self) -> dict[str, float]:
        """Return the state for `load_state_dict`."""
        return {
            "is_dynamic": self._dynamic,
            "scale": self.scale,
            "overflows_left": self._overflows_left,
            "steps_without_overflow": self._steps_without_overflow,
        }

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Load the state of another dynamic scaler. A static scale keeps the config's value."""
        if not self._dynamic or not state["is_dynamic"]:
            return
        self.scale = state["scale"]
        self._overflows_left = int(state["overflows_left"])
        self._steps_without_overflow = int(state["steps_without_overflow"])

    def update(self, overflowed: bool) -> None:
        """Update the scale after a step. Raises LossScaleError if the scale cannot decrease any more."""
        if not self._dynamic:
            return
        if overflowed:
            self._steps_without_overflow = 0
            if self._overflows_left > 1:
                self._overflows_left -= 1
                return
            if self.scale <= self._minimum:
                raise LossScaleError(
                    f"gradients overflow in float16 at the smallest loss scale ({self._minimum:g}, "
                    "fp16.min_loss_scale). The training has diverged, or the model needs bf16: lower the learning "
                    'rate, or set "bf16": {"enabled": true} instead of fp16.'
                )
            # As in DeepSpeed the hysteresis is not refilled here: further overflows in a row halve at once.
            self.scale = max(self.scale / 2, self._minimum)
            return
        self._steps_without_overflow += 1
        # As DeepSpeed: `consecutive_hysteresis` asks for overflows in a row, else they add up over the window.
        if self._refills_hysteresis:
            self._overflows_left = self._hysteresis
        if self._steps_without_overflow % self._window == 0:
            self.scale *= 2
            self._overflows_left = self._hysteresis
