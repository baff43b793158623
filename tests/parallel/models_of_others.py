"""Small models of transformers, made from configs, in float64, whose forward is the loss of (inputs, labels)."""

import os
from typing import Any

import torch
import transformers
from torch import Tensor, nn

os.environ["HF_HUB_OFFLINE"] = "1"
VOCAB = 67  # nothing divides it
LENGTH = 9
HIDDEN = {"hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 2, "num_attention_heads": 4}
COMMON: dict[str, Any] = {**HIDDEN, "vocab_size": VOCAB, "max_position_embeddings": LENGTH}
KEYS: dict[str, Any] = {**COMMON, "num_key_value_heads": 2, "pad_token_id": 0}


def own(name: str) -> Any:
    """Of a class of transformers one whose forward is the loss."""
    kind: Any = getattr(transformers, name)

    class Own(kind):  # type: ignore[misc]  # of any class
        def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
            loss: Tensor = super().forward(**{self.main_input_name: inputs, "labels": labels}).loss
            return loss

    Own.__name__, Own.__module__ = f"Own{name}", kind.__module__
    return Own


def made(name: str, config: str, sizes: dict[str, Any], **more: Any) -> nn.Module:
    values = {**sizes, **more, "use_cache": False, "dropout_rate": 0.0}
    model: Any = own(name)(getattr(transformers, config).from_dict(values))
    model.config._experts_implementation = "eager"  # grouped_mm takes no float64
    return model.double()


def llama(**more: Any) -> nn.Module:
    return made("LlamaForCausalLM", "LlamaConfig", COMMON, **{"num_key_value_heads": 4, **more})


def grouped_llama() -> nn.Module:
    """Two heads of keys for four of queries."""
    return llama(num_key_value_heads=2)


def one_head_of_keys() -> nn.Module:
    """Both ranks have its linear layers, and parts of their gradients."""
    return llama(num_key_value_heads=1)


def single_llama() -> nn.Module:
    return llama().float()


def qwen() -> nn.Module:
    sizes = {"num_key_value_heads": 4, "head_dim": 8, "tie_word_embeddings": True}
    return made("Qwen3ForCausalLM", "Qwen3Config", COMMON, **sizes)


def gpt2(dropout: float = 0.0, num_hidden_layers: int = 2) -> nn.Module:
    rates = {f"{part}_pdrop": dropout for part in ("resid", "embd", "attn")}
    sizes = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": num_hidden_layers, "n_head": 4, "n_positions": LENGTH}
    return made("GPT2LMHeadModel", "GPT2Config", sizes, **rates)


def dropping_gpt2() -> nn.Module:
    return gpt2(0.3)


def single_gpt2() -> nn.Module:
    return gpt2().float()


def bert() -> nn.Module:
    """Its head's bias is also that of the module around it."""
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return made("BertForMaskedLM", "BertConfig", COMMON, **rates)


def gemma() -> nn.Module:
    """Scaled embeddings, tied to a head with logits in a soft cap."""
    return made("Gemma2ForCausalLM", "Gemma2Config", KEYS, head_dim=8, sliding_window=4)


def t5() -> nn.Module:
    sizes = {"d_model": 32, "d_kv": 6, "d_ff": 44, "num_layers": 2, "num_heads": 4}
    return made("T5ForConditionalGeneration", "T5Config", sizes, vocab_size=VOCAB, decoder_start_token_id=0)


def vit() -> nn.Module:
    return made("ViTForImageClassification", "ViTConfig", HIDDEN, image_size=8, patch_size=4, num_labels=5)


def olmo2(**more: Any) -> nn.Module:
    """Norms over all heads of queries and keys, which are gathered for them."""
    return made("Olmo2ForCausalLM", "Olmo2Config", KEYS, **more)


def phi3() -> nn.Module:
    """Queries, keys and values in one layer, by widths of the config."""
    return made("Phi3ForCausalLM", "Phi3Config", KEYS)


def glm() -> nn.Module:
    return made("GlmForCausalLM", "GlmConfig", KEYS, head_dim=8)


def bloom(num_hidden_layers: int = 2, rate: float = 0.0) -> nn.Module:
    """Its attention adds the residual itself."""
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": num_hidden_layers, "n_head": 4}
    return made("BloomForCausalLM", "BloomConfig", sizes, attention_dropout=rate, hidden_dropout=rate)


# -- with experts -----------------------------------------------------------------------------------------------------

EXPERTS: dict[str, Any] = {**COMMON, "num_key_value_heads": 4}


def mixtral(**more: Any) -> nn.Module:
    return made("MixtralForCausalLM", "MixtralConfig", EXPERTS, **{"num_local_experts": 4, **more})


def plain_mixtral() -> nn.Module:
    """Of transformers' own class."""
    model: Any = transformers.MixtralForCausalLM(transformers.MixtralConfig(**EXPERTS, num_local_experts=4))
    model.config._experts_implementation = "eager"
    return model.double()


def mixtral_with_balance() -> nn.Module:
    """With the loss that balances the load, which each rank has of its own tokens."""
    return mixtral(output_router_logits=True, router_aux_loss_coef=0.1)


def single(model: Any, implementation: str) -> nn.Module:
    model.config._experts_implementation = implementation
    return model.float()


def single_mixtral() -> nn.Module:
    return single(mixtral(), "eager")


def grouped_mixtral() -> nn.Module:
    return single(mixtral(), "grouped_mm")


def batched_mixtral() -> nn.Module:
    return single(mixtral(), "batched_mm")


def grouped_gpt_oss() -> nn.Module:
    return single(gpt_oss(), "grouped_mm")


def qwen_moe() -> nn.Module:
    """Three choices of eight experts; the first layer has none."""
    sizes = {"head_dim": 8, "num_experts": 8, "num_experts_per_tok": 3, "norm_topk_prob": True}
    return made(
        "Qwen3MoeForCausalLM", "Qwen3MoeConfig", EXPERTS, **sizes, moe_intermediate_size=12, mlp_only_layers=[0]
    )


def deepseek() -> nn.Module:
    """A shared expert beside eight, of which four come from two of four groups."""
    sizes = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4, "n_shared_experts": 1}
    layers = {"moe_intermediate_size": 12, "first_k_dense_replace": 1, "q_lora_rank": 8, "kv_lora_rank": 8}
    heads = {"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
    return made("DeepseekV3ForCausalLM", "DeepseekV3Config", EXPERTS, **sizes, **layers, **heads)


def gpt_oss() -> nn.Module:
    """Each head has a sink; experts have biases, and names of their own for choices."""
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    sizes = {"head_dim": 8, "sliding_window": 4, "num_local_experts": 4}
    return made("GptOssForCausalLM", "GptOssConfig", KEYS, **sizes, **rope)


def tokens(step: int, rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3000 + step)
    ids = torch.randint(0, VOCAB, (rows, LENGTH), generator=generator)
    labels = ids.clone()
    labels[:, :2] = -100
    return ids, labels


def pictures(step: int, rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4000 + step)
    return torch.randn(rows, 3, 8, 8, generator=generator).double(), torch.randint(0, 5, (rows,), generator=generator)
