"""What the Trainer saves by a strategy of ours, and goes on from."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.lightning.modules import lightning, loader, module, trainer
from tests.integrations.lightning.test_training import world_size
from tests.kit.ranks import RankPool

NUM_EPOCHS = 2


def saved(folder: str, strategy: str) -> tuple[list[str], list[float], float]:
    """Fits for half of the epochs with ModelCheckpoint; the names that stand, all losses of a whole fit, its score."""
    pl = lightning()
    from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint

    kept = ModelCheckpoint(folder, "{epoch}", monitor="valid", save_top_k=1, save_last=True)
    made = module(pl)
    runner = trainer(
        pl, strategy, world_size(), max_epochs=NUM_EPOCHS // 2, enable_checkpointing=True, callbacks=[kept]
    )
    runner.fit(made, loader(), loader())
    runner.strategy.engine.close()
    whole = module(pl)
    rates = LearningRateMonitor()
    logger = pl.loggers.CSVLogger(folder, "logs", "0")
    full = trainer(
        pl, strategy, world_size(), max_epochs=NUM_EPOCHS, logger=logger, callbacks=[rates], log_every_n_steps=1
    )
    full.fit(whole, loader(), loader())
    assert list(rates.lrs) == ["lr-AdamW"]
    assert rates.lrs["lr-AdamW"][:3] == [1e-2, 1e-2, 5e-3]
    full.strategy.engine.close()
    names = sorted(path.name for path in Path(folder).iterdir() if path.name.startswith(("epoch", "last")))
    return names, whole.losses, float(full.callback_metrics["valid"])


def resumed(path: str, strategy: str) -> tuple[list[float], float, dict[str, float]]:
    """Goes on from a checkpoint until the last epoch, tests, and tests the checkpoint by itself."""
    pl = lightning()
    made = module(pl)
    runner = trainer(pl, strategy, world_size(), max_epochs=NUM_EPOCHS)
    runner.fit(made, loader(), loader(), ckpt_path=path, weights_only=False)
    valid = float(runner.callback_metrics["valid"])
    (after,) = runner.test(made, loader(), verbose=False)
    predicted = torch.cat(runner.predict(made, loader()))
    assert predicted.shape == (32 // world_size(), 3)
    assert after["valid"] == pytest.approx(valid)
    runner.strategy.engine.close()
    alone = trainer(pl, strategy, world_size())
    (again,) = alone.test(module(pl), loader(), ckpt_path=path, verbose=False, weights_only=False)
    alone.strategy.engine.close()
    return made.losses, valid, again


def test_a_fit_goes_on_where_it_was_saved(ranks: RankPool, tmp_path: Path) -> None:
    """And, alone, at another stage."""
    names, losses, score = ranks(2, saved, str(tmp_path), "lowtide_stage_3")[0]
    assert names == ["epoch=0.ckpt", "last.ckpt"]
    path = str(tmp_path / "last.ckpt")
    rest, valid, alone = ranks(2, resumed, path, "lowtide_stage_3")[0]
    assert rest == losses[len(losses) // 2 :]
    assert valid == score
    assert alone["valid"] > valid
    ((_, other, again),) = ranks(1, resumed, path, "lowtide_stage_1")
    assert other == pytest.approx(score, abs=0.05)
    assert again["valid"] == pytest.approx(alone["valid"])


def in_other_forms(folder: str, strategy: str) -> list[float]:
    """The score of a model: of the fit, of weights alone, of one ordinary file: in ours, in DDP, without a Trainer."""
    pl = lightning()
    from lowtide.lightning import consolidate

    made = module(pl)
    runner = trainer(pl, strategy, world_size())
    runner.fit(made, loader(), loader())
    runner.save_checkpoint(f"{folder}/full")
    runner.save_checkpoint(f"{folder}/weights", weights_only=True)
    found = [float(runner.callback_metrics["valid"])]
    runner.strategy.engine.close()
    consolidate(f"{folder}/full", f"{folder}/file-{runner.global_rank}.ckpt")
    for kind, path in ((strategy, "weights"), (strategy, "file-0.ckpt"), ("ddp", "file-0.ckpt")):
        runner = trainer(pl, kind, world_size())
        runner.strategy.barrier()
        (metrics,) = runner.test(module(pl), loader(), ckpt_path=f"{folder}/{path}", verbose=False, weights_only=False)
        found.append(metrics["valid"])
        if kind != "ddp":
            runner.strategy.engine.close()
    for path in ("file-0.ckpt", "full", "weights"):
        alone = type(made).load_from_checkpoint(f"{folder}/{path}", "cpu", how={}, weights_only=False)
        with torch.no_grad():
            errors = [torch.nn.functional.mse_loss(alone(x), y) for x, y in loader()]
        found.append(float(sum(errors) / len(errors)))
    return found


def test_weights_alone_and_one_file_have_the_same_values(ranks: RankPool, tmp_path: Path) -> None:
    found = ranks(2, in_other_forms, str(tmp_path), "lowtide_stage_3")[0]
    assert found == pytest.approx([found[0]] * 7, rel=1e-6)


def fitted_again(strategy: str) -> tuple[list[float], list[float]]:
    """Fits of one module, by a Trainer twice and by another one, and an evaluation by a third between them."""
    pl = lightning()
    made = module(pl)
    first, second, third = (trainer(pl, strategy, world_size()) for _ in range(3))
    first.fit(made, loader(), loader())
    first.fit_loop.epoch_progress.reset()
    first.fit_loop.max_epochs = 1
    first.fit(made, loader(), loader())
    second.validate(made, loader(), verbose=False)
    third.fit(made, loader(), loader())
    if strategy != "ddp":
        third.strategy.engine.close()
    return made.losses, [float(runner.callback_metrics["valid"]) for runner in (second, third)]


@pytest.mark.parametrize("strategy", ["lowtide_stage_2", "lowtide_stage_3"])
def test_any_trainer_begins_with_what_an_earlier_one_has_trained(ranks: RankPool, strategy: str) -> None:
    expected = ranks(1, fitted_again, "ddp")[0]
    found = ranks(1, fitted_again, strategy)[0]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def offloaded(folder: str, device: str) -> list[float]:
    pl = lightning()
    from lowtide.lightning import LowtideStrategy

    made = module(pl)
    places: dict[str, Any] = {"offload_optimizer": device, "offload_parameters": device, "nvme_path": folder}
    runner = trainer(pl, LowtideStrategy(stage=3, **places), world_size())
    runner.fit(made, loader(), loader())
    runner.strategy.engine.close()
    return list(made.losses)


def test_offload_trains_with_the_same_numbers(ranks: RankPool, tmp_path: Path) -> None:
    files, memory = (ranks(2, offloaded, str(tmp_path), device) for device in ("nvme", "cpu"))
    assert files == memory


def not_ours(folder: str) -> str:
    pl = lightning()
    made: Any = module(pl)
    runner = trainer(pl, "lowtide_stage_2", 1, plugins=[pl.plugins.io.AsyncCheckpointIO()])
    return str(runner and made)


def test_a_checkpoint_io_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    from tests.kit.ranks import RankError

    with pytest.raises(RankError, match="plugins: expected no CheckpointIO, found a AsyncCheckpointIO"):
        ranks(1, not_ours, str(tmp_path))
