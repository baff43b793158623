"""The weights and checkpoints of a `DeepSpeedEngine`, with DeepSpeed's arguments and return values.

And `deepspeed.utils.zero_to_fp32`: the fp32 weights of a checkpoint, in one process.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.chunk_view import ChunkView
from ..checkpoint.files import NoCheckpointError, folder_path
from ..checkpoint.folder import CheckpointFolder
from ..comm import CollectiveError
from ..engine.archive.run_state import read_client_state, read_training
from ..engine.engine import Engine
from . import comm
from .checkpoint_files import COUNTERS
from .config import DeepSpeedConfig
from .lr_schedules import SteppedScheduler
from .messages import UsageError, logger


@dataclass
class Counters:
    """Of an engine, saved with each checkpoint."""

    global_steps: int = 0
    global_samples: int = 0
    micro_steps: int = 0
    skipped_steps: int = 0

    def add_step(self, num_samples: int, was_skipped: bool) -> None:
        """A step has ended."""
        self.global_steps += 1
        self.global_samples += num_samples
        self.skipped_steps += was_skipped

    def at_step_start(self, accumulation: int) -> Counters:
        """As they were before the microbatches that are done of the next step."""
        return replace(self, micro_steps=self.micro_steps - self.micro_steps % accumulation)

    def as_state(self) -> dict[str, Any]:
        """A part of the client state."""
        return {COUNTERS: asdict(self)}

    @classmethod
    def taken(
        cls, client_state: Mapping[str, Any], global_step: int, accumulation: int, batch_size: int
    ) -> tuple[Counters, dict[str, Any]]:
        """Those of a checkpoint, and the caller's own part; of one that has none, by its number of steps."""
        own = {key: value for key, value in client_state.items() if key != COUNTERS}
        found = client_state.get(COUNTERS)
        if isinstance(found, Mapping):
            return cls(**found), own
        return cls(global_step, global_step * batch_size, global_step * accumulation), own


@dataclass(frozen=True)
class Saved:
    """Beside tensors."""

    client_state: dict[str, Any]
    scheduler: dict[str, Any] | None


def path_of(folder: str | os.PathLike[str], tag: str | None) -> tuple[Path, Callable[[], Saved]]:
    """Where a checkpoint is, and what reads it. Raises NoCheckpointError, CheckpointError."""
    found = CheckpointFolder(folder_path(folder)).open(tag)
    return found.path, lambda: _read(found)


def _read(checkpoint: Checkpoint) -> Saved:
    training = read_training(checkpoint.manifest.training)
    return Saved(read_client_state(checkpoint.own_state(0)), training["learning_rates"]["scheduler"])


