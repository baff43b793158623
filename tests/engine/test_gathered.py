"""`gathered` takes changes into master weights, and refuses what other ranks would not see.

That its changes reach every shard is asked in `test_parameter_values.py`.
"""

from typing import Any

import pytest
import torch

from lowtide.zero.sequence import StateError
from tests.engine.test_parameter_values import OPERATED, operate
from tests.kit import models
from tests.kit.grids import pairs
from tests.kit.ranks import on_ranks
from tests.kit.training import Case, differences, refusal, start, take_step

STAGES = (0, 1, 2, 3)
ROUTES = ("shared_memory", "sockets")
CASE = Case(models.short_gpt_float64, models.token_batch)


def on(stage: int, transport: str, case: Case = CASE) -> Case:
    return case.at(stage, config={"communication": {"transport": transport}})


@on_ranks(2)
def test_changes_reach_the_master_weights_of_bf16() -> None:
    """Small steps after a change show whether the float32 master weights have its exact value."""
    config = {"bf16": {"enabled": True}, "optimizer": {"type": "sgd", "params": {"lr": 1.0}}}
    for stage, transport in zip(STAGES, ROUTES * 2, strict=True):
        case = on(stage, transport, Case(models.mlp, models.vector_batch, config=config))
        with start(case, loss_fn=lambda loss, batch: loss * 2**-14) as engine:
            weight = engine.module.get_parameter("last.weight")
            with engine.gathered(weight, modify=True), torch.no_grad():
                weight.fill_(1.0)
            for step in range(2):
                take_step(engine, case, step)
            with engine.gathered(weight):
                assert weight.dtype == torch.bfloat16
                torch.testing.assert_close(weight.float(), torch.ones(3, 7), rtol=0, atol=1 / 128)
            master, other = engine.full(weight), engine.full("first.weight")
            with engine.gathered(modify=True):
                assert not torch.equal(engine.module.get_parameter("first.weight").float(), other)
            assert torch.equal(engine.full("first.weight"), other)  # unchanged, it keeps what bfloat16 lacks
        assert master.dtype == torch.float32 and bool((master != 1.0).any())
        torch.testing.assert_close(master, torch.ones(3, 7), rtol=0, atol=2e-3)


def add_one(weight: Any) -> None:
    with torch.no_grad():
        weight.add_(1.0)


def change_one_element_through_data(weight: Any) -> None:
    weight.data[1, 2] = 0.25


def assign_data(weight: Any) -> None:
    weight.data = torch.zeros_like(weight)


@pytest.mark.parametrize(("transport", "stages"), [("shared_memory", (0, 3)), ("sockets", (1, 2))])
@on_ranks(2)
def test_a_change_without_modify_is_an_error_on_every_rank(transport: str, stages: tuple[int, ...]) -> None:
    """Rank 1 changes what it is shown."""
    told = [
        f"parameter 'last.weight' was changed inside engine.gathered() (zero.GatheredParameters in lowtide.deepspeed) "
        f"on rank {rank}, but not all shards and master weights see it: use engine.gathered(parameter, modify=True), "
        "and change it on every rank alike (or GatheredParameters(parameter, modifier_rank=0), which takes that rank's "
        "values). Load the old values again if you need them"
        for rank in ((0, 1) if transport == "shared_memory" else (1,))  # by sockets nobody else sees it
    ]
    changes = (add_one, change_one_element_through_data, assign_data)
    for stage, change_it, bf16 in pairs(stages, changes, (False, True)):
        case = Case(models.mlp, models.vector_batch, config={"bf16": {"enabled": bf16}})
        with start(on(stage, transport, case)) as engine:
            weight = engine.module.get_parameter("last.weight")
            with pytest.raises(ValueError) as error, engine.gathered(*([weight] if stage % 2 else [])):
                if engine.rank == 1:
                    change_it(weight)
            assert str(error.value) in told


@on_ranks(2)
def test_an_error_inside_of_a_change_leaves_all_as_it_was() -> None:
    """A call inside of a change is refused, and a step inside of a look works."""
    for stage, transport in zip(STAGES, ROUTES * 2, strict=True):
        case = on(stage, transport)
        with start(case) as engine:
            batch = case.share(engine, 0)
            params = [engine.module.get_parameter(name) for name in OPERATED]
            with engine.gathered(*params, modify=True):
                assert "found engine.gathered(modify=True)" in refusal(engine, *batch, kind=StateError)
            with engine.gathered():
                engine.eval_step(batch)
                assert not engine.train_step(batch).skipped
            before = engine.state_dict()
            with pytest.raises(KeyError), engine.gathered(modify=True):
                operate(engine.module)
                raise KeyError
            assert differences(before, engine.state_dict()) == []
            engine.train_step(batch)
