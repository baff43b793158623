"""Small models of the families that `fuse_model` knows."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers")

NUM_TOKENS = 61
SIZES = {
    "vocab_size": NUM_TOKENS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}


def llama(**sizes: Any) -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES | sizes))


def mistral() -> nn.Module:
    return transformers.MistralForCausalLM(transformers.MistralConfig(**SIZES, head_dim=8))


def mixtral() -> nn.Module:
    config = transformers.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)
    return transformers.MixtralForCausalLM(config)


def qwen2() -> nn.Module:
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SIZES))


def qwen3() -> nn.Module:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES, head_dim=8))


def gemma() -> nn.Module:
    return transformers.GemmaForCausalLM(transformers.GemmaConfig(**SIZES, head_dim=8))


def gemma2() -> nn.Module:
    """Its soft cap is low, so that it matters."""
    config = transformers.Gemma2Config(**SIZES, head_dim=8, final_logit_softcapping=0.5)
    return transformers.Gemma2ForCausalLM(config)


def gpt2() -> nn.Module:
    sizes = {"n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0}
    no_dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=NUM_TOKENS, **sizes, **no_dropout))


CAUSAL_LMS: dict[str, Callable[[], nn.Module]] = {
    build.__name__: build for build in (llama, mistral, qwen2, qwen3, gemma, gemma2, gpt2)
}


class Classifier(nn.Module):
    """Torch's own norm and loss."""

    def __init__(self, affine: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.norm = nn.RMSNorm(7, elementwise_affine=affine)
        self.last = nn.Linear(7, 4)
        self.loss = nn.CrossEntropyLoss(label_smoothing=0.1, ignore_index=3)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:  # (rows, 5), (rows,)
        loss: Tensor = self.loss(self.last(self.norm(self.first(x)).tanh()), labels)
        return loss


def token_batch(generator: torch.Generator, rows: int = 2, length: int = 7) -> dict[str, Tensor]:
    """The labels of some tokens are ignored."""
    tokens = torch.randint(NUM_TOKENS, (rows, length), generator=generator)
    ignored = torch.rand(rows, length, generator=generator) < 0.3
    ignored[:, -1] = False
    return {"input_ids": tokens, "labels": tokens.masked_fill(ignored, -100)}
