"""Make torch's `clip_grad_norm_` work with reduced gradients, although they are sharded over the ranks."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import clip_grad

Clip = Callable[[Sequence[Tensor], float, float, bool], Tensor | None]
"""(values of `param.grad`, max_norm, norm_type, error_if_nonfinite) -> norm of `Engine.clip_grad_norm_`; None if the
gradients are not its engine's."""

_NORM, _SCALE = "_get_total_norm", "_clip_grads_with_norm_"  # the two halves of torch's clip_grad_norm_


def listen(clip: Clip) -> Callable[[], None]:
    """Call a bound method for each `clip_grad_norm_` of torch in the process. Return a function that ends it.

    The method's object is not kept alive. Users import torch's function by name, so the two functions that it calls
    are replaced while anybody listens.
    """
    calls = vars(clip_grad)[_NORM]
    if not isinstance(calls, _TotalNorm):
        calls = vars(clip_grad)[_NORM] = _TotalNorm(calls)
        vars(clip_grad)[_SCALE] = _ScaledGradients(vars(clip_grad)[_SCALE], calls)
    reference = weakref.WeakMethod(clip)
    calls.listeners.append(reference)

    def end() -> None:
        calls.listeners.remove(reference)
        # If foreign code has replaced torch's function since, its replacement stays, and calls ours.
        if not calls.listeners and vars(clip_grad)[_NORM] is calls:
            vars(clip_grad)[_SCALE] = vars(clip_grad)[_SCALE].run
            vars(clip_grad)[_NORM] = calls.run

    return end


class _TotalNorm:
    def __init__(self, run: Callable[..., Tensor]) -> None:
        self.run = run
        self.listeners: list[weakref.WeakMethod[Clip]] = []

    def ask(self, gradients: Sequence[Tensor], *how: Any) -> Tensor | None:
        """Return the norm of the engine with these gradients; None if no engine has them."""
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
        # max_norm inf: this half only returns the norm. The second half clips.
        norm = self.ask(gradients, math.inf, norm_type, error_if_nonfinite)
        if norm is None:
            return self.run(gradients, norm_type, error_if_nonfinite, foreach)
        norm.norm_type = norm_type  # type: ignore[attr-defined]  # the second half needs it
        return norm


class _ScaledGradients:
    def __init__(self, run: Callable[..., None], norms: _TotalNorm) -> None:
        self.run = run
        self._norms = norms

    def __call__(
        self, parameters: Sequence[nn.Parameter], max_norm: float, total_norm: Tensor, foreach: bool | None = None
    ) -> None:
        norm_type = getattr(total_norm, "norm_type", None)  # only the norm of an engine has it
        gradients = [param.grad for param in parameters if param.grad is not None]
        if norm_type is None or self._norms.ask(gradients, max_norm, norm_type, False) is None:
            self.run(parameters, max_norm, total_norm, foreach)
