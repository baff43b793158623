"""Adapters on a base that is only read: as plain torch trains them, at every stage, and nothing taken for the base."""

from typing import Any
from unittest import mock

import pytest
import torch

from lowtide.comm import World
from lowtide.zero.group import ShardedGroup
from tests.engine.adapted import ByHand, bytes_at_rest, engine_of, half_base, lora, train_all, train_plainly
from tests.kit import models
from tests.kit.ranks import RankPool
from tests.kit.training import Case
from tests.kit.training import train_all as train_cases

pytest.importorskip("peft")

SOCKETS = {"communication": {"transport": "sockets"}}
ON_HOST = {"zero_optimization": {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}}
RECOMPUTED = {"activation_checkpointing": {"every": 1}}
STEPS = 2


def in_files(folder: Any) -> dict[str, Any]:
    nvme = {"device": "nvme", "nvme_path": str(folder)}
    return {"zero_optimization": {"offload_param": nvme, "offload_optimizer": nvme}}


def test_lora_trains_as_by_plain_torch_at_every_stage(ranks: RankPool, tmp_path: Any) -> None:
    runs: list[Any] = [(lora, stage, {}) for stage in (0, 2, 3)]
    runs += [(lora, 3, RECOMPUTED | SOCKETS), (lora, 3, in_files(tmp_path)), (lora, 3, {"accumulation": 2})]
    runs += [(lora, 1, {"accumulation": 2, "parallel": {"pipeline": 2}, "pipeline": {"schedule": "1f1b"}})]
    found = ranks(2, train_all, runs, STEPS)[0]
    losses, state = train_plainly(lora, STEPS)
    for (_, stage, config), (own_losses, own_state) in zip(runs, found, strict=True):
        torch.testing.assert_close(own_losses, losses, rtol=0, atol=1e-6, msg=f"{stage} {config}")
        torch.testing.assert_close(own_state, state, rtol=0, atol=1e-5)
    for (own_losses, own_state), (_, stage, _) in zip(found[1:5], runs[1:5], strict=True):
        assert own_losses == found[0][0], stage
        assert all(torch.equal(value, found[0][1][name]) for name, value in own_state.items()), stage


def test_a_bf16_base_keeps_its_dtype_and_its_adapters_theirs(ranks: RankPool) -> None:
    runs: list[Any] = [(half_base, stage, SOCKETS) for stage in (0, 3)]
    (losses, state), (_, at_3) = ranks(2, train_all, runs, 2)[0]
    expected, _ = train_plainly(half_base, 2)
    torch.testing.assert_close(losses, expected, rtol=0, atol=2e-2)
    assert {value.dtype for name, value in state.items() if "lora" in name} == {torch.float32}
    assert {value.dtype for name, value in state.items() if "lora" not in name} == {torch.bfloat16}
    assert all(torch.equal(value, state[name]) for name, value in at_3.items())


@pytest.mark.parametrize("config", [SOCKETS, {"bf16": {"enabled": True}}, ON_HOST], ids=["sockets", "bf16", "offload"])
def test_the_base_has_no_masters_gradients_or_states(ranks: RankPool, config: dict[str, Any]) -> None:
    for stage in (0, 3):
        for held, said, trained in ranks(2, bytes_at_rest, lora, stage, config):
            assert held == said
            shards = 2 if stage else 1
            padding = 1024 * 2 * 8  # elements: a block for each rank and unit
            assert held["optimizer"] <= 12 * (trained // shards + padding)
            assert held["gradients"] <= 4 * (trained + padding)


def gathered_by_attaching() -> tuple[int, int, int]:
    """While a model is built with adapters and taken up: gathers, and bytes that are sent; and bytes of its buffers."""
    gathers: list[str] = []
    sent: list[int] = []

    def gather(group: Any, *args: Any) -> Any:
        gathers.append(group.plan.name)
        return original_gather(group, *args)

    def broadcast(world: Any, value: Any) -> Any:
        sent.append(value.nbytes)
        return original_broadcast(world, value)

    original_gather, original_broadcast = ShardedGroup.gather, World.broadcast_tensor
    with (
        mock.patch.object(ShardedGroup, "gather", gather),
        mock.patch.object(World, "broadcast_tensor", broadcast),
        engine_of(lora, 3, **SOCKETS) as engine,
    ):
        return len(gathers), sum(sent), sum(buffer.nbytes for buffer in engine.module.buffers())


def test_attaching_adapters_gathers_nothing(ranks: RankPool) -> None:
    for gathers, sent, of_buffers in ranks(2, gathered_by_attaching):
        assert gathers == 0
        assert sent == of_buffers


def test_adapters_by_hand_train_at_every_stage(ranks: RankPool) -> None:
    case = Case(ByHand, models.token_batch, steps=2)
    found = ranks(2, train_cases, [case.at(stage) for stage in range(4)])[0]
    assert [one.differences(found[0]) for one in found[1:]] == [[], [], []]
