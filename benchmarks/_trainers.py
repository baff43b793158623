"""How each contender trains: a builder a kind, from a model to a `Trainer`.

A builder takes a model, or a callable that builds one; then it keeps as much of it away from each process as its users
would, for a model that is too large to be built in one: lowtide and DeepSpeed's ZeRO-3 shard it while it is built,
FSDP2 builds it on the meta device and initializes the shards, and DDP, of which every process has all, builds it.

Every peer is set up as its own documentation advises for speed. The optimizer is AdamW for all; the peers get torch's
fused implementation, the fastest that torch has on the CPU.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from _model import initialize_in_place
from torch import Tensor, nn
from torch.optim import AdamW

OFFLOAD_FOLDER = "LOWTIDE_OFFLOAD_FOLDER"
"""The environment variable that says where files of offloaded state go."""

ADAMW: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


Model = nn.Module | Callable[[], nn.Module]


@dataclass(frozen=True)
class Setup:
    """What is asked of every contender alike, besides the model."""

    microbatch: int = 1  # sequences of a rank in a forward
    accumulation: int = 1  # forwards and backwards of a step
    clip: float = 0.0  # the largest norm of all gradients together; 0: any
    device: str = "cpu"  # or the type of an accelerator: the current one
    dtype: str = "fp32"  # or "bf16": in which a model computes; its weights and the optimizer stay in fp32
    recompute_blocks: bool = False  # blocks keep their input alone, and run again in the backward

    def microbatches(self, tokens: Tensor, targets: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Gives a rank's batch in parts; tokens, targets: (accumulation x microbatch, sequence)."""
        parts = (torch.split(one, self.microbatch) for one in (tokens, targets))
        return list(zip(*parts, strict=True))

    def computing(self) -> AbstractContextManager[Any]:
        """In which a forward of plain torch runs."""
        return torch.autocast(self.device, torch.bfloat16) if self.dtype == "bf16" else nullcontext()

    def join(self) -> str:
        """Makes the process group, unless there is one already, and gives its backend."""
        if not dist.is_initialized():
            dist.init_process_group(dist.get_default_backend_for_device(self.device))
        return str(dist.get_backend())


@dataclass(frozen=True)
class Trainer:
    """`step(tokens, targets)` trains one step and gives the loss; `close()` returns when every rank is done."""

    step: Callable[[Tensor, Tensor], Tensor]
    close: Callable[[], None]


def _plain(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    setup: Setup,
    close: Callable[[], None],
    unsummed: Callable[[], AbstractContextManager[Any]] = nullcontext,
    computing: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Trainer:
    """unsummed: within it a backward keeps its gradients on its rank, as all but the last of a step may.

    computing: in it a forward runs.
    """

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        losses = []
        for number, microbatch in enumerate(setup.microbatches(tokens, targets), 1):
            with nullcontext() if number == setup.accumulation else unsummed():
                with computing():
                    loss: Tensor = model(*microbatch) / setup.accumulation
                loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        if setup.clip:
            nn.utils.clip_grad_norm_(model.parameters(), setup.clip)
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).sum()

    return Trainer(step, close)


def _wait_for_all() -> None:
    dist.barrier()


def _built(model: Model, setup: Setup, device: str) -> nn.Module:
    """Gives the model on a device, with blocks that are recomputed where that is asked for, as torchtitan does it."""
    if isinstance(model, nn.Module):
        model = model.to(device)
    else:
        with torch.device(device):
            model = model()
    if setup.recompute_blocks:
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

        blocks = model.get_submodule("blocks")
        for name, block in list(blocks.named_children()):
            setattr(blocks, name, checkpoint_wrapper(block, preserve_rng_state=False))  # a block draws no numbers
    return model


def build_single(model: Model, setup: Setup) -> Trainer:
    """Gives plain torch in one process."""
    module = _built(model, setup, setup.device)
    optimizer = AdamW(module.parameters(), fused=True, **ADAMW)
    return _plain(module, optimizer, setup, lambda: None, computing=setup.computing)


def build_alone(model: Model, setup: Setup) -> Trainer:
    """Gives forwards and backwards with plain torch on each rank, and nothing else: the least that a step can take."""
    setup.join()
    module = _built(model, setup, setup.device)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        losses = []
        for microbatch in setup.microbatches(tokens, targets):
            with setup.computing():
                loss: Tensor = module(*microbatch) / setup.accumulation
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        module.zero_grad()
        return torch.stack(losses).sum()

    return Trainer(step, _wait_for_all)


def build_ddp(model: Model, setup: Setup, *, sharded_optimizer: bool, sums_each: bool = False) -> Trainer:
    """Gives DistributedDataParallel with bucket views; `sharded_optimizer` shards the optimizer state (ZeRO-1).

    sums_each: a loop that does not know `no_sync`, with which gradients are summed over ranks once a step.
    """
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    setup.join()
    wrapped = DistributedDataParallel(_built(model, setup, setup.device), gradient_as_bucket_view=True)
    optimizer: torch.optim.Optimizer
    if sharded_optimizer:
        optimizer = ZeroRedundancyOptimizer(wrapped.parameters(), AdamW, fused=True, **ADAMW)
    else:
        optimizer = AdamW(wrapped.parameters(), fused=True, **ADAMW)
    unsummed = nullcontext if sums_each else wrapped.no_sync
    return _plain(wrapped, optimizer, setup, _wait_for_all, unsummed, setup.computing)


