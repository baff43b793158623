"""How each contender trains: a builder a kind, from a plain model to a `Trainer`.

Every peer is set up as its own documentation advises for speed. The optimizer is AdamW for all; the peers get torch's
fused implementation, the fastest that torch has on the CPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW

OFFLOAD_FOLDER = "LOWTIDE_OFFLOAD_FOLDER"
"""The environment variable that says where files of offloaded state go."""

ADAMW: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


@dataclass(frozen=True)
class Trainer:
    """`step(tokens, targets)` trains one step and gives the loss; `close()` returns when every rank is done."""

    step: Callable[[Tensor, Tensor], Tensor]
    close: Callable[[], None]


def _plain(model: nn.Module, optimizer: torch.optim.Optimizer, close: Callable[[], None]) -> Trainer:
    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = model(tokens, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Trainer(step, close)


def _wait_for_all() -> None:
    dist.barrier()


def build_single(model: nn.Module) -> Trainer:
    """Gives plain torch in one process."""
    return _plain(model, AdamW(model.parameters(), fused=True, **ADAMW), lambda: None)


def build_ddp(model: nn.Module, *, sharded_optimizer: bool) -> Trainer:
    """Gives DistributedDataParallel with bucket views; `sharded_optimizer` shards the optimizer state (ZeRO-1)."""
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer: torch.optim.Optimizer
    if sharded_optimizer:
        optimizer = ZeroRedundancyOptimizer(wrapped.parameters(), AdamW, fused=True, **ADAMW)
    else:
        optimizer = AdamW(wrapped.parameters(), fused=True, **ADAMW)
    return _plain(wrapped, optimizer, _wait_for_all)


def build_fsdp2(model: nn.Module, *, reshard_after_forward: bool) -> Trainer:
    """Gives FSDP2: `fully_shard` on every block, then on the model."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.get_submodule("blocks").children():
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard_after_forward)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard_after_forward)
    return _plain(model, AdamW(model.parameters(), fused=True, **ADAMW), _wait_for_all)


def build_deepspeed(model: nn.Module, *, stage: int, offload: str = "none") -> Trainer:
    """Gives DeepSpeed ZeRO on the CPU accelerator, with torch's AdamW as the client optimizer.

    offload: "cpu" or "nvme", for states and parameters; then with DeepSpeed's own CPU Adam, which it asks for.
    """
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed  # type: ignore[import-not-found, unused-ignore]

    dist.init_process_group("gloo")
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "steps_per_print": 10**9,
        "gradient_clipping": 0.0,  # nobody else clips; left out, it means 1.0
    }
    optimizer = None
    if offload == "none":
        optimizer = AdamW(model.parameters(), fused=True, **ADAMW)
    else:
        place = {"device": offload, "nvme_path": os.environ[OFFLOAD_FOLDER]}
        config["zero_optimization"] = {"stage": stage, "offload_optimizer": place, "offload_param": place}
        config["optimizer"] = {"type": "AdamW", "params": {**ADAMW, "betas": list(ADAMW["betas"])}}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = engine(tokens, targets)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return Trainer(step, _wait_for_all)


def build_lowtide(
    model: nn.Module,
    *,
    stage: int,
    route: str,
    update_in_backward: bool,
    states: str = "none",
    parameters: str = "none",
    ratio: float = 1.0,
    overlap: bool = False,
) -> Trainer:
    """Gives lowtide as a user's script has it: the model and one config. states, parameters: the devices of offload."""
    import lowtide

    zero: dict[str, Any] = {"stage": stage, "update_in_backward": update_in_backward}
    folder = os.environ.get(OFFLOAD_FOLDER)
    if states != "none":
        zero["offload_optimizer"] = {"device": states, "nvme_path": folder, "ratio": ratio}
        zero["offload_optimizer"]["overlap"] = "speculative" if overlap else "none"
    if parameters != "none":
        zero["offload_param"] = {"device": parameters, "nvme_path": folder}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": zero,
        "optimizer": {"type": "adamw", "params": {**ADAMW, "betas": list(ADAMW["betas"])}},
        "communication": {"route": route},
    }
    engine = lowtide.initialize(model, config)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = engine.train_step((tokens, targets)).loss
        return loss

    return Trainer(step, engine.close)


BUILDERS: dict[str, Callable[..., Trainer]] = {
    "single": build_single,
    "ddp": build_ddp,
    "fsdp2": build_fsdp2,
    "deepspeed": build_deepspeed,
    "lowtide": build_lowtide,
}
