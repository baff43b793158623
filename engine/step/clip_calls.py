"""torch's `clip_grad_norm_`, where the gradients are reduced and divided over the ranks."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import clip_grad

Clip = Callable[[Sequence[Tensor], float, float, bool], Tensor | None]
"""Is given what stands in `param.grad`, and max_norm, norm_type and error_if_nonfinite of `Engine.clip_grad_norm_`.
Returns its norm, or None where the gradients are not those of its engine."""

_NORM, _SCALE = "_get_total_norm", "_clip_grads_with_norm_"  # the two halves of torch's clip_grad_norm_


def listen(clip: Clip) -> Callable[[], None]:
    """Has a bound method asked by each `clip_grad_norm_` of torch in the process. Returns what ends that.

    The object of the method is not held. Users import torch's function by its name, so what that calls is replaced, as
    long as somebody listens.
    """
    calls = vars(clip_grad)[_NORM]
    if not isinstance(calls, _TotalNorm):
        calls = vars(clip_grad)[_NORM] = _TotalNorm(calls)
        vars(clip_grad)[_SCALE] = _ScaledGradients(vars(clip_grad)[_SCALE], calls)
    reference = weakref.WeakMethod(clip)
    calls.listeners.append(reference)

    def end() -> None:
        calls.listeners.remove(reference)
        if not calls.listeners and vars(clip_grad)[_NORM] is calls:
            vars(clip_grad)[_SCALE] = vars(clip_grad)[_SCALE].run
            vars(clip_grad)[_NORM] = calls.run

    return end


class _TotalNorm:
    def __init__(self, run: Callable[..., Tensor]) -> None:
        self.run = run
        self.listeners: list[weakref.WeakMethod[Clip]] = []

    def ask(self, gradients: Sequence[Tensor], *how: Any) -> Tensor | None:
        """The norm of the engine that has these gradients; None where no engine has them."""
        clips = (clip for reference in list(self.listeners) if (clip := reference()) is not None)
        return next((norm for clip in clips if (norm := clip(gradients, *how)) is not None), None)

    def __call__(
        self,
        gradients: Tensor | Iterable[Tensor],
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        gradients = [gradients] if isinstance(gradients, Tensor) else list(gradients)
        norm = self.ask(gradients, math.inf, norm_type, error_if_nonfinite)
        if norm is None:
            return self.run(gradients, norm_type, error_if_nonfinite, foreach)
        norm.norm_type = norm_type  # type: ignore[attr-defined]  # for the second half, which is not told it
        return norm


class _ScaledGradients:
    def __init__(self, run: Callable[..., None], norms: _TotalNorm) -> None:
        self.run = run
        self._norms = norms

    def __call__(
        self, parameters: Sequence[nn.Parameter], max_norm: float, total_norm: Tensor, foreach: bool | None = None
    ) -> None:
        norm_type = getattr(total_norm, "norm_type", None)  # of an engine's norm alone
        gradients = [param.grad for param in parameters if param.grad is not None]
        if norm_type is None or self._norms.ask(gradients, max_norm, norm_type, False) is None:
            self.run(parameters, max_norm, total_norm, foreach)
