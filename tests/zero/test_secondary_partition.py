"""hpZ of ZeRO++: parameters gathered in pairs of ranks, states divided over all four. The numbers of stage 3."""

import logging
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import lowtide
from lowtide.offload import PagePool
from tests.engine.saving import Continuation, load_and_go_on, save_and_go_on
from tests.engine.test_memory import EVEN_NUMEL, Even, config_of, measured
from tests.kit import models
from tests.kit.ranks import RankPool
from tests.kit.training import Case, Outcome, assert_close, train_all

PAIRS = {"zero_hpz_partition_size": 2}
CASES = {
    "tied": Case(models.tied_gpt, models.token_batch, clip=0.3, steps=2),
    "bf16": Case(models.mlp, models.vector_batch, clip=0.3, config={"bf16": {"enabled": True}}),
}


def both(case: Case, transport: str, **zero: Any) -> list[Case]:
    """Plain stage 3, and with pairs."""
    config = {"communication": {"transport": transport}}
    return [case.at(3, config={**config, "zero_optimization": {**zero, **more}}) for more in ({}, PAIRS)]


def test_pairs_have_the_bits_of_stage_3(ranks: RankPool) -> None:
    """Sums are in the order of ranks, wherever the parts lie."""
    work = [one for case in (CASES["tied"], CASES["bf16"].at(3, accumulation=2)) for one in both(case, "sockets")]
    work += both(CASES["bf16"].at(3, clip=0.0), "sockets", update_in_backward=True)
    late = {"device": "cpu", "overlap": "delayed", "delay_after_steps": 1}
    for offload in ({"device": "cpu", "overlap": "speculative"}, late):
        work += both(CASES["bf16"], "sockets", offload_optimizer=offload)
    outcomes: list[Outcome] = ranks(4, train_all, work)[0]
    for plain, paired in zip(outcomes[::2], outcomes[1::2], strict=True):
        assert paired.differences(plain) == []


def test_pairs_of_a_backend_have_the_numbers_of_stage_3(ranks: RankPool) -> None:
    case = Case(models.short_gpt_float64, models.token_batch, clip=0.3, steps=2)
    plain, paired = ranks(4, train_all, both(case, "native"))[0]
    assert_close(paired, plain, 1e-10, 1e-10)


def train_without_pages(cases: list[Case]) -> list[Outcome]:
    """What stays has a storage of its own, as on a device."""
    with mock.patch.object(PagePool, "is_possible", return_value=False):
        return train_all(cases)


def test_pairs_with_a_storage_for_what_stays(ranks: RankPool) -> None:
    plain, paired = ranks(4, train_without_pages, both(CASES["bf16"], "sockets"))[0]
    assert paired.differences(plain) == []


def test_pairs_within_shard_groups(ranks: RankPool) -> None:
    """Where a partition is all of a shard group, that is hybrid sharding, and where it is all ranks, plain stage 3."""
    case = CASES["bf16"].at(3)
    pairs = {"communication": {"transport": "sockets"}, "zero_optimization": {"shard_size": 2}}
    work = [case.at(3, config=pairs), case.at(3, config={**pairs, "zero_optimization": {"shard_size": 2, **PAIRS}})]
    work += [both(case, "sockets")[0], both(case, "sockets", zero_hpz_partition_size=4)[0]]
    hybrid, same, plain, whole = ranks(4, train_all, work)[0]
    assert same.differences(hybrid) == [] and whole.differences(plain) == []


# -- bytes ----------------------------------------------------------------------------------------------------------


