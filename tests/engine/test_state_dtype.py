"""Narrow optimizer states: every stage agrees, they take the bytes that they should, and checkpoints keep them."""

from pathlib import Path
from typing import Any

import pytest
import torch

import lowtide
from tests.engine.saving import load_and_go_on, save_and_go_on
from tests.engine.test_optimizer_offload import Wide, offloaded
from tests.kit.models import mlp_float64, short_gpt, token_batch, vector_batch
from tests.kit.ranks import RankPool
from tests.kit.training import ADAMW, Case, refusal, settings, share_of, train_all

RULES: dict[str, dict[str, Any]] = {
    "adamw": ADAMW["params"],
    "adagrad": {"lr": 1e-2, "initial_accumulator_value": 0.5},
    "lion": {"lr": 1e-3},
    "sgd": {"lr": 1e-2, "momentum": 0.9},
}


def case_of(state_dtype: str, rule: str = "adamw", **config: Any) -> Case:
    optimizer = {"type": rule, "params": {**RULES[rule], "state_dtype": state_dtype}}
    return Case(short_gpt, token_batch, clip=0.5, config={"optimizer": optimizer, **config})


def test_they_are_narrow_and_not_float32(ranks: RankPool) -> None:
    wide, *narrow = ranks(2, train_all, [case_of(name).at(2) for name in ("fp32", "bf16", "int8")])[0]
    assert wide.losses != narrow[0].losses != narrow[1].losses != wide.losses
    for one in narrow:
        torch.testing.assert_close(one.losses, wide.losses, rtol=2e-2, atol=0.0)


def state_bytes(state_dtype: str) -> int:
    config = settings(1, optimizer={"type": "adamw", "params": {"state_dtype": state_dtype}})
    with lowtide.initialize(Wide(64), config) as engine:
        engine.train_step(share_of(vector_batch(0, 2 * engine.world_size)))
        return engine.memory().optimizer_bytes


def test_bytes_of_two_moments(ranks: RankPool) -> None:
    # Two units of 64 x 64 + 64 = 4160 elements, 3 blocks of 1024 on each of 2 ranks, and a rest of 579, one block.
    numel = (3 + 3 + 1) * 1024
    expected = {"fp32": 8 * numel, "bf16": 4 * numel, "int8": 2 * (numel + numel // 256 * 4)}
    for state_dtype, nbytes in expected.items():
        assert ranks(2, state_bytes, state_dtype) == [nbytes, nbytes], state_dtype


@pytest.mark.parametrize(
    ("written", "read", "place"),
    [("bf16", "bf16", "memory"), ("int8", "int8", "file"), ("int8", "fp32", "memory"), ("bf16", "int8", "memory")],
)
def test_a_checkpoint_goes_on(ranks: RankPool, tmp_path: Path, written: str, read: str, place: str) -> None:
    config: Any = {"bf16": {"enabled": True}} if written == read else {}
    before = ranks(2, save_and_go_on, case_of(written, **config).at(1), tmp_path / "saved", 2)[0]
    target = case_of(read, **config).at(3)
    target = target if place == "memory" else offloaded(target, tmp_path)
    after = ranks(2, load_and_go_on, target, tmp_path / "saved", 2)[0]
    if written == read == "bf16":
        assert after.differences(before) == []
    elif written == read:  # a block whose largest value was rounded up to its scale gets the next scale: it loses a bit
        for name, value in before.restored.items():
            torch.testing.assert_close(after.restored[name], value, rtol=0, atol=float(value.abs().max()) * 2.0**-13)
    torch.testing.assert_close(after.losses, before.losses, rtol=1e-3 if written == read else 2e-2, atol=0.0)


def test_float64_parameters_have_wide_states() -> None:
    config = settings(optimizer={"type": "adamw", "params": {"state_dtype": "int8"}})
    text = refusal(lowtide.initialize, mlp_float64(), config)
    assert 'state_dtype: "int8" needs parameters of at most float32, found float64 in' in text
