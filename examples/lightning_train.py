"""Trains a small language model with Lightning's Trainer, on lowtide's engine.

    python examples/lightning_train.py --devices 2
    lowtide launch --nproc 2 examples/lightning_train.py --devices 2
    python examples/lightning_train.py --devices 2 --epochs 4 --resume runs/lightning/last.ckpt

The model is that of train_gpt.py, the data are the bytes of Python's standard library. Nothing of the module or of the
Trainer knows of lowtide but the name of the strategy.
"""

import argparse
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from gpt_model import GPT, GPTShape
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from text_data import Text, stdlib_files
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import lowtide.lightning  # noqa: F401  # the import registers the strategies


class Pieces(Dataset[tuple[Tensor, Tensor]]):
    """Pieces of a text that follow each other: tokens and, one byte later, targets."""

    def __init__(self, text: Tensor, context: int, most: int) -> None:
        self.text, self.context = text, context
        self.num_pieces = min(most, (len(text) - 1) // context)

    def __len__(self) -> int:
        return self.num_pieces

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        piece = self.text[index * self.context : (index + 1) * self.context + 1].long()
        return piece[:-1], piece[1:]


class Model(pl.LightningModule):
    """A GPT as users of Lightning write it; `configure_model` makes it, so that no rank ever holds the whole."""

    def __init__(self, layers: int, width: int, context: int, learning_rate: float) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.learning_rate = learning_rate
        self.shape = GPTShape(num_layers=layers, width=width, context=context)
        self.gpt: GPT | None = None

    def configure_model(self) -> None:
        if self.gpt is None:
            self.gpt = GPT(self.shape)

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        loss = self.loss_of(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        self.log("validation_loss", self.loss_of(batch), sync_dist=True)

    def loss_of(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        assert self.gpt is not None
        loss: Tensor = self.gpt(*batch)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.learning_rate, weight_decay=0.1)
        num_steps = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="lowtide_stage_3", help="(default: lowtide_stage_3)")
    parser.add_argument("--devices", type=int, default=1, help="ranks on this host (default: 1)")
    parser.add_argument("--accelerator", default="auto", help="cpu, gpu, ... (default: auto)")
    parser.add_argument("--precision", default="32-true", help="32-true, bf16-mixed, ... (default: 32-true)")
    parser.add_argument("--epochs", type=int, default=2, help="(default: 2)")
    parser.add_argument("--batch-size", type=int, default=16, help="pieces of text of a rank (default: 16)")
    parser.add_argument("--accumulate", type=int, default=1, help="batches of a step (default: 1)")
    parser.add_argument("--pieces", type=int, default=2000, help="pieces of an epoch (default: 2000)")
    parser.add_argument("--layers", type=int, default=4, help="(default: 4)")
    parser.add_argument("--width", type=int, default=128, help="(default: 128)")
    parser.add_argument("--context", type=int, default=128, help="bytes that the model sees (default: 128)")
    parser.add_argument("--data", type=Path, help="a folder of .py files (default: Python's standard library)")
    parser.add_argument("--out", type=Path, default=Path("runs/lightning"), help="(default: runs/lightning)")
    parser.add_argument("--resume", type=Path, help="a checkpoint to go on from")
    chosen = parser.parse_args(arguments)

    pl.seed_everything(0)
    text = Text.from_files(stdlib_files(chosen.data))
    training, validation = [
        DataLoader(Pieces(part, chosen.context, most), batch_size=chosen.batch_size, shuffle=part is text.train)
        for part, most in ((text.train, chosen.pieces), (text.validation, chosen.pieces // 10))
    ]
    trainer = pl.Trainer(
        accelerator=chosen.accelerator,
        devices=chosen.devices,
        strategy=chosen.strategy,
        precision=chosen.precision,
        max_epochs=chosen.epochs,
        accumulate_grad_batches=chosen.accumulate,
        gradient_clip_val=1.0,
        callbacks=[
            ModelCheckpoint(chosen.out, "{epoch}", monitor="validation_loss", save_last=True),
            LearningRateMonitor(),
        ],
        logger=CSVLogger(chosen.out, "logs"),
        log_every_n_steps=1,
    )
    model = Model(chosen.layers, chosen.width, chosen.context, 3e-3)
    trainer.fit(model, training, validation, ckpt_path=chosen.resume, weights_only=False)
    if trainer.is_global_zero:
        print(f"step {trainer.global_step}: validation loss {trainer.callback_metrics['validation_loss']:.4f}")


if __name__ == "__main__":
    main()
