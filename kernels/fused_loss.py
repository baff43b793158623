"""Fuse the loss of Hugging Face's causal language models, with or without logits.

    with logits       loss_function is replaced: no float32 copy of the logits
    without logits    forward is replaced: output.loss is from `linear_cross_entropy`, output.logits is None

[Note: when logits are left out] Only in training mode, with labels and logits of every position, within `loss_only()`
or if the user named the fusion for the model. In evaluation, generation and calls without labels, the original forward
runs.

[Note: the head is called] The head is called as a module, with the labels beside its input. So code that gathers its
weight before its forward, such as ZeRO, need not know of the fusion.
"""

from __future__ import annotations

import inspect
import sys
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, fields
from functools import partial, wraps
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .cross_entropy import cross_entropy
from .dispatch import Backend
from .linear_cross_entropy import linear_cross_entropy
from .loss_terms import LossOptions, Reduction

_OUTPUTS = ("CausalLMOutputWithPast", "CausalLMOutputWithCrossAttentions")
_LOSS_ONLY: ContextVar[bool] = ContextVar("loss_only", default=False)
_TAKES_LABELS = "_lowtide_takes_labels"  # attribute of a class with the members of `head_members`


class loss_only(AbstractContextManager[None]):  # a class: `contextmanager` would add six calls
    """A context in which fused causal language models in training mode return no logits if they get labels.

    For calls whose loss alone is read. It has no effect on a forward that torch.compile traces as a whole.
    """

    def __enter__(self) -> None:
        self._token = _LOSS_ONLY.set(True)

    def __exit__(self, *_: object) -> None:
        _LOSS_ONLY.reset(self._token)


def is_causal_lm(module: nn.Module, original: type[nn.Module]) -> bool:
    """Tell if the loss of this language model is known: the mean over shifted labels of a linear head's logits."""
    head = getattr(module, "lm_head", None)
    backbone = getattr(module, getattr(module, "base_model_prefix", ""), None)
    return (
        family_of(original, "ForCausalLM", "LMHeadModel") is not None
        and isinstance(head, nn.Linear)
        and head.__class__.__module__ == nn.Linear.__module__  # nn.Linear itself, fused or not
        and head.__class__.__qualname__ == "Linear"
        and isinstance(backbone, nn.Module)
        # Older versions of transformers compute the loss inside forward.
        and isinstance(getattr(original, "loss_function", None), property)
        and getattr(module, "loss_type", None) in (None, "ForCausalLM")
        and _output_type(original) is not None
    )


def loss_members(original: type[nn.Module], backend: Backend) -> dict[str, Any]:
    """Make the member loss_function: the fused cross-entropy, unless the user has set a loss."""
    inherited: property = original.loss_function  # type: ignore[attr-defined]

    def loss_function(self: Any) -> Any:
        return inherited.__get__(self) if _has_own_loss(self) else partial(causal_lm_loss, backend=backend)

    return {"loss_function": property(loss_function, inherited.fset)}


def causal_lm_loss(
    logits: Tensor,
    labels: Tensor | None,
    vocab_size: int,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    *,
    backend: Backend = "auto",
    **_: Any,
) -> Tensor:
    """Compute transformers' ForCausalLMLoss: the mean over labels shifted by 1, or their sum / num_items_in_batch.

    logits: (batch, seq, vocab_size); labels: (batch, seq), or shift_labels, which are already shifted.
    """
    targets = _shifted(labels, shift_labels, ignore_index).to(logits.device)
    reduction: Reduction = "mean" if num_items_in_batch is None else "sum"
    rows = logits.reshape(-1, vocab_size)
    loss = cross_entropy(rows, targets.reshape(-1), ignore_index=ignore_index, reduction=reduction, backend=backend)
    return _divided(loss, num_items_in_batch)


def linear_loss_members(original: type[nn.Module], always: bool) -> dict[str, Any]:
    """Make the member forward, which leaves out unwanted logits. always: in training, not only in `loss_only()`."""
    unfused = original.forward
    signature = inspect.signature(unfused)
    output_type = _output_type(original)
    family = family_of(original, "ForCausalLM", "LMHeadModel")
    assert output_type is not None and family is not None
    caps_logits = family.caps_logits

    @wraps(unfused)  # generate() reads the signature, a pipeline the source
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.training or not (always or _is_loss_only()):
            return unfused(self, *args, **kwargs)
        given = dict(signature.bind(self, *args, **kwargs).arguments)
        # `bind` collects the keywords without a parameter under the name of **kwargs.
        given |= given.pop("kwargs", {})
        given.pop("self")
        labels, kept = given.pop("labels", None), given.pop("logits_to_keep", 0)
        has_labels = labels is not None
        # A tensor or a number above 0 in logits_to_keep wants the logits of some positions.
        if not has_labels or not isinstance(kept, int) or kept or not _can_leave_logits_out(self):
            return unfused(self, *args, **kwargs)
        return_dict = given.pop("return_dict", None)
        outputs = getattr(self, self.base_model_prefix)(**given, return_dict=True)
        soft_cap = self.config.final_logit_softcapping if caps_logits else None
        loss = _loss_of_head(self.lm_head, outputs[0], labels, given, soft_cap)
        others = {field.name: getattr(outputs, field.name, None) for field in fields(output_type)}
        output = output_type(**{**others, "loss": loss, "logits": None})
        # return_dict decides only about the form of the result, so the backbone above always gets True.
        wants_dict = getattr(self.config, "return_dict", True) if return_dict is None else return_dict
        return output if wants_dict else output.to_tuple()

    return {"forward": forward}


