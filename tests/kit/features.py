"""The features of a training, by name, and sets of them in which each two that go together meet.

A law of every training is asked of `feature_sets()`; a new feature is a row of FEATURES.
"""

import os
from collections.abc import Container, Iterable, Mapping
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

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


def _states(**keys: Any) -> dict[str, Any]:
    """Keys of the section of offloaded states, which are on the host if no key says where."""
    return _zero(offload_optimizer=keys)


NUMBERS: dict[str, dict[str, Any]] = {
    "accumulation": {"gradient_accumulation_steps": 3},
    "clipping": {"gradient_clipping": 0.3},
    "warm-up": {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3, "warmup_max_lr": 1e-2}}},
    "sgd": _optimizer("sgd", momentum=0.9),
    "lamb": _optimizer("lamb"),
    "muon": _optimizer("muon"),
    "adafactor": _optimizer("adafactor"),
    "states in 8 bits": _optimizer("adamw", state_dtype="int8"),
    "bf16": {"bf16": {"enabled": True, "masters": True}},
    "bf16 without masters": {"bf16": {"enabled": True, "masters": False}},
    "bf16 with remainders": {"bf16": {"enabled": True, "masters": "kahan"}},
    "bf16 with corrections": {"bf16": {"enabled": True, "masters": "int8"}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}},
    "gradients in bf16": {"data_types": {"grad_accum_dtype": "bf16"}},
    "messages in bf16": {"communication_data_type": "bf16"},
    "messages in 4 bits": {"communication": {"transport": "sockets", "gradient_bits": 4, "ranks_of_host": 1}},
    "power sgd": {"communication": {"power_sgd": {"rank": 2, "start_step": 1, "min_compression_rate": 2}}},
    "sums of gradients": {"gradient_allreduce_op": "sum"},
    "delayed update": _states(overlap="delayed", delay_after_steps=0),
    "units by name": _zero(units=["embedding", "blocks.?", "head"]),
    "fused modules": {"kernels": {"fuse_modules": True}},
    "compiled blocks": {"compile": {"blocks": True, "backend": "eager"}},
    "tiles of the loss": {"tiles": {"loss": 5}},
    "hybrid sharding": _zero(shard_size=2),
    "pipeline": {"parallel": {"pipeline": 2, "tensor": 1}},
    "split layers": {"parallel": {"pipeline": 1, "tensor": 2}},
}
"""Each changes the numbers of a training."""

PLACES: dict[str, dict[str, Any]] = {
    **{f"stage {stage}": _zero(stage=stage) for stage in range(4)},
    "shared memory": {"communication": {"transport": "shared_memory"}},
    "sockets": {"communication": {"transport": "sockets"}},
    "torch's group": {"communication": {"transport": "native"}},
    "states on the host": _states(**HOST),
    "half of the states elsewhere": _states(ratio=0.5),
    "states in files": _states(**FILES),
    "speculative update": _states(overlap="speculative"),
    "parameters on the host": _zero(offload_param=HOST),
    "parameters in files": _zero(offload_param=FILES),
    "update in backward": _zero(update_in_backward=True),
    "layer by layer": _zero(layered_gradient_accumulation=True),
    "no prefetch": _zero(stage3_prefetch_bucket_size=0),
    "hpZ": _zero(stage=3, zero_hpz_partition_size=2),
    "recomputation": {"activation_checkpointing": {"every": 1}},
    "activations on the host": _saved(HOST),
    "activations in files": _saved(FILES),
}
"""Each changes where tensors lie, when work is done or how, and no bit of a training."""

FEATURES = NUMBERS | PLACES
OF_FOUR_RANKS = {"hybrid sharding", "hpZ", "pipeline", "split layers"}
MOST = 14  # features of a set: enough for few sets, and each is also absent beside each other
_OF_WHOLE_PARAMETERS = "lamb", "muon", "adafactor"
_OF_A_STEP = *_OF_WHOLE_PARAMETERS, "power sgd", "pipeline"  # they need all gradients at once
_WITHOUT_MASTERS = "bf16 without masters", "bf16 with remainders", "bf16 with corrections"
_PARAMETERS_ELSEWHERE = "parameters on the host", "parameters in files"
_ACTIVATIONS_ELSEWHERE = "activations on the host", "activations in files"
_REFUSED: dict[str, tuple[str, ...]] = {
    "update in backward": (*_OF_A_STEP, "accumulation", "clipping", "fp16", "speculative update", "delayed update"),
    "speculative update": _OF_A_STEP,
    "delayed update": (*_OF_A_STEP, "parameters in files"),
    "fp16": ("bf16", *_WITHOUT_MASTERS),
    "power sgd": ("messages in 4 bits", "hybrid sharding"),
    "pipeline": (*_PARAMETERS_ELSEWHERE, *_ACTIVATIONS_ELSEWHERE, "layer by layer"),
    "split layers": (*_OF_WHOLE_PARAMETERS, "power sgd", "compiled blocks"),
    "hpZ": (*_PARAMETERS_ELSEWHERE, "muon", "adafactor", "power sgd"),
    "stage 2": ("power sgd",),
    "stage 3": ("power sgd",),
    "shared memory": ("parameters in files",),
}
REFUSED = {frozenset((name, other)) for name, others in _REFUSED.items() for other in others}
"""Pairs that a config is refused for."""
_LEFT_OUT = {  # pairs that an engine takes, and that do not keep the laws
    frozenset(("hpZ", "messages in 4 bits")),  # which are summed in other groups
}
OF_THE_CPU: dict[str | frozenset[str], str] = {
    **dict.fromkeys(("shared memory", "sockets", "messages in 4 bits"), "is for CPU ranks"),  # a GPU has NCCL
    frozenset(("delayed update", "parameters on the host")): "cannot be computed with while it is updated",
}
"""What is refused on a GPU, if need be at stage 3, and words of the error."""
_STATES_ELSEWHERE = "states on the host", "half of the states elsewhere", "states in files"
MORE_WAITS: dict[str | frozenset[str], str] = {
    "lamb": "its ratios are numbers of the host",
    "adafactor": "its ratios are numbers of the host",
    **{
        frozenset(("update in backward", place)): "each gradient is waited for"
        for place in (*_STATES_ELSEWHERE, *_PARAMETERS_ELSEWHERE)
    },
    **{frozenset(("muon", place)): "matrices of the host are sent by the device" for place in _STATES_ELSEWHERE},
}
"""Where the host waits for its device more often than once a step, if need be at stage 3, and why."""
OTHER_PEAKS: dict[str | frozenset[str], str] = {
    "torch's group": "what torch has on the way is not ours",
    "delayed update": "gradients of the step before may still be there",
    "speculative update": "its copies depend on when messages come",
    "power sgd": "too high (docs/planning.md)",
    **{
        frozenset((name, other)): "what torch's operations take of a chunk is not planned"
        for name in _OF_WHOLE_PARAMETERS
        for other in _WITHOUT_MASTERS
    },
    frozenset(("pipeline", "adafactor")): "too high: more than three groups take turns (docs/planning.md)",
    **{
        frozenset(("layer by layer", other)): "a known error (docs/planning.md)"
        for other in ("update in backward", "activations in files")
    },
}
"""Where a plan's peak is not that of a step, and why."""
FIRST_STEPS = {
    "pipeline": 1,  # stages agree on shapes
    "split layers": 1,  # and are compared with whole ones
}
"""How many steps at the beginning may wait more often."""


