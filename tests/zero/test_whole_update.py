"""Optimizers that look at whole parameters: the same at every stage and number of ranks, wherever their states rest."""

import re
from pathlib import Path
from typing import Any

import pytest

from lowtide.engine.config.config import Config, ConfigError
from tests.engine.saving import Trip, load_trips, save_trips
from tests.engine.test_optimizer_offload import offloaded
from tests.kit.models import short_gpt, tiny_gpt_float64, token_batch
from tests.kit.ranks import RankPool
from tests.kit.training import Case, assert_close, train_all
from tests.zero import test_adafactor as adafactor
from tests.zero import test_muon as muon
from tests.zero.apart import apart
from tests.zero.test_without_masters import assert_alike, assert_alike_on_any_ranks, same_rows

LAMB: dict[str, Any] = {"optimizer": {"type": "lamb", "params": {"lr": 1e-2, "weight_decay": 0.1}}}
OPTIMIZERS: dict[str, dict[str, Any]] = {"lamb": LAMB, "adafactor": adafactor.CONFIG, "muon": muon.CONFIG}
FORMS: dict[str, list[bool | str]] = {
    "lamb": [True, False, "int8"],
    "adafactor": [True, "int8"],
    "muon": [True, "kahan"],
}


def in_form(config: dict[str, Any], masters: bool | str) -> dict[str, Any]:
    """With states of eight bits where there are no masters, as far as the optimizer has such."""
    type_, params = config["optimizer"]["type"], config["optimizer"]["params"]
    if type_ == "Adafactor" and masters is not True:
        params = {**params, "state_dtype": "int8"}
    return {"optimizer": {"type": type_, "params": params}, "bf16": {"enabled": True, "masters": masters}}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_stages_and_places_have_the_same_bits(ranks: RankPool, tmp_path: Path, name: str) -> None:
    forms = [
        Case(short_gpt, token_batch, steps=2, config=in_form(OPTIMIZERS[name], masters)) for masters in FORMS[name]
    ]
    half = {"zero_optimization": {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}}
    places = [[case.at(1, config=half), case.at(3), offloaded(case.at(2), tmp_path)] for case in forms]
    found = iter(ranks(2, train_all, [case for cases in places for case in cases])[0])
    on_host = ranks(2, apart, train_all, [cases[2] for cases in places])[0]
    for masters, cases, moved in zip(FORMS[name], places, on_host, strict=True):
        assert_alike([*(next(found) for _ in cases), moved], masters)


def test_any_number_of_ranks_has_the_same_bits(ranks: RankPool) -> None:
    assert_alike_on_any_ranks(ranks, OPTIMIZERS)


def test_hybrid_shards_and_pipelines(ranks: RankPool) -> None:
    cases = [Case(tiny_gpt_float64, same_rows, 1, accumulation=2, steps=2, config=one) for one in OPTIMIZERS.values()]
    hybrid = [case.at(3, config={"zero_optimization": {"shard_size": 2}}) for case in cases]
    piped = [case.at(2, config={"parallel": {"pipeline": 2}}) for case in cases]
    alone = ranks(1, train_all, cases)[0]
    found = [*ranks(4, train_all, hybrid)[0], *ranks(2, train_all, piped)[0]]
    for expected, outcome in zip(alone * 2, found, strict=True):
        assert_close(outcome, expected, 1e-7, 1e-7)


def test_a_checkpoint_goes_on_at_another_stage(ranks: RankPool, tmp_path: Path) -> None:
    cases = [Case(short_gpt, token_batch, clip=0.5, config=config) for config in OPTIMIZERS.values()]
    trips = [Trip(case.at(1), offloaded(case.at(3), tmp_path)) for case in cases]
    before = ranks(2, save_trips, trips, tmp_path, 2)[0]
    after = ranks(2, load_trips, trips, tmp_path, 2)[0]
    assert [other.differences(one) for one, other in zip(before, after, strict=True)] == [[]] * len(trips)


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
