"""The pretend group has NCCL's manners."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.kit.ranks import RankError, RankPool, on_device
from tests.pretend import group

RECEIVES_FIRST = ["receive", "send"]
# Since torch 2.13 they have these names, and warn about the ones before.
GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def talk(is_eager: bool, orders: list[list[str]]) -> None:
    """Two ranks send each other a value, each in its order; "batch": both in one."""
    group.join_on_cpu(is_eager)
    other = 1 - dist.get_rank()
    sent, received = torch.full((3,), float(dist.get_rank())), torch.empty(3)
    works: list[Any] = []
    for what in orders[dist.get_rank()]:
        if what == "send":
            works.append(dist.isend(sent, other, tag=5 + other))
        elif what == "receive":
            works.append(dist.irecv(received, other, tag=other))
        else:
            operations = [dist.P2POp(dist.irecv, received, other), dist.P2POp(dist.isend, sent, other)]
            works += dist.batch_isend_irecv(operations)
    assert received.isnan().all()
    for work in works:
        work.wait()
    assert (received == other).all()


@pytest.mark.parametrize("is_eager", [False, True])
@pytest.mark.parametrize("orders", [[["send", "receive"], RECEIVES_FIRST], [["batch"], ["batch"]]])
@on_device(2)
def test_messages_match_in_their_order(is_eager: bool, orders: list[list[str]]) -> None:
    talk(is_eager, orders)


def test_two_ranks_that_receive_first_hang(pretend_ranks: RankPool) -> None:
    with pytest.raises(RankError, match=r"(?s)rank 0: Hang\nstill running.* in talk"):
        pretend_ranks(2, talk, False, [RECEIVES_FIRST, RECEIVES_FIRST], process_group=False, timeout=10)


@on_device(2)
def test_collectives() -> None:
    group.join_on_cpu()
    rank = dist.get_rank()
    total, everything, part, swapped = torch.full((4,), rank + 1.0), torch.empty(4), torch.empty(2), torch.empty(4)
    works = [
        dist.all_reduce(total, async_op=True),
        GATHER(everything, torch.full((2,), float(rank)), async_op=True),
        SCATTER(part, torch.arange(4.0), async_op=True),
        dist.all_to_all_single(swapped, torch.arange(4.0) + 4 * rank, async_op=True),
    ]
    assert everything.isnan().all() and part.isnan().all() and swapped.isnan().all()
    for work in works:
        work.wait()
    objects: list[object] = [None, None]
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": 0}, {"rank": 1}]
    found = [total[:1].tolist(), everything.tolist(), part.tolist(), swapped.tolist()]
    own = [[[0.0, 2.0], [0.0, 1.0, 4.0, 5.0]], [[4.0, 6.0], [2.0, 3.0, 6.0, 7.0]]]
    assert found == [[3.0], [0.0, 0.0, 1.0, 1.0], *own[rank]]


def other_order() -> None:
    group.join_on_cpu()
    if dist.get_rank():
        dist.all_reduce(torch.zeros(2))
    GATHER(torch.empty(4), torch.zeros(2))


def test_collectives_in_another_order_are_found(pretend_ranks: RankPool) -> None:
    with pytest.raises(RankError, match=r"Hang: collective 0 of .* rank 0 is in all_gather.* rank 1 in all_reduce"):
        pretend_ranks(2, other_order, process_group=False)
