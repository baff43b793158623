"""Small models of transformers, made from configs, whose forward is the loss of (ids, labels)."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

VOCAB = 67  # nothing divides it
LENGTH = 9
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": LENGTH,
}


class OwnLlamaForCausalLM(LlamaForCausalLM):
    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = super().forward(input_ids=ids, labels=labels, use_cache=False).loss
        return loss


class OwnQwenForCausalLM(Qwen3ForCausalLM):
    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = super().forward(input_ids=ids, labels=labels, use_cache=False).loss
        return loss


class OwnGpt2ForCausalLM(GPT2LMHeadModel):
    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = super().forward(input_ids=ids, labels=labels, use_cache=False).loss
        return loss


class OwnT5ForConditionalGeneration(T5ForConditionalGeneration):
    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = super().forward(input_ids=ids, labels=labels, use_cache=False).loss
        return loss


class OwnBertForMaskedLM(BertForMaskedLM):
    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = super().forward(input_ids=ids, labels=labels).loss
        return loss


class OwnGemmaForCausalLM(Gemma2ForCausalLM):
    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = super().forward(input_ids=ids, labels=labels, use_cache=False).loss
        return loss


class OwnGptOssForCausalLM(GptOssForCausalLM):
    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = super().forward(input_ids=ids, labels=labels, use_cache=False).loss
        return loss


class OwnVitForImageClassification(ViTForImageClassification):
    def forward(self, pixels: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = super().forward(pixel_values=pixels, labels=labels).loss
        return loss


def llama() -> nn.Module:
    return OwnLlamaForCausalLM(LlamaConfig(**COMMON, num_key_value_heads=4)).double()


def grouped_llama() -> nn.Module:
    """Two heads of keys for four of queries."""
    return OwnLlamaForCausalLM(LlamaConfig(**COMMON, num_key_value_heads=2)).double()


def qwen() -> nn.Module:
    return OwnQwenForCausalLM(
        Qwen3Config(**COMMON, num_key_value_heads=4, head_dim=8, tie_word_embeddings=True)
    ).double()


def gpt2(dropout: float = 0.0) -> nn.Module:
    rates: dict[str, Any] = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    config = GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=LENGTH, **rates)
    return OwnGpt2ForCausalLM(config).double()


def bert() -> nn.Module:
    """Its head's bias is also that of the module around it."""
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return OwnBertForMaskedLM(BertConfig.from_dict({**COMMON, **rates})).double()


def gemma() -> nn.Module:
    """Scaled embeddings, tied to a head with logits in a soft cap."""
    sizes = {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 4, "pad_token_id": 0}
    return OwnGemmaForCausalLM(Gemma2Config.from_dict({**COMMON, **sizes})).double()


def gpt_oss() -> nn.Module:
    """Each head has a sink."""
    sizes = {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 4, "num_local_experts": 4, "pad_token_id": 0}
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    return OwnGptOssForCausalLM(GptOssConfig.from_dict({**COMMON, **sizes, **rope})).double()


def t5() -> nn.Module:
    sizes = {"d_model": 32, "d_kv": 6, "d_ff": 44, "num_layers": 2, "num_heads": 4}
    config = T5Config.from_dict({**sizes, "vocab_size": VOCAB, "dropout_rate": 0.0, "decoder_start_token_id": 0})
    return OwnT5ForConditionalGeneration(config).double()


def vit() -> nn.Module:
    sizes = {key: value for key, value in COMMON.items() if key not in ("vocab_size", "max_position_embeddings")}
    config = ViTConfig.from_dict({**sizes, "image_size": 8, "patch_size": 4, "num_labels": 5})
    return OwnVitForImageClassification(config).double()


def tokens(step: int, rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3000 + step)
    ids = torch.randint(0, VOCAB, (rows, LENGTH), generator=generator)
    labels = ids.clone()
    labels[:, :2] = -100
    return ids, labels


def pictures(step: int, rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4000 + step)
    return torch.randn(rows, 3, 8, 8, generator=generator).double(), torch.randint(0, 5, (rows,), generator=generator)
