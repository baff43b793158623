"""A fit over ranks that share layers or experts is one with Lightning's DDP over the same data."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tests.integrations.huggingface.test_parallel_axes import two_heads
from tests.integrations.huggingface.trainings import Sentences, apart, mixtral, padded
from tests.integrations.lightning.modules import lightning, trainer
from tests.kit.ranks import RankPool


def token_module(pl: Any, build: Any, manual: bool = False) -> Any:
    class Module(pl.LightningModule):  # type: ignore[misc]  # the package has no types for mypy here
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = not manual
            self.model = build()

        def training_step(self, batch: Any, index: int) -> Tensor:
            loss: Tensor = self.model(**batch).loss
            self.log("loss", loss, sync_dist=True, on_step=False, on_epoch=True)
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            loss = self.model(**batch).loss
            self.log("valid", loss, sync_dist=True)
            self.log("total", loss, sync_dist=True, reduce_fx="sum")

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)

    return Module()


def fitted(folder: str, build: Any, parallel: dict[str, int] | None, stage: int, manual: bool = False) -> Any:
    pl = lightning()
    from lowtide.lightning import LowtideStrategy, consolidate

    strategy: Any = "ddp"
    if parallel is not None:
        strategy = LowtideStrategy(config={"zero_optimization": {"stage": stage}, "parallel": parallel})
    data, held = (DataLoader(Sentences(16, seed), batch_size=2, collate_fn=padded) for seed in (3, 8))
    made = token_module(pl, build, manual)
    steps: dict[str, Any] = {} if manual else {"accumulate_grad_batches": 2, "gradient_clip_val": 1.0}
    runner = trainer(pl, strategy, **steps)
    runner.fit(made, data, held)
    numbers = [float(runner.callback_metrics[name]) for name in ("loss", "valid", "total")]
    # ModelCheckpoint asks whether all ranks say so, an early stop whether any does.
    is_last, decide = runner.global_rank == runner.world_size - 1, runner.strategy.reduce_boolean_decision
    numbers += [decide(True), decide(is_last), decide(is_last, all=False)]
    if parallel is None:
        return numbers, {name: value.clone() for name, value in made.state_dict().items()}
    runner.save_checkpoint(f"{folder}/last.ckpt")
    runner.strategy.engine.close()
    if runner.is_global_zero:
        consolidate(f"{folder}/last.ckpt", f"{folder}/one.ckpt")
        return numbers, torch.load(f"{folder}/one.ckpt", weights_only=True)["state_dict"]
    return None


CASES: dict[str, tuple[int, int, dict[str, int], int, Any]] = {  # ranks, those with data of their own, the stage
    "tensor x data": (4, 2, {"tensor": 2}, 3, two_heads),
    "expert": (2, 2, {"expert": 2}, 1, mixtral),
}


@pytest.mark.parametrize("case", CASES)
def test_losses_metrics_and_weights_are_those_of_ddp(ranks: RankPool, tmp_path: Path, case: str) -> None:
    num_ranks, data_size, parallel, stage, build = CASES[case]
    expected, weights = ranks(data_size, fitted, str(tmp_path), build, None, 0)[0]
    found, own = ranks(num_ranks, fitted, str(tmp_path), build, parallel, stage)[0]
    assert found == pytest.approx(expected, rel=1e-6)
    assert apart(own, weights) < 1e-6


REFUSED: dict[str, tuple[dict[str, Any], bool]] = {
    "parallel.sequence: expected 1 in the config of LowtideStrategy, found 2: a training_": ({"sequence": 2}, False),
    "parallel.tensor_sequence: expected False in the config of": ({"tensor": 2, "tensor_sequence": True}, False),
    "automatic_optimization: expected true with parallel.tensor or parallel.expert": ({"tensor": 2}, True),
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_a_step_of_lightning_cannot_divide_is_refused(ranks: RankPool, tmp_path: Path, said: str) -> None:
    parallel, manual = REFUSED[said]
    assert all(said in failed.text for failed in ranks.fails(2, fitted, str(tmp_path), two_heads, parallel, 1, manual))
