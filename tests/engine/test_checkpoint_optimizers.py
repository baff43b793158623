"""Every optimizer goes on where it was saved, at other stages and numbers of ranks: fused rules and torch's own."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from lowtide.checkpoint.files import CheckpointError
from tests.engine.saving import (
    Continuation,
    Trip,
    engine_for,
    load_and_go_on,
    load_trips,
    run_steps,
    save_and_go_on,
    save_trips,
)
from tests.kit.models import mlp, short_gpt, token_batch, vector_batch
from tests.kit.ranks import RankPool
from tests.kit.training import Case

RULES: list[dict[str, Any]] = [
    {"type": "adam", "params": {"lr": 1e-2, "weight_decay": 0.1, "adam_w_mode": False}},
    {"type": "sgd", "params": {"lr": 1e-1}},
    {"type": "sgd", "params": {"lr": 1e-1, "momentum": 0.9, "nesterov": True}},
    {"type": "lion", "params": {"lr": 1e-3, "weight_decay": 0.1}},
    {"type": "adagrad", "params": {"lr": 1e-2, "initial_accumulator_value": 0.1}},
]


def two_groups(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Its fused twin takes it."""
    weights = [param for param in params if param.dim() > 1]
    others = [param for param in params if param.dim() < 2]
    groups: list[dict[str, Any]] = [{"params": weights, "lr": 2e-2, "weight_decay": 0.2}, {"params": others}]
    return torch.optim.AdamW(groups, lr=1e-2)


