"""The features of a training, by name, and sets of them in which each two that go together meet.

A law of every training is asked of `feature_sets()`; a new feature is a row of FEATURES.
"""

import os
from collections.abc import Iterable, Mapping
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.kit.compiling import ignore_warning_of_compiler
from tests.kit.models import TinyGPT, token_batch
from tests.kit.training import Case

HOST = {"device": "cpu"}
FILES = {"device": "nvme", "nvme_path": "offloaded"}


def _zero(**keys: Any) -> dict[str, Any]:
    return {"zero_optimization": keys}


def _saved(place: Mapping[str, str]) -> dict[str, Any]:
    return {"activation_checkpointing": {"offload": {**place, "min_bytes": 1}}}


def _optimizer(kind: str, **params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": kind, "params": {"lr": 1e-2, **params}}}


NUMBERS: dict[str, dict[str, Any]] = {
    "accumulation": {"gradient_accumulation_steps": 3},
    "clipping": {"gradient_clipping": 0.3},
    "warm-up": {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3, "warmup_max_lr": 1e-2}}},
    "sgd": _optimizer("sgd", momentum=0.9),
    "lion": _optimizer("lion"),
    "lamb": _optimizer("lamb"),
    "muon": _optimizer("muon"),
    "states in 8 bits": _optimizer("adamw", state_dtype="int8"),
    "bf16": {"bf16": {"enabled": True, "masters": True}},
    "bf16 without masters": {"bf16": {"enabled": True, "masters": False}},
    "bf16 with remainders": {"bf16": {"enabled": True, "masters": "kahan"}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}},
    "gradients in bf16": {"data_types": {"grad_accum_dtype": "bf16"}},
    "units by name": _zero(units=["embedding", "blocks.?", "head"]),
    "fused modules": {"kernels": {"fuse_modules": True}},
    "compiled blocks": {"compile": {"blocks": True, "backend": "eager"}},
}
"""Each changes the numbers of a training."""

PLACES: dict[str, dict[str, Any]] = {
    **{f"stage {stage}": _zero(stage=stage) for stage in range(4)},
    "shared memory": {"communication": {"transport": "shared_memory"}},
    "sockets": {"communication": {"transport": "sockets"}},
    "torch's group": {"communication": {"transport": "native"}},
    "states on the host": _zero(offload_optimizer={**HOST, "ratio": 1.0, "overlap": "none"}),
    "half of the states on the host": _zero(offload_optimizer={**HOST, "ratio": 0.5, "overlap": "none"}),
    "states in files": _zero(offload_optimizer=FILES),
    "speculative update": _zero(offload_optimizer={**HOST, "ratio": 1.0, "overlap": "speculative"}),
    "parameters on the host": _zero(offload_param=HOST),
    "parameters in files": _zero(offload_param=FILES),
    "update in backward": _zero(update_in_backward=True),
    "layer by layer": _zero(layered_gradient_accumulation=True),
    "no prefetch": _zero(stage3_prefetch_bucket_size=0),
    "recomputation": {"activation_checkpointing": {"every": 1}},
    "activations on the host": _saved(HOST),
    "activations in files": _saved(FILES),
}
"""Each changes where tensors lie, when work is done or how, and no bit of a training."""

FEATURES = NUMBERS | PLACES
MOST = 8  # features of a set: enough for few sets, and each is also absent beside each other
_GRADIENTS_AT_ONCE = "accumulation", "clipping", "lamb", "muon", "fp16", "speculative update"
REFUSED = {
    *(frozenset((name, "update in backward")) for name in _GRADIENTS_AT_ONCE),
    *(frozenset((name, "fp16")) for name in ("bf16", "bf16 without masters", "bf16 with remainders")),
    frozenset(("shared memory", "parameters in files")),
    *(frozenset((name, "speculative update")) for name in ("lamb", "muon")),
}
"""Pairs that a config is refused for."""


def joined(names: Iterable[str]) -> dict[str, Any] | None:
    """The config of these features. None if two of them give a key different values."""
    config: dict[str, Any] = {}
    return config if all(_add(config, FEATURES[name]) for name in names) else None


def _add(config: dict[str, Any], more: Mapping[str, Any]) -> bool:
    """Add `more` to config, section by section. False if they give a key different values."""
    for key, value in more.items():
        if isinstance(value, Mapping):
            if not _add(config.setdefault(key, {}), value):
                return False
        elif config.setdefault(key, value) != value:
            return False
    return True


@cache
def feature_sets(*without: str) -> list[tuple[str, ...]]:
    """Sets of features that go together; each two that do are in one of them. without: features to leave out."""
    features = [name for name in FEATURES if name not in without]
    apart = {frozenset(pair) for pair in combinations(features, 2) if joined(pair) is None} | REFUSED
    missing = [frozenset(pair) for pair in combinations(features, 2) if frozenset(pair) not in apart]
    sets = []
    while missing:
        chosen = set(missing[0])
        while len(chosen) < MOST:
            fitting = [name for name in features if not any(frozenset((name, other)) in apart for other in chosen)]
            best = max(fitting, key=lambda name: _brings(name, chosen, missing))
            if not _brings(best, chosen, missing):
                break
            chosen.add(best)
        missing = [pair for pair in missing if not pair <= chosen]
        sets.append(tuple(name for name in features if name in chosen))
    return sets


def _brings(name: str, chosen: set[str], missing: list[frozenset[str]]) -> int:
    """The number of missing pairs that `name` forms with the chosen."""
    return 0 if name in chosen else sum(frozenset((name, other)) in missing for other in chosen)


class TwoBlocks(TinyGPT):
    """A language model that fails as it is told to: "forward", "backward" or "NaN"."""

    fault = ""

    def __init__(self) -> None:
        super().__init__(layers=2)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = super().forward(ids, targets)
        if self.fault == "forward":
            raise ArithmeticError("a fault in forward")
        if self.fault == "backward":
            loss.register_hook(_fail)
        return loss * torch.nan if self.fault == "NaN" else loss


def _fail(gradient: Tensor) -> None:
    raise ArithmeticError("a fault in backward")


def start_in(folder: Path) -> None:
    """Let relative paths of a config lie in the folder, and let torch's compiler look at any input."""
    os.chdir(folder)
    ignore_warning_of_compiler()


def case_of(names: Iterable[str], stage: int | None = None) -> Case:
    """A training with these features; at `stage`, if it is given."""
    config = joined(names) or {}
    zero = config.pop("zero_optimization", {})
    own = zero.pop("stage", 0)
    accumulation = config.pop("gradient_accumulation_steps", 1)
    clip = config.pop("gradient_clipping", 0.0)
    config = {**config, "zero_optimization": zero}
    return Case(TwoBlocks, token_batch, own if stage is None else stage, accumulation, clip=clip, config=config)


def without_places(names: Iterable[str]) -> Case:
    """The same numbers with all in memory, at the first stage that sums gradients in the same order."""
    rounds_sums = {"layer by layer", "torch's group"} if "gradients in bf16" in names else set[str]()
    numbers = [name for name in names if name in NUMBERS.keys() | rounds_sums]
    return case_of(numbers, case_of(names).stage // 2 * 2 if "accumulation" in numbers else 0)
