"""Where memory has the addresses of what was freed, every step has those of the step before."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.comm.native import NativeRoute
from tests import models
from tests.engine.test_blueprint import BF16, FP32, config_of
from tests.pretend import device
from tests.pretend.group import register
from tests.ranks import RankPool

WARM_UP, STEPS = 2, 4
Seen = list[tuple[str, tuple[int, ...]]]  # what was used, and the addresses that it had, in the order of its use


def gpt() -> nn.Module:
    return models.TinyGPT(width=16, layers=3)


@contextmanager
def addresses_seen(module: nn.Module, seen: Seen) -> Iterator[None]:
    """Of parameters in forwards and backwards, of gradients, of what is gathered, and of messages."""

    def look(what: str, *tensors: Tensor) -> None:
        seen.append((what, tuple(tensor.untyped_storage().data_ptr() for tensor in tensors)))

    def look_at(name: str, part: nn.Module, *_: Any) -> None:
        look(f"parameters of {name}", *part.parameters(recurse=False))

    def look_at_gradient(name: str, gradient: Tensor) -> None:
        look(f"the gradient of {name}", gradient)

    plain = NativeRoute._start

    def start(self: NativeRoute, collective: Any, what: str, *tensors: Tensor) -> Any:
        look(what, *tensors)
        return plain(self, collective, what, *tensors)

    handles = [part.register_forward_pre_hook(partial(look_at, name)) for name, part in module.named_modules()]
    for name, param in module.named_parameters():
        handles.append(param.register_hook(partial(look_at_gradient, name)))
    with patch.object(NativeRoute, "_start", start):
        yield
    for handle in handles:
        handle.remove()


def differences(case: tuple[int, dict[str, Any], int]) -> list[str]:
    stage, dtypes, accumulation = case
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    config = config_of(stage, accumulation, "auto", **dtypes)
    steps: list[Seen] = [[] for _ in range(STEPS)]
    with lowtide.initialize(gpt(), {**config, "kernels": {"fuse_modules": False}}) as engine:
        for step, seen in enumerate(steps):
            batch = models.token_batch(step, 2 * accumulation * num_ranks)
            with addresses_seen(engine.module, seen):
                engine.train_step(tuple(one.chunk(num_ranks)[rank] for one in batch))
    wrong = []
    for step in range(WARM_UP, STEPS):
        for (what, before), (other, now) in zip(steps[step - 1], steps[step], strict=True):
            assert what.split(" of step")[0] == other.split(" of step")[0]
            if before != now:
                wrong.append(f"rank {rank}, {case}, step {step}, {what}: {before} and then {now}")
    return wrong


def differences_of_all(cases: list[tuple[int, dict[str, Any], int]]) -> list[str]:
    register()
    with device.reused_addresses():
        return [text for case in cases for text in differences(case)]


@pytest.mark.parametrize("stage", range(4))
def test_every_step_has_the_addresses_of_the_one_before(pretend_ranks: RankPool, stage: int) -> None:
    cases = list(product([stage], (FP32, BF16), (1, 2)))
    wrong = [text for texts in pretend_ranks(2, differences_of_all, cases, process_group=False) for text in texts]
    assert not wrong, "\n".join(wrong[:40])
