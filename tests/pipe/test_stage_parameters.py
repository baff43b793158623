"""A stage has its own parameters only, under the names of the whole model; so have those of Hugging Face models."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowtide.model.patches import ModelPatches
from lowtide.pipe.split.split import plan_split
from lowtide.pipe.stage import Stage, make_stages
from tests.kit import models
from tests.kit.training import refusal
from tests.pipe.hugging_face import MODELS, batch_for, builder
from tests.pipe.staged import Call, equal_staged, numels, seeded, staged, stages_of, whole

tied_gpt = partial(models.TinyGPT, layers=4, tied=True)


class Normalized(models.Mlp):
    """Buffers that training changes: before the blocks, in them, and behind them."""

    first: Any  # of another class than the parent's
    last: Any

    def __init__(self) -> None:
        super().__init__()
        plain = nn.BatchNorm1d(models.FEATURES, affine=False)  # no parameter says which stage has its statistics
        self.first = nn.Sequential(plain, nn.Linear(models.FEATURES, 7), nn.BatchNorm1d(7))
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(7, 7), nn.BatchNorm1d(7)) for _ in range(4)))
        self.last = nn.Sequential(nn.BatchNorm1d(7), nn.Linear(7, 3), nn.BatchNorm1d(3, affine=False))
        self.register_buffer("center", torch.zeros(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        self.center: Tensor = self.center + y.mean(0)
        return nn.functional.mse_loss(self.last(x), y - self.center)


@pytest.mark.parametrize("build", [tied_gpt, builder("T5ForConditionalGeneration"), builder("BertForMaskedLM")])
def test_every_parameter_is_on_a_stage_and_only_tied_ones_are_on_several(build: Callable[[], nn.Module]) -> None:
    model, stages = seeded(build), stages_of(build, 4)
    names = [name for name, _ in model.named_parameters()]
    found = [name for stage in stages for name, _ in stage.module.named_parameters()]
    plan = stages[0].plan
    assert set(found) == set(names)
    assert {name: found.count(name) for name in names if found.count(name) > 1} == {
        name: len(tied) for name, tied in plan.tied.items()
    }
    for stage in stages:
        own = dict(stage.module.named_parameters())
        assert list(own) == list(plan.parameters[stage.index]) == [name for name in names if name in own]
        assert numels(plan, model)[stage.index] == sum(param.numel() for param in own.values())
        assert all(torch.equal(param, model.get_parameter(name)) for name, param in own.items())


def ranks_of_one_stage() -> list[Stage]:
    return stages_of(Normalized, 3)


def a_rank_with_the_first_and_the_last() -> list[Stage]:
    plan = plan_split(Normalized(), 3)
    first, last = make_stages(seeded(Normalized), plan, [0, 2], ModelPatches())
    return [first, Stage(seeded(Normalized), plan, 1), last]


@pytest.mark.parametrize("make", [ranks_of_one_stage, a_rank_with_the_first_and_the_last])
def test_the_state_dicts_of_the_stages_make_up_that_of_the_model_also_when_training_changes_buffers(
    make: Callable[[], list[Stage]],
) -> None:
    model, stages = seeded(Normalized), make()
    modules = list(dict.fromkeys(stage.module for stage in stages))
    for step in range(2):
        states = [module.state_dict() for module in modules]
        merged = {key: value for state in states for key, value in state.items()}
        assert sorted(key for state in states for key in state) == sorted(model.state_dict())
        assert [key for key, value in model.state_dict().items() if not torch.equal(value, merged[key])] == []
        call = lambda model, step=step: model(*models.vector_batch(step, 6))  # noqa: E731
        for module in (model, *modules):
            module.zero_grad()
        assert staged(stages, call).differences(whole(model, call)) == []


def test_the_module_can_be_moved_and_initialized_as_any_other() -> None:
    stage = stages_of(tied_gpt, 4)[1]
    stage.module.to(torch.float64).apply(lambda module: None).requires_grad_(True)
    assert {param.dtype for param in stage.module.parameters()} == {torch.float64}
    assert repr(stage.module).startswith("TinyGPT(")


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
