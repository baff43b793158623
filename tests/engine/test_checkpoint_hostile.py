"""Checkpoints whose checksums fit and whose content does not: one kind of error on all ranks, and nothing changed."""

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import lowtide
from lowtide.checkpoint.files import MANIFEST, CheckpointError
from tests.checkpoint.making import put, resign
from tests.engine.saving import engine_for, run_steps
from tests.kit.models import mlp, vector_batch
from tests.kit.ranks import RankPool
from tests.kit.training import Case, refusal

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


Change = Callable[[Any], None]
FIRST, SECOND = "rank0.json", "rank1.json"
STATES = "optim.state.first.weight."  # of one parameter


def without_states(content: Any) -> None:
    for name in [name for name in content["tensors"] if name.startswith(STATES)]:
        del content["tensors"][name]


def without_rows_of_states(content: Any) -> None:
    content["rows"] = [row for row in content["rows"] if not row[0].startswith(STATES)]


def described(words: str, *path: Any) -> tuple[dict[str, Change], str]:
    return {MANIFEST: put(*path)}, words


def own(words: str, *path: Any, file: str = SECOND) -> tuple[dict[str, Change], str]:
    return {file: put("own_state", *path)}, words


OPTIONS = "training", "learning_rates", "options", 0
RANDOM = "on rank 1: random state: expected the states of random"
TENSOR = {"a": {"$type": "tensor", "dtype": "load", "shape": [1], "base64": ""}}
CASES: dict[str, tuple[dict[str, Change], str]] = {
    "no training": described("Input should be a valid dictionary", "training", None),
    "steps": described("num_steps: Input should be greater than or equal to 0, found -1", "training", "num_steps", -1),
    "optimizer": described("optimizer: Input should be a valid string, found 3", "training", "optimizer", 3),
    "scaler": described("loss_scaler.is_dynamic: Field required", "training", "loss_scaler", {}),
    "no values": described("training: expected plain values as JSON", "training", "global_step", {"$type": "x"}),
    "option": described("the option 'lr' is 'high' in it, 0.01 in the optimizer", *OPTIONS, "lr", "high"),
    "options": described("the option 'betas' is [0.9] in it, ", *OPTIONS, "betas", [0.9]),
    "config": described("config.optimizer: expected a section with params, found 3", "config", "optimizer", 3),
    "kind": described(
        "'first.bias' is torch.int32 in it, torch.float32 in the model", "tensors", "model.first.bias", ["int32", [7]]
    ),
    "states": (
        {MANIFEST: without_states, FIRST: without_rows_of_states, SECOND: without_rows_of_states},
        "'first.weight' has no optimizer state in it (exp_avg, exp_avg_sq)",
    ),
    "random": own(RANDOM, "random", "python", [1, 2]),
    "random of torch": own(RANDOM, "random", "torch", "x"),
    "no random": own(RANDOM, "random", None),
    "client state": own("on rank 1: client_state: expected a dictionary, found [1]", "client_state", [1]),
    "client values": own("on rank 0: client_state: expected plain values as JSON", "client_state", TENSOR, file=FIRST),
    "scalars": own("on ranks 0, 1: optimizer state: a: Input should be a valid dict", "scalars", {"a": 1}),
    "missed steps": own(
        "on ranks 0, 1: optimizer state: a.missed_steps: expected a count, found 'b'",
        *("scalars", {"a": {"missed_steps": "b"}}),
    ),
    "own state": own("on ranks 0, 1: expected the random, client_state and scalars of a rank, found 7", 7),
    "loader": own("on rank 1: KeyError: 'no such place'", "client_state", {"loader": {"place": "end"}}),
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
        text = refusal(engine.load_checkpoint, folder / name, kind=CheckpointError)
        after = everything_of(engine)
        found[name] = (text, [key for key in before if repr(before[key]) != repr(after[key])])
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


def give_no_path(folder: Path) -> list[str]:
    """Rank 1 has lost its path, rank 0 has not; then both have."""
    engine, before = engine_for(CASE, 2), os.getcwd()
    os.chdir(folder)
    try:
        texts = [
            refusal(call, path, kind=CheckpointError)
            for call in (engine.save_checkpoint, engine.load_checkpoint, engine.export, engine.load_weights)
            for path in ("", "" if engine.rank else "some")
        ]
    finally:
        os.chdir(before)
    run_steps(engine, CASE, 0, 1)
    engine.close()
    return texts


def test_no_path_is_not_the_working_directory(ranks: RankPool, tmp_path: Path) -> None:
    first, second = ranks(2, give_no_path, tmp_path)
    words = "expected the path of a folder (\".\" for the working directory), found ''"
    assert all(f"ranks 0, 1: {words}" in text for text in first[0::2])
    assert all(words in text for text in first[1::2] + second)
    assert first[0].startswith("saving checkpoint 'global_step0' to \"\" failed on ranks 0, 1: ")
    assert list(tmp_path.iterdir()) == []
