"""Layer by layer: what is done in which order, and that it obeys the rules of every schedule."""

import pytest

from lowtide.pipe.schedules.generators import layered, layered_evaluation
from lowtide.pipe.schedules.rules import check_rules
from lowtide.pipe.schedules.schedule import Op, Schedule


def text_of(schedule: Schedule) -> str:
    return " ".join(map(str, schedule.actions[0]))


def test_all_microbatches_of_a_stage_come_before_the_next_stage() -> None:
    assert text_of(layered(3, 2, [True] * 3)) == (
        "0GATHER 1GATHER 0F0 0F1 0RELEASE 2GATHER 1F0 1F1 1RELEASE 2F0 2F1 "
        "1GATHER 2B0 2B1 2REDUCE 2RELEASE 0GATHER 1B0 1B1 1REDUCE 1RELEASE 0B0 0B1 0REDUCE 0RELEASE"
    )


def test_without_room_ahead_a_stage_is_gathered_when_the_one_before_it_is_released() -> None:
    assert text_of(layered(2, 2, [False] * 2)) == (
        "0GATHER 0F0 0F1 0RELEASE 1GATHER 1F0 1F1 1B0 1B1 1REDUCE 1RELEASE 0GATHER 0B0 0B1 0REDUCE 0RELEASE"
    )


def test_parameters_that_stay_are_not_gathered() -> None:
    assert text_of(layered(2, 2)) == "0F0 0F1 1F0 1F1 1B0 1B1 1REDUCE 0B0 0B1 0REDUCE"
    assert text_of(layered_evaluation(2)) == "0F0 1F0"


def test_an_evaluation_releases_all() -> None:
    assert text_of(layered_evaluation(2, [True] * 2)) == "0GATHER 1GATHER 0F0 0RELEASE 1F0 1RELEASE"


@pytest.mark.parametrize("ahead", [None, [True] * 5, [False] * 5, [True, False, True, False, True]])
@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_it_obeys_the_rules(ahead: list[bool] | None, num_microbatches: int) -> None:
    schedule = layered(5, num_microbatches, ahead)
    check_rules(schedule)
    check_rules(layered_evaluation(5, ahead))
    gathers = [action for action in schedule.actions[0] if action.op is Op.GATHER]
    assert len(gathers) == (0 if ahead is None else 2 * 5 - 1), "whatever the number of microbatches"
    assert Schedule.from_text(schedule.to_text()) == schedule
