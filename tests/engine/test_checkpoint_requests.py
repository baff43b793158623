"""When a checkpoint is made and under which name: every so many steps, tags, how many are kept, and when not."""

from pathlib import Path
from typing import Any

import pytest

from lowtide.checkpoint.files import CheckpointError
from lowtide.checkpoint.folder import CheckpointFolder
from tests.engine.saving import GLOBAL_ROWS, engine_for, load_and_go_on, run_steps
from tests.kit.models import mlp, short_gpt, token_batch, vector_batch
from tests.kit.ranks import RankPool
from tests.kit.training import Case, refusal

CASE = Case(mlp, vector_batch)


def case_with(folder: Path | str, **settings: Any) -> Case:
    return CASE.at(0, config={"checkpoint": {"folder": str(folder), **settings}})


def train_and_close(case: Case, steps: int) -> list[float]:
    with engine_for(case, 2) as engine:
        return run_steps(engine, case, 0, steps).losses


@pytest.mark.parametrize("asynchronous", [False, True])
def test_every_so_many_steps_one_is_saved_that_goes_on(ranks: RankPool, tmp_path: Path, asynchronous: bool) -> None:
    case = case_with(tmp_path, every_steps=2, **{"async": asynchronous})
    losses = ranks(2, train_and_close, case, 7)[0]
    target = CheckpointFolder(tmp_path)
    assert target.tags() == ["global_step2", "global_step4", "global_step6"] and target.latest() == "global_step6"
    assert [target.open(tag).manifest.step for tag in target.tags()] == [2, 4, 6]
    assert not any(target.open(tag).manifest.has_own_tag for tag in target.tags())
    found = ranks(2, load_and_go_on, CASE, tmp_path, 2, "global_step4", 4, 3)[0]
    assert found.losses == losses[4:]


def test_only_the_newest_without_a_tag_of_the_callers_are_kept(tmp_path: Path) -> None:
    case = case_with(tmp_path, every_steps=1, keep_last=2)
    with engine_for(case, 1) as engine:
        for step in range(4):
            run_steps(engine, case, step, 1)
            engine.save_checkpoint(tmp_path, f"own{step}")
            engine.save_checkpoint(tmp_path / "other")
    assert set(CheckpointFolder(tmp_path).tags()) == {"global_step3", "global_step4", *(f"own{i}" for i in range(4))}
    assert CheckpointFolder(tmp_path / "other").tags() == ["global_step3", "global_step4"]


def test_a_training_that_goes_back_replaces_what_it_does_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a path may be relative and new
    case = case_with("runs/a", every_steps=1)
    with engine_for(case, 1) as engine:
        run_steps(engine, case, 0, 3)
        engine.load_checkpoint("runs/a", "global_step1")
        run_steps(engine, case, 7, 1)
        target = CheckpointFolder(tmp_path / "runs" / "a")
        assert target.latest() == "global_step2" and target.tags() == ["global_step1", "global_step3", "global_step2"]


def save_under_own_names(folder: Path) -> list[str]:
    with engine_for(CASE, 2) as engine:
        found = [
            engine.save_checkpoint(folder, f"of rank {engine.rank}"),
            engine.save_checkpoint(folder, None if engine.rank == 0 else "mine"),
            engine.save_checkpoint(folder, "zero" if engine.rank == 0 else None),
        ]
        assert engine.load_checkpoint(folder, ["of rank 0", "nowhere"][engine.rank]) == {}
        return found


def test_ranks_that_give_different_tags_use_that_of_rank_0(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks(2, save_under_own_names, tmp_path) == [["of rank 0", "global_step0", "zero"]] * 2
    target = CheckpointFolder(tmp_path)
    assert target.tags() == ["of rank 0", "global_step0", "zero"]
    assert [target.open(tag).manifest.has_own_tag for tag in target.tags()] == [True, False, True]


BAD_TAGS = ("a/b", "", "..", "latest")


def use_bad_tags(folder: Path) -> list[str]:
    with engine_for(CASE, 2) as engine:
        calls = engine.save_checkpoint, engine.load_checkpoint
        texts = [refusal(call, folder, tag, kind=CheckpointError) for tag in BAD_TAGS for call in calls]
        run_steps(engine, CASE, 0, 1)
        return texts


def test_a_tag_that_is_no_name_of_a_folder_is_an_error_on_all(ranks: RankPool, tmp_path: Path) -> None:
    for texts in ranks(2, use_bad_tags, tmp_path):
        for tag, saving, loading in zip(BAD_TAGS, texts[::2], texts[1::2], strict=True):
            refused = "failed on rank 0: tag: expected a folder name"
            assert saving.startswith(f"saving checkpoint '{tag}' to {tmp_path} {refused}")
            assert f"found {tag!r}. What was saved before is as it was" in saving
            assert loading.startswith("looking for ") and refused in loading
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("stage", [0, 3])
def test_saving_between_microbatches_is_refused_and_loading_forgets_their_gradients(tmp_path: Path, stage: int) -> None:
    case = Case(short_gpt, token_batch, stage, accumulation=3)
    with engine_for(case, 1) as engine:
        run_steps(engine, case, 0, 1)
        engine.save_checkpoint(tmp_path)
        expected = run_steps(engine, case, 1, 2)
        for number in (1, 2):
            engine.backward(engine(*case.batch(9, GLOBAL_ROWS)))
            engine.step()
            assert refusal(engine.save_checkpoint, tmp_path) == (
                f"save_checkpoint: expected a call between steps, found {number} of 3 microbatches done "
                "(gradient_accumulation_steps); gradients are not saved, so call it after engine.step() has updated"
            )
            assert engine.save_checkpoint(tmp_path, "within", within_step=True) == "within"
        engine.load_checkpoint(tmp_path, "global_step1")
        assert run_steps(engine, case, 1, 2).losses == expected.losses
        assert engine.save_checkpoint(tmp_path) == "global_step3"
