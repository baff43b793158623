"""`gathered` shows full parameters, and takes changes of them into shards and master weights of every rank."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from tests.kit import models
from tests.kit.grids import pairs
from tests.kit.ranks import RankPool
from tests.kit.training import ADAMW, Case, adamw, share_of

STAGES = (0, 1, 2, 3)
ROUTES = ("shared_memory", "sockets")


def of_two_blocks() -> nn.Module:
    return models.TinyGPT(layers=2).double()


CASE = Case(of_two_blocks, models.token_batch, accumulation=1)


def change(model: nn.Module) -> None:
    """A surgery on three parameters, in each of the ways in which users write it."""
    gpt: Any = model
    with torch.no_grad():
        gpt.head.weight[3:290] = 0.25
        gpt.blocks[0].up.weight.mul_(2)
        nn.init.constant_(gpt.blocks[1].norm.bias, 0.5)


def changed_params(model: nn.Module) -> list[nn.Parameter]:
    gpt: Any = model
    return [gpt.head.weight, gpt.blocks[0].up.weight, gpt.blocks[1].norm.bias]


def train_and_change(case: Case, everything: bool) -> tuple[list[float], dict[str, Tensor], list[Tensor]]:
    """A step, a change inside `gathered`, two steps. Also what `gathered` shows before and after the change."""
    torch.manual_seed(0)
    engine = lowtide.initialize(case.build(), case.as_config())
    params = changed_params(engine.module)
    losses, seen = [], []
    for step in range(3):
        if step == 1:
            with engine.gathered(*params):
                seen += [param.detach().clone() for param in params]
            with engine.gathered(*([] if everything else params), modify=True):
                change(engine.module)
            with engine.gathered():
                seen += [param.detach().clone() for param in params]
        losses.append(engine.train_step(share_of(case.global_batch(step, engine.world_size))).loss.item())
    state = engine.state_dict()
    engine.close()
    return losses, state, seen


def train_and_change_all(cases: list[tuple[Case, bool]]) -> list[Any]:
    return [train_and_change(case, everything) for case, everything in cases]


def expected(case: Case, world_size: int) -> tuple[list[float], dict[str, Tensor], list[Tensor]]:
    torch.manual_seed(0)
    model = case.build()
    optimizer = adamw(model.parameters())
    losses, seen = [], []
    for step in range(3):
        if step == 1:
            seen += [param.detach().clone() for param in changed_params(model)]
            change(model)
            seen += [param.detach().clone() for param in changed_params(model)]
        loss = model(*case.global_batch(step, world_size))
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses, model.state_dict(), seen


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_changes_reach_every_shard(ranks: RankPool, world_size: int) -> None:
    """Over four ranks one of the parameters fills the third's shard, and reaches into those beside it."""
    transports, stages = ROUTES if world_size == 2 else ("auto",), {1: (0, 3), 2: STAGES, 4: (3,)}[world_size]
    grid = pairs(transports, stages, (False, True)) if world_size > 1 else pairs(transports, stages, (True,))
    cases = [
        (CASE.at(stage, config={"communication": {"transport": transport}}), all_) for transport, stage, all_ in grid
    ]
    losses, state, seen = expected(CASE, world_size)
    results = ranks(world_size, train_and_change_all, cases)
    for found_losses, found_state, _ in results[0]:
        torch.testing.assert_close(found_losses, losses, rtol=1e-10, atol=0)
        torch.testing.assert_close(found_state, dict(state), rtol=1e-9, atol=1e-9)
    for rank_results in results:
        for _, _, found_seen in rank_results:
            torch.testing.assert_close(found_seen, seen, rtol=1e-9, atol=1e-9)


def change_master(stage: int, transport: str) -> list[Any]:
    """Small steps after a change show whether the float32 master weights have its exact value."""
    torch.manual_seed(0)
    optimizer = {"type": "sgd", "params": {"lr": 1.0}}
    case = Case(models.mlp, models.vector_batch, stage, config={"bf16": {"enabled": True}, "optimizer": optimizer})
    engine = lowtide.initialize(
        case.build(),
        {**case.as_config(), "communication": {"transport": transport}},
        loss_fn=lambda loss, batch: loss * 2**-14,
    )
    weight: Any = engine.module.last.weight  # type: ignore[union-attr]
    with engine.gathered(weight, modify=True), torch.no_grad():
        weight.fill_(1.0)
    for step in range(2):
        engine.train_step(share_of(case.global_batch(step, engine.world_size)))
    master = [
        shard.master[param_shard.offset_in_shard : param_shard.offset_in_shard + param_shard.numel].clone()
        for shard in engine.optimizer.shards
        for param_shard in shard.group.param_shards
        if shard.group.params[param_shard.index] is weight
    ]
    with engine.gathered(weight):
        return [weight.detach().clone(), master]


