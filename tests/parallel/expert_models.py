"""Small models with experts, made from configs of transformers, whose forward is the loss of (ids, labels)."""

from typing import Any

from torch import Tensor, nn
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tests.parallel.models_of_others import COMMON, OwnGptOssForCausalLM, tokens

__all__ = ["tokens"]


class OwnMixtralForCausalLM(MixtralForCausalLM):
    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = super().forward(input_ids=ids, labels=labels, use_cache=False).loss
        return loss


class OwnQwenMoeForCausalLM(Qwen3MoeForCausalLM):
    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = super().forward(input_ids=ids, labels=labels, use_cache=False).loss
        return loss


class OwnDeepseekForCausalLM(DeepseekV3ForCausalLM):
    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = super().forward(input_ids=ids, labels=labels, use_cache=False).loss
        return loss


def _double(model: Any, implementation: str = "eager") -> nn.Module:
    """grouped_mm takes no float64."""
    model.config._experts_implementation = implementation
    made: nn.Module = model.double()
    return made


def mixtral(**more: Any) -> nn.Module:
    sizes = {**COMMON, "num_key_value_heads": 4, "num_local_experts": 4}
    return _double(OwnMixtralForCausalLM(MixtralConfig(**{**sizes, **more})))


def plain_mixtral() -> nn.Module:
    """Of transformers' own class."""
    return _double(MixtralForCausalLM(MixtralConfig(**COMMON, num_key_value_heads=4, num_local_experts=4)))


def mixtral_with_balance() -> nn.Module:
    """With the loss that balances the load, which each rank has of its own tokens."""
    return mixtral(output_router_logits=True, router_aux_loss_coef=0.1)


def mixtral_of(implementation: str) -> nn.Module:
    model: Any = mixtral().float()
    model.config._experts_implementation = implementation
    return model


def qwen() -> nn.Module:
    """Three choices of eight experts; the first layer has none."""
    sizes = {"num_key_value_heads": 4, "head_dim": 8, "num_experts": 8, "num_experts_per_tok": 3}
    layers = {"moe_intermediate_size": 12, "mlp_only_layers": [0], "norm_topk_prob": True}
    return _double(OwnQwenMoeForCausalLM(Qwen3MoeConfig.from_dict({**COMMON, **sizes, **layers})))


def deepseek() -> nn.Module:
    """A shared expert beside eight, of which four come from two of four groups."""
    sizes = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4, "n_shared_experts": 1}
    layers = {"moe_intermediate_size": 12, "first_k_dense_replace": 1, "num_key_value_heads": 4}
    heads = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
    return _double(OwnDeepseekForCausalLM(DeepseekV3Config.from_dict({**COMMON, **sizes, **layers, **heads})))


def gpt_oss() -> nn.Module:
    """Experts with biases, and names of its own for choices."""
    sizes = {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 4, "num_local_experts": 4, "pad_token_id": 0}
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    return _double(OwnGptOssForCausalLM(GptOssConfig.from_dict({**COMMON, **sizes, **rope})))


def grouped_gpt_oss() -> nn.Module:
    model: Any = gpt_oss().float()
    model.config._experts_implementation = "grouped_mm"
    return model
