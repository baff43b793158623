"""Who is compared on the wire: a line each. How one trains is in `_wire_worker.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

LEARNING_RATE = 1e-3
RANKS_OF_HOST = 2
SETTLED = 4
"""Steps after which every contender sends what it sends from then on: 1-bit Adam and PowerSGD begin with whole
gradients."""


@dataclass(frozen=True)
class Contender:
    """One row; `options` go to the builder of its `kind`."""

    name: str
    label: str
    kind: str  # "lowtide", "ddp" or "fsdp2"
    options: dict[str, Any]


def _stage(stage: int, more: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **(more or {})}}


def _lowtide(name: str, label: str, stage: int, zero: dict[str, Any] | None = None, **communication: Any) -> Contender:
    config = {**_stage(stage, zero), "communication": communication}
    return Contender(name, f"lowtide stage {stage}{label}", "lowtide", config)


ONE_BIT = {"type": "OneBitAdam", "params": {"lr": LEARNING_RATE, "freeze_step": 2}}
HPZ = {"zero_hpz_partition_size": 2}
CONTENDERS = {
    contender.name: contender
    for contender in (
        _lowtide("plain", "", 3),
        _lowtide("hpz", ", hpZ", 3, HPZ),
        _lowtide("zero++", ", qwZ 8 + qgZ 4", 3, weight_bits=8, gradient_bits=4),
        _lowtide("zero++4", ", qwZ 4 + qgZ 4", 3, weight_bits=4, gradient_bits=4),
        _lowtide("hpz4", ", hpZ, differences 4 + qgZ 4", 3, HPZ, weight_bits=4, gradient_bits=4),
        _lowtide("plain2", "", 2),
        _lowtide("both4", ", differences 4 + qgZ 4", 2, weight_bits=4, gradient_bits=4),
        Contender("onebit", "lowtide stage 0, 1-bit Adam", "lowtide", {**_stage(0), "optimizer": ONE_BIT}),
        _lowtide("power_sgd", ", PowerSGD of rank 4", 0, power_sgd={"rank": 4, "start_step": 2}),
        Contender("ddp", "DDP, fp16 messages", "ddp", {"hook": "fp16"}),
        Contender("powersgd", "DDP, PowerSGD of rank 4", "ddp", {"hook": "powersgd"}),
        Contender("fsdp2", "FSDP2", "fsdp2", {}),
    )
}
REFERENCE = "plain"
