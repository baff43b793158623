"""What scripts import from `deepspeed.ops`: optimizers by their names there, with their arguments and defaults.

Each is torch's class that does the same, so that the engine updates by its own kernels. Which processor updates is said
by the config (`zero_optimization.offload_optimizer`), not by the name.
"""

from __future__ import annotations

from typing import Any

import torch

Betas = tuple[float, float]


class FusedAdam(torch.optim.Adam):
    """Adam with its decay apart from the gradient (AdamW); `adam_w_mode=False`: in it. No decay by default."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        _refuse("FusedAdam", bias_correction=(bias_correction, True), amsgrad=(amsgrad, False))
        super().__init__(params, lr, (betas[0], betas[1]), eps, weight_decay, decoupled_weight_decay=adam_w_mode)


class DeepSpeedCPUAdam(torch.optim.Adam):
    """As FusedAdam, with the arguments that DeepSpeed's has for the host."""

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        _refuse(
            "DeepSpeedCPUAdam",
            bias_correction=(bias_correction, True),
            amsgrad=(amsgrad, False),
            fp32_optimizer_states=(fp32_optimizer_states, True),
        )
        super().__init__(model_params, lr, (betas[0], betas[1]), eps, weight_decay, decoupled_weight_decay=adamw_mode)


class DeepSpeedCPUAdagrad(torch.optim.Adagrad):
    """Adagrad."""

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> None:
        _refuse(
            "DeepSpeedCPUAdagrad",
            amsgrad=(amsgrad, False),
            fp32_optimizer_states=(fp32_optimizer_states, True),
        )
        super().__init__(model_params, lr=lr, eps=eps, weight_decay=weight_decay)


class FusedLion(torch.optim.Optimizer):
    """Lion, of which torch has none: updated by its formula."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: Betas = (0.9, 0.999),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """w -= lr * (sign(beta1 m + (1 - beta1) g) + decay w);  m = beta2 m + (1 - beta2) g."""
        for group in self.param_groups:
            lr, (beta1, beta2) = group["lr"], group["betas"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["exp_avg"] = torch.zeros_like(param)
                momentum = state["exp_avg"]
                param.mul_(1 - lr * group["weight_decay"])
                param.add_(param.grad.lerp(momentum, beta1).sign_(), alpha=-lr)
                momentum.lerp_(param.grad, 1 - beta2)


class DeepSpeedCPULion(FusedLion):
    """As FusedLion."""

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        betas: Betas = (0.9, 0.999),
        weight_decay: float = 0.0,
        fp32_optimizer_states: bool = True,
    ) -> None:
        _refuse("DeepSpeedCPULion", fp32_optimizer_states=(fp32_optimizer_states, True))
        super().__init__(model_params, lr, betas, weight_decay)


_WHY = {
    "bias_correction": "moments are always corrected",
    "amsgrad": "there is no such variant; use torch.optim.Adam(amsgrad=True)",
    "fp32_optimizer_states": 'set optimizer.params.state_dtype "bf16" in the config in place of it',
}


def _refuse(name: str, **options: tuple[object, object]) -> None:
    for key, (found, expected) in options.items():
        if found != expected:
            raise NotImplementedError(f"{name}: expected {key}={expected}, found {found}: {_WHY[key]}")
