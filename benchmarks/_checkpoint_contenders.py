"""How each contender saves, loads and exports what it trains: a builder a kind, from a plain model to a `Saver`.

Every peer is called as its own documentation advises. All train the same model with AdamW in fp32, so that a checkpoint
holds 12 bytes a parameter: the parameter and two moments.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _contenders import CONTENDERS, FSDP2, Contender
from _trainers import ADAMW
from torch import Tensor, nn
from torch.optim import AdamW

STATE_BYTES_PER_PARAMETER = 12
WEIGHT_BYTES_PER_PARAMETER = 4
ASYNCHRONOUS = "lowtide-3-async"
DEEPSPEED = "deepspeed-3"
_POLL_SECONDS = 0.002


@dataclass(frozen=True)
class Saver:
    """A training whose state goes to disk and back. Every function is called by all ranks.

    save: returns when the contender lets the training go on; finish: when it says that the save is complete.
    export: full weights under the model's own names, for others to load.
    """

    step: Callable[[Tensor, Tensor], Tensor]
    save: Callable[[Path], object]
    finish: Callable[[Path], object]
    load: Callable[[Path], object]
    export: Callable[[Path], object]


def _nothing(folder: Path) -> None:
    pass


def build_lowtide(model: nn.Module, *, stage: int, asynchronous: bool = False, **_: Any) -> Saver:
    """Gives lowtide as a user's script has it."""
    import lowtide

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "adamw", "params": {**ADAMW, "betas": list(ADAMW["betas"])}},
        "checkpoint": {"async": asynchronous},
        "steps_per_print": 0,
    }
    engine = lowtide.initialize(model, config)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = engine.train_step((tokens, targets)).loss
        return loss

    def finish(folder: Path) -> None:
        while not (folder / "latest").exists():
            time.sleep(_POLL_SECONDS)

    return Saver(
        step=step,
        save=engine.save_checkpoint,
        finish=finish if asynchronous else _nothing,
        load=engine.load_checkpoint,
        export=engine.export,
    )


def build_fsdp2(model: nn.Module, *, reshard_after_forward: bool) -> Saver:
    """Gives FSDP2 with torch.distributed.checkpoint; the export is a gathered state dict in safetensors."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        get_state_dict,
        set_state_dict,
    )
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.get_submodule("blocks").children():
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard_after_forward)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard_after_forward)
    optimizer = AdamW(model.parameters(), fused=True, **ADAMW)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = model(tokens, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    def save(folder: Path) -> None:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        dcp.save({"model": model_state, "optim": optimizer_state}, checkpoint_id=folder)

    def load(folder: Path) -> None:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        dcp.load({"model": model_state, "optim": optimizer_state}, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)

    def export(folder: Path) -> None:
        from safetensors.torch import save_file

        weights: dict[str, Any] = get_model_state_dict(
            model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
        )
        if dist.get_rank() == 0:
            folder.mkdir(parents=True)
            save_file({name: value.contiguous() for name, value in weights.items()}, folder / "model.safetensors")
        dist.barrier()

    return Saver(step, save, _nothing, load, export)


def build_deepspeed(model: nn.Module, *, stage: int) -> Saver:
    """Gives DeepSpeed ZeRO on the CPU accelerator; the export is `save_16bit_model`, here in fp32 as the model is."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed  # type: ignore[import-not-found, unused-ignore]

    dist.init_process_group("gloo")
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True},
        "steps_per_print": 10**9,
        "gradient_clipping": 0.0,  # nobody else clips; left out, it means 1.0
    }
    optimizer = AdamW(model.parameters(), fused=True, **ADAMW)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = engine(tokens, targets)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    def load(folder: Path) -> None:
        found, _ = engine.load_checkpoint(str(folder))
        if found is None:
            raise FileNotFoundError(f"DeepSpeed found no checkpoint in {folder}")

    return Saver(
        step=step,
        save=lambda folder: engine.save_checkpoint(str(folder)) and None,
        finish=_nothing,
        load=load,
        export=lambda folder: engine.save_16bit_model(str(folder)) and None,
    )


BUILDERS: dict[str, Callable[..., Saver]] = {
    "lowtide": build_lowtide,
    "fsdp2": build_fsdp2,
    "deepspeed": build_deepspeed,
}


def _savers() -> dict[str, Contender]:
    names = [FSDP2, *(f"deepspeed-{stage}" for stage in (1, 2, 3)), *(f"lowtide-{stage}" for stage in (0, 1, 2, 3))]
    found = {name: CONTENDERS[name] for name in names}
    options = {"stage": 3, "asynchronous": True}
    found[ASYNCHRONOUS] = Contender(ASYNCHRONOUS, "lowtide stage 3, async", "lowtide", options)
    return found


SAVERS = _savers()
DEFAULT_SAVERS = (FSDP2, DEEPSPEED, "lowtide-3")


def barrier() -> None:
    """Waits for all ranks, where there are several."""
    if dist.is_initialized():
        dist.barrier()


def all_equal(values: list[float], others: list[float]) -> bool:
    """Says whether two lists of losses are the same to the last bit."""
    return torch.equal(torch.tensor(values), torch.tensor(others))
