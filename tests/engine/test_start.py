"""All ranks begin with rank 0's values. What one rank cannot do at a start is an error on all of them."""

import contextlib
import errno
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lowtide
from lowtide.offload.block_file import BlockFile
from tests.kit.ranks import RankPool, on_ranks
from tests.kit.training import refusal, settings

NO_ROOM = lowtide.OffloadError("the disk: rank 1 needs more")
FAULTS: dict[str, tuple[str, Exception, str]] = {  # what fails on rank 1 and how, and what is told
    "offload_param": ("reserve", NO_ROOM, "the disk: rank 1 needs more"),
    "activations": (
        "_open",
        OSError(errno.ENOSPC, "No space left on device"),
        "rank 1 expected a writable folder, and cannot create a file there: No space",
    ),
}


def start(config: dict[str, Any], **options: Any) -> lowtide.Engine:
    return lowtide.initialize(nn.Linear(2, 2), config, loss_fn=lambda output, batch: output.mean(), **options)


def start_without_room(kind: str, folder: str) -> str:
    """The error of a start for which rank 1 has no room; afterwards another start must do."""
    nvme = {"device": "nvme", "nvme_path": folder}
    section: dict[str, Any] = {"zero_optimization": {"stage": 3, kind: nvme}}
    if kind == "activations":
        section = {"activation_checkpointing": {"offload": nvme}}
    method, fault, _ = FAULTS[kind]
    fails = mock.patch.object(BlockFile, method, side_effect=fault)
    said = "nothing"
    with fails if os.environ["RANK"] == "1" else contextlib.nullcontext():
        try:
            start(settings(**section))
        except RuntimeError as error:
            said = f"{type(error).__name__}: {error}"
    assert not dist.is_initialized()
    with start(settings()) as engine:
        assert engine.train_step(torch.ones(2, 2)).loss.isfinite()
    return said


@pytest.mark.parametrize("kind", list(FAULTS))
def test_too_little_room_on_one_rank(ranks: RankPool, tmp_path: Path, kind: str) -> None:
    first, second = ranks(2, start_without_room, kind, str(tmp_path), process_group=False)
    assert second.startswith("OffloadError: ") and FAULTS[kind][2] in second
    assert first == "OffloadError: lowtide.initialize failed on rank 1: " + second.removeprefix("OffloadError: ")


def make_optimizer(params: Any) -> torch.optim.Optimizer:
    if dist.get_rank() == 1:
        raise ArithmeticError("a fault of rank 1 alone")
    return torch.optim.SGD(params, lr=0.1)


@on_ranks(2)
def test_a_fault_in_the_script_s_own_part_on_one_rank() -> None:
    kind = ArithmeticError if dist.get_rank() else RuntimeError
    text = refusal(start, settings(optimizer=None), optimizer=make_optimizer, kind=kind)
    assert dist.get_rank() or text.startswith(
        "lowtide.initialize failed on rank 1: ArithmeticError: a fault of rank 1 alone"
    )


@on_ranks(2)
def test_a_start_asks_the_others_nine_times() -> None:
    world = dist.distributed_c10d  # where dist's own functions look each other up
    kinds = ["all_gather", "broadcast", "all_reduce", "barrier"]
    with contextlib.ExitStack() as stack:
        spies = [stack.enter_context(mock.patch.object(world, kind, wraps=getattr(world, kind))) for kind in kinds]
        for kind in kinds:
            stack.enter_context(mock.patch.object(dist, kind, getattr(world, kind)))
        start(settings(3, communication={"transport": "auto"})).close()
    assert sum(spy.call_count for spy in spies) == 9


class Kinds(nn.Module):
    """Dtypes that alternate, a scalar, an empty one, strides of a transpose, and one of more than a message."""

    def __init__(self) -> None:
        super().__init__()
        shapes = [(3,), (), (2, 5), (0,), (1 << 17,), (4,)]
        dtypes = [torch.float32, torch.float32, torch.bfloat16, torch.float32, torch.float32, torch.bfloat16]
        self.kinds = nn.ParameterList(torch.randn(s).to(dtype) for s, dtype in zip(shapes, dtypes, strict=True))
        self.turned = nn.Parameter(torch.randn(3, 4).t())

    def forward(self) -> Tensor:
        return torch.stack([param.float().sum() for param in self.parameters()]).sum()


def begin() -> tuple[list[Tensor], list[Tensor], int]:
    torch.manual_seed(dist.get_rank())
    model = Kinds()
    own = [param.detach().clone() for param in model.parameters()]
    with mock.patch.object(dist, "broadcast", wraps=dist.broadcast) as message:
        engine = lowtide.initialize(model, settings(3, optimizer=None))
    with engine, engine.gathered():
        found = [param.detach().clone().to(was.dtype) for param, was in zip(model.parameters(), own, strict=True)]
    return own, found, message.call_count


def test_values_are_those_of_rank_0(ranks: RankPool) -> None:
    (given, first, messages), (_, second, _) = ranks(2, begin)
    assert all(map(torch.equal, first, given)) and all(map(torch.equal, second, given))
    assert messages == 5  # the kinds follow each other as float32, bfloat16, an empty one, a large one, bfloat16
