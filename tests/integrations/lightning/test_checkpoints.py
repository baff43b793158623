"""What the Trainer saves by a strategy of ours, and goes on from."""

from pathlib import Path
from threading import Event
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import lowtide
from lowtide.checkpoint.folder import CheckpointFolder
from lowtide.lightning import LowtideStrategy, checkpoints
from tests.integrations.lightning.modules import closed, fitted, lightning, loader, module, trainer, world_size
from tests.kit.ranks import RankPool, on_ranks
from tests.kit.training import refusal

NUM_EPOCHS = 2


def saved(folder: str, strategy: str) -> tuple[list[str], list[float]]:
    """Fits for half of the epochs with ModelCheckpoint; the names that stand, and all numbers of a whole fit."""
    pl = lightning()
    from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint

    kept = ModelCheckpoint(folder, "{epoch}", monitor="valid", save_top_k=1, save_last=True)
    options = {"max_epochs": NUM_EPOCHS // 2, "enable_checkpointing": True, "callbacks": [kept]}
    fitted(trainer(pl, strategy, **options), module(pl))
    rates, logger = LearningRateMonitor(), pl.loggers.CSVLogger(folder, "logs", "0")
    options = {"max_epochs": NUM_EPOCHS, "logger": logger, "callbacks": [rates], "log_every_n_steps": 1}
    whole = fitted(trainer(pl, strategy, **options), module(pl))
    assert list(rates.lrs) == ["lr-AdamW"] and rates.lrs["lr-AdamW"][:3] == [1e-2, 1e-2, 5e-3]
    names = sorted(path.name for path in Path(folder).iterdir() if path.name.startswith(("epoch", "last")))
    return names, whole


def resumed(path: str, strategy: str) -> tuple[list[float], float, float]:
    """Goes on from a checkpoint until the last epoch, tests, and tests the checkpoint by itself."""
    pl = lightning()
    made = module(pl)
    runner = trainer(pl, strategy, max_epochs=NUM_EPOCHS)
    runner.fit(made, loader(), loader(), ckpt_path=path, weights_only=False)
    valid = float(runner.callback_metrics["valid"])
    (after,) = runner.test(made, loader(), verbose=False)
    predicted = torch.cat(runner.predict(made, loader()))
    assert predicted.shape == (32 // world_size(), 3) and after["valid"] == pytest.approx(valid)
    closed(runner)
    alone = trainer(pl, strategy)
    (again,) = alone.test(module(pl), loader(), ckpt_path=path, verbose=False, weights_only=False)
    closed(alone)
    return made.losses, valid, again["valid"]


def test_a_fit_goes_on_where_it_was_saved(ranks: RankPool, tmp_path: Path) -> None:
    """And, alone, at another stage."""
    names, (*losses, score) = ranks(2, saved, str(tmp_path), "lowtide_stage_3")[0]
    assert names == ["epoch=0.ckpt", "last.ckpt"]
    path = str(tmp_path / "last.ckpt")
    rest, valid, alone = ranks(2, resumed, path, "lowtide_stage_3")[0]
    assert rest == losses[len(losses) // 2 :]
    assert valid == score and alone > valid
    ((_, other, again),) = ranks(1, resumed, path, "lowtide_stage_1")
    assert other == pytest.approx(score, abs=0.05)
    assert again == pytest.approx(alone)


@on_ranks(2)
def test_weights_alone_and_one_file_have_the_same_values(tmp_path: Path) -> None:
    """Of the fit, of weights alone, of one ordinary file: in ours, in DDP, without a Trainer, also of a tied layer."""
    pl = lightning()
    from lowtide.lightning import consolidate

    made = module(pl, tied=True)
    runner = trainer(pl, "lowtide_stage_3")
    runner.fit(made, loader(), loader())
    runner.save_checkpoint(f"{tmp_path}/full")
    runner.save_checkpoint(f"{tmp_path}/weights", weights_only=True)
    found = [float(runner.callback_metrics["valid"])]
    closed(runner)
    consolidate(f"{tmp_path}/full", f"{tmp_path}/file-{runner.global_rank}.ckpt")
    for kind, path in (("lowtide_stage_3", "weights"), ("lowtide_stage_3", "file-0.ckpt"), ("ddp", "file-0.ckpt")):
        runner = trainer(pl, kind)
        runner.strategy.barrier()
        (metrics,) = runner.test(
            module(pl, tied=True), loader(), ckpt_path=f"{tmp_path}/{path}", verbose=False, weights_only=False
        )
        found.append(metrics["valid"])
        closed(runner)
    for path in ("file-0.ckpt", "full", "weights"):
        alone = type(made).load_from_checkpoint(f"{tmp_path}/{path}", "cpu", how={}, weights_only=False)
        with torch.no_grad():
            errors = [torch.nn.functional.mse_loss(alone(x), y) for x, y in loader()]
        found.append(float(sum(errors) / len(errors)))
    assert found == pytest.approx([found[0]] * 7, rel=1e-6)


class Noting(nn.Linear):
    """Has a state that is no tensor."""

    def get_extra_state(self) -> None:
        """None, the same object for all layers."""


@on_ranks(1)
def test_equal_extra_states_are_no_tied_weights(tmp_path: Path) -> None:
    model, config = nn.Sequential(Noting(3, 3), Noting(3, 3)), {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    with lowtide.initialize(model, config) as engine:
        checkpoints.save(engine, tmp_path / "weights", {}, is_first=True)
    assert checkpoints.read_whole(tmp_path / "weights")["state_dict"].keys() == {
        "0.weight",
        "0.bias",
        "1.weight",
        "1.bias",
    }


@on_ranks(1)
def test_a_checkpoint_stays_until_the_next_is_complete(tmp_path: Path) -> None:
    pl = lightning()
    from lightning.pytorch.callbacks import Callback, ModelCheckpoint

    may_commit, complete, commit = [Event(), Event(), Event()], list[list[str]](), CheckpointFolder.commit

    def commit_late(*given: Any) -> None:
        may_commit[len(complete)].wait()
        complete.append([path.parent.name for path in tmp_path.glob("*/latest")])
        commit(*given)

    class Continues(Callback):
        def on_train_epoch_start(self, runner: Any, module: Any) -> None:
            if runner.current_epoch:
                may_commit[0].set()

        def on_train_end(self, runner: Any, module: Any) -> None:
            may_commit[1].set()
            may_commit[2].set()

    strategy = LowtideStrategy(config={"checkpoint": {"async": True}})
    kept = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=1)
    options = {"max_epochs": 2, "enable_checkpointing": True, "callbacks": [kept, Continues()]}
    runner, made = trainer(pl, strategy, **options), module(pl)
    with mock.patch.object(CheckpointFolder, "commit", commit_late):
        runner.fit(made, loader(), loader())
        assert complete == [[], ["epoch=0.ckpt"]]
        assert [path.parent.name for path in tmp_path.glob("*/latest")] == ["epoch=1.ckpt"]
        runner.test(made, loader(), ckpt_path=kept.best_model_path, verbose=False, weights_only=False)
        runner.save_checkpoint(tmp_path / "by hand")
    assert CheckpointFolder(tmp_path / "by hand").latest() is not None
    closed(runner)


@on_ranks(1)
def test_an_error_leaves_the_checkpoint_that_an_incomplete_save_would_replace(tmp_path: Path) -> None:
    pl = lightning()
    from lightning.pytorch.callbacks import Callback, ModelCheckpoint

    class Fails(Callback):
        def on_train_end(self, runner: Any, module: Any) -> None:
            raise RuntimeError("the batch is bad")

    def commit_first(folder: CheckpointFolder, *given: Any) -> None:
        if folder.path.name != "epoch=0.ckpt":
            raise OSError("No space left on device")
        commit(folder, *given)

    commit = CheckpointFolder.commit
    strategy = LowtideStrategy(config={"checkpoint": {"async": True}})
    kept = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=1)
    runner = trainer(pl, strategy, max_epochs=2, enable_checkpointing=True, callbacks=[kept, Fails()])
    with mock.patch.object(CheckpointFolder, "commit", commit_first):
        assert refusal(runner.fit, module(pl), loader(), loader(), kind=RuntimeError) == "the batch is bad"
    assert CheckpointFolder(tmp_path / "epoch=0.ckpt").latest() is not None


@on_ranks(1)
def test_a_checkpoint_io_is_refused() -> None:
    pl = lightning()
    said = "plugins: expected no CheckpointIO, found a AsyncCheckpointIO"
    assert said in refusal(trainer, pl, "lowtide_stage_2", plugins=[pl.plugins.io.AsyncCheckpointIO()])
    save = trainer(pl, "lowtide_stage_2").strategy.save_checkpoint
    assert "expected no storage_options, since" in refusal(save, {}, "checkpoint", {"retries": 3}, kind=TypeError)
