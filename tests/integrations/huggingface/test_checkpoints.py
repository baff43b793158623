"""What a Trainer over an engine saves, and what goes on from it."""

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file
from torch import nn

from lowtide.checkpoint.folder import CheckpointFolder
from tests.integrations.huggingface.trainings import (
    Outcome,
    adapted,
    apart,
    closed,
    is_first,
    llama,
    mixtral,
    outcome_of,
    stage,
    trained,
    trainer,
)
from tests.kit.ranks import RankPool, on_ranks
from tests.kit.training import refusal

EVERY_STEP = {"save_strategy": "steps", "save_steps": 1, "max_steps": 3}
BEST = {**EVERY_STEP, "eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True}
BEST |= {"metric_for_best_model": "worth", "greater_is_better": True, "save_only_model": True}


def run_best(folder: str, model: Callable[[], nn.Module]) -> Outcome:
    """Of a training that takes up the best model, which is that of the first step."""
    worth = iter((1.0, 0.5, 0.2))
    return trained(folder, stage(3), BEST, model=model(), compute_metrics=lambda _: {"worth": next(worth)})


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def test_a_training_goes_on_with_other_ranks(ranks: RankPool, tmp_path: Path) -> None:
    """Batches of eight on all ranks together; their samples are in another order within each."""
    config = stage(3, optimizer={"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}})
    alone = {**EVERY_STEP, "per_device_train_batch_size": 8}
    whole = ranks(2, trained, str(tmp_path), config, EVERY_STEP)[0]
    resumed = ranks(1, trained, str(tmp_path / "again"), config, alone, str(tmp_path / "checkpoint-1"))[0]
    assert resumed.logged("loss") == pytest.approx(whole.logged("loss"), abs=1e-5)
    assert resumed.logged("learning_rate") == whole.logged("learning_rate")
    assert apart(resumed.state, whole.state) < 1e-5


def test_a_saved_model_is_whole(ranks: RankPool, tmp_path: Path) -> None:
    config = stage(3, bf16={"enabled": True})
    outcome = ranks(2, trained, str(tmp_path), config, EVERY_STEP, saves=True)[0]
    assert {"model.safetensors", "config.json", "training_args.bin"} <= set(os.listdir(tmp_path / "model"))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert loaded.dtype == torch.bfloat16
    assert same(dict(loaded.state_dict()), outcome.state)
    assert CheckpointFolder(tmp_path / "checkpoint-3").tags() == ["global_step3"]


@pytest.mark.parametrize("model", [adapted, llama, mixtral])
def test_the_best_of_saved_models_is_taken_up_at_the_end(ranks: RankPool, tmp_path: Path, model: Any) -> None:
    """Of checkpoints of engines: `test_parallel_axes.py`. Files have each expert of a Mixtral alone."""
    best = ranks(2, run_best, str(tmp_path), model)[0].state
    first, last = (tmp_path / f"checkpoint-{step}" for step in (1, 3))
    if model is adapted:
        saved, other = (load_file(folder / "adapter_model.safetensors") for folder in (first, last))
        assert all("lora" in key for key in saved)
        best = {key.replace(".default", ""): value for key, value in best.items() if "lora" in key}
    else:
        saved, other = (
            transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (first, last)
        )
    assert same(best, saved) and not same(other, saved)


def run_best_without_files(folder: str) -> None:
    with mock.patch.object(transformers.MixtralForCausalLM, "from_pretrained", side_effect=OSError("no file")):
        run_best(folder, mixtral)


def test_a_best_model_that_cannot_be_read_is_an_error_of_all_ranks(ranks: RankPool, tmp_path: Path) -> None:
    failed = ranks.fails(2, run_best_without_files, str(tmp_path))
    assert {rank.rank: rank.kind for rank in failed} == {0: "OSError", 1: "RuntimeError"}


@on_ranks(2)
def test_a_checkpoint_in_the_background_is_complete_or_an_error(tmp_path: Path) -> None:
    """Without its optimizer, the training would begin anew without a word."""
    one, config = {**EVERY_STEP, "save_steps": 2}, stage(1, checkpoint={"async": True})
    whole = trained(str(tmp_path), config, one)
    made = trainer(str(tmp_path / "stopped"), config, one, callbacks=[Failing()])
    with mock.patch.object(CheckpointFolder, "commit", late_commit), pytest.raises(RuntimeError, match="of this test"):
        made.train()
    dist.barrier()  # rank 0 has written the state of the Trainer
    made.train(resume_from_checkpoint=str(tmp_path / "stopped" / "checkpoint-2"))
    assert same(outcome_of(made).state, whole.state)
    closed(made)
    dist.barrier()
    if is_first():
        shutil.rmtree(tmp_path / "checkpoint-2" / "global_step2")
    dist.barrier()
    text = refusal(trained, str(tmp_path / "again"), config, one, str(tmp_path / "checkpoint-2"))
    assert text.startswith(
        "resume_from_checkpoint: expected a complete checkpoint with a folder global_stepN, found none"
    )


class Failing(transformers.TrainerCallback):
    """Fails once, when a checkpoint has begun."""

    failed = False

    def on_save(self, *args: Any, **kwargs: Any) -> None:
        if not self.failed:
            self.failed = True
            raise RuntimeError("of this test")


def late_commit(self: CheckpointFolder, *args: Any, commit: Any = CheckpointFolder.commit) -> None:
    time.sleep(0.5)
    commit(self, *args)


class Looking(transformers.TrainerCallback):
    """Says after each save if it is complete."""

    def __init__(self) -> None:
        self.found: list[bool] = []

    def on_save(self, args: Any, state: Any, *_: Any, **kwargs: Any) -> None:
        step = state.global_step
        self.found.append(
            CheckpointFolder(Path(args.output_dir) / f"checkpoint-{step}").latest() == f"global_step{step}"
        )


@on_ranks(2)
def test_a_checkpoint_is_removed_when_the_next_one_is_complete(tmp_path: Path) -> None:
    looking = Looking()
    one = {**EVERY_STEP, "save_total_limit": 1}
    with mock.patch.object(CheckpointFolder, "commit", late_commit):
        made = trainer(str(tmp_path), stage(1, checkpoint={"async": True}), one, callbacks=[looking])
        made.train()
    closed(made)
    assert looking.found == [True] * 3


class Preempted(transformers.TrainerCallback):
    """Saves before the update of the second step, as transformers does for a signal (enable_jit_checkpoint)."""

    trainer: Any = None

    def on_pre_optimizer_step(self, args: Any, state: Any, *_: Any, **kwargs: Any) -> None:
        if state.global_step == 1:
            self.trainer._save_checkpoint(self.trainer.model, trial=None)


@on_ranks(2)
def test_a_checkpoint_before_an_update_begins_that_step_again(tmp_path: Path) -> None:
    one, saving = {**EVERY_STEP, "save_steps": 100}, Preempted()
    saving.trainer = made = trainer(str(tmp_path), stage(2), one, callbacks=[saving])
    made.train()
    whole = outcome_of(made)
    closed(made)
    dist.barrier()  # rank 0 has written the state of the Trainer
    assert same(trained(str(tmp_path / "again"), stage(2), one, str(tmp_path / "checkpoint-1")).state, whole.state)


def test_a_saved_model_alone_is_begun_with(ranks: RankPool, tmp_path: Path) -> None:
    ranks(2, trained, str(tmp_path), stage(3), {**EVERY_STEP, "save_only_model": True})
    resumed = ranks(2, trained, str(tmp_path / "again"), stage(3), EVERY_STEP, str(tmp_path / "checkpoint-2"))[0]
    assert len(resumed.logged("loss")) == 3


def test_a_checkpoint_of_another_trainer_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    ranks(2, trained, str(tmp_path), None, EVERY_STEP)
    failed = ranks.fails(2, trained, str(tmp_path / "again"), stage(3), EVERY_STEP, str(tmp_path / "checkpoint-2"))
    said = "expected a checkpoint of lowtide's Trainer, with a folder global_stepN, found optimizer.pt of another Train"
    assert all(said in rank.text for rank in failed)


@on_ranks(2)
def test_adapters_are_saved_without_the_base(tmp_path: Path) -> None:
    made = trainer(str(tmp_path), stage(3), {"max_steps": 1}, model=adapted())
    made.train()
    with mock.patch.object(type(made.engine), "state_dict", side_effect=AssertionError("the base was gathered")):
        made.save_model(str(tmp_path / "saved"))
    state = outcome_of(made).state
    closed(made)
    if is_first():
        saved = load_file(tmp_path / "saved" / "adapter_model.safetensors")
        assert same(saved, {key.replace(".default", ""): value for key, value in state.items() if "lora" in key})
        assert {"README.md", "adapter_config.json", "training_args.bin"} <= set(os.listdir(tmp_path / "saved"))
