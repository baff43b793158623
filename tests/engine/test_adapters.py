"""Adapters on a base that is only read: as plain torch trains them, at every stage, and nothing is gathered for it."""

from typing import Any
from unittest import mock

import pytest
import torch

from lowtide.comm import World
from lowtide.zero.group import ShardedGroup
from tests.engine.adapted import ByHand, engine_of, half_base, lora, train_all, train_plainly
from tests.kit import models
from tests.kit.ranks import RankPool
from tests.kit.training import Case, differences, train_all as train_cases

pytest.importorskip("peft")

SOCKETS = {"communication": {"transport": "sockets"}}
RECOMPUTED = {"activation_checkpointing": {"every": 1}}
STEPS = 2


def in_files(folder: Any) -> dict[str, Any]:
    nvme = {"device": "nvme", "nvme_path": str(folder)}
    return {"zero_optimization": {"offload_param": nvme, "offload_optimizer": nvme}}


def test_lora_trains_as_by_plain_torch_at_every_stage(ranks: RankPool, tmp_path: Any) -> None:
    runs: list[Any] = [(lora, 0, {}), (lora, 3, RECOMPUTED | SOCKETS | in_files(tmp_path))]
    runs += [(lora, 1, {"accumulation": 2, "parallel": {"pipeline": 2}, "pipeline": {"schedule": "1f1b"}})]
    found = ranks(2, train_all, runs, STEPS)[0]
    losses, state = train_plainly(lora, STEPS)
    for (_, stage, config), (own_losses, own_state) in zip(runs, found, strict=True):
        torch.testing.assert_close(own_losses, losses, rtol=0, atol=1e-6, msg=f"{stage} {config}")
        torch.testing.assert_close(own_state, state, rtol=0, atol=1e-5)
    (own_losses, own_state), (at_3, state_at_3), _ = found
    assert own_losses == at_3 and differences(own_state, state_at_3) == []


def test_a_bf16_base_keeps_its_dtype_and_its_adapters_theirs(ranks: RankPool) -> None:
    runs: list[Any] = [(half_base, stage, SOCKETS) for stage in (0, 3)]
    (losses, state), (_, at_3) = ranks(2, train_all, runs, 2)[0]
    expected, _ = train_plainly(half_base, 2)
    torch.testing.assert_close(losses, expected, rtol=0, atol=2e-2)
    assert {value.dtype for name, value in state.items() if "lora" in name} == {torch.float32}
    assert {value.dtype for name, value in state.items() if "lora" not in name} == {torch.bfloat16}
    assert differences(at_3, state) == []


def gathered_by_attaching() -> tuple[int, int, int]:
    """While a model is built with adapters and taken up: gathers, and bytes that are sent; and bytes of its buffers."""
    with (
        mock.patch.object(ShardedGroup, "gather", autospec=True, side_effect=ShardedGroup.gather) as gather,
        mock.patch.object(World, "broadcast_tensor", autospec=True, side_effect=World.broadcast_tensor) as broadcast,
        engine_of(lora, 3, **SOCKETS) as engine,
    ):
        sent = sum(call.args[1].nbytes for call in broadcast.call_args_list)
        return gather.call_count, sent, sum(buffer.nbytes for buffer in engine.module.buffers())


def test_attaching_adapters_gathers_nothing(ranks: RankPool) -> None:
    for gathers, sent, of_buffers in ranks(2, gathered_by_attaching):
        assert gathers == 0
        assert sent == of_buffers


def test_adapters_by_hand_train_at_every_stage(ranks: RankPool) -> None:
    case = Case(ByHand, models.token_batch, steps=2)
    found = ranks(2, train_cases, [case.at(stage) for stage in range(4)])[0]
    assert [one.differences(found[0]) for one in found[1:]] == [[], [], []]
