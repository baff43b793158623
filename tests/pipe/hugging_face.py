"""Small models of Hugging Face, with blocks for four stages and without dropout, and their batches."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers")

NUM_TOKENS = 61
HIDDEN = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
TEXT = HIDDEN | {"vocab_size": NUM_TOKENS, "max_position_embeddings": 32, "use_cache": False}
GROUPED = TEXT | {"num_key_value_heads": 2}
IMAGE = HIDDEN | {"image_size": 16, "patch_size": 8, "num_labels": 5}
SMALL = {"vocab_size": NUM_TOKENS, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 4}
TWO_STACKS = {
    "vocab_size": NUM_TOKENS,
    "d_model": 32,
    "pad_token_id": 0,
    "decoder_start_token_id": 0,
    "use_cache": False,
}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GPT2 = {"n_positions": 32, "n_embd": 32, "n_layer": 4, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0}
GPT2_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
OPT = {"ffn_dim": 48, "max_position_embeddings": 32, "word_embed_proj_dim": 16, "dropout": 0.0}
T5 = {"d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
BART = {"encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "dropout": 0.0}
BART_HEADS = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_position_embeddings": 32}
SWIN = {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [1, 1, 1, 1], "num_heads": [2, 2, 4, 4]}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "LlamaForCausalLM": ("LlamaConfig", GROUPED),
    "MistralForCausalLM": ("MistralConfig", GROUPED | {"sliding_window": 4}),
    "Gemma2ForCausalLM": ("Gemma2Config", GROUPED | {"head_dim": 8, "sliding_window": 4}),
    "MixtralForCausalLM": ("MixtralConfig", GROUPED | {"num_local_experts": 4}),
    "GPT2LMHeadModel": ("GPT2Config", {"vocab_size": NUM_TOKENS, **GPT2, **GPT2_DROPOUT}),
    "OPTForCausalLM": ("OPTConfig", SMALL | OPT),
    "BloomForCausalLM": ("BloomConfig", {"vocab_size": NUM_TOKENS, "hidden_size": 32, "n_layer": 4, "n_head": 4}),
    "BertForMaskedLM": ("BertConfig", TEXT | NO_DROPOUT),
    "T5ForConditionalGeneration": ("T5Config", TWO_STACKS | T5),
    "BartForConditionalGeneration": ("BartConfig", TWO_STACKS | BART | BART_HEADS),
    "ViTForImageClassification": ("ViTConfig", IMAGE),
    "SwinForImageClassification": (
        "SwinConfig",
        SWIN | NO_DROPOUT | {"num_labels": 5, "drop_path_rate": 0.0, "window_size": 2},
    ),
}


def builder(name: str, **changes: Any) -> Callable[[], nn.Module]:
    config_name, sizes = MODELS[name]

    def build() -> nn.Module:
        torch.manual_seed(0)
        model: nn.Module = getattr(transformers, name)(getattr(transformers, config_name)(**(sizes | changes)))
        return model.train()

    return build


def batch_for(name: str, seed: int = 1) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    if "Image" in name:
        size = 32 if name.startswith("Swin") else 16
        images = torch.randn(2, 3, size, size, generator=generator)
        return {"pixel_values": images, "labels": torch.randint(5, (2,), generator=generator)}
    tokens = torch.randint(1, NUM_TOKENS, (2, 9), generator=generator)
    mask = torch.ones_like(tokens)
    mask[0, -3:] = 0
    return {"input_ids": tokens, "labels": tokens.masked_fill(mask == 0, -100), "attention_mask": mask}
