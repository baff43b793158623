"""Other ways into a fit: the other package, callbacks that unfreeze, an optimizer of the config, sums by hand."""

import warnings
from typing import Any

import torch

from tests.integrations.lightning.modules import lightning, loader, module, trainer
from tests.integrations.lightning.test_training import world_size
from tests.kit.ranks import RankPool


def names() -> list[str]:
    lightning()
    from lowtide.lightning import NAMES

    return list(NAMES)


def test_the_names_are_those_of_the_deepspeed_strategy(ranks: RankPool) -> None:
    suffixes = ["", "_stage_1", "_stage_2", "_stage_2_offload", "_stage_3", "_stage_3_offload", "_stage_3_offload_nvme"]
    assert ranks(1, names)[0] == [f"lowtide{suffix}" for suffix in suffixes]


def losses_of(runner: Any, made: Any) -> list[float]:
    runner.fit(made, loader(), loader())
    if hasattr(runner.strategy, "engine"):
        runner.strategy.engine.close()
    return list(made.losses)


def in_other_package(strategy: str) -> list[float]:
    lightning()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what importing it deprecates
        import pytorch_lightning as pl

    from lowtide.lightning import register
    from lowtide.lightning.for_pytorch_lightning import LowtideStrategy

    register(LowtideStrategy)
    return losses_of(trainer(pl, strategy, world_size(), gradient_clip_val=0.5), module(pl))


def test_pytorch_lightning_has_the_strategies_too(ranks: RankPool) -> None:
    expected, found = (ranks(1, in_other_package, name)[0] for name in ("ddp", "lowtide_stage_3"))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def unfrozen(strategy: str) -> list[float]:
    """The net but for its last layer is frozen in the first epoch."""
    pl = lightning()
    warnings.filterwarnings("ignore", message=r"The provided params to be frozen already exist")
    from lightning.pytorch.callbacks import BaseFinetuning

    class Unfreezes(BaseFinetuning):
        def freeze_before_training(self, pl_module: Any) -> None:
            self.freeze(pl_module.net.layers)

        def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
            if epoch == 1:
                self.unfreeze_and_add_param_group(pl_module.net.layers, optimizer, lr=1e-3)

    made = module(pl, trained_only=True)
    return losses_of(trainer(pl, strategy, world_size(), max_epochs=2, callbacks=[Unfreezes()]), made)


def test_a_callback_that_unfreezes_reaches_the_engine(ranks: RankPool) -> None:
    # On one rank, since DDP does not sum gradients of what was frozen when it was made.
    expected, found = (ranks(1, unfrozen, name)[0] for name in ("ddp", "lowtide_stage_2"))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def accumulated_by_hand(strategy: str) -> list[float]:
    pl = lightning()
    made = module(pl, manual=True)

    def training_step(batch: Any, batch_idx: int) -> None:
        optimizer = made.optimizers()
        with optimizer.toggle_model(sync_grad=bool(batch_idx % 2)):
            loss = torch.nn.functional.mse_loss(made(batch[0]), batch[1])
            made.losses.append(loss.item())
            made.manual_backward(loss)
        if batch_idx % 2:
            optimizer.step()
            optimizer.zero_grad()

    made.training_step = training_step
    return losses_of(trainer(pl, strategy, world_size()), made)


def test_gradients_are_summed_when_the_module_says_so(ranks: RankPool) -> None:
    expected, found = (ranks(2, accumulated_by_hand, name)[0] for name in ("ddp", "lowtide_stage_3"))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def by_config() -> list[float]:
    pl = lightning()
    from lowtide.lightning import LowtideStrategy

    optimizer = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01}}
    strategy = LowtideStrategy(config={"zero_optimization": {"stage": 2}, "optimizer": optimizer})
    return losses_of(trainer(pl, strategy, world_size()), module(pl, optimizers=0))


def plain() -> list[float]:
    pl = lightning()
    made = module(pl)
    made.configure_optimizers = lambda: torch.optim.AdamW(made.parameters(), lr=1e-2, weight_decay=0.01)
    return losses_of(trainer(pl, "ddp", world_size()), made)


def test_the_optimizer_may_be_that_of_the_config(ranks: RankPool) -> None:
    torch.testing.assert_close(ranks(1, by_config)[0], ranks(1, plain)[0], rtol=1e-6, atol=1e-6)


def averaged(strategy: str) -> list[float]:
    """Losses, and that of a validation with the moving averages of the weights."""
    pl = lightning()
    warnings.filterwarnings("ignore", message=r"You're using the WeightAveraging callback with a model that overrides")
    from lightning.pytorch.callbacks import Callback, EMAWeightAveraging

    class Averages(Callback):
        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            trainer.strategy.engine.ema(0.9)

        def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
            self.shown = trainer.strategy.engine.ema_weights()
            self.shown.__enter__()

        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            self.shown.__exit__(None, None, None)

    made = module(pl)
    callback = EMAWeightAveraging(decay=0.9) if strategy == "ddp" else Averages()
    runner = trainer(pl, strategy, world_size(), callbacks=[callback])
    return [*losses_of(runner, made), float(runner.callback_metrics["valid"])]


def test_averages_of_the_engine_are_those_of_the_callback(ranks: RankPool) -> None:
    expected, found = (ranks(2, averaged, name)[0] for name in ("ddp", "lowtide_stage_3"))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
