"""A stage has its own parameters only, under the names that they have in the whole model."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lowtide.model.patches import ModelPatches
from lowtide.pipe.split.split import plan_split
from lowtide.pipe.stage import Stage, make_stages
from tests.kit import models
from tests.pipe.hugging_face import builder
from tests.pipe.staged import numels, seeded, staged, stages_of, whole

TOKENS = models.token_batch(0, 2)


def tied_gpt() -> nn.Module:
    return models.TinyGPT(layers=4, tied=True)


class Normalized(models.Mlp):
    """Buffers that training changes: before the blocks, in them, and behind them."""

    first: Any  # of another class than the parent's
    last: Any

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(models.FEATURES, 7), nn.BatchNorm1d(7))
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(7, 7), nn.BatchNorm1d(7)) for _ in range(4)))
        self.last = nn.Sequential(nn.BatchNorm1d(7), nn.Linear(7, 3))


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


def test_a_tied_weight_is_one_parameter_within_a_stage() -> None:
    last = stages_of(tied_gpt, 2)[1].module
    assert last.get_parameter("head.weight") is last.get_parameter("embedding.weight")


def test_a_model_on_the_meta_device_is_split_and_keeps_the_other_stages_there() -> None:
    values, stages = seeded(tied_gpt).state_dict(), list[Stage]()
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
    call = lambda model: model(*TOKENS)  # noqa: E731
    assert staged(stages, call).differences(whole(seeded(tied_gpt), call)) == []


def test_the_module_can_be_moved_and_initialized_as_any_other() -> None:
    stage = stages_of(tied_gpt, 4)[1]
    stage.module.to(torch.float64).apply(lambda module: None).requires_grad_(True)
    assert {param.dtype for param in stage.module.parameters()} == {torch.float64}
    assert repr(stage.module).startswith("TinyGPT(")
