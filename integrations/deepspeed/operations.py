"""`deepspeed.ops`: the existing operations, and optimizers by their DeepSpeed names.

Nothing is compiled. Each optimizer is the equivalent torch class, and the engine updates by its kernels. The config
(`zero_optimization.offload_optimizer`) chooses the processor of the update, not the name.
"""

from __future__ import annotations

from typing import Any

import torch

_HERE = ("fused_adam", "cpu_adam", "fused_lion", "cpu_lion", "cpu_adagrad")
_NOT_HERE = (
    "async_io",
    "cutlass_ops",
    "evoformer_attn",
    "fp_quantizer",
    "fused_lamb",
    "gds",
    "inference_core_ops",
    "quantizer",
    "ragged_device_ops",
    "ragged_ops",
    "random_ltd",
    "spatial_inference",
    "stochastic_transformer",
    "transformer",
    "transformer_inference",
    "utils",
)
__compatible_ops__ = {name: name in _HERE for name in (*_HERE, *_NOT_HERE)}
__installed_ops__ = installed_ops = compatible_ops = __compatible_ops__


Betas = tuple[float, float]


class FusedAdam(torch.optim.Adam):
    """AdamW, without weight decay by default; `adam_w_mode=False`: Adam with the decay in the gradient."""

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
    """The same as FusedAdam, with the arguments of DeepSpeed's class."""

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
    """Lion, missing in torch. The engine recognizes it by its formula."""

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
                # lerp(g, m, beta1) = g + beta1 (m - g) = beta1 m + (1 - beta1) g.
                param.add_(param.grad.lerp(momentum, beta1).sign_(), alpha=-lr)
                momentum.lerp_(param.grad, 1 - beta2)


class DeepSpeedCPULion(FusedLion):
    """The same as FusedLion."""

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
    "amsgrad": "use torch.optim.Adam(amsgrad=True)",
    "fp32_optimizer_states": 'set optimizer.params.state_dtype "bf16" in the config instead',
}


def _refuse(name: str, **options: tuple[object, object]) -> None:
    for key, (found, expected) in options.items():
        if found != expected:
            raise NotImplementedError(f"{name}: expected {key}={expected}, found {found}: {_WHY[key]}")
