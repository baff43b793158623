"""Where memory has the addresses of what was freed, every step has those of the step before."""

import gc
import math
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial, partialmethod
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from torch import Tensor, nn

import lowtide
from lowtide.comm.native import NativeTransport
from lowtide.comm.p2p import P2P
from tests.kit import models
from tests.kit.ranks import RankPool
from tests.kit.training import Case, start
from tests.pretend import device
from tests.pretend.group import register

WARM_UP, STEPS = 2, 3
BF16: dict[str, Any] = {"bf16": {"enabled": True}}
FP16: dict[str, Any] = {"fp16": {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}}
Seen = list[tuple[str, tuple[int, ...]]]  # what was used, and the addresses that it had, in the order of its use


class Gpt(models.TinyGPT):
    """factor: of its loss."""

    factor = 1.0

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        return super().forward(ids, targets) * self.factor


@dataclass(frozen=True)
class Looked(Case):
    """A training. between: what is done in front of each compared step."""

    between: str = ""


def at(
    stage: int, more: dict[str, Any], accumulation: int = 1, between: str = "", layers: int = 3, **zero: Any
) -> Looked:
    """more: sections; zero: of the section `zero_optimization`."""
    build = partial(Gpt, width=16, layers=layers)
    config = {**more, "zero_optimization": zero, "kernels": {"fuse_modules": False}}
    return Looked(build, models.token_batch, stage, accumulation, STEPS, config=config, between=between)


@contextmanager
def addresses_seen(module: nn.Module, seen: Seen) -> Iterator[None]:
    """Of parameters in forwards and backwards, of gradients, of what is gathered, and of messages."""

    def look(what: str, *tensors: Tensor) -> None:
        seen.append((what, tuple(tensor.untyped_storage().data_ptr() for tensor in tensors)))

    def look_at(name: str, part: nn.Module, *_: Any) -> None:
        look(f"parameters of {name}", *part.parameters(recurse=False))

    def look_at_gradient(name: str, gradient: Tensor) -> None:
        look(f"the gradient of {name}", gradient)

    plain = NativeTransport._start

    def start(self: NativeTransport, collective: Any, what: str, *tensors: Tensor) -> Any:
        look(what, *tensors)
        return plain(self, collective, what, *tensors)

    def message(self: P2P, plain: Any, tensor: Tensor, place: int, tag: int, what: str) -> Any:
        look(what, tensor)
        return plain(self, tensor, place, tag, what)

    handles = [part.register_forward_pre_hook(partial(look_at, name)) for name, part in module.named_modules()]
    for name, param in module.named_parameters():
        handles.append(param.register_hook(partial(look_at_gradient, name)))
    with ExitStack() as stack:
        stack.enter_context(patch.object(NativeTransport, "_start", start))
        for way in ("send", "receive"):
            stack.enter_context(patch.object(P2P, way, partialmethod(message, getattr(P2P, way))))
        yield
    for handle in handles:
        handle.remove()


def come_between(engine: lowtide.Engine, what: str, batch: tuple[Tensor, ...], folder: str) -> None:
    if what == "evaluation":
        engine.eval_step(tuple(one[:2] for one in batch))
    elif what == "checkpoint":
        engine.save_checkpoint(folder)
    elif what == "skipped step":
        module: Any = engine.module
        module.factor = math.inf
        assert engine.train_step(batch).skipped
        module.factor = 1.0


def differences(case: Looked, folder: str) -> list[str]:
    gc.collect(), gc.collect()  # an engine has cycles: what the last one has left goes now, and not in a step
    rank = int(os.environ["RANK"])
    steps: list[Seen] = [[] for _ in range(case.steps)]
    with start(case) as engine:
        for step, seen in enumerate(steps):
            own = case.share(engine, step)
            if step >= WARM_UP:
                gc.collect()  # a step may leave no memory in cycles, which would go at any time
                come_between(engine, case.between, own, folder)
            with addresses_seen(engine.module, seen):
                engine.train_step(own)
    wrong = []
    for step in range(WARM_UP, STEPS):
        for (what, before), (other, now) in zip(steps[step - 1], steps[step], strict=True):
            assert what.split(" of step")[0] == other.split(" of step")[0]
            if before != now:
                wrong.append(f"rank {rank}, {case}, step {step}, {what}: {before} and then {now}")
    return wrong[:5]


def differences_of_all(cases: list[Looked], folder: str) -> list[str]:
    register()
    os.chdir(folder)
    with device.reused_addresses():
        return [text for case in cases for text in differences(case, folder)]


def assert_held(pool: RankPool, num_ranks: int, cases: list[Looked], folder: Path) -> None:
    found = pool(num_ranks, differences_of_all, cases, str(folder), process_group=False)
    wrong = [text for texts in found for text in texts]
    assert not wrong, "\n".join(wrong)


HOST = {"device": "cpu"}
FILE = {"device": "nvme", "nvme_path": "."}
MOVED = {"offload": {**HOST, "min_bytes": 1}}
PLAIN = [*(at(stage, BF16, 2) for stage in (0, 2)), at(3, BF16, 2, shard_size=1)]
BETWEEN = [
    *(at(stage, {}, 2, what) for stage, what in ((3, "evaluation"), (1, "checkpoint"))),
    *(at(stage, FP16, between="skipped step") for stage in (0, 3)),
]
OFFLOADED = [
    at(1, BF16, offload_optimizer=HOST),
    at(2, {}, 2, offload_optimizer={**HOST, "ratio": 0.5}),
    at(2, FP16, offload_optimizer={**HOST, "overlap": "speculative"}),
    at(3, BF16, offload_optimizer={**HOST, "overlap": "delayed", "delay_after_steps": 1}),
    at(3, BF16, offload_param=HOST, offload_optimizer=HOST),  # see the docs for one without the other
    at(3, {}, 2, offload_param=FILE, offload_optimizer=FILE),
    at(2, {**BF16, "activation_checkpointing": MOVED}, layers=2),  # all within limit
    at(3, {"activation_checkpointing": {"number_checkpoints": 2, **MOVED}}),
    at(3, BF16, update_in_backward=True),
]
IN_GROUPS = [at(3, {}, zero_hpz_partition_size=2)]
PIPELINED = [
    at(stage, {**dtype, "parallel": {"pipeline": 2}, "pipeline": {"schedule": schedule}}, 4, layers=4)
    for schedule, stage, dtype in (("interleaved", 2, BF16), ("zb-h1", 0, BF16), ("dualpipe-v", 1, {}))
]
KINDS = {
    "plain": (2, PLAIN),
    "between": (2, BETWEEN),
    "offload": (2, OFFLOADED),
    "groups": (4, IN_GROUPS),
    "pipelines": (2, PIPELINED),
}


@pytest.mark.parametrize("name", KINDS)
def test_every_step_has_the_addresses_of_the_one_before(pretend_ranks: RankPool, tmp_path: Path, name: str) -> None:
    num_ranks, cases = KINDS[name]
    assert_held(pretend_ranks, num_ranks, cases, tmp_path)
