"""Shards within groups of ranks, replicas between them; and hpZ, parameters in groups and states over all ranks."""

import time
from collections import Counter
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import lowtide
from lowtide.comm.axis import Terms
from lowtide.comm.native import NativeTransport
from lowtide.comm.shared_segment import REDUCED, SharedCounters
from tests.engine.test_memory import EVEN_NUMEL, Even, config_of, measured
from tests.kit import models
from tests.kit.ranks import RankPool, on_ranks
from tests.kit.training import Case, Outcome, assert_alike, logged, train, trained

HYBRID = {"zero_optimization": {"shard_size": 2}}
MLP = Case(models.mlp, models.vector_batch, clip=0.3)


def train_hearing_late(case: Case) -> Outcome:
    hears = SharedCounters.has_come

    def hears_late(counters: SharedCounters, counter: int, target: int) -> bool:
        time.sleep(2e-4)
        return counter != REDUCED and hears(counters, counter, target)

    with mock.patch.object(SharedCounters, "has_come", hears_late):
        return train(case)


def test_what_a_rank_does_early_waits_for_nothing(ranks: RankPool) -> None:
    """A rank that hears late of a sum must not go on with a newer one: that one needs the memory of the older one."""
    case = MLP.at(2, build=partial(models.Mlp, 12), config=HYBRID, steps=2)
    assert_alike([ranks(4, train_hearing_late, case)[0], ranks(4, train, case)[0]])


@pytest.mark.parametrize(("size", "stage", "config"), [(2, 0, {}), (4, 2, HYBRID)])
@on_ranks("size")
def test_a_backend_sums_over_replicas_where_the_sum_lies(size: int, stage: int, config: dict[str, Any]) -> None:
    """That it gives the bits of other transports is asked in tests/laws."""
    all_reduce, sums = NativeTransport.all_reduce, list[bool]()

    def in_place(transport: NativeTransport, slot: Tensor, out: Tensor, what: str) -> Terms:
        sums.append(slot.data_ptr() == out.data_ptr())
        return all_reduce(transport, slot, out, what)

    case = MLP.at(stage, config={**config, "communication": {"transport": "native"}})
    with mock.patch.object(NativeTransport, "all_reduce", in_place), trained(case, 2):
        assert sums and all(sums)


def step_after_two_backwards(cases: list[Case]) -> list[float]:
    """Norms. Both backwards are the last of their step, as far as is known when they run."""
    norms = []
    for case in cases:
        torch.manual_seed(0)
        with lowtide.initialize(case.build(), case.as_config()) as engine:
            for number in range(2):
                engine(*models.vector_batch_float64(10 * engine.rank + number, 2)).backward()
            norms.append(engine.step().grad_norm.item())
    return norms


def test_another_backward_adds_to_a_sum_that_was_final(ranks: RankPool) -> None:
    torch.manual_seed(0)
    model = models.mlp_float64()
    for number in (10 * rank + number for rank in range(4) for number in range(2)):
        (model(*models.vector_batch_float64(number, 2)) / 4).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), torch.inf).item()
    case = Case(models.mlp_float64, models.vector_batch_float64)
    transports = [{"communication": {"transport": transport}} for transport in ("shared_memory", "sockets", "native")]
    cases = [
        one for transport in transports for one in (case.at(0, config=transport), case.at(2, config=transport | HYBRID))
    ]
    found = ranks(4, step_after_two_backwards, cases)[0]
    assert found == pytest.approx([norm] * 6, rel=1e-6)  # it is shown in float32


# -- hpZ of ZeRO++ ----------------------------------------------------------------------------------------------------

PAIRS = {"zero_hpz_partition_size": 2}


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
    unit = 2 * EVEN_NUMEL // 4  # bytes of each of the four matrices
    for rank, (said, gathers) in enumerate(ranks(4, bytes_and_gathers, "sockets", PAIRS)):
        assert said == {
            "parameter_bytes": 2 * EVEN_NUMEL // 2,
            "optimizer_bytes": 12 * EVEN_NUMEL // 4,
            "gradient_bytes": 2 * EVEN_NUMEL // 4,
        }
        pair, others = ((0, 1), (2, 3))[rank // 2], (rank % 2, rank % 2 + 2)
        # To the other pair goes, once a step, what was updated.
        assert {key: count for key, count in gathers.items() if key[0] == others} == {(others, unit // 4): 4}
        assert set(gathers) == {(pair, unit // 2), (others, unit // 4)}


def notes_at_start(zero: dict[str, Any]) -> list[str]:
    config = {**config_of(3, "shared_memory", is_mixed=False), "zero_optimization": {"stage": 3, **zero}}
    with logged() as found:
        lowtide.initialize(Even(), config).close()
    return [text for text in found if "zero_hpz_partition_size" in text]


def test_ranks_that_share_memory_have_one_copy_in_any_case_and_are_told(ranks: RankPool) -> None:
    for said, _ in ranks(4, bytes_and_gathers, "shared_memory", PAIRS):
        assert (said["parameter_bytes"], said["optimizer_bytes"]) == (2 * EVEN_NUMEL // 4, 12 * EVEN_NUMEL // 4)
    assert ranks(4, notes_at_start, PAIRS)[0] == [
        "config: zero_optimization.zero_hpz_partition_size: 2 has no effect here: its ranks share the memory of a "
        "host, with a single copy of the parameters, so nothing is gathered"
    ]
    assert ranks(4, notes_at_start, {})[0] == []
