"""Which optimizer updates the shards: the config's, or what the caller's own does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.dispatch import Backend
from ..optimizers.table import OPTIMIZERS
from ..zero.fused_update import FusedUpdate
from ..zero.optimizer_choice import OptimizerFactory, another, check_elementwise, record_like
from ..zero.plan import GroupPlan
from ..zero.torch_update import TorchUpdate
from .config.config import Config
from .fusing import optimizer_backend

_STATE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}

OptimizerChoice = torch.optim.Optimizer | type[torch.optim.Optimizer] | Callable[[Any], torch.optim.Optimizer] | None


@dataclass(frozen=True)
class OptimizerPlan:
    """Options by parameter, and what updates: a rule of `kernels/`, or the caller's own elementwise optimizer."""

    param_groups: list[dict[str, Any]]  # the caller's own dictionaries
    fused: FusedUpdate | None
    factory: OptimizerFactory | None  # of the caller's class, where there is no rule that does the same

    @classmethod
    def of(
        cls, config: Config, module: nn.Module, groups: Sequence[GroupPlan], choice: OptimizerChoice
    ) -> OptimizerPlan:
        """groups: that are trained. Raises ValueError where none or two were given, or one cannot run on shards."""
        if choice is not None and config.optimizer is not None:
            raise ValueError(
                f'optimizer: found one in the config ("{config.optimizer.type}") and one passed to initialize; '
                "leave one out"
            )
        trained = [param for param in module.parameters() if param.requires_grad]
        backend = optimizer_backend(config)
        if choice is not None:
            own = choice if isinstance(choice, torch.optim.Optimizer) else _call(choice, trained)
            _check_covers(own, trained)
            return cls._like(own, backend)
        if config.optimizer is None:
            raise ValueError(
                'optimizer: expected one in the config, for example {"type": "adamw", "params": {"lr": 1e-3}}, or one '
                "passed to initialize(..., optimizer=...); found neither"
            )
        options, record = config.optimizer.options, OPTIMIZERS[config.optimizer.type]
        param_groups: list[dict[str, Any]] = [{"params": trained, **options}]
        state_dtype = _state_dtype(config.optimizer.state_dtype, groups)
        return cls(param_groups, FusedUpdate(record, options, state_dtype, backend), None)

    @classmethod
    def _like(cls, own: torch.optim.Optimizer, backend: Backend) -> OptimizerPlan:
        record = record_like(own)
        if record is not None:
            update = FusedUpdate(record, dict(own.param_groups[0]), torch.float32, backend)
            return cls(own.param_groups, update, None)
        factory = partial(another, own)
        check_elementwise(factory)
        return cls(own.param_groups, None, factory)

    def new_states(self, master: Tensor) -> dict[str, Tensor]:
        """The states of master weights, (n,), by name; none where only the first step shows them."""
        return {} if self.fused is None else self.fused.new_states(master)

    def make_update(self) -> FusedUpdate | TorchUpdate:
        """What does to shards what the optimizer does to its parameters."""
        if self.fused is not None:
            return self.fused
        assert self.factory is not None
        return TorchUpdate(self.factory)


def _call(make: Callable[[Any], torch.optim.Optimizer], params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return make(params)


def _state_dtype(name: str, groups: Sequence[GroupPlan]) -> torch.dtype:
    wide = [group.name for group in groups if group.dtype == torch.float64]
    if name != "fp32" and wide:
        raise ValueError(
            f'optimizer.params.state_dtype: "{name}" needs parameters of at most float32, found float64 in {wide[0]}; '
            'use "fp32", with which the states have the dtype of the parameters'
        )
    return _STATE_DTYPES[name]


def _check_covers(optimizer: torch.optim.Optimizer, trained: list[nn.Parameter]) -> None:
    covered = {id(param) for group in optimizer.param_groups for param in group["params"]}
    missing = sum(id(param) not in covered for param in trained)
    extra = len(covered - {id(param) for param in trained})
    if missing or extra:
        raise ValueError(
            f"optimizer: expected one over exactly the {len(trained)} parameters of the model that require "
            f"gradients, found {missing} of them left out and {extra} others; freeze what is not to be trained with "
            "requires_grad_(False)"
        )
