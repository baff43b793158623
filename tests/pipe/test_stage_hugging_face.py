"""Hugging Face models, unchanged, have the loss and gradients of the whole model when they run as stages."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.kit.training import refusal
from tests.pipe.hugging_face import MODELS, batch_for, builder
from tests.pipe.staged import Call, equal_staged, staged, stages_of, whole

LLAMA, T5 = "LlamaForCausalLM", "T5ForConditionalGeneration"


def calling(name: str) -> Call:
    batch = batch_for(name)
    return lambda model: model(**batch)


@pytest.mark.parametrize("name", MODELS)
def test_stages_equal_the_whole_model_bitwise(name: str) -> None:
    equal_staged(builder(name), calling(name), 4)


def test_three_uses_of_one_tied_weight_on_two_stages_are_summed_in_another_order() -> None:
    build, call, shared = builder("BartForConditionalGeneration"), calling("Bart"), "model.shared.weight"
    found, expected = staged(stages_of(build, 2), call), whole(build(), call)
    assert found.differences(expected) == [shared]  # (a + b) + c
    torch.testing.assert_close(found.gradients[shared], expected.gradients[shared])


def test_a_second_microbatch_of_another_length_is_right_too() -> None:
    build, stages = builder(T5), stages_of(builder(T5), 4)
    short = {key: value[:1, :5] for key, value in batch_for(T5).items()}
    staged(stages, calling(T5))
    for stage in stages:
        stage.module.zero_grad()
    call = lambda model: model(**short)  # noqa: E731
    assert staged(stages, call).differences(whole(build(), call)) == []


def test_a_decoder_stage_is_sent_the_output_of_the_encoder_and_the_position_biases() -> None:
    carried = staged(stages_of(builder(T5), 4), calling(T5)).carried
    assert [sorted(len(shape.shape) for shape in output.spec.tensors) for output in carried] == [
        [3, 4],  # hidden state, and the position bias that encoder block 0 made
        [3, 3],  # embedded decoder tokens and the encoder's output
        [3, 3, 4, 4],  # with both position biases of the decoder
    ]
    assert carried[1].spec.tensors[0].shape == (2, 9, 32) and carried[2].spec.tensors[1].shape[1:] == (4, 9, 9)
    assert [output.spec.block for output in carried] == ["encoder.block.1", "decoder.block.0", "decoder.block.1"]


def test_only_the_hidden_state_is_sent_by_a_model_with_masks_and_rotary_tables() -> None:
    name = "Gemma2ForCausalLM"
    (output,) = staged(stages_of(builder(name), 2), calling(name)).carried
    assert [shape.shape for shape in output.spec.tensors] == [(2, 9, 32)] and output.spec.needs_grad == (True,)


def test_caches_of_keys_and_values_are_off_while_a_stage_runs_and_the_config_keeps_its_value() -> None:
    build, batch = builder(LLAMA, use_cache=True), batch_for(LLAMA)
    stages, seen = stages_of(build, 2), list[Any]()

    def call(model: nn.Module) -> Any:
        output = model(**batch)
        seen.append(output.past_key_values)
        return output

    found = staged(stages, call)
    configs: list[Any] = [stage.module.config for stage in stages]
    assert seen == [None] and all(config.use_cache is True for config in configs)
    assert found.differences(whole(build(), call)) == []


def test_a_loss_over_the_routers_of_all_layers_is_refused() -> None:
    text = refusal(stages_of, builder("MixtralForCausalLM", output_router_logits=True), 2)
    assert "output_router_logits of '(the model)' is True: this loss needs the routers of all blocks on the" in text


@pytest.mark.parametrize("name", [LLAMA, "BloomForCausalLM", T5])
def test_a_stage_cast_to_bfloat16_makes_the_masks_of_the_whole_model_in_bfloat16(name: str) -> None:
    stages = stages_of(builder(name), 4)
    for stage in stages:
        stage.module.bfloat16()
    assert staged(stages, calling(name)).differences(whole(builder(name)().bfloat16(), calling(name))) == []
