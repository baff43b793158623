"""What goes wrong while saving or loading: every rank hears of it, what was there stays, and training goes on."""

import contextlib
import os
import random
import resource
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

import lowtide
from lowtide.checkpoint import folder as folder_module, index as index_module
from lowtide.checkpoint.files import MANIFEST, CheckpointError, NoCheckpointError
from lowtide.checkpoint.folder import CheckpointFolder
from lowtide.engine.archive import checkpoint as checkpoint_module
from lowtide.zero.sequence import StateError
from tests.checkpoint.making import put, resign
from tests.engine.saving import engine_for, load_and_go_on, no_space, run_steps, save_and_go_on
from tests.kit.models import mlp, short_gpt, tiny_gpt, token_batch, vector_batch
from tests.kit.ranks import RankPool, on_ranks
from tests.kit.training import Case, refusal

GPT = Case(short_gpt, token_batch, 3)
MLP = Case(mlp, vector_batch)
DEEP = Case(tiny_gpt, token_batch, 3)  # in the middle of each of its files are values
INTACT = "What was saved before is as it was, and training can go on."


WAYS: dict[str, tuple[int, object, str]] = {  # on which rank which call finds no room
    "data": (1, os, "pwrite"),
    "index": (1, index_module.RankIndex, "write"),
    "description": (0, index_module.Manifest, "write"),
    "metadata": (0, folder_module, "write_durably"),
    "begin": (0, os, "mkdir"),
    "model files": (0, checkpoint_module, "model_files"),
}


@contextlib.contextmanager
def without_room(way: str, rank: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with contextlib.ExitStack() as stack:
        if way == "limit":
            resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
            stack.callback(resource.setrlimit, resource.RLIMIT_FSIZE, before)
        elif rank == WAYS[way][0]:
            stack.enter_context(mock.patch.object(*WAYS[way][1:], no_space))
        yield


@on_ranks(2, timeout=120)
def test_a_full_disk_on_one_rank_is_an_error_on_all_and_training_goes_on(tmp_path: Path) -> None:
    with engine_for(GPT, 2) as engine:
        for way in (*WAYS, "limit"):
            folder = tmp_path / way
            tag = "a" if way in ("data", "metadata") else "b"  # of these two in the place of what is there
            cause = "ranks 0, 1: File too large" if way == "limit" else f"rank {WAYS[way][0]}: No space left on device"
            run_steps(engine, GPT, 0, 1)
            engine.save_checkpoint(folder, "a")
            run_steps(engine, GPT, 1, 1)
            with without_room(way, engine.rank):
                text = refusal(engine.save_checkpoint, folder, tag, kind=CheckpointError)
            assert text == f"saving checkpoint '{tag}' to {folder} failed on {cause}. {INTACT}"
            first = run_steps(engine, GPT, 2, 2).losses
            engine.save_checkpoint(folder, "c")
            engine.load_checkpoint(folder, "a")
            run_steps(engine, GPT, 1, 1)
            assert run_steps(engine, GPT, 2, 2).losses == first, way
            assert {path.name for path in folder.iterdir()} == {"latest", "a", "c"}, way
            for kept in ("a", "c"):
                CheckpointFolder(folder).open(kept).verify()


@on_ranks(2)
def test_a_folder_that_cannot_be_written_by_all_is_an_error_on_all(tmp_path: Path) -> None:
    """In the place of a file, below it, and each rank in a folder of its own."""
    file, below = tmp_path / "file", tmp_path / "file" / "below"
    file.write_text("x")
    with engine_for(GPT, 2) as engine:
        own = tmp_path / str(engine.rank)
        for path, words in (
            (file, f"saving checkpoint 'a' to {file} failed on rank 0: File exists: {file}. {INTACT}"),
            (below, f"saving checkpoint 'a' to {below} failed on rank 0: Not a directory: {below}. {INTACT}"),
            (own, f"failed on rank 1: {tmp_path}/1/.saving-a does not exist; all ranks must see the same folder: "),
        ):
            assert words in refusal(engine.save_checkpoint, path, "a", kind=CheckpointError)
        run_steps(engine, GPT, 0, 1)
    assert list((tmp_path / "0").iterdir()) == []


# -- loading ---------------------------------------------------------------------------------------------------------


def flip(content: bytes) -> bytes:
    """A byte inside of values: the largest part of each file."""
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 4]) + content[middle + 1 :]