def groups_with_other_states(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Only the weights have a momentum; only the rest, which begins somewhere in a shard, is centered."""
    weights = [param for param in params if param.dim() > 1]
    others = [param for param in params if param.dim() < 2]
    groups = [{"params": weights, "lr": 2e-3, "momentum": 0.5}, {"params": others, "centered": True}]
    return torch.optim.RMSprop(groups, lr=1e-3)


CHOICES: list[Any] = [
    torch.optim.RMSprop,
    torch.optim.Adamax,
    partial(torch.optim.NAdam, lr=1e-2),
    partial(torch.optim.ASGD, lr=1e-1),
    partial(torch.optim.Rprop, lr=1e-3),
    partial(torch.optim.Adam, lr=1e-2, amsgrad=True),
    partial(torch.optim.Adagrad, lr=1e-2, initial_accumulator_value=0.1, maximize=True),
    two_groups,
    groups_with_other_states,
]

GPT = Case(short_gpt, token_batch, 3, clip=0.5)
TRIPS = [
    Trip(case, case.at(stage))
    for stage, case in zip((0, 1, 2, 3, 0), [GPT.at(3, config={"optimizer": rule}) for rule in RULES], strict=True)
] + [
    Trip(GPT.at(3, config={"optimizer": None}), GPT.at(stage, config={"optimizer": None}), {"optimizer": choice})
    for stage, choice in zip((0, 1, 2, 3) * 4, CHOICES, strict=False)
]
NAMES = [rule["type"] for rule in RULES] + [str(choice) for choice in CHOICES]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def before(ranks: RankPool, folder: Path) -> list[Continuation]:
    """What went on without a break on two ranks."""
    return ranks(2, save_trips, TRIPS, folder, 2)[0]


def test_every_optimizer_goes_on_to_the_same_bits_at_another_stage(
    ranks: RankPool, folder: Path, before: list[Continuation]
) -> None:
    after = ranks(2, load_trips, TRIPS, folder, 2)[0]
    for name, one, other in zip(NAMES, before, after, strict=True):
        assert other.differences(one) == [], name
    state_names = {
        name: {key.rpartition(".")[2] for key in one.restored if key.startswith("state.head.weight.")}
        for name, one in zip(NAMES[3:6], before[3:6], strict=True)
    }
    assert list(state_names.values()) == [{"exp_avg"}, {"sum"}, {"square_avg"}]


def load_chosen(trips: Mapping[int, Trip], folder: Path) -> dict[int, Continuation]:
    """By number, which is in the tag."""
    return {
        number: load_and_go_on(trip.loaded, folder, 1, f"trip{number}", trip.steps_before, **trip.options)
        for number, trip in trips.items()
    }


def test_every_optimizer_goes_on_alone_what_two_ranks_have_saved(
    ranks: RankPool, folder: Path, before: list[Continuation]
) -> None:
    """Every second of them."""
    chosen = dict(list(enumerate(TRIPS))[1::2])
    after = ranks(1, load_chosen, chosen, folder)[0]
    for index, other in after.items():
        name, one = NAMES[index], before[index]
        assert other.state_differences(one) == [], name
        assert other.losses == pytest.approx(one.losses, rel=2e-3 if "Rprop" in name or name == "lion" else 1e-4), name


def test_groups_keep_the_states_that_each_of_them_has(before: list[Continuation]) -> None:
    names = before[-1].restored
    of_weight = {name.rpartition(".")[2] for name in names if name.startswith("state.blocks.0.qkv.weight")}
    of_bias = {name.rpartition(".")[2] for name in names if name.startswith("state.blocks.0.up.bias")}
    assert of_weight == {"square_avg", "momentum_buffer"} and of_bias == {"square_avg", "grad_avg"}


def test_an_optimizer_of_torch_and_its_fused_twin_continue_each_other(tmp_path: Path) -> None:
    own = Case(mlp, vector_batch, config={"optimizer": None})
    adamw = partial(torch.optim.AdamW, lr=1e-2, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1)
    before = save_trips([Trip(own, own, {"optimizer": adamw})], tmp_path, 1)
    ours = Case(mlp, vector_batch)
    assert load_trips([Trip(ours, ours)], tmp_path, 1)[0].differences(before[0]) == []


@pytest.mark.parametrize(
    ("saved", "config", "words"),
    [
        (RULES[0], RULES[3], "the states of optimizer adam (exp_avg, exp_avg_sq), this run has optimizer lion"),
        (RULES[1], RULES[2], "the states of optimizer sgd (none), this run has optimizer sgd"),
        (RULES[3], RULES[1], "the states of optimizer lion (exp_avg), this run has optimizer sgd"),
    ],
)
def test_the_states_of_another_optimizer_are_refused(
    tmp_path: Path, saved: dict[str, Any], config: dict[str, Any], words: str
) -> None:
    case = Case(mlp, vector_batch, config={"optimizer": saved})
    save_and_go_on(case, tmp_path, 1, "a")
    with engine_for(case.at(0, config={"optimizer": config}), 1) as engine:
        with pytest.raises(CheckpointError) as caught:
            engine.load_checkpoint(tmp_path)
        assert f"/a does not fit: it has {words}; engine.load_weights(folder) takes the parameters alone." in str(
            caught.value
        )


MLP = Case(mlp, vector_batch, config={"optimizer": None})
RATES = {"weight": (2e-2, 0.2), "bias": (1e-2, 0.1)}  # of what each name ends with


def grouped(*groups: list[str], kind: Any = torch.optim.AdamW) -> Any:
    """An optimizer with these groups, by the ends of names, each with the RATES of its first."""

    def build(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        names = [name for name, _ in mlp().named_parameters()]
        by_name = dict(zip(names, params, strict=True))
        found = []
        for group in groups:
            members = [name for end in group for name in names if name.endswith(end)]
            lr, decay = RATES[members[0].rpartition(".")[2]]
            found.append({"params": [by_name[name] for name in members], "lr": lr, "weight_decay": decay})
        made: torch.optim.Optimizer = kind(found)
        return made

    return build


@pytest.mark.parametrize(
    ("kind", "groups"),
    [
        (torch.optim.AdamW, ([".bias"], [".weight"])),
        (torch.optim.NAdam, ([".bias"], ["t.weight"], ["0.weight", "1.weight", "2.weight"])),
        (
            torch.optim.NAdam,
            (["t.bias", "1.bias"], ["0.weight", "t.weight"], ["0.bias", "2.bias"], ["1.weight", "2.weight"]),
        ),
    ],
)
def test_options_follow_the_names_of_the_members(tmp_path: Path, groups: Any, kind: Any) -> None:
    """Loaded by groups of another order or number whose options differ from what was saved: those come back."""
    saved = grouped([".weight"], [".bias"], kind=kind)
    expected = save_and_go_on(MLP, tmp_path, 1, "a", optimizer=saved)
    with mock.patch.dict(RATES, {"weight": (0.5, 0.0), "bias": (0.7, 0.0)}):
        engine = engine_for(MLP, 1, optimizer=grouped(*groups, kind=kind))
    engine.load_checkpoint(tmp_path)
    found = {len(group["params"][0].shape): group["lr"] for group in engine.optimizer.param_groups}
    assert found == {2: 2e-2, 1: 1e-2}
    assert run_steps(engine, MLP, 2, 2).losses == expected.losses
    engine.close()


def schedule(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)


W, B = [".weight"], [".bias"]
BIASES = "first.bias, layers.0.bias, layers.1.bias"
REFUSED_GROUPS: list[tuple[Any, Any, dict[str, Any], str]] = [
    (
        (W, B),
        (W + B,),
        {},
        "'first.weight' and 'first.bias', of group 0 here, were in two groups, with lr 0.02 and 0.01; put them into",
    ),
    ((W,), (W, B), {}, f"no parameter group of it has a parameter of group 1 here ({BIASES})"),
    (
        (W, B),
        (B, W),
        {"lr_scheduler": schedule},
        "the state of its LambdaLR has base_lrs by group index, and the groups have another order here; give the "
        "optimizer groups in the order [['first.weight', 'layers.0.weight', 'layers.1.weight'], "
        "['first.bias', 'layers.0.bias', 'layers.1.bias']], or leave lr_scheduler out of initialize",
    ),
]


@pytest.mark.parametrize(("saved", "here", "options", "words"), REFUSED_GROUPS)
def test_groups_whose_options_cannot_follow_are_refused(
    tmp_path: Path, saved: Any, here: Any, options: dict[str, Any], words: str
) -> None:
    save_and_go_on(MLP, tmp_path, 1, "a", optimizer=grouped(*saved), **options)
    engine = engine_for(MLP, 1, optimizer=grouped(*here), **options)
    before = {name: value.clone() for name, value in engine.state_dict().items()}
    with engine, pytest.raises(CheckpointError) as caught:
        engine.load_checkpoint(tmp_path)
    assert f"/a does not fit: {words}" in str(caught.value) and "Nothing was changed" in str(caught.value)
    assert all(torch.equal(before[name], value) for name, value in engine.module.state_dict().items())


def test_an_optimizer_that_has_not_stepped_yet_takes_any(tmp_path: Path) -> None:
    """Before the first step there are no states that could be of another optimizer."""
    first = Case(mlp, vector_batch, config={"optimizer": RULES[0]})
    save_and_go_on(first, tmp_path, 1, "a", steps=0)
    with engine_for(first.at(0, config={"optimizer": RULES[3]}), 1) as engine:
        engine.load_checkpoint(tmp_path)
        assert engine.global_step == 0