def build_fsdp2(model: Model, setup: Setup, *, reshard_after_forward: bool) -> Trainer:
    """Gives FSDP2: `fully_shard` on every block, then on the model."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    setup.join()
    narrow = torch.bfloat16 if setup.dtype == "bf16" else None
    precision = MixedPrecisionPolicy(param_dtype=narrow, reduce_dtype=torch.float32)
    mesh = init_device_mesh(setup.device, (dist.get_world_size(),))
    is_empty = not isinstance(model, nn.Module)
    module = _built(model, setup, "meta" if is_empty else setup.device)
    for block in module.get_submodule("blocks").children():
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard_after_forward, mp_policy=precision)
    fully_shard(module, mesh=mesh, reshard_after_forward=reshard_after_forward, mp_policy=precision)
    if is_empty:
        module.to_empty(device=setup.device)
        initialize_in_place(module)
    return _plain(module, AdamW(module.parameters(), fused=True, **ADAMW), setup, _wait_for_all)


def _choose_accelerator(setup: Setup) -> None:
    """Tells DeepSpeed, which asks when it is imported."""
    if setup.device == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"


def build_deepspeed(model: Model, setup: Setup, *, stage: int, offload: str = "none") -> Trainer:
    """Gives DeepSpeed ZeRO, with torch's AdamW as the client optimizer.

    offload: "cpu" or "nvme", for states and parameters; then with DeepSpeed's own CPU Adam, which it asks for.
    """
    _choose_accelerator(setup)
    import deepspeed  # type: ignore[import-not-found, unused-ignore]

    deepspeed.init_distributed(dist_backend=setup.join(), verbose=False)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": setup.microbatch,
        "gradient_accumulation_steps": setup.accumulation,
        "zero_optimization": {"stage": stage},
        "steps_per_print": 10**9,
        "gradient_clipping": setup.clip,  # left out, it means 1.0
        "bf16": {"enabled": setup.dtype == "bf16"},
    }
    if offload != "none":
        place = {"device": offload, "nvme_path": os.environ[OFFLOAD_FOLDER]}
        config["zero_optimization"] = {"stage": stage, "offload_optimizer": place, "offload_param": place}
        config["optimizer"] = {"type": "AdamW", "params": {**ADAMW, "betas": list(ADAMW["betas"])}}
    is_sharded_at_once = stage == 3 and not isinstance(model, nn.Module)
    with deepspeed.zero.Init(config_dict_or_path=config) if is_sharded_at_once else nullcontext():
        module = _built(model, setup, setup.device)
    optimizer = AdamW(module.parameters(), fused=True, **ADAMW) if offload == "none" else None
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        losses = []
        for microbatch in setup.microbatches(tokens, targets):
            loss: Tensor = engine(*microbatch)
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    return Trainer(step, _wait_for_all)


def build_lowtide(
    model: Model,
    setup: Setup,
    *,
    stage: int,
    route: str,
    update_in_backward: bool,
    states: str = "none",
    parameters: str = "none",
    ratio: float = 1.0,
    overlap: bool = False,
    prefetch_numel: int | None = None,
    tiles: str | None = None,
    recomputes: bool = False,
) -> Trainer:
    """Gives lowtide as a user's script has it: the model and one config. states, parameters: the devices of offload.

    prefetch_numel: how many parameters are gathered ahead of their use, None for the default. tiles: as of the config.
    recomputes: every block, whatever the setup says.
    """
    import lowtide

    zero: dict[str, Any] = {"stage": stage, "update_in_backward": update_in_backward}
    folder = os.environ.get(OFFLOAD_FOLDER)
    if states != "none":
        zero["offload_optimizer"] = {"device": states, "nvme_path": folder, "ratio": ratio}
        zero["offload_optimizer"]["overlap"] = "speculative" if overlap else "none"
    if parameters != "none":
        zero["offload_param"] = {"device": parameters, "nvme_path": folder}
    if prefetch_numel is not None:
        zero["stage3_prefetch_bucket_size"] = prefetch_numel
    config = {
        "train_micro_batch_size_per_gpu": setup.microbatch,
        "gradient_accumulation_steps": setup.accumulation,
        "zero_optimization": zero,
        "optimizer": {"type": "adamw", "params": {**ADAMW, "betas": list(ADAMW["betas"])}},
        "gradient_clipping": setup.clip,
        "communication": {"route": route},
        "activation_checkpointing": {"every": 1 if setup.recompute_blocks or recomputes else 0},
        "bf16": {"enabled": setup.dtype == "bf16"},
        "device": "cpu" if setup.device == "cpu" else "auto",
    }
    if tiles is not None:
        config["tiles"] = tiles
    engine = lowtide.initialize(model, config)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = engine.train_step((tokens, targets)).loss
        return loss

    return Trainer(step, engine.close)


_LIBRARIES = {
    "single": [],
    "alone": [],
    "ddp": ["torch.nn.parallel", "torch.distributed.optim"],
    "fsdp2": ["torch.distributed.device_mesh", "torch.distributed.fsdp"],
    "deepspeed": ["deepspeed"],
    "lowtide": ["lowtide.engine.build"],
}


def import_libraries(kind: str, setup: Setup) -> None:
    """Imports what the builder of a kind imports, so that its memory can be told from that of the training."""
    _choose_accelerator(setup)
    for name in ["torch._dynamo", *_LIBRARIES[kind]]:  # the first optimizer imports torch's compiler, some 70 MiB
        importlib.import_module(name)


BUILDERS: dict[str, Callable[..., Trainer]] = {
    "single": build_single,
    "alone": build_alone,
    "ddp": build_ddp,
    "fsdp2": build_fsdp2,
    "deepspeed": build_deepspeed,
    "lowtide": build_lowtide,
}
