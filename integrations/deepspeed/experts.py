"""What scripts import as `deepspeed.moe.utils`, of models that have no MoE layers of DeepSpeed's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn


def is_moe_param(param: Tensor) -> bool:
    """Whether it is marked as one that not all ranks have (`allreduce` False), as DeepSpeed's MoE does."""
    return not getattr(param, "allreduce", True)


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """(False, 0): there are no layers of DeepSpeed's."""
    return False, 0


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: Mapping[str, Any] | Iterable[Mapping[str, Any]], max_group_size: float = 178956971
) -> list[dict[str, Any]]:
    """The groups as they are. Raises NotImplementedError for such a parameter in one."""
    groups = [param_groups] if isinstance(param_groups, Mapping) else list(param_groups)
    found = [{**group, "params": list(group["params"])} for group in groups]
    for group in found:
        refuse_moe_params(group["params"])
    return found


def refuse_moe_params(params: Iterable[Any]) -> None:
    """Raises NotImplementedError for a parameter that not all ranks have."""
    found = sum(is_moe_param(param) for param in params)
    if found:
        raise NotImplementedError(
            f"model_parameters: expected parameters that all ranks have, found {found} with allreduce=False, which "
            'DeepSpeed\'s MoE gives to experts; build all experts on each rank, and set "parallel": {"expert": N}'
        )
