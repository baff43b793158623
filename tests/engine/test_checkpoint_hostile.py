"""Checkpoints whose checksums fit and whose content does not: one kind of error on all ranks, and nothing changed."""

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lowtide
from lowtide.checkpoint.files import MANIFEST, CheckpointError
from tests.checkpoint.making import resign
from tests.engine.saving import engine_for, run_steps
from tests.kit.models import Mlp, mlp, vector_batch
from tests.kit.ranks import RankPool
from tests.kit.training import Case

CASE = Case(mlp, vector_batch, 3)


class Loader:
    """Refuses what is not its own."""

    def __init__(self) -> None:
        self.place: int | str = 0

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]
        if self.place == "end":
            raise KeyError("no such place")


def training(key: str, value: Any) -> Callable[[Any], None]:
    return lambda content: content["training"].update({key: value})


def own(key: str, value: Any) -> Callable[[Any], None]:
    return lambda content: content["own_state"].update({key: value})


def option(name: str, value: Any) -> Callable[[Any], None]:
    return lambda content: content["training"]["learning_rates"]["options"][0].update({name: value})


def in_random(name: str, value: Any) -> Callable[[Any], None]:
    return lambda content: content["own_state"]["random"].update({name: value})


def without_states(content: Any) -> None:
    """Of one parameter."""
    for name in [name for name in content["tensors"] if name.startswith("optim.state.first.weight.")]:
        del content["tensors"][name]


def without_rows_of_states(content: Any) -> None:
    content["rows"] = [row for row in content["rows"] if not row[0].startswith("optim.state.first.weight.")]


FIRST, SECOND = "rank0.json", "rank1.json"
CASES: dict[str, tuple[dict[str, Callable[[Any], None]], str]] = {
    "no training": ({MANIFEST: lambda content: content.update(training=None)}, "Input should be a valid dictionary"),
    "steps": ({MANIFEST: training("num_steps", -1)}, "num_steps: Input should be greater than or equal to 0, found -1"),
    "optimizer": ({MANIFEST: training("optimizer", 3)}, "optimizer: Input should be a valid string, found 3"),
    "scaler": ({MANIFEST: training("loss_scaler", {})}, "loss_scaler.is_dynamic: Field required"),
    "no values": ({MANIFEST: training("global_step", {"$type": "x"})}, "training: expected plain values as JSON"),
    "option": ({MANIFEST: option("lr", "high")}, "the option 'lr' is 'high' in it, 0.01 in the optimizer"),
    "options": ({MANIFEST: option("betas", [0.9])}, "the option 'betas' is [0.9] in it, "),
    "config": (
        {MANIFEST: lambda content: content["config"].update(optimizer=3)},
        "config.optimizer: expected a section with params, found 3",
    ),
    "kind": (
        {MANIFEST: lambda content: content["tensors"].update({"model.first.bias": ["int32", [7]]})},
        "'first.bias' is torch.int32 in it, torch.float32 in the model",
    ),
    "states": (
        {MANIFEST: without_states, FIRST: without_rows_of_states, SECOND: without_rows_of_states},
        "'first.weight' has no optimizer state in it (exp_avg, exp_avg_sq)",
    ),
    "random": ({SECOND: in_random("python", [1, 2])}, "on rank 1: random state: expected the states of random"),
    "random of torch": ({SECOND: in_random("torch", "x")}, "on rank 1: random state: expected the states of random"),
    "no random": ({SECOND: own("random", None)}, "on rank 1: random state: expected the states of random"),
    "client state": ({SECOND: own("client_state", [1])}, "on rank 1: client_state: expected a dictionary, found [1]"),
    "client values": (
        {FIRST: own("client_state", {"a": {"$type": "tensor", "dtype": "load", "shape": [1], "base64": ""}})},
        "on rank 0: client_state: expected plain values as JSON; ",
    ),
    "scalars": ({SECOND: own("scalars", {"a": 1})}, "on ranks 0, 1: optimizer state: a: Input should be a valid dict"),
    "missed steps": (
        {SECOND: own("scalars", {"a": {"missed_steps": "b"}})},
        "on ranks 0, 1: optimizer state: a.missed_steps: expected a count, found 'b'",
    ),
    "own state": (
        {SECOND: lambda content: content.update(own_state=7)},
        "on ranks 0, 1: expected the random, client_state and scalars of a rank, found 7",
    ),
    "loader": (
        {SECOND: own("client_state", {"loader": {"place": "end"}})},
        "on rank 1: KeyError: 'no such place'",
    ),
}


def save(folder: Path) -> None:
    engine = engine_for(CASE, 2)
    engine.client_state["loader"] = Loader()
    run_steps(engine, CASE, 0, 1)
    engine.save_checkpoint(folder, "a")
    engine.close()