def cut(content: bytes) -> bytes:
    return content[: len(content) // 2]


UNCHANGED, CHANGED = "Nothing was changed.", "Parameters were read in part: load another checkpoint"
IN_PART = (
    "engine.load_checkpoint(): an error interrupted the load, so some values may be those of the checkpoint and others "
    "not; load a checkpoint, or start again"
)
DAMAGES: list[tuple[str, Callable[[bytes], bytes], str, str]] = [
    ("__1_0.distcp", cut, "the file is truncated", UNCHANGED),
    ("__1_0.distcp", flip, "(the checksum differs): the file is altered", CHANGED),
    ("rank1.json", cut, "the file is truncated", UNCHANGED),
    ("rank1.json", flip, "found it altered (the CRC-32 differs)", UNCHANGED),
    ("lowtide.json", cut, "found it truncated or altered", UNCHANGED),
    ("lowtide.json", flip, "found it truncated or altered", UNCHANGED),
]


@on_ranks(2)
def test_damage_is_named_on_every_rank_and_the_other_checkpoint_offered(tmp_path: Path) -> None:
    offer = "The newest other checkpoint is 'good0': load_checkpoint(folder, tag=\"good0\"). "
    with engine_for(DEEP, 2) as engine:
        for step in range(2):
            run_steps(engine, DEEP, step, 1)
            engine.save_checkpoint(tmp_path, f"good{step}")
        for name, damage, words, end in DAMAGES:
            path = tmp_path / "good1" / name
            content = path.read_bytes()
            for values in (damage(content), content):
                dist.barrier()
                if engine.rank == 0:
                    path.write_bytes(values)
                dist.barrier()
                if values is not content:
                    text = refusal(engine.load_checkpoint, tmp_path, kind=CheckpointError)
                    assert text.startswith(f"loading checkpoint 'good1' from {tmp_path} failed on "), text
                    assert f"{path}: expected " in text and words in text and offer + end in text, text
                    if end == CHANGED:
                        for call in (partial(run_steps, engine, DEEP, 0, 1), partial(engine.save_checkpoint, tmp_path)):
                            assert refusal(call, kind=StateError) == IN_PART
                    engine.load_checkpoint(tmp_path, tag="good0")
                    run_steps(engine, DEEP, engine.global_step, 1)
                    assert engine.global_step == 2
    CheckpointFolder(tmp_path).open("good1").verify()


def test_metadata_for_other_readers_is_not_needed_and_verified_on_demand(tmp_path: Path) -> None:
    save_and_go_on(MLP, tmp_path, 1, "a")
    path = tmp_path / "a" / ".metadata"
    path.write_bytes(flip(path.read_bytes()))
    with engine_for(MLP, 1) as engine:
        engine.load_checkpoint(tmp_path)
    text = refusal(CheckpointFolder(tmp_path).open().verify, kind=CheckpointError)
    assert f"{path}: expected the file as written, found it altered" in text


@on_ranks(2)
def test_no_checkpoint_at_all_is_an_error_of_its_own(tmp_path: Path) -> None:
    with engine_for(GPT, 2) as engine:
        for tag, words in (
            (None, "expected a file `latest` that names a checkpoint, found none and no checkpoint"),
            ("a", "expected a checkpoint with the tag 'a', found none"),
        ):
            assert refusal(engine.load_checkpoint, tmp_path, tag, kind=NoCheckpointError) == f"{tmp_path}: {words}"


def test_a_checkpoint_of_an_island_loads_from_its_own_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As earlier versions have saved it: what they had agreed on is left there, with a warning."""
    expected = save_and_go_on(MLP, tmp_path / "island0", 1, "a")
    outer = {"island": 0, "fragments": 2, "arrived": [1]}
    resign(tmp_path / "island0" / "a", lambda content: content["training"].update(outer=outer))
    with engine_for(MLP, 1) as engine:
        text = refusal(engine.load_checkpoint, tmp_path, kind=NoCheckpointError)
    assert "; the folder has islands, a feature of earlier versions: load a subfolder, such as island0" in text
    assert "of an island" not in caplog.text
    assert load_and_go_on(MLP, tmp_path / "island0", 1, "a").differences(expected) == []
    assert "the checkpoint is of an island, a feature of earlier versions: its parameters and" in caplog.text


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


@on_ranks(2)
def test_no_path_is_not_the_working_directory(tmp_path: Path) -> None:
    """Rank 1 has lost its path, rank 0 has not; then both have."""
    words = "expected the path of a folder (\".\" for the working directory), found ''"
    os.chdir(tmp_path)
    with engine_for(CASE, 2) as engine:
        for call in (engine.save_checkpoint, engine.load_checkpoint, engine.export, engine.load_weights):
            text = refusal(call, "", kind=CheckpointError)
            assert f"ranks 0, 1: {words}" in text or (engine.rank and words in text)
            assert call != engine.save_checkpoint or text.startswith("saving checkpoint 'global_step0' to \"\" failed")
            assert words in refusal(call, "" if engine.rank else "some", kind=CheckpointError)
        for tag in ("", "latest"):  # no tag that was left out, and no tag of a checkpoint
            saving, loading = f"saving checkpoint '{tag}' to {tmp_path} ", "looking for "
            for begin, call in ((saving, engine.save_checkpoint), (loading, engine.load_checkpoint)):
                text = refusal(call, tmp_path, tag, kind=CheckpointError)
                assert text.startswith(begin) and "failed on rank 0: tag: expected a folder name" in text
        run_steps(engine, CASE, 0, 1)
    assert list(tmp_path.iterdir()) == []
