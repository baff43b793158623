"""Checkpoints read by others: `dcp_to_torch_save`, FSDP2 in its own way; and nothing is unpickled here."""

import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from tests.engine.saving import STEPS_AFTER, STEPS_BEFORE, Trip, engine_for, run_steps, save_and_go_on, save_trips
from tests.kit.models import mlp, short_gpt, tied_gpt, token_batch, vector_batch, vector_batch_float64
from tests.kit.ranks import RankPool
from tests.kit.training import Case, adamw, share_of
from tests.zero.test_special_parameters import Empty, Frozen

GPT = Case(short_gpt, token_batch, 3)
SGD = {"optimizer": {"type": "sgd", "params": {"lr": 0.1, "momentum": 0.9}}}
CASES = [
    Case(tied_gpt, token_batch, 3, config={"bf16": {"enabled": True}}),
    Case(mlp, vector_batch, 1, config=SGD),
    *(Case(kind, vector_batch_float64, 3) for kind in (Empty, Frozen)),
]


def read_by_torch(folder: Path, tag: str) -> dict[str, Any]:
    """Nested dictionaries."""
    dcp_to_torch_save(folder / tag, folder / "plain.pt")
    return dict(torch.load(folder / "plain.pt", weights_only=True))


def test_torch_reads_the_same_values(ranks: RankPool, tmp_path: Path) -> None:
    outcomes = ranks(2, save_trips, [Trip(case, case) for case in CASES], tmp_path, 2)[0]
    for number, (case, outcome) in enumerate(zip(CASES, outcomes, strict=True)):
        found = read_by_torch(tmp_path, f"trip{number}")
        assert set(found) == {"model", "optim"} and set(found["optim"]) == {"state", "param_groups"}
        assert set(found["model"]) == set(case.build().state_dict())
        for name, value in outcome.restored.items():
            theirs = found["model"].get(name)
            if name.startswith("state."):
                parameter, _, state = name.removeprefix("state.").rpartition(".")
                theirs = found["optim"]["state"][parameter][state]
            assert theirs is not None and theirs.dtype == value.dtype and torch.equal(theirs, value), name
        assert all(state.get("step", 2) == 2 for state in found["optim"]["state"].values())
        if case.build is tied_gpt:  # under each name
            assert torch.equal(found["model"]["head.weight"], found["model"]["embedding.weight"])


def two_groups(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    weights = [param for param in params if param.dim() > 1]
    others = [param for param in params if param.dim() < 2]
    groups: list[dict[str, Any]] = [{"params": weights, "lr": 2e-2, "weight_decay": 0.2}, {"params": others}]
    return torch.optim.AdamW(groups, lr=1e-2)


def test_the_options_of_each_group_are_torchs(tmp_path: Path) -> None:
    save_and_go_on(Case(mlp, vector_batch, config={"optimizer": None}), tmp_path, 1, "a", optimizer=two_groups)
    model = mlp()
    expected = two_groups(list(model.parameters()))
    names = {id(param): name for name, param in model.named_parameters()}
    found = read_by_torch(tmp_path, "a")["optim"]["param_groups"]
    for group, theirs in zip(expected.param_groups, found, strict=True):
        group["params"] = [names[id(param)] for param in group["params"]]
        assert theirs == group


@pytest.mark.parametrize(
    ("options", "twin"),
    [
        ({"type": "adamw", "params": {"lr": 0.3}}, torch.optim.AdamW),
        ({"type": "adam", "params": {"lr": 0.3, "adam_w_mode": False}}, torch.optim.Adam),
        ({"type": "sgd", "params": {"lr": 0.3, "momentum": 0.9}}, partial(torch.optim.SGD, momentum=0.9)),
        ({"type": "adagrad", "params": {"lr": 0.3}}, torch.optim.Adagrad),
    ],
)
def test_every_option_that_torchs_optimizer_has_is_there(tmp_path: Path, options: dict[str, Any], twin: Any) -> None:
    save_and_go_on(Case(mlp, vector_batch, config={"optimizer": options}), tmp_path, 1, "a")
    (found,) = read_by_torch(tmp_path, "a")["optim"]["param_groups"]
    (expected,) = twin([torch.nn.Parameter(torch.zeros(1))], lr=0.3).param_groups
    assert set(expected) <= set(found)
    compared = expected.keys() - {"params", "eps", "weight_decay"}
    assert {key: found[key] for key in compared} == {key: expected[key] for key in compared}


def go_on_by_fsdp2(folder: Path, tag: str, build: Any, options: dict[str, Any]) -> tuple[list[float], dict[str, Any]]:
    """torch's recipe, on a model with other weights and an optimizer with another learning rate."""
    torch.manual_seed(5)
    model = build()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = adamw(model.parameters())
    optimizer.param_groups[0]["lr"] = 7.0
    chosen = StateDictOptions(**options)
    model_state, optimizer_state = get_state_dict(model, optimizer, options=chosen)
    dcp.load({"model": model_state, "optim": optimizer_state}, checkpoint_id=folder / tag)
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state, options=chosen)
    losses = []
    for step in range(STEPS_BEFORE, STEPS_BEFORE + STEPS_AFTER):
        optimizer.zero_grad()
        loss = model(*share_of(token_batch(step, 8)))
        loss.backward()
        optimizer.step()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        losses.append(mean.item())
    group = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    return losses, group


OPTIONS: list[dict[str, Any]] = [{}, {"flatten_optimizer_state_dict": True}]


def test_fsdp2_goes_on_where_we_stopped(ranks: RankPool, tmp_path: Path) -> None:
    expected = ranks(2, save_and_go_on, GPT.at(1), tmp_path, 2, "a")[0]
    for options in OPTIONS:
        losses, group = ranks(2, go_on_by_fsdp2, tmp_path, "a", short_gpt, options)[0]
        assert losses == pytest.approx(expected.losses, rel=1e-6), options
        assert group["lr"] == 1e-2 and tuple(group["betas"]) == (0.9, 0.95) and group["weight_decay"] == 0.1


def test_nothing_is_unpickled_when_a_checkpoint_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(mlp, vector_batch, config={"optimizer": None})
    expected = save_and_go_on(case, tmp_path, 1, "a", optimizer=torch.optim.RMSprop)

    def refuse(*args: Any, **options: Any) -> Any:
        raise AssertionError("something was unpickled")

    with engine_for(case, 1, optimizer=torch.optim.RMSprop) as engine:
        for module, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")):
            monkeypatch.setattr(module, name, refuse)
        engine.load_checkpoint(tmp_path)
        monkeypatch.undo()
        assert run_steps(engine, case, 2, STEPS_AFTER).losses == expected.losses