def bytes_and_gathers(transport: str, zero: dict[str, Any]) -> tuple[dict[str, int], Counter[tuple[Any, ...]]]:
    """Bytes of model states between steps; (ranks, bytes received) of each message-passing gather of a step."""
    config = config_of(3, transport, is_mixed=True)
    engine = lowtide.initialize(Even(), {**config, "zero_optimization": {"stage": 3, **zero}})
    gathers: Counter[tuple[Any, ...]] = Counter()
    for axis in {id(axis.transport): axis for axis in engine._mesh._lines.values()}.values():

        def gather(full: Any, part: Any, what: str, axis: Any = axis, plain: Any = axis.transport.gather) -> Any:
            if axis.size > 1:
                gathers[axis.ranks, full.nbytes - part.nbytes] += 1
            return plain(full, part, what)

        axis.transport.gather = gather  # type: ignore[method-assign]  # to count its messages
    for _ in range(2):
        engine.backward(engine(torch.randn(2, 64)))
        engine.step()
    said = engine.memory()
    assert measured(engine) == said.__dict__
    engine.close()
    lines = engine._mesh._lines.values()
    assert transport != "sockets" or all(
        getattr(axis.transport, "_group", 0) is None for axis in lines if axis.size > 1
    ), "see World.leave"
    return said.__dict__, gathers


def test_every_pair_holds_all_parameters_and_every_rank_a_quarter_of_the_states(ranks: RankPool) -> None:
    """bf16: 2 bytes of a parameter, 2 of its gradient, 12 of master weight and moments."""
    found = ranks(4, bytes_and_gathers, "sockets", PAIRS)
    unit = 2 * EVEN_NUMEL // 4  # bytes of each of the four matrices
    for rank, (said, gathers) in enumerate(found):
        assert said["parameter_bytes"] == 2 * EVEN_NUMEL // 2
        assert said["optimizer_bytes"] == 12 * EVEN_NUMEL // 4
        assert said["gradient_bytes"] == 2 * EVEN_NUMEL // 4
        pair, others = ((0, 1), (2, 3))[rank // 2], (rank % 2, rank % 2 + 2)
        assert {key: count for key, count in gathers.items() if key[0] == others} == {(others, unit // 4): 4}, (
            "to the other pair goes, once a step, what was updated"
        )
        assert {key[0] for key in gathers} == {pair, others} and {key[1] for key in gathers if key[0] == pair} == {
            unit // 2
        }


def test_ranks_that_share_memory_have_one_copy_in_any_case(ranks: RankPool) -> None:
    for said, _ in ranks(4, bytes_and_gathers, "shared_memory", PAIRS):
        assert said["parameter_bytes"] == 2 * EVEN_NUMEL // 4
        assert said["optimizer_bytes"] == 12 * EVEN_NUMEL // 4


def notes_at_start(zero: dict[str, Any]) -> list[str]:
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("lowtide")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    config = {**config_of(3, "shared_memory", is_mixed=False), "zero_optimization": {"stage": 3, **zero}}
    lowtide.initialize(Even(), config).close()
    logger.removeHandler(handler)
    logger.setLevel(before)
    return [text for text in found if "zero_hpz_partition_size" in text]


def test_ranks_that_share_memory_are_told_that_it_is_idle(ranks: RankPool) -> None:
    assert ranks(4, notes_at_start, PAIRS)[0] == [
        "config: zero_optimization.zero_hpz_partition_size: 2 has no effect here: its ranks share the memory of a "
        "host, with a single copy of the parameters, so nothing is gathered"
    ]
    assert ranks(4, notes_at_start, {})[0] == []


# -- checkpoints ----------------------------------------------------------------------------------------------------

TRIP = Case(models.short_gpt, models.token_batch, clip=0.5)


def test_checkpoints_go_to_other_worlds_and_come_back(ranks: RankPool, tmp_path: Path) -> None:
    plain, paired = both(TRIP, "sockets")
    saved: dict[str, Continuation] = {
        "pairs": ranks(4, save_and_go_on, paired, tmp_path, 4, "pairs")[0],
        "two": ranks(2, save_and_go_on, plain, tmp_path, 2, "two")[0],
    }
    for tag, case, size in (("pairs", TRIP.at(1), 2), ("two", paired, 4)):
        loaded = ranks(size, load_and_go_on, case, tmp_path, size, tag)[0]
        assert sorted(loaded.restored) == sorted(saved[tag].restored)
        for name, value in saved[tag].restored.items():
            assert torch.equal(loaded.restored[name], value), (tag, size, name)
        assert loaded.losses == pytest.approx(saved[tag].losses, rel=1e-4)
