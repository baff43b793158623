"""A fit with a strategy of ours is one with Lightning's own DDP, whatever of the Trainer is used."""

import warnings
from collections.abc import Callable
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from tests.integrations.lightning.modules import closed, fitted, lightning, loader, module, trainer
from tests.kit.ranks import RankError, RankPool, on_ranks
from tests.kit.training import refusal

WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "accumulated": ({}, {"accumulate_grad_batches": 3, "gradient_clip_val": 0.5}),
    "clipped by value": ({"calls": "net"}, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "manual": ({"manual": True, "calls": "net"}, {}),
    "configured": ({"configured": True}, {}),
    "deferred": ({"configured": True}, {}),
    "on meta": ({"configured": True, "on_meta": True}, {}),
}


def strategy_of(**options: Any) -> Any:
    """Once Lightning is imported."""
    from lowtide.lightning import LowtideStrategy

    return LowtideStrategy(**options)


def fitted_with(strategy: str, how: dict[str, Any], options: dict[str, Any]) -> list[float]:
    pl = lightning()
    return fitted(trainer(pl, strategy, **options), module(pl, **how))


@pytest.fixture(scope="module")
def plain(ranks: RankPool) -> list[list[float]]:
    """By DDP, of the net wherever it is made."""
    return ranks(2, fitted_with, "ddp", {}, {})


@pytest.mark.parametrize("way", WAYS)
def test_losses_are_those_of_ddp(ranks: RankPool, plain: list[list[float]], way: str) -> None:
    how, options = WAYS[way]
    strategy = "lowtide_stage_1" if way in ("configured", "on meta") else "lowtide_stage_3"
    is_plain = way == "plain" or "configured" in how
    expected = plain if is_plain else ranks(2, fitted_with, "ddp", how, options)
    torch.testing.assert_close(ranks(2, fitted_with, strategy, how, options), expected, rtol=1e-6, atol=1e-6)


# -- other ways into a fit: each a function from a strategy to losses -------------------------------------------------


def in_the_other_package(strategy: str) -> list[float]:
    lightning()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what importing it deprecates
        import pytorch_lightning as pl

    from lowtide.lightning import register
    from lowtide.lightning.for_pytorch_lightning import LowtideStrategy

    register(LowtideStrategy)
    return fitted(trainer(pl, strategy, gradient_clip_val=0.5), module(pl))


def with_a_callback_that_unfreezes(strategy: str) -> list[float]:
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

    return fitted(trainer(pl, strategy, max_epochs=2, callbacks=[Unfreezes()]), module(pl, trained_only=True))


def with_sums_by_hand(strategy: str) -> list[float]:
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
    return fitted(trainer(pl, strategy), made)


def with_the_optimizer_of_the_config(strategy: str) -> list[float]:
    pl = lightning()
    if strategy == "ddp":
        made = module(pl)
        made.configure_optimizers = lambda: torch.optim.AdamW(made.parameters(), lr=1e-2, weight_decay=0.01)
        return fitted(trainer(pl, strategy), made)
    optimizer = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01}}
    own = strategy_of(config={"zero_optimization": {"stage": 2}, "optimizer": optimizer})
    return fitted(trainer(pl, own), module(pl, optimizers=0))


def by_several_trainers(strategy: str) -> list[float]:
    """An evaluation of a module, fits by a Trainer twice, an evaluation by another one, and a fit by a third."""
    pl = lightning()
    made = module(pl)
    first, second, third = (trainer(pl, strategy) for _ in range(3))
    first.validate(made, loader(), verbose=False)
    first.fit(made, loader(), loader())
    first.fit_loop.epoch_progress.reset()
    first.fit_loop.max_epochs = 1
    first.fit(made, loader(), loader())
    second.validate(made, loader(), verbose=False)
    return [float(second.callback_metrics["valid"]), *fitted(third, made)]


def with_steps_without_a_loss(strategy: str) -> list[float]:
    """A first microbatch, a whole window, and a last window that is short, of whose batches none has a loss."""
    pl = lightning()
    warnings.filterwarnings("ignore", message=r"`training_step` returned `None`")
    options = {"accumulate_grad_batches": 3, "gradient_clip_val": 0.5}
    return fitted(trainer(pl, strategy, **options), module(pl, skipped=(0, 6, 7, 8, 15)))


