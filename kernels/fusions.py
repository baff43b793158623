"""The table of `fuse_model`: known modules, and the members that a fused class replaces.

    fusion                  modules                                                     kernel
    rms_norm                nn.RMSNorm; the RMSNorm of the families below               rms_norm
    gated_mlp               the MLP of Llama, Mistral, Qwen, Gemma: silu or gelu        swiglu, geglu
    rotary_embedding        the Attention of the families: its rotation of q and k      rotary_embedding
    cross_entropy           nn.CrossEntropyLoss; the loss of causal language models     cross_entropy
    linear_cross_entropy    causal language models: head and loss, without logits       linear_cross_entropy

Classes of Hugging Face are known by their full name, such as `transformers.models.llama.modeling_llama.LlamaRMSNorm`,
and must have the attributes that the fused form reads. transformers is never imported here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import update_wrapper
from types import CellType, FunctionType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .cross_entropy import cross_entropy
from .dispatch import Backend, has_autocast
from .fused_loss import family_of, head_members, is_causal_lm, linear_loss_members, loss_members
from .gated_mlp import geglu, swiglu
from .rotary import rotary_embedding
from .row_norm import rms_norm

FUSIONS = ("rms_norm", "gated_mlp", "rotary_embedding", "cross_entropy", "linear_cross_entropy")
"""The names of all fusions."""
COMPILED_FUSIONS = ("rms_norm", "gated_mlp", "rotary_embedding")
"""Fusions of the layers of a block. torch.compile reaches the same bandwidth, and its code costs the host less."""

Members = dict[str, Any]
Option = str | float | bool
_ROTATION = "apply_rotary_pos_emb"


@dataclass(frozen=True)
class Fusion:
    """The change of a class by a kernel, as plain values, so that it can be a cache key and be pickled."""

    kernel: str  # of FUSIONS
    form: str  # variant of the kernel, a key of MEMBERS
    option: Option
    backend: Backend


def fusions_of(
    module: nn.Module, original: type[nn.Module], backends: Mapping[str, Backend], always_fuses_loss: bool
) -> tuple[Fusion, ...]:
    """Find the fusions of a module among the kernels in `backends`. original: its class before fusion."""
    if "forward" in vars(module) or getattr(original.forward, "__module__", None) != original.__module__:
        return ()  # forward is inherited, or was replaced by foreign code
    found = []
    for kernel, backend in backends.items():
        match = _FINDERS[kernel](module, original)
        if match is not None:
            form, option = match
            found.append(Fusion(kernel, form, always_fuses_loss if form == "linear_loss" else option, backend))
    return tuple(found)


# -- known modules: (form, option) of a module, or None --------------------------------------------------------------


def _find_rms_norm(module: nn.Module, original: type[nn.Module]) -> tuple[str, Option] | None:
    if original is nn.RMSNorm:
        return ("torch_rms_norm", "") if len(module.normalized_shape) == 1 else None  # type: ignore[arg-type]
    family = family_of(original, "RMSNorm")
    weight = getattr(module, "weight", None)
    if family is None or not isinstance(weight, Tensor) or weight.dim() != 1 or list(module._parameters) != ["weight"]:
        return None
    # Llama's norm has variance_epsilon, Gemma's has eps.
    eps_names = [name for name in ("variance_epsilon", "eps") if isinstance(getattr(module, name, None), float)]
    return (f"rms_norm_{eps_names[0]}", family.norm_offset) if len(eps_names) == 1 else None


_ACTIVATIONS = {
    "torch.nn.modules.activation.SiLU": "silu",
    "transformers.activations.SiLUActivation": "silu",
    "torch.nn.modules.activation.GELU": "gelu",
    "transformers.activations.GELUActivation": "gelu",
    "transformers.activations.GELUTanh": "gelu_tanh",
    "transformers.activations.PytorchGELUTanh": "gelu_tanh",  # its name before transformers 5
    "transformers.activations.NewGELUActivation": "gelu_tanh",
}


def _find_gated_mlp(module: nn.Module, original: type[nn.Module]) -> tuple[str, Option] | None:
    parts = ("gate_proj", "up_proj", "down_proj")
    # The fused forward would leave out a further part: for example a norm that the user has added.
    if family_of(original, "MLP") is None or set(module._modules) - {"act_fn"} != set(parts):
        return None
    activation = getattr(module, "act_fn", None)
    name = _ACTIVATIONS.get(f"{type(activation).__module__}.{type(activation).__qualname__}")
    if isinstance(activation, nn.GELU) and activation.approximate == "tanh":
        name = "gelu_tanh"
    return ("gated_mlp", name) if name is not None else None


def _find_rotary(module: nn.Module, original: type[nn.Module]) -> tuple[str, Option] | None:
    forward = _innermost(vars(original).get("forward"))
    if family_of(original, "Attention") is None or not isinstance(forward, FunctionType):
        return None
    rotate = forward.__globals__.get(_ROTATION)
    # A different module: another library has put its function in the place of transformers'.
    if not isinstance(rotate, FunctionType) or rotate.__module__ != original.__module__:
        return None
    if _ROTATION not in forward.__code__.co_names:  # forward rotates without this function
        return None
    return ("rotary", "") if list(inspect.signature(rotate).parameters)[:4] == ["q", "k", "cos", "sin"] else None


def _find_cross_entropy(module: nn.Module, original: type[nn.Module]) -> tuple[str, Option] | None:
    if original is nn.CrossEntropyLoss:
        return "cross_entropy", ""
    return ("loss", "") if is_causal_lm(module, original) else None


def _find_linear_cross_entropy(module: nn.Module, original: type[nn.Module]) -> tuple[str, Option] | None:
    return ("linear_loss", False) if is_causal_lm(module, original) else None


_FINDERS: Mapping[str, Callable[[nn.Module, type[nn.Module]], tuple[str, Option] | None]] = {
    "rms_norm": _find_rms_norm,
    "gated_mlp": _find_gated_mlp,
    "rotary_embedding": _find_rotary,
    "cross_entropy": _find_cross_entropy,
    "linear_cross_entropy": _find_linear_cross_entropy,
}


# -- members of a fused class -----------------------------------------------------------------------------------------


def _rms_norm_members(original: type[nn.Module], fusion: Fusion) -> Members:
    eps_name, offset = fusion.form.removeprefix("rms_norm_"), float(fusion.option)

    def forward(self: Any, x: Tensor) -> Tensor:
        y = rms_norm(x, self.weight, getattr(self, eps_name), offset=offset, backend=fusion.backend)
        # A weight of a wider dtype widens the product, except in Gemma's form, which ends with the dtype of x.
        return y if offset else y.to(torch.promote_types(y.dtype, self.weight.dtype))

    return {"forward": forward}


def _torch_rms_norm_members(original: type[nn.Module], fusion: Fusion) -> Members:
    def forward(self: Any, x: Tensor) -> Tensor:
        # A kernel without weight would take any width.
        if x.shape[-1:] != self.normalized_shape:
            raise ValueError(
                f"{type(self).__name__}: expected an input whose last dimension is {self.normalized_shape[0]}, "
                f"found {tuple(x.shape)}"
            )
        # torch takes the eps of the dtype in which it computes, not of x.dtype as its documentation says.
        eps = torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps if self.eps is None else self.eps
        return rms_norm(x, self.weight, eps, backend=fusion.backend)

    return {"forward": forward}


def _gated_mlp_members(original: type[nn.Module], fusion: Fusion) -> Members:
    backend = fusion.backend
    approximate: Literal["tanh", "none"] = "tanh" if fusion.option == "gelu_tanh" else "none"

    def forward(self: Any, x: Tensor) -> Any:
        gate, up = self.gate_proj(x), self.up_proj(x)
        if gate.dtype != up.dtype:  # an adapter on a single projection may compute in a different dtype
            wide = torch.promote_types(gate.dtype, up.dtype)
            gate, up = gate.to(wide), up.to(wide)
        if fusion.option == "silu":
            return self.down_proj(swiglu(gate, up, backend=backend))
        return self.down_proj(geglu(gate, up, approximate=approximate, backend=backend))

    return {"forward": forward}


def _rotary_members(original: type[nn.Module], fusion: Fusion) -> Members:
    """Copy the original's forward, and let it call the fused rotation under a new name in the module's globals."""
    # A copy of the globals would hide later changes of that module, and torch.compile reads the module.
    forward = vars(original)["forward"]
    new_name = f"_lowtide_{fusion.kernel}_{fusion.backend}"
    code_globals = _innermost(forward).__globals__
    code_globals.setdefault(new_name, _fused_rotation(code_globals[_ROTATION], fusion.backend))
    return {"forward": _renamed(forward, _ROTATION, new_name)}


def _innermost(forward: Any) -> Any:
    """Return the function inside all decorators, such as those that rename deprecated keywords."""
    return inspect.unwrap(forward) if callable(forward) else None


def _renamed(forward: FunctionType, name: str, new_name: str) -> FunctionType:
    """Copy `forward` and the decorators around it; the copy reads the global `new_name` in the place of `name`."""
    inner = getattr(forward, "__wrapped__", None)
    code, cells, copied_inner = forward.__code__, forward.__closure__, forward
    if inner is None:
        code = code.replace(co_names=tuple(new_name if used == name else used for used in code.co_names))
    else:
        copied_inner = _renamed(inner, name, new_name)
        cells = tuple(CellType(copied_inner) if cell.cell_contents is inner else cell for cell in cells or ())
    copied = FunctionType(code, forward.__globals__, forward.__name__, forward.__defaults__, cells)
    update_wrapper(copied, forward)
    copied.__kwdefaults__ = forward.__kwdefaults__
    copied.__wrapped__ = copied_inner  # type: ignore[attr-defined]
    return copied


def _fused_rotation(rotate: Callable[..., Any], backend: Backend) -> Callable[..., Any]:
    """Make the replacement of `rotate`, the function apply_rotary_pos_emb of a family."""

    def fused_rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:  # such as unsqueeze_dim: heads are in a different dimension
            return rotate(q, k, cos, sin, *args, **kwargs)
        # For example float16 tables beside bfloat16 heads: the kernel refuses them.
        if cos.dtype not in (torch.float32, q.dtype):
            cos, sin = cos.float(), sin.float()
        return rotary_embedding(q, k, cos, sin, backend=backend)

    return fused_rotate


def _cross_entropy_members(original: type[nn.Module], fusion: Fusion) -> Members:
    def forward(self: Any, input: Tensor, target: Tensor) -> Any:
        is_known = (
            self.weight is None
            and input.dim() in (1, 2)
            and target.dtype in (torch.int64, torch.int32)
            and target.shape == input.shape[:-1]
        )
        if not is_known:  # probabilities, class weights, images, and inputs that torch refuses
            return original.forward(self, input, target)
        loss = cross_entropy(
            input,
            target,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            reduction=self.reduction,
            backend=fusion.backend,
        )
        # torch computes the loss in float32 under autocast, else in the dtype of the input.
        return loss if has_autocast(input) else loss.to(input.dtype)

    return {"forward": forward}


MEMBERS: Mapping[str, Callable[[type[nn.Module], Fusion], Members]] = {
    "rms_norm_eps": _rms_norm_members,
    "rms_norm_variance_epsilon": _rms_norm_members,
    "torch_rms_norm": _torch_rms_norm_members,
    "gated_mlp": _gated_mlp_members,
    "rotary": _rotary_members,
    "cross_entropy": _cross_entropy_members,
    "loss": lambda original, fusion: loss_members(original, fusion.backend),
    "linear_loss": lambda original, fusion: linear_loss_members(original, always=bool(fusion.option)),
    "head": lambda original, fusion: head_members(original, fusion.backend),
}
"""(original class, fusion) -> members of the fused class, by form. "head": the last layer of a causal LM."""
