"""Small models of Hugging Face, by the names of their classes: NUM_TOKENS tokens, width 32, two layers, four heads."""

import os
from typing import Any

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers")

NUM_TOKENS = 61
HIDDEN = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = HIDDEN | {"vocab_size": NUM_TOKENS, "max_position_embeddings": 32}
GROUPED = TEXT | {"num_key_value_heads": 2}
IMAGE = HIDDEN | {"image_size": 16, "patch_size": 8, "num_labels": 5}
GPT2 = {"n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
BART = {"encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "d_model": 32}
BART_HEADS = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_position_embeddings": 32}
SWIN = {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [1, 1, 1, 1], "num_heads": [2, 2, 4, 4]}
SIZES: dict[str, dict[str, Any]] = {
    "BartForConditionalGeneration": BART | BART_HEADS | {"vocab_size": NUM_TOKENS, "decoder_start_token_id": 0},
    "BertForMaskedLM": TEXT,
    "BloomForCausalLM": {"vocab_size": NUM_TOKENS, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "GPT2LMHeadModel": GPT2 | {"vocab_size": NUM_TOKENS},
    "SwinForImageClassification": SWIN | {"num_labels": 5, "window_size": 2},
    "T5ForConditionalGeneration": T5 | {"vocab_size": NUM_TOKENS},
    "ViTForImageClassification": IMAGE,
}
"""Of the classes that are no decoders with GROUPED heads."""


def small(kind: str, **more: Any) -> Any:
    """A model of this class. more: of its config, in the place of the sizes here."""
    family = kind.split("For")[0].removesuffix("LMHeadModel")
    config = getattr(transformers, f"{family}Config")(**SIZES.get(kind, GROUPED) | more)
    return getattr(transformers, kind)(config)


def gpt2_dropout(rate: float) -> dict[str, float]:
    """The keys of all its dropouts."""
    return dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), rate)
