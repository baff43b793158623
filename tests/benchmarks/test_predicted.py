"""Predicted beside measured: what is concluded from it, and what cannot be asked."""

from pathlib import Path

import pytest

from tests.benchmarks import Helper


def test_tau_counts_pairs_in_the_same_order(helper: Helper) -> None:
    tau = helper("predicted").kendall_tau
    assert tau([(1.0, 10.0), (2.0, 20.0), (3.0, 30.0)]) == 1.0
    assert tau([(1.0, 30.0), (2.0, 20.0), (3.0, 10.0)]) == -1.0
    assert tau([(1.0, 10.0), (2.0, 30.0), (3.0, 20.0), (4.0, 40.0)]) == pytest.approx(4 / 6)
    assert tau([(1.0, 10.0), (1.0, 20.0), (2.0, 30.0)]) == pytest.approx(2 / 3), "a tie is in no order"
    assert tau([(1.0, 1.0)]) is None


def test_the_median_is_of_how_far_predictions_are_off(helper: Helper) -> None:
    predicted = helper("predicted")
    row_of, pairs = helper("_harness").row_of, ((1.1, 1.0), (1.8, 2.0), (3.0, 4.0))
    rows = [row_of(str(ms), {"predicted": said, "measured": ms, "ratio": said / ms}) for said, ms in pairs]
    assert predicted.median_error(rows) == pytest.approx(0.1)


def test_each_group_has_ten_configs_to_rank(helper: Helper) -> None:
    predicted = helper("predicted")
    cases = [case for ranks in (1, 2) for case in predicted.cases(ranks, Path("folder"))]
    names = {(case.group, case.name) for case in cases}
    assert len(names) == len(cases)
    groups = [group for group, _ in names]
    assert {group: groups.count(group) >= 10 for group in groups} == dict.fromkeys(groups, True)
