"""A LightningModule in the ways in which users write one, its data, and a fit of it on the ranks of a test."""

import warnings
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

ROWS, FEATURES, OUTPUTS = 32, 5, 3


class Net(nn.Module):
    """Three blocks between two layers, one parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.last = nn.Linear(16, OUTPUTS)
        self.scale = nn.Parameter(torch.ones(OUTPUTS))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.last(x) * self.scale


def loader() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(ROWS, width, generator=generator) for width in (FEATURES, OUTPUTS))
    return DataLoader(TensorDataset(x, y), batch_size=2)


def lightning() -> Any:
    """The package, which warns of what torch has renamed and of what tests leave small."""
    warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)` is deprecated")
    warnings.filterwarnings("ignore", message=r".*does not have many workers")
    warnings.filterwarnings("ignore", message=r".*number of training batches .* smaller than the logging interval")
    warnings.filterwarnings("ignore", message=r".*this fit will run with no optimizer")
    warnings.filterwarnings("ignore", message=r"Using `DistributedSampler` with the dataloaders. During `trainer.test")
    warnings.filterwarnings("ignore", message=r"Be aware that when using `ckpt_path`, callbacks used to create")
    warnings.filterwarnings("ignore", message=r"The `srun` command is available on your system but is not used")
    import lightning.pytorch as pl

    import lowtide.lightning as registered

    assert registered.NAMES
    return pl


def module(pl: Any, **how: Any) -> Any:
    """calls "net": in training_step, in place of the module itself. manual: optimization. configured: the net is made
    in `configure_model`, on_meta: on the meta device. optimizers: how many.
    tied: two of the net's layers are the same.
    trained_only: of what is not frozen, without a scheduler. skipped: batches whose training_step returns None."""

    class Module(pl.LightningModule):  # type: ignore[misc]  # of the package that is used
        def __init__(self, how: dict[str, Any]) -> None:
            super().__init__()
            self.how = how
            self.automatic_optimization = not how.get("manual")
            self.losses: list[float] = []
            self.net: Any = None
            if not how.get("configured"):
                self.net = Net()
            if how.get("tied"):
                self.net.layers[1] = self.net.layers[0]

        def configure_model(self) -> None:
            if self.net is None:
                torch.manual_seed(5)
                # The strategy has chosen a device too, which "cpu" would replace.
                device: Any = torch.device("meta") if self.how.get("on_meta") else nullcontext()
                with device:
                    self.net = Net()

        def forward(self, x: Tensor) -> Any:
            return self.net(x)

        def training_step(self, batch: Any, index: int) -> Any:
            if index in self.how.get("skipped", ()):
                return None
            x, y = batch
            predicted = self.net(x) if self.how.get("calls") == "net" else self(x)
            loss = nn.functional.mse_loss(predicted.float(), y.float())
            self.log("loss", loss)
            self.losses.append(loss.item())
            if self.automatic_optimization:
                return loss
            self.manual_backward(loss / 2)
            if index % 2:
                self.clip_gradients(self.optimizers(), 0.5, "norm")
                self.optimizers().step()
                self.lr_schedulers().step()
                self.optimizers().zero_grad()
            return None

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("valid", nn.functional.mse_loss(self(batch[0]).float(), batch[1].float()), sync_dist=True)

        test_step = validation_step

        def predict_step(self, batch: Any, index: int) -> Any:
            return self(batch[0])

        def configure_optimizers(self) -> Any:
            params = [p for p in self.parameters() if p.requires_grad or not self.how.get("trained_only")]
            made = [torch.optim.AdamW(params, lr=1e-2) for _ in range(self.how.get("optimizers", 1))]
            if not made or len(made) > 1:
                return made or None
            if self.how.get("trained_only"):
                return made[0]
            scheduler = torch.optim.lr_scheduler.StepLR(made[0], 2, 0.5)
            return {"optimizer": made[0], "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    torch.manual_seed(5)
    return Module(how)


def trainer(pl: Any, strategy: Any, **options: Any) -> Any:
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    chosen = {"max_epochs": 1, "num_sanity_val_steps": 0, **quiet, **options}
    return pl.Trainer(accelerator="cpu", devices=world_size(), strategy=strategy, **chosen)


def fitted(runner: Any, made: Any) -> list[float]:
    """The losses of this rank's microbatches, then the mean of a validation. The engine is closed."""
    runner.fit(made, loader(), loader())
    closed(runner)
    return [*made.losses, float(runner.callback_metrics["valid"])]


def closed(runner: Any) -> None:
    if hasattr(runner.strategy, "engine"):
        runner.strategy.engine.close()


def world_size() -> int:
    return dist.get_world_size()  # Lightning takes the variable out of the environment
