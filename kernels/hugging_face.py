"""What is known of Hugging Face's classes, by their names: transformers is never imported here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """The classes of `transformers.models.<name>.modeling_<name>` that have the forms of Llama."""

    name: str
    prefix: str
    parts: tuple[str, ...] = ("RMSNorm", "MLP", "Attention", "ForCausalLM")
    norm_offset: float = 0.0  # what is added to the weight of an RMS norm: Gemma's begin at 0
    caps_logits: bool = False  # config.final_logit_softcapping


_FAMILIES = (
    Family("llama", "Llama"),
    Family("mistral", "Mistral"),
    Family("mixtral", "Mixtral", ("RMSNorm", "Attention")),  # experts, and a loss that has more terms
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
    """The family of which `cls` is one of `parts`, such as "RMSNorm"; None where it is none of them.

    cls itself is asked for, not its bases: a subclass may compute something else.
    """
    family, part = _BY_NAME.get(f"{cls.__module__}.{cls.__qualname__}", (None, ""))
    return family if part in parts else None
