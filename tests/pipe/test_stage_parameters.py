"""A stage has its own parameters only, under the names that they have in the whole model."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lowtide.engine.model.deferred import DeferredModel
from lowtide.model.patches import ModelPatches
from lowtide.pipe.split.split import plan_split
from lowtide.pipe.stage import Stage, make_stages
from tests.kit import models
from tests.pipe.staged import numels, staged, stages_of, whole
from tests.pipe.test_stage_hugging_face import batch_for, builder

TOKENS = models.token_batch(0, 2)


def tied_gpt() -> nn.Module:
    torch.manual_seed(0)
    return models.TinyGPT(layers=4, tied=True)


class Normalized(models.Mlp):
    """Buffers that training changes: before the blocks, in them, and behind them."""

    first: Any  # of another class than the parent's
    last: Any

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.first = nn.Sequential(nn.Linear(models.FEATURES, 7), nn.BatchNorm1d(7))
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(7, 7), nn.BatchNorm1d(7)) for _ in range(4)))
        self.last = nn.Sequential(nn.BatchNorm1d(7), nn.Linear(7, 3))


@pytest.mark.parametrize("build", [tied_gpt, builder("T5ForConditionalGeneration"), builder("BertForMaskedLM")])
def test_every_parameter_is_on_a_stage_and_only_tied_ones_are_on_several(build: Callable[[], nn.Module]) -> None:
    model, stages = build(), stages_of(build, 4)
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


def test_the_state_dicts_of_the_stages_make_up_that_of_the_model() -> None:
    expected = Normalized().state_dict()
    stages = stages_of(Normalized, 3)
    states = [stage.module.state_dict() for stage in stages]
    assert sorted(key for state in states for key in state) == sorted(expected)
    merged = {key: value for state in states for key, value in state.items()}
    assert all(torch.equal(merged[key], expected[key]) for key in expected)


def test_buffers_that_training_changes_are_right_on_their_stage() -> None:
    model, stages = Normalized(), stages_of(Normalized, 3)
    for step in range(2):
        call = lambda model, step=step: model(*models.vector_batch(step, 6))  # noqa: E731
        model.zero_grad()
        for stage in stages:
            stage.module.zero_grad()
        assert staged(stages, call).differences(whole(model, call)) == []
    merged = {key: value for stage in stages for key, value in stage.module.state_dict().items()}
    assert [key for key, value in model.state_dict().items() if not torch.equal(value, merged[key])] == []


def test_buffers_are_right_where_one_rank_has_the_first_and_the_last_stage() -> None:
    model, plan = Normalized(), plan_split(Normalized(), 3)
    (first, last), middle = make_stages(Normalized(), plan, [0, 2], ModelPatches()), Stage(Normalized(), plan, 1)
    call = lambda model: model(*models.vector_batch(0, 6))  # noqa: E731
    assert staged([first, middle, last], call).differences(whole(model, call)) == []
    merged = first.module.state_dict() | middle.module.state_dict()
    assert [key for key, value in model.state_dict().items() if not torch.equal(value, merged[key])] == []


def test_a_tied_weight_is_one_parameter_within_a_stage() -> None:
    last = stages_of(tied_gpt, 2)[1].module
    assert last.get_parameter("head.weight") is last.get_parameter("embedding.weight")


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "GPT2LMHeadModel", "T5ForConditionalGeneration"])
def test_a_recorded_construction_fills_the_stage_only(name: str) -> None:
    build, batch = builder(name), batch_for(name)
    expected = whole(build(), lambda model: model(**batch))
    stages = []
    for index in range(4):
        torch.manual_seed(0)
        deferred = DeferredModel(build)
        stage = Stage(deferred.module, plan_split(deferred.module, 4), index)
        own = {id(param) for param in stage.module.parameters()}
        for param, value in deferred.values():
            if id(param) in own:
                param.data = value.clone()
        stages.append(stage)
    assert staged(stages, lambda model: model(**batch)).differences(expected) == []


def test_a_model_on_the_meta_device_is_split_and_keeps_the_other_stages_there() -> None:
    values = tied_gpt().state_dict()
    expected = whole(tied_gpt(), lambda model: model(*TOKENS))
    stages = []
    for index in range(3):
        with torch.device("meta"):
            model = models.TinyGPT(layers=4, tied=True)
        model.head.weight = model.embedding.weight
        stage = Stage(model, plan_split(model, 3), index)
        for name, param in list(model.named_parameters()):
            assert param.is_meta
            owner, _, attribute = name.rpartition(".")
            real = nn.Parameter(values[name].clone())
            setattr(model.get_submodule(owner), attribute, real)
            if name == "embedding.weight" and stage.is_last:
                model.head.weight = real
        stages.append(stage)
    assert staged(stages, lambda model: model(*TOKENS)).differences(expected) == []


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "BloomForCausalLM", "T5ForConditionalGeneration"])
def test_a_stage_cast_to_bfloat16_makes_the_masks_of_the_whole_model_in_bfloat16(name: str) -> None:
    batch = batch_for(name)
    expected = whole(builder(name)().bfloat16(), lambda model: model(**batch))
    stages = stages_of(builder(name), 4)
    for stage in stages:
        stage.module.bfloat16()
    assert staged(stages, lambda model: model(**batch)).differences(expected) == []


def test_the_module_can_be_moved_and_initialized_as_any_other() -> None:
    stage = stages_of(tied_gpt, 4)[1]
    stage.module.to(torch.float64).apply(lambda module: None).requires_grad_(True)
    assert {param.dtype for param in stage.module.parameters()} == {torch.float64}
    assert repr(stage.module).startswith("TinyGPT(")
