"""Who is compared on the wire: a line each. How one trains is in `_wire_trainers.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Contender:
    """One row; `options` go to the builder of its `kind`."""

    name: str
    label: str
    kind: str  # "lowtide", "ddp" or "fsdp2"
    options: dict[str, Any]


def _lowtide(name: str, label: str, stage: int, zero: dict[str, Any] | None = None, **communication: Any) -> Contender:
    config = {"zero_optimization": {"stage": stage, **(zero or {})}, "communication": communication}
    return Contender(name, f"lowtide stage {stage}{label}", "lowtide", config)


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
        Contender("ddp", "DDP, fp16 messages", "ddp", {"hook": "fp16"}),
        Contender("powersgd", "DDP, PowerSGD of rank 4", "ddp", {"hook": "powersgd"}),
        Contender("fsdp2", "FSDP2", "fsdp2", {}),
    )
}
REFERENCE = "plain"