def load_all_cases(folder: Path) -> dict[str, tuple[str, list[str]]]:
    """For each case the error, and what has changed."""
    engine = engine_for(CASE, 2)
    run_steps(engine, CASE, 3, 2)
    loader = engine.client_state["loader"] = Loader()
    loader.place = 5
    found = {}
    for name in CASES:
        before = everything_of(engine)
        with pytest.raises(CheckpointError) as caught:
            engine.load_checkpoint(folder / name)
        after = everything_of(engine)
        found[name] = (str(caught.value), [key for key in before if repr(before[key]) != repr(after[key])])
    engine.load_checkpoint(folder, "a")
    assert engine.global_step == 1 and loader.place == 0
    run_steps(engine, CASE, 1, 1)
    engine.close()
    return found


def everything_of(engine: lowtide.Engine) -> dict[str, Any]:
    state = {name: value.tolist() for name, value in engine.state_dict().items()}
    moments = [chunk_view.values.tolist() for chunk_view in engine._archive.named.states()]
    generators = (
        random.getstate(),
        np.random.get_state(legacy=False)["state"]["key"].tolist(),
        torch.get_rng_state().tolist(),
    )
    options = [{k: v for k, v in group.items() if k != "params"} for group in engine.optimizer.param_groups]
    counts = engine.global_step, engine.optimizer.num_steps, engine.client_state["loader"].place
    return {"weights": state, "states": moments, "generators": generators, "options": options, "counts": counts}


def test_odd_content_is_one_kind_of_error_on_all_ranks_and_changes_nothing(ranks: RankPool, tmp_path: Path) -> None:
    ranks(2, save, tmp_path)
    for name, (changes, _) in CASES.items():
        shutil.copytree(tmp_path / "a", tmp_path / name / "a")
        (tmp_path / name / "latest").write_text("a\n")
        for file, change in sorted(changes.items(), reverse=True):
            resign(tmp_path / name / "a", change, file)
    first, second = ranks(2, load_all_cases, tmp_path)
    assert first == second
    for name, (_, words) in CASES.items():
        text, changed = first[name]
        assert text.startswith(f"loading checkpoint 'a' from {tmp_path / name} failed on rank"), text
        assert words in text and text.endswith(". Nothing was changed."), text
        assert changed == [], name


def give_no_path() -> list[str]:
    """Rank 1 has lost its path, rank 0 has not; then both have."""
    engine = engine_for(CASE, 2)
    calls: list[Callable[[str], object]] = [
        engine.save_checkpoint,
        engine.load_checkpoint,
        engine.export,
        engine.load_weights,
    ]
    texts = []
    for call in calls:
        for path in ("", "" if engine.rank else "some"):
            with pytest.raises(CheckpointError) as caught:
                call(path)
            texts.append(str(caught.value))
    run_steps(engine, CASE, 0, 1)
    engine.close()
    return texts


def test_no_path_is_not_the_working_directory(ranks: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = ranks(2, in_folder, tmp_path)
    words = "expected the path of a folder (\".\" for the working directory), found ''"
    assert all(f"ranks 0, 1: {words}" in text for text in first[0::2])
    assert all(words in text for text in first[1::2] + second)
    assert first[0].startswith("saving checkpoint 'global_step0' to \"\" failed on ranks 0, 1: ")
    assert list(tmp_path.iterdir()) == []


def in_folder(folder: Path) -> list[str]:
    before = os.getcwd()
    os.chdir(folder)
    try:
        return give_no_path()
    finally:
        os.chdir(before)


@pytest.mark.parametrize("tag", ["", "..", "../a", "/a"])
def test_a_tag_to_load_is_a_name(tmp_path: Path, tag: str) -> None:
    with engine_for(CASE, 1) as engine:
        engine.save_checkpoint(tmp_path / "a", "b")
        with pytest.raises(CheckpointError, match=r"looking for .* failed on rank 0: tag: expected a folder name"):
            engine.load_checkpoint(tmp_path / "c", tag)


class Frozen(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.first.bias.requires_grad_(False)


def with_a_group_of_one(build: type[Mlp], name: str) -> lowtide.Engine:
    torch.manual_seed(0)
    model = build()
    trained = {key: param for key, param in model.named_parameters() if param.requires_grad}
    groups = [{"params": [trained.pop(name)]}, {"params": list(trained.values())}]
    config = {**CASE.as_config(), "optimizer": None, "train_micro_batch_size_per_gpu": 8}
    return lowtide.initialize(model, config, optimizer=torch.optim.AdamW(groups))


def test_a_group_that_was_frozen_as_a_whole_is_named_before_anything_is_changed(tmp_path: Path) -> None:
    """No other parameter of its group has a state that it lacks."""
    with with_a_group_of_one(Frozen, "last.bias") as engine:
        run_steps(engine, CASE, 0, 1)
        engine.save_checkpoint(tmp_path)
    with (
        with_a_group_of_one(Mlp, "first.bias") as engine,
        pytest.raises(CheckpointError, match=r"'first.bias' has no optimizer state in it .* Nothing was changed"),
    ):
        engine.load_checkpoint(tmp_path)
