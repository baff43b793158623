"""When a checkpoint is made and under which name: every so many steps, tags, how many are kept, and when not."""

from pathlib import Path
from typing import Any

import pytest

from lowtide.checkpoint.files import CheckpointError
from lowtide.checkpoint.folder import CheckpointFolder
from tests.engine.saving import GLOBAL_ROWS, engine_for, load_and_go_on, run_steps
from tests.kit.models import mlp, short_gpt, token_batch, vector_batch
from tests.kit.ranks import RankPool
from tests.kit.training import Case, share_of

CASE = Case(mlp, vector_batch)


def case_with(folder: Path, **settings: Any) -> Case:
    return CASE.at(0, config={"checkpoint": {"folder": str(folder), **settings}})


def train_and_close(case: Case, steps: int) -> None:
    engine = engine_for(case, 2)
    run_steps(engine, case, 0, steps)
    engine.close()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_every_so_many_steps_one_is_saved(ranks: RankPool, tmp_path: Path, asynchronous: bool) -> None:
    case = case_with(tmp_path, every_steps=2, **{"async": asynchronous})
    ranks(2, train_and_close, case, 7)
    target = CheckpointFolder(tmp_path)
    assert target.tags() == ["global_step2", "global_step4", "global_step6"] and target.latest() == "global_step6"
    assert [target.open(tag).manifest.step for tag in target.tags()] == [2, 4, 6]
    assert not any(target.open(tag).manifest.has_own_tag for tag in target.tags())


def test_what_is_saved_by_itself_goes_on(tmp_path: Path) -> None:
    case = case_with(tmp_path, every_steps=2)
    engine = engine_for(case, 1)
    expected = run_steps(engine, case, 0, 4)
    engine.close()
    assert load_and_go_on(CASE, tmp_path, 1, "global_step2").losses == expected.losses[2:]


def test_only_the_newest_without_a_tag_of_the_callers_are_kept(tmp_path: Path) -> None:
    case = case_with(tmp_path, every_steps=1, keep_last=2)
    engine = engine_for(case, 1)
    for step in range(4):
        run_steps(engine, case, step, 1)
        engine.save_checkpoint(tmp_path, f"own{step}")
        engine.save_checkpoint(tmp_path / "other")
    engine.close()
    assert set(CheckpointFolder(tmp_path).tags()) == {"global_step3", "global_step4", *(f"own{i}" for i in range(4))}
    assert CheckpointFolder(tmp_path / "other").tags() == ["global_step3", "global_step4"]


def test_a_training_that_goes_back_replaces_what_it_does_again(tmp_path: Path) -> None:
    case = case_with(tmp_path, every_steps=1)
    engine = engine_for(case, 1)
    run_steps(engine, case, 0, 3)
    engine.load_checkpoint(tmp_path, "global_step1")
    run_steps(engine, case, 7, 1)
    assert CheckpointFolder(tmp_path).latest() == "global_step2"
    assert CheckpointFolder(tmp_path).tags() == ["global_step1", "global_step3", "global_step2"]
    engine.close()


def save_under_own_names(folder: Path) -> list[str]:
    engine = engine_for(CASE, 2)
    found = [
        engine.save_checkpoint(folder, f"of rank {engine.rank}"),
        engine.save_checkpoint(folder, None if engine.rank == 0 else "mine"),
        engine.save_checkpoint(folder, "zero" if engine.rank == 0 else None),
    ]
    assert engine.load_checkpoint(folder, ["of rank 0", "nowhere"][engine.rank]) == {}
    engine.close()
    return found


def test_ranks_that_give_different_tags_use_that_of_rank_0(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks(2, save_under_own_names, tmp_path) == [["of rank 0", "global_step0", "zero"]] * 2
    target = CheckpointFolder(tmp_path)
    assert target.tags() == ["of rank 0", "global_step0", "zero"]
    assert [target.open(tag).manifest.has_own_tag for tag in target.tags()] == [True, False, True]


def save_with_bad_tags(folder: Path) -> list[str]:
    engine = engine_for(CASE, 2)
    texts = []
    for tag in ("a/b", "", "..", "latest"):
        with pytest.raises(CheckpointError) as caught:
            engine.save_checkpoint(folder, tag)
        texts.append(str(caught.value))
    run_steps(engine, CASE, 0, 1)
    engine.close()
    return texts


def test_a_tag_that_is_no_name_of_a_folder_is_an_error_on_all(ranks: RankPool, tmp_path: Path) -> None:
    for texts in ranks(2, save_with_bad_tags, tmp_path):
        for tag, text in zip(("a/b", "", "..", "latest"), texts, strict=True):
            assert text.startswith(
                f"saving checkpoint '{tag}' to {tmp_path} failed on rank 0: tag: expected a folder name"
            )
            assert f"found {tag!r}. What was saved before is as it was" in text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("stage", [0, 3])
def test_saving_between_microbatches_is_refused(tmp_path: Path, stage: int) -> None:
    case = Case(short_gpt, token_batch, stage, accumulation=3)
    engine = engine_for(case, 1)
    batches = [share_of(case.batch(number, GLOBAL_ROWS)) for number in range(3)]
    for number, batch in enumerate(batches):
        engine.backward(engine(*batch))
        engine.step()
        if number < 2:
            with pytest.raises(ValueError) as caught:
                engine.save_checkpoint(tmp_path)
            assert str(caught.value) == (
                f"save_checkpoint: expected a call between steps, found {number + 1} of 3 microbatches done "
                "(gradient_accumulation_steps); gradients are not saved, so call it after engine.step() has updated"
            )
            assert engine.save_checkpoint(tmp_path, "within", within_step=True) == "within"
    assert engine.save_checkpoint(tmp_path) == "global_step1"
    engine.close()


def test_a_path_may_be_relative_and_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    case = CASE.at(0, config={"checkpoint": {"folder": "runs/a", "every_steps": 1}})
    engine = engine_for(case, 1)
    run_steps(engine, case, 0, 1)
    assert engine.load_checkpoint("runs/a") == {}
    assert (tmp_path / "runs" / "a" / "global_step1" / "lowtide.json").is_file()
    engine.close()


def test_loading_between_microbatches_forgets_their_gradients(tmp_path: Path) -> None:
    case = Case(short_gpt, token_batch, 2, accumulation=3)
    engine = engine_for(case, 1)
    run_steps(engine, case, 0, 1)
    engine.save_checkpoint(tmp_path)
    expected = run_steps(engine, case, 1, 2)
    engine.load_checkpoint(tmp_path)
    engine.backward(engine(*case.batch(9, GLOBAL_ROWS)))
    engine.load_checkpoint(tmp_path)
    assert run_steps(engine, case, 1, 2).losses == expected.losses
    engine.close()
