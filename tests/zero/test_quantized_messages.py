"""Messages of few bits: one training at every stage and on every transport that sends; errors do not add up."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lowtide
from lowtide.zero.group import ShardedGroup
from tests.engine.saving import load_all, save_all
from tests.kit import models
from tests.kit.ranks import RankPool, on_ranks
from tests.kit.training import Case, assert_alike, logged, take_step, train_all, trained

BASE = Case(models.short_gpt, models.token_batch, clip=0.3, steps=2)
BF16 = {"bf16": {"enabled": True}}


def at(stage: int, transport: str = "sockets", zero: Any = (), case: Case = BASE, **more: Any) -> Case:
    """Four ranks that stand for two hosts, with gradients of 4 bits between these. more: of the section."""
    communication = {"transport": transport, "gradient_bits": 4, "ranks_of_host": 2, **more}
    return case.at(stage, config={"communication": communication, "zero_optimization": dict(zero)})


def test_a_backend_that_sums_sends_the_same_messages(ranks: RankPool) -> None:
    assert_alike(ranks(4, train_all, [at(3, transport, weight_bits=8) for transport in ("sockets", "native")])[0])


TIED = BASE.at(2, build=partial(models.TinyGPT, layers=1, tied=True), accumulation=2)
FP16 = BASE.at(1, config={"fp16": {"enabled": True, "initial_scale_power": 8}})
PIPED = BASE.at(1, build=partial(models.TinyGPT, layers=2), config={"parallel": {"pipeline": 2}}, accumulation=2)
OTHER_FORMS: dict[str, Case] = {
    "accumulation, tied": at(2, weight_bits=4, case=TIED),
    "hybrid": at(3, weight_bits=8, zero={"shard_size": 2}),
    "hpZ": at(3, weight_bits=4, zero={"zero_hpz_partition_size": 2}),
    "exact in a host, fp16": at(1, gradient_bits_in_host=None, weight_bits=8, case=FP16),
    "pipeline": at(1, weight_bits=4, ranks_of_host=1, case=PIPED),
}


def test_other_forms_train_as_they_do_with_whole_messages(ranks: RankPool) -> None:
    """Within the noise of four bits."""
    whole = {"communication": {"transport": "sockets"}}
    work = [one for case in OTHER_FORMS.values() for one in (case, case.at(case.stage, config=whole))]
    outcomes = ranks(4, train_all, work)[0]
    for name, one, plain in zip(OTHER_FORMS, outcomes[::2], outcomes[1::2], strict=True):
        assert one.differences(plain) != [], name
        assert one.losses == pytest.approx(plain.losses, rel=0.03), name


def groups_of(engine: lowtide.Engine) -> list[ShardedGroup]:
    return [group for unit in engine._runner.passes.units for group in unit.groups]


def copies_and_errors(case: Case) -> tuple[list[Tensor], list[float]]:
    """Every rank's copy of all parameters in the end, and after each step the largest error of this rank's own part,
    over the bound of its last difference alone."""
    errors = []
    with trained(case, 0) as engine:
        for step in range(6):
            before = [group.full[group.own].clone() for group in groups_of(engine)]
            take_step(engine, case, step)
            for old, group in zip(before, groups_of(engine), strict=True):
                bound = (group.shard - old).view(-1, 128).abs().amax(1, keepdim=True) / 14
                error = (group.shard - group.full[group.own]).view(-1, 128).abs()
                errors.append(float((error / (bound + 1e-9)).max()))
        return [group.full.clone() for group in groups_of(engine)], errors


def test_copies_are_the_same_on_all_ranks_and_errors_do_not_add_up(ranks: RankPool) -> None:
    found = ranks(2, copies_and_errors, at(2, weight_bits=4))
    for copies, errors in found:
        assert all(map(torch.equal, copies, found[0][0]))
        assert 0.5 < max(errors) < 1.01, "half of a scale of the last difference, whatever came before"


def test_a_resumed_training_has_the_bits_of_one_without_a_break(ranks: RankPool, tmp_path: Path) -> None:
    case = at(3, weight_bits=4, ranks_of_host=1, case=BASE.at(3, config=BF16))
    elsewhere = at(1, gradient_bits=None, ranks_of_host=1)
    (saved,) = ranks(2, save_all, [case], tmp_path, 2)[0]
    (loaded,) = ranks(2, load_all, [("2-3", case)], tmp_path, 2)[0]
    assert loaded.differences(saved) == []
    (found,) = ranks(1, load_all, [("2-3", elsewhere)], tmp_path, 1)[0]
    assert found.state_differences(saved) == [], "what is saved is exact"


@on_ranks(2)
def test_what_is_shown_is_exact() -> None:
    """What the engine shows of parameters is what shards have."""
    with trained(at(3, weight_bits=4), 2) as engine:
        name, param = next(iter(engine.module.named_parameters()))
        shard_values = engine.full(param)
        with engine.gathered(param):
            assert torch.equal(param.detach(), shard_values)
        state = engine.state_dict()
        assert engine.rank > 0 or torch.equal(state[name], shard_values)


def notes_at_start(case: Case) -> list[str]:
    with logged() as found, trained(case, 0):
        return [text for text in found if "_bits" in text]


def test_ranks_that_share_memory_send_nothing_and_are_told_so(ranks: RankPool) -> None:
    case = at(2, "shared_memory", weight_bits=8)
    why = "has no effect here: ranks of the same host share memory, and send nothing"
    said = [f"config: communication.weight_bits: 8 {why}", f"config: communication.gradient_bits: 4 {why}"]
    assert ranks(2, notes_at_start, case) == [said, []]
    assert_alike(ranks(2, train_all, [at(2, "shared_memory", gradient_bits=None), case])[0])


def train_with_a_nan(case: Case) -> None:
    with trained(case, 0) as engine:
        if engine.rank == 1:
            param = engine.module.get_parameter("blocks.0.up.weight")
            param.register_hook(lambda gradient: gradient.index_fill(0, torch.tensor([3]), torch.nan))
        take_step(engine, case, 0)


def test_a_gradient_that_is_not_finite_is_found_with_its_name(ranks: RankPool) -> None:
    for failure in ranks.fails(2, train_with_a_nan, at(2, ranks_of_host=1)):
        assert "a NaN or infinite value in the gradient of 'blocks.0.up.weight'" in failure.text
