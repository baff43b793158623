"""Optimizers that look at whole parameters: the same at every stage and number of ranks, wherever their states rest."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from lowtide.engine.config.config import Config, ConfigError
from tests.engine.saving import Trip, load_trips, save_trips
from tests.engine.test_optimizer_offload import offloaded
from tests.models import tiny_gpt, token_batch
from tests.ranks import RankPool
from tests.zero.apart import apart
from tests.zero.test_without_masters import assert_alike, same_rows
from tests.zero.training import Case, train_all

LAMB: dict[str, Any] = {"optimizer": {"type": "lamb", "params": {"lr": 1e-2, "weight_decay": 0.1}}}


def case_of(**config: Any) -> Case:
    return Case(tiny_gpt, token_batch, clip=0.5, config={**LAMB, **config})


@pytest.mark.parametrize("masters", [True, False, "kahan", "int8"])
def test_stages_and_places_have_the_same_bits(ranks: RankPool, tmp_path: Path, masters: bool | str) -> None:
    case = case_of(bf16={"enabled": True, "masters": masters})
    half = {"zero_optimization": {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}}
    cases = [case, case.at(1), case.at(3), offloaded(case.at(2), tmp_path), case.at(1, config=half)]
    outcomes = ranks(2, train_all, cases)[0]
    assert_alike([*outcomes, *ranks(2, apart, train_all, cases[3:4])[0]], masters)


def test_any_number_of_ranks_has_the_same_bits(ranks: RankPool) -> None:
    case = Case(tiny_gpt, same_rows, config=LAMB)
    found = [ranks(size, train_all, [case.at(stage)])[0][0] for size, stage in ((1, 0), (2, 3), (4, 2))]
    for other in found[1:]:
        other.norms = found[0].norms
    assert_alike(found, "ranks")


def test_hybrid_shards_and_pipelines(ranks: RankPool) -> None:
    case = Case(tiny_gpt, same_rows, accumulation=2, config=LAMB)
    hybrid = case.at(3, config={"zero_optimization": {"shard_size": 2}})
    piped = case.at(2, config={"parallel": {"pipeline": 2}})
    plain, *others = ranks(4, train_all, [case.at(1), hybrid, piped])[0]
    for other in others:
        torch.testing.assert_close(other.losses, plain.losses, rtol=1e-5, atol=0)
        for name, value in plain.state.items():
            torch.testing.assert_close(other.state[name], value, rtol=1e-5, atol=1e-6)


def test_a_checkpoint_goes_on_at_another_stage(ranks: RankPool, tmp_path: Path) -> None:
    trip = Trip(case_of().at(1), offloaded(case_of().at(3), tmp_path))
    (before,) = ranks(2, save_trips, [trip], tmp_path, 2)[0]
    (after,) = ranks(2, load_trips, [trip], tmp_path, 2)[0]
    assert after.differences(before) == []


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"zero_optimization": {"update_in_backward": True}}, "update_in_backward: .* needs false, found true"),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "cpu", "overlap": "delayed"}}},
            'overlap: .* needs "none", found "delayed"',
        ),
        ({"parallel": {"tensor": 2}}, "parallel.tensor: .* needs 1, found 2"),
        ({"parallel": {"expert": 2}}, "parallel.expert: .* needs 1, found 2"),
    ],
)
def test_what_does_not_go_together(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Config.load({**LAMB, **config})


def test_bounds_must_be_in_order() -> None:
    words = "min_coeff: expected at most max_coeff (10), found 20"
    with pytest.raises(ConfigError, match=re.escape(words)):
        Config.load({"optimizer": {"type": "Lamb", "params": {"min_coeff": 20}}})
