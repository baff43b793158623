"""Pipeline x replica x shard on one machine, with 4 and 8 processes, and states on a drive."""

from pathlib import Path
from typing import Any

import torch

import lowtide
from tests.kit import models
from tests.kit.ranks import RankPool
from tests.kit.training import Case, assert_close, train_all, train_plainly
from tests.pipe.pipelines import TOLERANCE_64, deep_gpt, deep_tied_gpt_64, pipelined

CASE = Case(deep_tied_gpt_64, models.token_batch, clip=0.3, accumulation=2, steps=2)


def test_three_axes_of_two_train_like_one_process(ranks: RankPool) -> None:
    expected = train_plainly(CASE, 4, num_parts=2)
    case = pipelined(CASE.at(3), 2, "1f1b", zero_optimization={"shard_size": 2})
    by_rank = ranks(8, train_all, [case], timeout=120)
    assert_close(by_rank[0][0], expected, TOLERANCE_64, TOLERANCE_64)
    assert len({tuple(outcome.norms) for (outcome,) in by_rank}) == 1


def test_four_stages_train_like_one_process(ranks: RankPool) -> None:
    expected = train_plainly(CASE, 1, num_parts=2)
    (found,) = ranks(4, train_all, [pipelined(CASE.at(0), 4, "zb-h1")])[0]
    assert_close(found, expected, TOLERANCE_64, TOLERANCE_64)


def test_states_on_a_drive_give_the_same_bits(ranks: RankPool, tmp_path: Path) -> None:
    offload = {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}
    cases = [pipelined(CASE.at(3), 2, "1f1b", zero_optimization=zero) for zero in ({}, offload)]
    (kept, offloaded), _ = ranks(2, train_all, cases)
    assert not kept.differences(offloaded)


def places_and_values() -> dict[str, Any]:
    """Who this rank is, what it holds, and a class of torch's own as optimizer."""
    torch.manual_seed(0)
    config = pipelined(Case(deep_gpt, models.token_batch, accumulation=2), 2, "1f1b").as_config()
    engine = lowtide.initialize(deep_gpt, {**config, "optimizer": None}, optimizer=torch.optim.RMSprop)
    rows = 2 * 2 * engine.data_size
    batch = [tensor.chunk(engine.data_size)[engine.data_rank] for tensor in models.token_batch(0, rows)]
    before = engine.eval_step(tuple(batch)).item()
    for _ in range(3):
        engine.train_step(tuple(batch))
    found = {
        "place": (engine.rank, engine.data_rank, engine.data_size, engine.world_size),
        "names": [name for name, _ in engine.module.named_parameters()],
        "losses": (before, engine.eval_step(tuple(batch)).item()),
        "parameter_bytes": engine.memory().parameter_bytes,
    }
    with engine.gathered():
        found["sums"] = {name: param.sum().item() for name, param in engine.module.named_parameters()}
    engine.close()
    return found


def test_ranks_know_their_places_and_hold_their_own(ranks: RankPool) -> None:
    found = ranks(4, places_and_values)
    assert [one["place"] for one in found] == [(0, 0, 2, 4), (1, 1, 2, 4), (2, 0, 2, 4), (3, 1, 2, 4)]
    first, last = found[0]["names"], found[2]["names"]
    assert "embedding.weight" in first and "head.weight" in last and not {*first} & {*last}
    assert sorted(first + last) == sorted(name for name, _ in deep_gpt().named_parameters())
    assert len({one["losses"] for one in found}) == 1 and found[0]["losses"][1] < found[0]["losses"][0]
    whole = sum(param.numel() for param in deep_gpt().parameters()) * 4
    assert all(one["parameter_bytes"] < 0.75 * whole for one in found)
    assert found[0]["sums"] == found[1]["sums"] and found[2]["sums"] == found[3]["sums"]


def stages_by_time() -> list[str]:
    config = pipelined(Case(deep_gpt, models.token_batch), 2, "1f1b", pipeline={"balance": "time"}).as_config()
    engine = lowtide.initialize(deep_gpt(), config, sample_batch=models.token_batch(0, 2))
    names = [name for name, _ in engine.module.named_parameters()]
    engine.train_step(tuple(models.token_batch(0, 2)))
    engine.close()
    return names


def test_blocks_are_divided_by_time(ranks: RankPool) -> None:
    first, last = ranks(2, stages_by_time)
    assert "embedding.weight" in first and "head.weight" in last and not {*first} & {*last}
