"""Hugging Face models, unchanged, have the loss and gradients of the whole model when they run as stages."""

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.pipe.staged import staged, stages_of, whole

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers")

NUM_TOKENS = 61
HIDDEN = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
TEXT = HIDDEN | {"vocab_size": NUM_TOKENS, "max_position_embeddings": 32, "use_cache": False}
GROUPED = TEXT | {"num_key_value_heads": 2}
IMAGE = HIDDEN | {"image_size": 16, "patch_size": 8, "num_labels": 5}
SMALL = {"vocab_size": NUM_TOKENS, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 4}
TWO_STACKS = {"vocab_size": NUM_TOKENS, "d_model": 32, "pad_token_id": 0, "decoder_start_token_id": 0}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GPT2 = {"n_positions": 32, "n_embd": 32, "n_layer": 4, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0}
GPT2_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
OPT = {"ffn_dim": 48, "max_position_embeddings": 32, "word_embed_proj_dim": 16, "dropout": 0.0}
T5 = {"d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
BART = {"encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "dropout": 0.0}
BART_HEADS = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_position_embeddings": 32}
SWIN = {
    "image_size": 32,
    "patch_size": 2,
    "embed_dim": 16,
    "depths": [1, 1, 1, 1],
    "num_heads": [2, 2, 4, 4],
    "num_labels": 5,
}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "LlamaForCausalLM": ("LlamaConfig", GROUPED),
    "MistralForCausalLM": ("MistralConfig", GROUPED | {"sliding_window": 4}),
    "Qwen3ForCausalLM": ("Qwen3Config", GROUPED | {"head_dim": 8}),
    "GemmaForCausalLM": ("GemmaConfig", GROUPED | {"head_dim": 8}),
    "Gemma2ForCausalLM": ("Gemma2Config", GROUPED | {"head_dim": 8, "sliding_window": 4}),
    "MixtralForCausalLM": ("MixtralConfig", GROUPED | {"num_local_experts": 4}),
    "GPT2LMHeadModel": ("GPT2Config", {"vocab_size": NUM_TOKENS, **GPT2, **GPT2_DROPOUT}),
    "GPTNeoXForCausalLM": ("GPTNeoXConfig", TEXT),
    "OPTForCausalLM": ("OPTConfig", SMALL | OPT),
    "BloomForCausalLM": ("BloomConfig", {"vocab_size": NUM_TOKENS, "hidden_size": 32, "n_layer": 4, "n_head": 4}),
    "PhiForCausalLM": ("PhiConfig", TEXT),
    "BertForMaskedLM": ("BertConfig", TEXT | NO_DROPOUT),
    "T5ForConditionalGeneration": ("T5Config", TWO_STACKS | T5 | {"use_cache": False}),
    "BartForConditionalGeneration": ("BartConfig", TWO_STACKS | BART | BART_HEADS | {"use_cache": False}),
    "ViTForImageClassification": ("ViTConfig", IMAGE),
    "SwinForImageClassification": ("SwinConfig", SWIN | NO_DROPOUT | {"drop_path_rate": 0.0, "window_size": 2}),
}


def builder(name: str, **changes: Any) -> Callable[[], nn.Module]:
    config_name, sizes = MODELS[name]

    def build() -> nn.Module:
        torch.manual_seed(0)
        model: nn.Module = getattr(transformers, name)(getattr(transformers, config_name)(**(sizes | changes)))
        return model.train()

    return build


def batch_for(name: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    if "Image" in name:
        size = 32 if name.startswith("Swin") else 16
        images = torch.randn(2, 3, size, size, generator=generator)
        return {"pixel_values": images, "labels": torch.randint(5, (2,), generator=generator)}
    tokens = torch.randint(1, NUM_TOKENS, (2, 9), generator=generator)
    mask = torch.ones_like(tokens)
    mask[0, -3:] = 0
    return {"input_ids": tokens, "labels": tokens.masked_fill(mask == 0, -100), "attention_mask": mask}


@pytest.mark.parametrize(
    ("name", "num_stages"),
    [*((name, 4) for name in MODELS), *((name, 2) for name in ("LlamaForCausalLM", "BartForConditionalGeneration"))],
)
def test_stages_equal_the_whole_model_bitwise(name: str, num_stages: int) -> None:
    batch = batch_for(name)
    expected = whole(builder(name)(), lambda model: model(**batch))
    stages = stages_of(builder(name), num_stages)
    found = staged(stages, lambda model: model(**batch))
    differing = found.differences(expected)
    if name.startswith("Bart") and num_stages == 2:  # three uses of one tied weight on two stages: (a + b) + c
        assert differing == ["model.shared.weight"]
        torch.testing.assert_close(found.gradients["model.shared.weight"], expected.gradients["model.shared.weight"])
    else:
        assert differing == []


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "T5ForConditionalGeneration"])
def test_a_second_microbatch_of_another_length_is_right_too(name: str) -> None:
    stages = stages_of(builder(name), 4)
    batch = batch_for(name)
    short = {key: value[:1, :5] for key, value in batch.items()}
    staged(stages, lambda model: model(**batch))
    for stage in stages:
        stage.module.zero_grad()
    expected = whole(builder(name)(), lambda model: model(**short))
    assert staged(stages, lambda model: model(**short)).differences(expected) == []


