"""Whether a checkpoint fits the model and the optimizer: options go by names, and each difference is told."""

from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from lowtide.checkpoint.files import CheckpointError
from tests.engine.saving import Trip, engine_for, load_trips, run_steps, save_and_go_on, save_trips
from tests.kit.models import Mlp, mlp, vector_batch, vector_batch_float64
from tests.kit.training import Case, differences, refusal
from tests.zero.test_special_parameters import Frozen

CASE = Case(mlp, vector_batch)
OWN = CASE.at(0, config={"optimizer": None})
RATES = {"weight": (2e-2, 0.2), "bias": (1e-2, 0.1)}  # of what each name ends with
W, B = [".weight"], [".bias"]
INNER = ["0.bias", "1.bias", "2.bias"]


def ruled(name: str, **params: Any) -> Case:
    return CASE.at(0, config={"optimizer": {"type": name, "params": params}})


def grouped(*groups: list[str], kind: Any = torch.optim.AdamW, build: Any = mlp) -> Any:
    """An optimizer with these groups, by the ends of names, each with the RATES of its first."""

    def make(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        names = [name for name, param in build().named_parameters() if param.requires_grad]
        by_name = dict(zip(names, params, strict=True))
        found = []
        for group in groups:
            members = [name for end in group for name in names if name.endswith(end)]
            lr, decay = RATES[members[0].rpartition(".")[2]]
            found.append({"params": [by_name[name] for name in members], "lr": lr, "weight_decay": decay})
        made: torch.optim.Optimizer = kind(found)
        return made

    return make


# -- what fits -------------------------------------------------------------------------------------------------------


def test_an_optimizer_of_torch_and_its_fused_twin_continue_each_other(tmp_path: Path) -> None:
    adamw = partial(torch.optim.AdamW, lr=1e-2, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1)
    before = save_trips([Trip(OWN, OWN, {"optimizer": adamw})], tmp_path, 1)
    assert load_trips([Trip(CASE, CASE)], tmp_path, 1)[0].differences(before[0]) == []


@pytest.mark.parametrize(
    ("kind", "groups"),
    [
        (torch.optim.AdamW, (B, W)),
        (torch.optim.NAdam, (B, ["t.weight"], ["0.weight", "1.weight", "2.weight"])),
        (
            torch.optim.NAdam,
            (["t.bias", "1.bias"], ["0.weight", "t.weight"], ["0.bias", "2.bias"], ["1.weight", "2.weight"]),
        ),
    ],
)
def test_options_follow_the_names_of_the_members(tmp_path: Path, groups: Any, kind: Any) -> None:
    """Loaded by groups of another order or number whose options differ from what was saved: those come back."""
    expected = save_and_go_on(OWN, tmp_path, 1, "a", optimizer=grouped(W, B, kind=kind))
    with mock.patch.dict(RATES, {"weight": (0.5, 0.0), "bias": (0.7, 0.0)}):
        engine = engine_for(OWN, 1, optimizer=grouped(*groups, kind=kind))
    engine.load_checkpoint(tmp_path)
    found = {len(group["params"][0].shape): group["lr"] for group in engine.optimizer.param_groups}
    assert found == {2: 2e-2, 1: 1e-2}
    assert run_steps(engine, OWN, 2, 2).losses == expected.losses
    engine.close()


def test_an_optimizer_that_has_not_stepped_yet_takes_any(tmp_path: Path) -> None:
    """Before the first step there are no states that could be of another optimizer."""
    save_and_go_on(ruled("adam"), tmp_path, 1, "a", steps=0)
    with engine_for(ruled("lion"), 1) as engine:
        engine.load_checkpoint(tmp_path)
        assert engine.global_step == 0


class Unfrozen(Frozen):
    def change(self) -> None: ...


def test_parameters_may_be_frozen_after_a_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    case = Case(Frozen, vector_batch_float64)
    save_and_go_on(Case(Unfrozen, vector_batch_float64), tmp_path, 1, "a")
    with engine_for(case, 1) as engine:
        engine.load_checkpoint(tmp_path)
        before = engine.module.get_parameter("layers.0.weight").detach().clone()
        run_steps(engine, case, 2, 2)
        assert torch.equal(engine.module.get_parameter("layers.0.weight"), before)
    told = "has trained are in no parameter group here: 'first.bias' and 3 more. They keep the loaded values"
    assert told in caplog.text and "call engine.add_param_group before the load" in caplog.text


# -- what does not ---------------------------------------------------------------------------------------------------


class BiasFrozen(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.first.bias.requires_grad_(False)


class Wider(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(7, 3, bias=False)
        self.first = nn.Linear(5, 7, bias=False)
        self.first.weight = nn.Parameter(torch.zeros(8, 5))
        self.extra = nn.Parameter(torch.zeros(2))


def by(optimizer: Any, build: Any = mlp, **options: Any) -> tuple[Case, dict[str, Any]]:
    return Case(build, vector_batch, config={"optimizer": None}), {"optimizer": optimizer, **options}


def scheduled(*groups: list[str]) -> tuple[Case, dict[str, Any]]:
    return by(grouped(*groups), lr_scheduler=lambda optimizer: LambdaLR(optimizer, lambda step: 1.0))


ALONE = "engine.load_weights(folder) (load_module_only=True in lowtide.deepspeed) takes the parameters alone."
NO_STATE = "has no optimizer state in it (exp_avg, exp_avg_sq): it was not trained then"
REFUSED: dict[str, tuple[Any, Any, list[str]]] = {  # saved, loaded, words
    "lion": (
        ruled("adam", adam_w_mode=False),
        ruled("lion"),
        [f"it has the states of optimizer adam (exp_avg, exp_avg_sq), this run has optimizer lion; {ALONE}"],
    ),
    "momentum": (
        ruled("sgd", lr=0.1),
        ruled("sgd", lr=0.1, momentum=0.9),
        [f"it has the states of optimizer sgd (none), this run has optimizer sgd; {ALONE}"],
    ),
    "sgd": (
        ruled("lion"),
        ruled("sgd", lr=0.1),
        [f"it has the states of optimizer lion (exp_avg), this run has optimizer sgd; {ALONE}"],
    ),
    "one group": (
        by(grouped(W, B)),
        by(grouped(W + B)),
        ["'first.weight' and 'first.bias', of group 0 here, were in two groups, with lr 0.02 and 0.01; put them into"],
    ),
    "new group": (
        by(grouped(W)),
        by(grouped(W, B)),
        ["no saved group has a parameter of group 1 here (first.bias, layers.0.bias, layers.1.bias)"],
    ),
    "order": (
        scheduled(W, B),
        scheduled(B, W),
        [
            "the state of its LambdaLR has base_lrs by group index, and the groups have another order here; give the "
            "optimizer groups in the order [['first.weight', 'layers.0.weight', 'layers.1.weight'], "
            "['first.bias', 'layers.0.bias', 'layers.1.bias']], or leave lr_scheduler out of initialize"
        ],
    ),
    "frozen": (
        Case(Frozen, vector_batch_float64),
        Case(Unfrozen, vector_batch_float64),
        [f"'{name}' {NO_STATE}" for name in ("first.bias", "layers.0.weight", "layers.0.bias", "layers.2.weight")],
    ),
    # No other parameter of its group has a state that it lacks.
    "frozen group": (
        by(grouped(["last.bias"], [*W, *INNER], build=BiasFrozen), BiasFrozen),
        by(grouped(["first.bias"], [*W, *INNER, "last.bias"])),
        ["'first.bias' has no optimizer state in it "],
    ),
    "wider": (
        CASE,
        Case(Wider, vector_batch),
        [
            "'extra' is not in it",
            "'first.bias' is not in the model",
            "'last.bias' is not in the model",
            "'first.weight' has shape (7, 5) in it, (8, 5) in the model",
        ],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_listed_and_nothing_is_changed(tmp_path: Path, name: str) -> None:
    saved, loaded, words = REFUSED[name]
    case, options = saved if isinstance(saved, tuple) else (saved, {})
    save_and_go_on(case, tmp_path, 1, "a", **options)
    case, options = loaded if isinstance(loaded, tuple) else (loaded, {})
    with engine_for(case, 1, **options) as engine:
        before = engine.state_dict()
        text = refusal(engine.load_checkpoint, tmp_path, kind=CheckpointError)
        assert f"{tmp_path}/a does not fit: " in text and text.endswith("Nothing was changed.")
        assert all(one in text for one in words) and "'layers.1.weight' has" not in text
        assert differences(engine.state_dict(), before) == []