def head_members(original: type[nn.Module], backend: Backend) -> dict[str, Any]:
    """Make the member forward of the head: the loss if it gets labels, else the logits."""

    def forward(self: Any, input: Tensor, labels: Tensor | None = None, **options: Unpack[LossOptions]) -> Any:
        if labels is None:
            return original.forward(self, input)
        return linear_cross_entropy(input, self.weight, labels, self.bias, backend=backend, **options)

    return {"forward": forward, _TAKES_LABELS: True}


def _loss_of_head(
    head: nn.Module, hidden: Tensor, labels: Tensor, given: dict[str, Any], soft_cap: float | None
) -> Tensor:
    ignore_index, num_items = given.get("ignore_index", -100), given.get("num_items_in_batch")
    targets = _shifted(labels, given.get("shift_labels"), ignore_index).reshape(hidden.shape[:-1])
    loss: Tensor = head(
        hidden,
        labels=targets.to(hidden.device),
        ignore_index=ignore_index,
        soft_cap=soft_cap,
        reduction="mean" if num_items is None else "sum",
    )
    return _divided(loss, num_items)


def _shifted(labels: Tensor | None, shift_labels: Tensor | None, ignore_index: int) -> Tensor:
    """Return the label of each position: the next token."""
    if shift_labels is not None:
        return shift_labels
    assert labels is not None
    # Labels are shifted and not logits: all logits without the last position would be a copy of them.
    return F.pad(labels, (0, 1), value=ignore_index)[..., 1:]


def _divided(loss: Tensor, num_items: Tensor | int | None) -> Tensor:
    if num_items is None:
        return loss
    return loss / (num_items.to(loss.device) if isinstance(num_items, Tensor) else num_items)


def _is_loss_only() -> bool:
    return not torch.compiler.is_compiling() and _LOSS_ONLY.get()  # dynamo cannot trace a context variable


def _has_own_loss(model: Any) -> bool:
    return "_loss_function" in vars(model)


def _can_leave_logits_out(model: Any) -> bool:
    head = model.lm_head
    # Since the fusion the head may have been replaced: by PEFT, or by resize_token_embeddings.
    if _has_own_loss(model) or not hasattr(type(head), _TAKES_LABELS):
        return False
    # ForCausalLMLoss views the logits as rows of vocab_size, but a padded head has longer rows.
    return bool(head.out_features == model.config.vocab_size)


def _output_type(original: type[nn.Module]) -> Any:
    """Find the class of forward's output in the module of the model."""
    modeling = sys.modules.get(original.__module__)
    found = [getattr(modeling, name) for name in _OUTPUTS if hasattr(modeling, name)]
    # GPT-2's module has both: the model with a language modeling head returns the class with cross-attentions.
    return found[-1] if found else None


# -- known classes of Hugging Face, by name: transformers is never imported here ---------------------------------------


@dataclass(frozen=True)
class Family:
    """The classes of `transformers.models.<name>.modeling_<name>` that have the form of Llama's."""

    name: str
    prefix: str
    parts: tuple[str, ...] = ("RMSNorm", "MLP", "Attention", "ForCausalLM")
    norm_offset: float = 0.0  # added to the weight of an RMS norm: Gemma's weights begin at 0
    caps_logits: bool = False  # config.final_logit_softcapping


_FAMILIES = (
    Family("llama", "Llama"),
    Family("mistral", "Mistral"),
    Family("mixtral", "Mixtral", ("RMSNorm", "Attention")),  # has experts, and a loss with more terms
    Family("qwen2", "Qwen2"),
    Family("qwen3", "Qwen3"),
    Family("gemma", "Gemma", norm_offset=1.0),
    Family("gemma2", "Gemma2", norm_offset=1.0, caps_logits=True),
    Family("gpt2", "GPT2", ("LMHeadModel",)),  # its norms are torch's
)
_BY_NAME = {
    f"transformers.models.{family.name}.modeling_{family.name}.{family.prefix}{part}": (family, part)
    for family in _FAMILIES
    for part in family.parts
}


def family_of(cls: type, *parts: str) -> Family | None:
    """Return the family in which `cls` is one of `parts`, such as "RMSNorm", or None.

    A subclass of a known class is not known, because it may compute something different.
    """
    family, part = _BY_NAME.get(f"{cls.__module__}.{cls.__qualname__}", (None, ""))
    return family if part in parts else None
