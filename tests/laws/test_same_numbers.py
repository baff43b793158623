"""No stage, no transport and no place of a tensor changes a bit of a training; in float64 it is that of plain torch."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

import lowtide
from tests.kit.features import NUMBERS, REFUSED, TwoBlocks, case_of, feature_sets, start_in, without_places
from tests.kit.ranks import RankPool
from tests.kit.training import Case, Outcome, adamw, assert_close, train, train_plainly

OF_TORCH = {  # the rest of NUMBERS rounds, or is ours
    "accumulation",
    "clipping",
    "sgd",
    "units by name",
    "compiled blocks",
}


def differences(folder: Path, sets: Sequence[tuple[str, ...]]) -> dict[tuple[str, ...], list[str]]:
    """What differs between a training with these features and one without those that only move tensors and work."""
    start_in(folder)
    known: list[tuple[Case, Outcome]] = []
    found = {}
    for names in sets:
        plain = without_places(names)
        outcome = next((outcome for case, outcome in known if case == plain), None) or train(plain)
        known.append((plain, outcome))
        found[names] = outcome.differences(train(case_of(names)))
    return found


def test_places_and_stages_change_no_bit(ranks: RankPool, tmp_path: Path) -> None:
    for found in ranks(2, differences, tmp_path, feature_sets(), timeout=240):
        assert found == {names: [] for names in feature_sets()}


def float64() -> nn.Module:
    return TwoBlocks().double()


def sgd(params: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1e-2, momentum=0.9)  # type: ignore[arg-type]


def outcomes(folder: Path, cases: Sequence[Case]) -> list[Outcome]:
    start_in(folder)
    return [train(case) for case in cases]


def test_a_training_in_float64_is_that_of_torch(ranks: RankPool, tmp_path: Path) -> None:
    sets = feature_sets(*(NUMBERS.keys() - OF_TORCH))
    cases = [replace(case_of(names), build=float64) for names in sets]
    for names, case, outcome in zip(sets, cases, ranks(2, outcomes, tmp_path, cases, timeout=240)[0], strict=True):
        expected = train_plainly(case, 2, sgd if "sgd" in names else adamw)
        assert_close(outcome, expected, 1e-10, 1e-10, str(names))


def accepted() -> list[frozenset[str]]:
    """The pairs of REFUSED with which an engine starts."""
    found = []
    for pair in REFUSED:
        case = case_of(pair, stage=3)
        try:
            lowtide.initialize(case.build(), case.as_config()).close()
        except ValueError:
            continue
        found.append(pair)
    return found


def test_pairs_that_do_not_go_together_are_refused(ranks: RankPool) -> None:
    assert ranks(2, accepted) == [[], []]