def joined(names: Iterable[str]) -> dict[str, Any] | None:
    """The config of these features. None if two of them give a key different values."""
    config: dict[str, Any] = {}
    if not all(_add(config, FEATURES[name]) for name in names):
        return None
    zero = config.get("zero_optimization", {})
    if "offload_optimizer" in zero:
        zero["offload_optimizer"].setdefault("device", "cpu")
    return config


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
def feature_sets(*without: str | frozenset[str]) -> list[tuple[str, ...]]:
    """Sets of features that go together; each two that do are in one of them. without: what to leave out."""
    features = [name for name in FEATURES if name not in without]
    apart = {frozenset(pair) for pair in combinations(features, 2) if joined(pair) is None} | REFUSED | _LEFT_OUT
    apart |= {one for one in without if isinstance(one, frozenset)}
    pairs = [frozenset(pair) for pair in combinations(features, 2) if frozenset(pair) not in apart]
    missing = dict.fromkeys(sorted(pairs, key=num_ranks, reverse=True))
    sets = []
    while missing:
        chosen = set(next(iter(missing)))
        while len(chosen) < MOST:
            fitting = [name for name in features if not any(frozenset((name, other)) in apart for other in chosen)]
            best = max(fitting, key=lambda name: _brings(name, chosen, missing))
            if not _brings(best, chosen, missing):
                break
            chosen.add(best)
        missing = dict.fromkeys(pair for pair in missing if not pair <= chosen)
        sets.append(tuple(name for name in features if name in chosen))
    return sets


def _brings(name: str, chosen: set[str], missing: Container[frozenset[str]]) -> int:
    """The missing pairs that `name` forms with the chosen. Those for four ranks weigh more: such sets are to be few."""
    pairs = [frozenset((name, other)) for other in chosen if name not in chosen]
    return sum(num_ranks(pair) ** 2 for pair in pairs if pair in missing)


class TwoBlocks(TinyGPT):
    """A language model with a frozen parameter and one that is not used. It fails as `fault` says."""

    fault = ""

    def __init__(self) -> None:
        super().__init__(layers=2)
        self.position.requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(7))

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = super().forward(ids, targets)
        if self.fault == "forward":
            raise ArithmeticError("a fault in forward")
        if self.fault == "backward":
            loss.register_hook(_fail)
        return loss[None].expand(2) if self.fault == "loss" else loss


def _fail(gradient: Tensor) -> None:
    raise ArithmeticError("a fault in backward")


def start_in(folder: Path) -> None:
    """Let relative paths of a config lie in the folder, and let torch's compiler look at any input."""
    os.chdir(folder)
    ignore_warning_of_compiler()


def num_ranks(names: Iterable[str]) -> int:
    """The number of ranks on which each of the features has an effect."""
    return 2 if OF_FOUR_RANKS.isdisjoint(names) else 4


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
    """The same numbers with all in memory, at another stage if another sums gradients in the same order."""
    rounds = {"torch's group"} if num_ranks(names) > 2 else set()  # it sums more than two in an order of its own
    if {"gradients in bf16", "messages in bf16"} & {*names}:
        rounds |= {"layer by layer", "torch's group"}
    numbers = [name for name in names if name in NUMBERS.keys() | rounds]
    own = case_of(names).stage
    return case_of(numbers, next((stage for stage in _alike(names, own) if stage != own), own))


def _alike(names: Iterable[str], stage: int) -> list[int]:
    """Stages that sum gradients in the same order as this one: from 2 on, microbatches are added after the ranks.

    Groups of ranks, and messages of few bits, have another order than stage 0.
    """
    orders = [{0, 1}, {2, 3}] if "accumulation" in names else [{0, 1, 2, 3}]
    if {"hybrid sharding", "messages in 4 bits"} & {*names}:
        orders = [{0}, *(order - {0} for order in orders)]
    return next(sorted(order) for order in orders if stage in order)
