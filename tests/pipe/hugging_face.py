"""Small models of Hugging Face, with blocks for four stages and without dropout, and their batches."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.kit.hugging_face import NUM_TOKENS, gpt2_dropout, small

FOUR = {"num_hidden_layers": 4, "use_cache": False}
TWO_STACKS = {"pad_token_id": 0, "use_cache": False}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

MODELS: dict[str, dict[str, Any]] = {  # what stands in the place of the kit's sizes
    "LlamaForCausalLM": FOUR,
    "MistralForCausalLM": FOUR | {"sliding_window": 4},
    "Gemma2ForCausalLM": FOUR | {"head_dim": 8, "sliding_window": 4},
    "MixtralForCausalLM": FOUR | {"num_local_experts": 4},
    "GPT2LMHeadModel": {"n_layer": 4, **gpt2_dropout(0.0)},
    "OPTForCausalLM": FOUR | {"ffn_dim": 48, "word_embed_proj_dim": 16, "dropout": 0.0},
    "BloomForCausalLM": {"n_layer": 4},
    "BertForMaskedLM": FOUR | NO_DROPOUT,
    "T5ForConditionalGeneration": TWO_STACKS | {"dropout_rate": 0.0},
    "BartForConditionalGeneration": TWO_STACKS | {"dropout": 0.0},
    "ViTForImageClassification": {"num_hidden_layers": 4},
    "SwinForImageClassification": NO_DROPOUT | {"drop_path_rate": 0.0},
}


def builder(name: str, **changes: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        torch.manual_seed(0)
        model: nn.Module = small(name, **(MODELS[name] | changes))
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
