"""The weights and checkpoints of a `DeepSpeedEngine`, with DeepSpeed's arguments and return values."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoint.files import NoCheckpointError
from ..comm import CollectiveError
from ..engine.engine import Engine
from . import comm
from .config import DeepSpeedConfig
from .errors import UsageError
from .messages import logger
from .saved import Counters, path_of
from .stepped import SteppedScheduler


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