class SavingEngine(nn.Module):
    """The part of `DeepSpeedEngine` that shows, writes and reads what the training is."""

    lowtide: Engine
    module: nn.Module
    _config: DeepSpeedConfig
    _counters: Counters

    @property
    def _stepped(self) -> SteppedScheduler | None:
        """The scheduler, as the engine steps it."""
        found: SteppedScheduler | None = self.lowtide.lr_scheduler
        return found

    # -- weights --------------------------------------------------------------------------------------------------

    def module_state_dict(
        self, *args: Any, exclude_frozen_parameters: bool = False, **kwargs: Any
    ) -> dict[str, Tensor]:
        """Of the module. At stage 3, and over a pipeline, on rank 0, the others {}; all ranks must call it."""
        if self._config.stage < 3 and self.lowtide.config.parallel.pipeline == 1:
            found = dict(self.module.state_dict(*args, **kwargs))
        else:
            found = self.lowtide.state_dict()
        if exclude_frozen_parameters:
            frozen = {name for name, param in self.module.named_parameters() if not param.requires_grad}
            found = {name: value for name, value in found.items() if name not in frozen}
        return found

    def load_module_state_dict(
        self,
        checkpoint: Mapping[str, Any],
        strict: bool = True,
        custom_load_fn: Callable[..., Any] | None = None,
        fetch_z3_params: bool = False,
    ) -> None:
        """Rank 0's values. checkpoint: of the module, or with them under "module"."""
        _refuse_custom(custom_load_fn)
        values = checkpoint.get("module", checkpoint)
        self.lowtide.load_state_dict(values, strict)

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Writes the module's state dict by torch.save, on rank 0; all ranks must call it.

        False, and nothing is written, at stage 3 without `stage3_gather_16bit_weights_on_model_save`.
        """
        if self._config.stage == 3 and not self._config.zero_gather_16bit_weights_on_model_save:
            logger.warning("save_16bit_model: stage3_gather_16bit_weights_on_model_save is false, nothing is written")
            return False
        values = self.module_state_dict(exclude_frozen_parameters=exclude_frozen_parameters)
        if self.lowtide.rank == 0:
            os.makedirs(save_dir, exist_ok=True)
            torch.save(
                {name: value.detach().cpu() for name, value in values.items()}, os.path.join(save_dir, save_filename)
            )
        comm.barrier()
        return True

    def save_fp16_model(self, save_dir: str | os.PathLike[str], save_filename: str = "pytorch_model.bin") -> bool:
        return self.save_16bit_model(save_dir, save_filename)

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor] | None:
        found = self.module_state_dict(exclude_frozen_parameters=exclude_frozen_parameters)
        return found if self.lowtide.rank == 0 else None

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: Any = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Saves all that the training is into save_dir/tag; True. All ranks must call it.

        tag: None: "global_step" and the number. client_state: plain values, which `load_checkpoint` returns. Frozen
        parameters are saved in any case. The format is lowtide's own. Between the microbatches of a step it saves no
        gradients: after a load the step begins anew.
        """
        if not save_dir:
            raise ValueError(f"save_checkpoint: expected a folder, found {save_dir!r}")
        name = f"global_step{self._counters.global_steps}" if tag is None else str(tag)
        self._check_tag(name)
        counters = self._counters.at_step_start(int(self._config.gradient_accumulation_steps or 1))
        state = {**(client_state or {}), **counters.as_state()}
        self.lowtide.save_checkpoint(save_dir, name, state, latest=save_latest, within_step=True)
        return True

    def _check_tag(self, name: str) -> None:
        """As `checkpoint.tag_validation` says, where ranks have different tags: rank 0's is used, or UsageError."""
        if self._config.tag_validation == "IGNORE" or self.lowtide.world_size == 1:
            return
        names: list[Any] = [None] * self.lowtide.world_size
        try:
            comm.all_gather_object(names, name)
        except RuntimeError as error:
            raise CollectiveError(
                f"rank {self.lowtide.rank} in save_checkpoint: not all ranks came ({str(error).splitlines()[0]}). "
                "Every rank must call engine.save_checkpoint(), not one alone."
            ) from error
        if len(set(names)) > 1:
            text = f"save_checkpoint: expected one tag on all ranks, found {', '.join(sorted(set(names)))}"
            if self._config.tag_validation == "FAIL":
                raise UsageError(text)
            logger.warning("%s; that of rank 0 is used", text)

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: Any = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """(path of the checkpoint, client state); (None, None) where no tag is given and there is none.

        Of lowtide's format, and after `lowtide checkpoint import` of DeepSpeed's. load_module_only: the weights alone.
        """
        _refuse_custom(custom_load_fn)
        name = None if tag is None else str(tag)
        try:
            path, saved = path_of(load_dir, name)
        except NoCheckpointError as error:
            if tag is not None:
                raise
            logger.warning("load_checkpoint: %s", error)
            return None, None
        if load_module_only or not load_optimizer_states:
            self.lowtide.load_weights(path, load_module_strict)
            state = saved()
            if not load_module_only and load_lr_scheduler_states and self._stepped is not None:
                scheduler = state.scheduler
                if scheduler is not None:
                    self._stepped.load_state_dict(scheduler)
            client_state = state.client_state
        else:
            before = None
            if self._stepped is not None and not load_lr_scheduler_states and hasattr(self._stepped, "state_dict"):
                before = self._stepped.state_dict()
            client_state = self.lowtide.load_checkpoint(path.parent, path.name)
            if self._stepped is not None and before is not None:
                self._stepped.load_state_dict(before)
        accumulation, batch_size = self._config.gradient_accumulation_steps or 1, self._config.train_batch_size or 0
        steps = self.lowtide.global_step
        counters, client_state = Counters.taken(client_state, steps, int(accumulation), int(batch_size))
        if not load_module_only:
            self._counters = counters
        return str(path), client_state


def _refuse_custom(custom_load_fn: Callable[..., Any] | None) -> None:
    if custom_load_fn is not None:
        raise NotImplementedError(
            "custom_load_fn: expected none, found one: no rank loads sharded parameters into the module by itself; "
            "change the state dict before, and give it to engine.lowtide.load_state_dict"
        )


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike[str],
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, Tensor]:
    """The master weights and buffers of a checkpoint by the model's own names, on the CPU. tag: None for the latest.

    Of lowtide's checkpoints, and of those that `lowtide checkpoint import` has made of DeepSpeed's. lazy_mode has no
    effect. Raises NoCheckpointError, CheckpointError.
    """
    found = CheckpointFolder(folder_path(checkpoint_dir)).open(tag)
    values: dict[str, Tensor] = {}
    for name, info in found.weights.tensors.items():
        flat = torch.empty(info.shape, dtype=info.dtype).view(-1)
        found.weights.read([ChunkView(name, tuple(info.shape), 0, flat)])
        values[name] = flat.view(info.shape)
    for alias, name in found.aliases.items():
        values[alias] = values[name]
    return values


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | os.PathLike[str], tag: str | None = None
) -> nn.Module:
    """The model, on the CPU, with these weights. What has them already is left alone."""
    model = model.cpu()
    values, own = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), model.state_dict()
    others = {name: value for name, value in values.items() if name not in own or not _is_same(own[name], value)}
    model.load_state_dict(others, strict=False)
    return model


def _is_same(own: Tensor, value: Tensor) -> bool:
    return own.dtype == value.dtype and torch.equal(own, value)


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    max_shard_size: str = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    **others: Any,
) -> None:
    """Writes them by torch.save to output_dir/pytorch_model.bin, a single file; as safetensors use `lowtide export`."""
    values = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag, exclude_frozen_parameters)
    os.makedirs(output_dir, exist_ok=True)
    torch.save(values, os.path.join(output_dir, "pytorch_model.bin"))