def test_a_decoder_stage_is_sent_the_output_of_the_encoder_and_the_position_biases() -> None:
    stages = stages_of(builder("T5ForConditionalGeneration"), 4)
    batch = batch_for("T5ForConditionalGeneration")
    found = staged(stages, lambda model: model(**batch))
    hidden, bias = (2, 9, 32), (2, 4, 9, 9)
    assert [sorted(len(shape.shape) for shape in output.spec.tensors) for output in found.carried] == [
        [3, 4],  # hidden state, and the position bias that encoder block 0 made
        [3, 3],  # embedded decoder tokens and the encoder's output
        [3, 3, 4, 4],  # with both position biases of the decoder
    ]
    assert found.carried[1].spec.tensors[0].shape == hidden
    assert found.carried[2].spec.tensors[1].shape[1:] == bias[1:]
    assert [output.spec.block for output in found.carried] == ["encoder.block.1", "decoder.block.0", "decoder.block.1"]


def test_only_the_hidden_state_is_sent_by_a_model_with_masks_and_rotary_tables() -> None:
    batch = batch_for("Gemma2ForCausalLM")
    found = staged(stages_of(builder("Gemma2ForCausalLM"), 2), lambda model: model(**batch))
    (output,) = found.carried
    assert [shape.shape for shape in output.spec.tensors] == [(2, 9, 32)] and output.spec.needs_grad == (True,)


def test_caches_of_keys_and_values_are_off_while_a_stage_runs_and_the_config_keeps_its_value() -> None:
    batch = batch_for("LlamaForCausalLM")
    expected = whole(builder("LlamaForCausalLM", use_cache=True)(), lambda model: model(**batch))
    stages = stages_of(builder("LlamaForCausalLM", use_cache=True), 2)
    seen: list[Any] = []

    def call(model: nn.Module) -> Any:
        output = model(**batch)
        seen.append(output.past_key_values)
        return output

    assert staged(stages, call).differences(expected) == []
    configs: list[Any] = [stage.module.config for stage in stages]
    assert seen == [None] and all(config.use_cache is True for config in configs)


def test_the_model_checkpoints_its_layers_itself() -> None:
    batch = batch_for("LlamaForCausalLM")
    expected = whole(builder("LlamaForCausalLM")(), lambda model: model(**batch))

    def build(use_reentrant: bool) -> nn.Module:
        model: Any = builder("LlamaForCausalLM")()
        current = hasattr(model, "activation_checkpointing_enable")  # the older name warns where this one is
        enable = model.activation_checkpointing_enable if current else model.gradient_checkpointing_enable
        enable({"use_reentrant": use_reentrant})
        return model

    for use_reentrant in (False, True):
        stages = stages_of(partial(build, use_reentrant), 2)
        assert staged(stages, lambda model: model(**batch)).differences(expected) == []


def test_a_loss_over_the_routers_of_all_layers_is_refused() -> None:
    text = "output_router_logits of '.the model.' is True: this loss needs the routers of all blocks on the same rank"
    with pytest.raises(ValueError, match=text):
        stages_of(builder("MixtralForCausalLM", output_router_logits=True), 2)