def with_checkpoints_within_a_window(strategy: str) -> list[float]:
    """Validations, and so checkpoints, come between microbatches, and a second fit goes on from the last."""
    pl = lightning()
    warnings.filterwarnings("ignore", message=r".*resuming from a checkpoint that ended before the epoch ended")
    losses = []
    with TemporaryDirectory() as folder:
        kept = pl.callbacks.ModelCheckpoint(folder, "{step}", save_last=True)
        for num_epochs, path, callbacks in ((1, None, [kept]), (2, f"{folder}/last.ckpt", [])):
            often = {"accumulate_grad_batches": 3, "val_check_interval": 5, "enable_checkpointing": bool(callbacks)}
            runner, made = trainer(pl, strategy, max_epochs=num_epochs, callbacks=callbacks, **often), module(pl)
            runner.fit(made, loader(), loader(), ckpt_path=path, weights_only=False)
            closed(runner)
            losses += made.losses
    return losses


# DDP does not sum gradients of what was frozen when it was made, so one rank unfreezes.
OTHER_WAYS: list[tuple[Callable[[str], list[float]], int, str]] = [
    (in_the_other_package, 1, "lowtide_stage_3"),
    (with_a_callback_that_unfreezes, 1, "lowtide_stage_3"),
    (with_sums_by_hand, 2, "lowtide_stage_3"),
    (with_the_optimizer_of_the_config, 1, "lowtide_stage_2"),
    (by_several_trainers, 1, "lowtide_stage_3"),
    (with_checkpoints_within_a_window, 1, "lowtide_stage_3"),
    (with_steps_without_a_loss, 1, "lowtide_stage_3"),  # Lightning refuses them on several ranks
]


@pytest.mark.parametrize(("fit", "num_ranks", "strategy"), OTHER_WAYS)
def test_a_fit_is_that_of_ddp(ranks: RankPool, fit: Any, num_ranks: int, strategy: str) -> None:
    expected, found = (ranks(num_ranks, fit, name)[0] for name in ("ddp", strategy))
    is_long = fit in (by_several_trainers, with_a_callback_that_unfreezes)
    torch.testing.assert_close(found, expected, rtol=1e-5 if is_long else 1e-6, atol=1e-6)


@on_ranks(1)
def test_the_names_and_arguments_are_those_of_the_deepspeed_strategy() -> None:
    lightning()
    from lowtide.lightning import NAMES

    zero = strategy_of(offload_optimizer="cpu", offload_parameters="nvme", stage=3).config.zero_optimization
    assert (zero.stage, zero.offload_optimizer.device) == (3, "cpu")
    assert (zero.offload_param.device, zero.offload_param.nvme_path) == ("nvme", "/local_nvme")

    suffixes = ["", "_stage_1", "_stage_2", "_stage_2_offload", "_stage_3", "_stage_3_offload", "_stage_3_offload_nvme"]
    assert list(NAMES) == [f"lowtide{suffix}" for suffix in suffixes]


# -- refusals ---------------------------------------------------------------------------------------------------------

CLIPS = {"config": {"gradient_clipping": 1.0}}
BY_VALUE = {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}
AVERAGES, SWA = {"callbacks": [("EMAWeightAveraging",)]}, {"callbacks": [("StochasticWeightAveraging", 0.1)]}
TWO = {"optimizers": 2, "manual": True}
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {  # strategy, module, Trainer
    "configure_optimizers: expected a single optimizer": ({"stage": 2}, TWO, {}),
    "configure_optimizers: expected an optimizer": ({"stage": 2}, {"optimizers": 0}, {}),
    'optimizer: found both "adamw" in the config and the AdamW': ({"config": "zero1"}, {}, {}),
    "train_batch_size: expected no batch sizes": ({"config": {"train_batch_size": 4}}, {}, {}),
    "parallel.pipeline: expected 1 in the config of": ({"config": {"parallel": {"pipeline": 2}}}, {}, {}),
    "LowtideStrategy: expected either config or further arguments": ({"config": {}, "stage": 2}, {}, {}),
    "LowtideStrategy: unknown argument 'sub_group_size'": ({"sub_group_size": 2}, {}, {}),
    "gradient_clipping: found both 1 (by": (CLIPS, {}, {"gradient_clip_val": 2.0}),
    'Trainer(gradient_clip_val=1, gradient_clip_algorithm="value"). Remove either': (CLIPS, {}, BY_VALUE),
    "checkpoint.folder: expected none": ({"config": {"checkpoint": {"folder": "x"}}}, {}, {}),
    "precision '16-true': without a loss scale": ({"stage": 1}, {}, {"precision": "16-true"}),
    "callbacks: expected none that averages the": ({"stage": 2}, {}, AVERAGES),
    "found a StochasticWeightAveraging": ({"stage": 2}, {}, SWA),
    "bf16: enabled in the config, but": ({"config": {"bf16": {"enabled": True}}}, {}, {}),
}


