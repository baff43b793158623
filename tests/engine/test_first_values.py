"""All ranks begin with rank 0's values, which come in messages of several parameters."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lowtide
from tests.kit.ranks import RankPool
from tests.kit.training import settings


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


def begin(stage: int) -> tuple[list[Tensor], list[Tensor], int]:
    torch.manual_seed(dist.get_rank())
    model = Kinds()
    own = [param.detach().clone() for param in model.parameters()]
    with mock.patch.object(dist, "broadcast", wraps=dist.broadcast) as message:
        engine = lowtide.initialize(model, settings(stage, optimizer=None))
    with engine, engine.gathered():
        found = [param.detach().clone().to(was.dtype) for param, was in zip(model.parameters(), own, strict=True)]
    return own, found, message.call_count


@pytest.mark.parametrize("stage", [0, 3])
def test_values_are_those_of_rank_0(ranks: RankPool, stage: int) -> None:
    (given, first, messages), (_, second, _) = ranks(2, begin, stage)
    assert all(map(torch.equal, first, given)) and all(map(torch.equal, second, given))
    assert messages == 5  # the kinds follow each other as float32, bfloat16, an empty one, a large one, bfloat16
