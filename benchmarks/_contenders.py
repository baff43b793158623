"""Who is compared: a table of data. How each one trains is in `_trainers.py`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Contender:
    """One row of the comparison; `options` go to the builder of its `kind` in `_trainers.py`."""

    name: str
    label: str
    kind: str  # "single", "alone", "ddp", "fsdp2", "deepspeed" or "lowtide"
    options: dict[str, Any]
    only_when_named: bool = False

    @property
    def trains(self) -> bool:
        """Whether its weights are updated, so that its losses can be right or wrong."""
        return self.kind != "alone"

    def num_processes(self, ranks: int) -> int:
        """Gives how many processes train it: one for the reference, else all ranks."""
        return 1 if self.kind == "single" else ranks

    def as_dict(self) -> dict[str, Any]:
        """Gives the fields, for JSON."""
        return asdict(self)


def _lowtide(stage: int, route: str, *, update_in_backward: bool = False) -> Contender:
    suffix = ("-in-backward" if update_in_backward else "") + ("-sockets" if route == "sockets" else "")
    words = [f"lowtide stage {stage}"] + ["update in backward"] * update_in_backward + [route] * (route == "sockets")
    options = {"stage": stage, "route": route, "update_in_backward": update_in_backward}
    return Contender(f"lowtide-{stage}{suffix}", ", ".join(words), "lowtide", options)


def _lowtide_offload(name: str, label: str, stage: int, **options: Any) -> Contender:
    options = {"stage": stage, "route": "auto", "update_in_backward": False, **options}
    return Contender(f"lowtide-{stage}-{name}", f"lowtide stage {stage}, {label}", "lowtide", options, True)


def _deepspeed_offload(device: str) -> Contender:
    options = {"stage": 3, "offload": device}
    return Contender(f"deepspeed-3-{device}", f"DeepSpeed ZeRO-3, offload to {device}", "deepspeed", options, True)


REFERENCE = "single"
DDP = "ddp"
FSDP2 = "fsdp2"

CONTENDERS = {
    contender.name: contender
    for contender in [
        Contender(REFERENCE, "one process, whole batch", "single", {}),
        Contender("alone", "forwards and backwards alone, nothing sent or updated", "alone", {}, True),
        Contender(DDP, "DDP", "ddp", {"sharded_optimizer": False}),
        Contender("ddp-each", "DDP, sums of each microbatch", "ddp", {"sharded_optimizer": False, "sums_each": True}),
        Contender("ddp-zero", "DDP + ZeroRedundancyOptimizer", "ddp", {"sharded_optimizer": True}),
        Contender(FSDP2, "FSDP2", "fsdp2", {"reshard_after_forward": True}),
        Contender("fsdp2-keep", "FSDP2, no reshard after forward", "fsdp2", {"reshard_after_forward": False}),
        *(
            Contender(f"deepspeed-{stage}", f"DeepSpeed ZeRO-{stage}", "deepspeed", {"stage": stage})
            for stage in (1, 2, 3)
        ),
        *(_lowtide(stage, "auto") for stage in (0, 1, 2, 3)),
        _lowtide(3, "auto", update_in_backward=True),
        *(_lowtide(stage, "sockets") for stage in (0, 1, 2, 3)),
        _lowtide_offload("states-cpu", "states on the CPU", 3, states="cpu"),
        _lowtide_offload("states-nvme", "states in a file", 3, states="nvme"),
        _lowtide_offload("half-nvme", "half of the states in a file", 3, states="nvme", ratio=0.5),
        _lowtide_offload("nvme", "states and parameters in files", 3, states="nvme", parameters="nvme"),
        _lowtide_offload(
            "nvme-overlap", "both in files, speculative", 3, states="nvme", parameters="nvme", overlap=True
        ),
        _lowtide_offload(
            "least",
            "both in files, least memory",
            3,
            states="nvme",
            parameters="nvme",
            update_in_backward=True,
            prefetch_numel=0,
        ),
        _lowtide_offload("recompute", "blocks recomputed", 3, recomputes=True),
        _lowtide_offload("tiles", "tiles", 3, tiles="auto"),
        _lowtide_offload("long", "tiles, blocks recomputed", 3, tiles="auto", recomputes=True),
        _deepspeed_offload("cpu"),
        _deepspeed_offload("nvme"),
    ]
}


def choose(names: list[str] | None, *, with_deepspeed: bool) -> list[Contender]:
    """Gives the contenders to run: those named, or all that can run here.

    A name may end in `*`: `lowtide*` stands for every contender that begins so.
    Raises ValueError for a name that fits none, and for DeepSpeed without an interpreter that has it.
    """
    if names is None:
        everyone = [c for c in CONTENDERS.values() if not c.only_when_named]
        return [c for c in everyone if with_deepspeed or c.kind != "deepspeed"]
    chosen: dict[str, Contender] = {}
    for name in names:
        fits = [c for c in CONTENDERS.values() if c.name == name or (name[-1:] == "*" and c.name.startswith(name[:-1]))]
        if not fits:
            raise ValueError(f"--contenders: expected one of {', '.join(CONTENDERS)}; found {name!r}")
        chosen.update((c.name, c) for c in fits)
    if not with_deepspeed and any(c.kind == "deepspeed" for c in chosen.values()):
        raise ValueError(
            "--contenders: DeepSpeed is not installed in this environment; name one with --deepspeed-python"
        )
    return [c for c in CONTENDERS.values() if c.name in chosen]