def fit_with(pl: Any, strategy: dict[str, Any], how: dict[str, Any], options: dict[str, Any]) -> None:
    callbacks = [getattr(pl.callbacks, name)(*args) for name, *args in options.pop("callbacks", [])]
    fitted(trainer(pl, strategy_of(**strategy), callbacks=callbacks, **options), module(pl, **how))


@on_ranks(1)
@pytest.mark.parametrize("said", REFUSED)
def test_what_the_engine_would_not_do_is_refused(said: str) -> None:
    kind = TypeError if "unknown argument" in said else ValueError
    assert said in refusal(fit_with, lightning(), *REFUSED[said], kind=kind)


@on_ranks(1)
def test_a_window_is_not_dropped_by_a_last_batch_without_a_loss() -> None:
    warnings.filterwarnings("ignore", message=r"`training_step` returned `None`")
    options = {"accumulate_grad_batches": 3}
    assert refusal(fit_with, lightning(), {"stage": 2}, {"skipped": (4, 5)}, options) == (
        "training_step: expected a loss for batch 5, the last of an accumulation window, found None. The step needs "
        "its backward, else the gradients of 1 earlier microbatches are lost. Return 0 times a finite output of the "
        "model, or use Trainer(accumulate_grad_batches=1), where a batch without a loss is skipped"
    )


# -- precisions -------------------------------------------------------------------------------------------------------


def precise(precision: str) -> tuple[list[float], str, int]:
    """Losses, the dtype of the master weights, and the number of steps."""
    pl = lightning()
    from lowtide.lightning import LowtidePrecision

    options: dict[str, Any] = {"precision": precision}
    if precision == "16-mixed":  # else Lightning makes bf16 of it on a CPU
        options = {"plugins": [LowtidePrecision(precision)]}
    made = module(pl, calls="net")
    runner = trainer(pl, "lowtide_stage_3", gradient_clip_val=1.0, **options)
    runner.fit(made, loader(), loader())
    engine = runner.strategy.engine
    dtype, num_steps = engine.full("net.scale").dtype, engine.optimizer.num_steps
    closed(runner)
    return made.losses, str(dtype), num_steps


@pytest.fixture(scope="module")
def clipped(ranks: RankPool) -> list[list[float]]:
    return ranks(2, fitted_with, "ddp", {}, {"gradient_clip_val": 1.0})


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed", "bf16-true", "64-true"])
def test_precisions_train_with_the_master_weights_that_they_say(
    ranks: RankPool, clipped: list[list[float]], precision: str
) -> None:
    tolerance = 1e-6 if precision == "64-true" else 0.05
    known = 1 if precision == "16-mixed" else 8  # its loss scale begins too high for some steps
    for (losses, dtype, num_steps), reference in zip(ranks(2, precise, precision), clipped, strict=True):
        assert dtype == ("torch.float64" if precision == "64-true" else "torch.float32")
        torch.testing.assert_close(losses[:known], reference[:known], rtol=tolerance, atol=tolerance)
        assert known <= num_steps <= 8


def failing() -> None:
    pl = lightning()
    made = module(pl)
    made.forward = lambda x: (_ for _ in ()).throw(RuntimeError("a fault of the user's"))
    fitted(trainer(pl, "lowtide_stage_2"), made)


def test_an_error_in_a_step_closes_the_engine(ranks: RankPool) -> None:
    with pytest.raises(RankError, match="a fault of the user's"):
        ranks(1, failing)
    assert ranks(1, with_sums_by_hand, "lowtide_stage_2")
