"""The names under which Lightning's Trainer knows the strategy, as those of its DeepSpeed strategy."""

from __future__ import annotations

from typing import Any

_OFFLOADED = {"offload_optimizer": "cpu", "offload_parameters": "cpu"}

NAMES: dict[str, dict[str, Any]] = {
    "lowtide": {"stage": 2},
    "lowtide_stage_1": {"stage": 1},
    "lowtide_stage_2": {"stage": 2},
    "lowtide_stage_2_offload": {"stage": 2, "offload_optimizer": "cpu"},
    "lowtide_stage_3": {"stage": 3},
    "lowtide_stage_3_offload": {"stage": 3, **_OFFLOADED},
    "lowtide_stage_3_offload_nvme": {"stage": 3, "offload_optimizer": "nvme", "offload_parameters": "nvme"},
}
"""Name -> what `LowtideStrategy` is called with."""


def register(strategy: Any) -> None:
    """strategy: a class of a Lightning package, in whose registry the names stand from then on."""
    registry = strategy.registry()
    for name, options in NAMES.items():
        if name not in registry:
            described = ", ".join(f"{key} {value}" for key, value in options.items())
            registry.register(name, strategy, description=f"lowtide: {described}", **options)