def test_changes_reach_the_master_weights_of_bf16(ranks: RankPool) -> None:
    for transport in ROUTES:
        for stage in STAGES:
            for weight, master in ranks(2, change_master, stage, transport):
                assert weight.dtype == torch.bfloat16
                torch.testing.assert_close(weight.float(), torch.ones(3, 7), rtol=0, atol=1 / 128)
                for part in master:
                    assert part.dtype == torch.float32 and not torch.equal(part, torch.ones_like(part))
                    torch.testing.assert_close(part, torch.ones_like(part), rtol=0, atol=2e-3)


def test_parameters_of_another_model_are_refused() -> None:
    engine = lowtide.initialize(models.mlp(), {"train_micro_batch_size_per_gpu": 1, "optimizer": ADAMW})
    words = "gathered: expected parameters of the engine's module, found 1 that are not; pass the parameters themselves"
    with pytest.raises(ValueError, match=words), engine.gathered(nn.Parameter(torch.zeros(3))):
        pass


def add_one(weight: Any) -> None:
    with torch.no_grad():
        weight.add_(1.0)


def change_one_element_through_data(weight: Any) -> None:
    weight.data[1, 2] = 0.25


def assign_data(weight: Any) -> None:
    weight.data = torch.zeros_like(weight)


def change_without_modify(stages: tuple[int, ...], config: dict[str, Any], change: Any, rank: int) -> list[str]:
    """The errors where one rank changes what it is shown. Training goes on after them."""
    found = []
    for stage in stages:
        engine = lowtide.initialize(models.mlp(), CASE.at(stage, config=config).as_config())
        weight: Any = engine.module.last.weight  # type: ignore[union-attr]
        with pytest.raises(ValueError) as error, engine.gathered(*([weight] if stage % 2 else [])):
            if engine.rank == rank:
                change(weight)
        found.append(str(error.value))
        engine.close()
    return found


@pytest.mark.parametrize(
    ("change", "config"),
    [
        (add_one, {}),
        (change_one_element_through_data, {"bf16": {"enabled": True}}),
        (change_one_element_through_data, {}),
        (assign_data, {}),
    ],
)
def test_a_change_without_modify_is_an_error_on_every_rank(
    ranks: RankPool, change: Any, config: dict[str, Any]
) -> None:
    words = (
        "parameter 'last.weight' was changed inside engine.gathered() (zero.GatheredParameters in lowtide.deepspeed)"
    )
    ends = (
        ", but not all shards and master weights see it: use engine.gathered(parameter, modify=True), and change it on "
        "every rank alike (or GatheredParameters(parameter, modifier_rank=0), which takes that rank's values). Load "
        "the old values again if you need them"
    )
    for transport, stages in zip(ROUTES, ((0, 3), (1, 2)), strict=True):
        by_rank = ranks(
            2, change_without_modify, stages, {**config, "communication": {"transport": transport}}, change, 1
        )
        for texts in by_rank:
            assert all(text in (f"{words} on rank {rank}{ends}" for rank in (0, 1)) for text in texts), texts
    assert all(text.startswith(f"{words} on rank 1, but") for text in by_rank[0])  # by sockets nobody else sees it


def test_a_forward_inside_of_gathered_is_no_change(ranks: RankPool) -> None:
    ranks(2, evaluate_inside, STAGES)


def evaluate_inside(stages: tuple[int, ...]) -> None:
    for stage in stages:
        engine = lowtide.initialize(models.mlp(), CASE.at(stage).as_config())
        with engine.gathered():
            engine.eval_step(models.vector_batch(0, 2))
        engine.close()


def interrupt_changes(transport: str) -> list[tuple[bool, str, bool]]:
    return [interrupt_a_change(stage, transport) for stage in STAGES]


def interrupt_a_change(stage: int, transport: str) -> tuple[bool, str, bool]:
    """Does an error inside leave all as it was; what a call inside says; does a step inside of a look work."""
    case = CASE.at(stage, config={"communication": {"transport": transport}})
    torch.manual_seed(0)
    engine = lowtide.initialize(case.build(), case.as_config())
    batch = share_of(case.global_batch(0, engine.world_size))
    before, text = engine.state_dict(), ""
    with pytest.raises(KeyError), engine.gathered(modify=True):
        change(engine.module)
        raise KeyError
    after = engine.state_dict()
    with engine.gathered(*changed_params(engine.module), modify=True):
        try:
            engine(*batch)
        except RuntimeError as error:
            text = str(error)
    with engine.gathered():
        changes = not engine.train_step(batch).skipped
    engine.train_step(batch)
    engine.close()
    return all(torch.equal(before[name], after[name]) for name in before), text, changes


@pytest.mark.parametrize(("world_size", "transport"), [(1, "auto"), (2, "shared_memory"), (2, "sockets")])
def test_an_error_inside_of_a_change_leaves_all_as_it_was(ranks: RankPool, world_size: int, transport: str) -> None:
    for by_stage in ranks(world_size, interrupt_changes, transport):
        for is_same, text, changes in by_stage:
            assert is_same and changes
            assert "found engine.gathered(modify=True)" in text
