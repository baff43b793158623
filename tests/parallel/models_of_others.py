"""Small models of transformers, made from configs, in float64, whose forward is the loss of (inputs, labels)."""

import os
from collections.abc import Callable
from functools import partial
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
EXPERTS: dict[str, Any] = {**COMMON, "num_key_value_heads": 4}


def own(name: str) -> Any:
    """Of a class of transformers one whose forward is the loss."""
    kind: Any = getattr(transformers, name)

    class Own(kind):  # type: ignore[misc]  # of any class
        def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
            loss: Tensor = super().forward(**{self.main_input_name: inputs, "labels": labels}).loss
            return loss

    Own.__name__, Own.__module__ = f"Own{name}", kind.__module__
    return Own


def made(family: str, sizes: dict[str, Any], head: str = "ForCausalLM", **more: Any) -> nn.Module:
    values = {**sizes, **more, "use_cache": False, "dropout_rate": 0.0}
    model: Any = own(family + head)(getattr(transformers, f"{family}Config").from_dict(values))
    model.config._experts_implementation = "eager"  # grouped_mm takes no float64
    return model.double()


def single(build: Callable[[], Any], implementation: str = "eager") -> nn.Module:
    """In float32, with this implementation of experts."""
    model = build()
    model.config._experts_implementation = implementation
    return model.float()


def gpt2(dropout: float = 0.0, num_hidden_layers: int = 2) -> nn.Module:
    rates = {f"{part}_pdrop": dropout for part in ("resid", "embd", "attn")}
    sizes = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": num_hidden_layers, "n_head": 4, "n_positions": LENGTH}
    return made("GPT2", sizes, "LMHeadModel", **rates)


def bloom(num_hidden_layers: int = 2, rate: float = 0.0) -> nn.Module:
    """Its attention adds the residual itself."""
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": num_hidden_layers, "n_head": 4}
    return made("Bloom", sizes, attention_dropout=rate, hidden_dropout=rate)


def plain_mixtral() -> nn.Module:
    """Of transformers' own class."""
    model: Any = transformers.MixtralForCausalLM(transformers.MixtralConfig(**EXPERTS, num_local_experts=4))
    model.config._experts_implementation = "eager"
    return model.double()


llama = partial(made, "Llama", COMMON, num_key_value_heads=4)
grouped_llama = partial(llama, num_key_value_heads=2)  # two heads of keys for four of queries
one_head_of_keys = partial(llama, num_key_value_heads=1)  # both ranks have its linear layers, and parts of gradients
qwen = partial(made, "Qwen3", COMMON, num_key_value_heads=4, head_dim=8, tie_word_embeddings=True)
dropping_gpt2 = partial(gpt2, 0.3)
# Its head's bias is also that of the module around it.
bert = partial(made, "Bert", COMMON, "ForMaskedLM", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
T5 = {"d_model": 32, "d_kv": 6, "d_ff": 44, "num_layers": 2, "num_heads": 4, "vocab_size": VOCAB}
t5 = partial(made, "T5", T5, "ForConditionalGeneration", decoder_start_token_id=0)
vit = partial(made, "ViT", HIDDEN, "ForImageClassification", image_size=8, patch_size=4, num_labels=5)
olmo2 = partial(made, "Olmo2", KEYS)  # norms over all heads of queries and keys, which are gathered for them
phi3 = partial(made, "Phi3", KEYS)  # queries, keys and values in one layer, by widths of the config

# -- with experts -----------------------------------------------------------------------------------------------------

mixtral = partial(made, "Mixtral", EXPERTS, num_local_experts=4)
# With the loss that balances the load, which each rank has of its own tokens.
mixtral_with_balance = partial(mixtral, output_router_logits=True, router_aux_loss_coef=0.1)
grouped_mixtral = partial(single, mixtral, "grouped_mm")
batched_mixtral = partial(single, mixtral, "batched_mm")
# Three choices of eight experts; the first layer has none.
CHOICES = {"num_experts": 8, "num_experts_per_tok": 3, "norm_topk_prob": True, "moe_intermediate_size": 12}
qwen_moe = partial(made, "Qwen3Moe", EXPERTS | CHOICES, head_dim=8, mlp_only_layers=[0])
# A shared expert beside eight, of which four come from two of four groups.
GROUPS = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4, "n_shared_experts": 1}
LOW_RANK = {"moe_intermediate_size": 12, "first_k_dense_replace": 1, "q_lora_rank": 8, "kv_lora_rank": 8}
HEADS = {"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
deepseek = partial(made, "DeepseekV3", EXPERTS | GROUPS | LOW_RANK | HEADS)
# Each head has a sink; experts have biases, and names of their own for choices.
ROPE = {"rope_type": "default", "rope_theta": 1e4}
gpt_oss = partial(made, "GptOss", KEYS, head_dim=8, sliding_window=4, num_local_experts=4, rope_parameters=ROPE)
grouped_gpt_oss = partial(single, gpt_oss, "grouped_mm")


def tokens(step: int, rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3000 + step)
    ids = torch.randint(0, VOCAB, (rows, LENGTH), generator=generator)
    labels = ids.clone()
    labels[:, :2] = -100
    return ids, labels


def pictures(step: int, rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4000 + step)
    return torch.randn(rows, 3, 8, 8, generator=generator).double(), torch.randint(0, 5, (rows,), generator=generator)
