"""Full parameters are gathered within a budget, with the fewest gathers there can be."""

from functools import cache

import pytest

from lowtide.pipe.schedules.costs import Costs
from lowtide.pipe.schedules.passes import add_gathers, complete
from lowtide.pipe.schedules.registry import KINDS, make_schedule
from lowtide.pipe.schedules.schedule import COMPUTE_OPS, Action, Op, Schedule, ScheduleError
from lowtide.pipe.schedules.simulator import simulate


def one_rank(row: str, num_stages: int, num_microbatches: int = 1) -> Schedule:
    actions = tuple(map(Action.parse, row.split()))
    return Schedule("own", 1, num_stages, num_microbatches, (0,) * num_stages, (actions,))


def num_gathers(schedule: Schedule, rank: int) -> int:
    return sum(action.op is Op.GATHER for action in schedule.actions[rank])


def fewest_gathers(stages: tuple[int, ...], budget: int) -> int:
    """By trying every choice."""

    @cache
    def rest(position: int, held: frozenset[int]) -> int:
        if position == len(stages):
            return 0
        stage = stages[position]
        if stage in held:
            return rest(position + 1, held)
        if len(held) < budget:
            return 1 + rest(position + 1, held | {stage})
        return 1 + min(rest(position + 1, held - {victim} | {stage}) for victim in held)

    return rest(0, frozenset())


@pytest.mark.parametrize("name", KINDS)
def test_without_a_budget_each_stage_is_gathered_once_from_its_first_use_to_its_last(name: str) -> None:
    schedule = make_schedule(name, 3, 6)
    for row in add_gathers(schedule).actions:
        for stage in {action.stage for action in row}:
            where = [index for index, action in enumerate(row) if action.stage == stage]
            gather, release = (row.index(Action(op, stage)) for op in (Op.GATHER, Op.RELEASE))
            assert (where[0], where[-1]) == (gather, release)
            assert num_gathers(schedule.replace_actions([row]), 0) == len({action.stage for action in row})


@pytest.mark.parametrize(("name", "chunks"), [("interleaved", 2), ("interleaved", 4), ("zb-h1", 3), ("zb-v", 2)])
@pytest.mark.parametrize("budget", [1, 2, 3])
def test_the_budget_holds_with_the_fewest_gathers(name: str, chunks: int, budget: int) -> None:
    for p, m in ((1, 4), (2, 4), (3, 7)):
        schedule = make_schedule(name, p, m, chunks)
        gathered = add_gathers(schedule, budget)
        costs = Costs.uniform(schedule.num_stages, parameter_bytes=1.0)
        for rank, peaks in enumerate(simulate(gathered, costs).peaks):
            assert peaks.parameter_bytes <= budget
            uses = tuple(action.stage for action in schedule.actions[rank])
            assert num_gathers(gathered, rank) == fewest_gathers(uses, budget)


def test_with_a_budget_of_one_a_stage_is_gathered_for_each_run_of_uses() -> None:
    text = " ".join(map(str, add_gathers(one_rank("0F0 0F1 1F0 1B0 1F1 1B1 0B0 0B1", 2, 2), 1).actions[0]))
    assert text == ("0GATHER 0F0 0F1 0RELEASE 1GATHER 1F0 1B0 1F1 1B1 1RELEASE 0GATHER 0B0 0B1 0RELEASE")


def test_where_there_is_room_a_stage_is_gathered_one_action_ahead() -> None:
    text = " ".join(map(str, add_gathers(one_rank("0F0 1F0 2F0 2B0 1B0 0B0", 3), 2).actions[0]))
    assert text == ("0GATHER 1GATHER 0F0 0RELEASE 2GATHER 1F0 2F0 2B0 2RELEASE 0GATHER 1B0 1RELEASE 0B0 0RELEASE")


def test_sizes_are_weighed_against_the_budget() -> None:
    schedule = one_rank("0F0 1F0 2F0 2B0 1B0 0B0", 3)
    sizes = [10.0, 1.0, 5.0]
    gathered = add_gathers(schedule, 11.0, sizes)
    costs = Costs((1.0,) * 3, (1.0,) * 3, (1.0,) * 3, (1.0,) * 3, (0.0,) * 3, (0.0,) * 3, tuple(sizes))
    assert simulate(gathered, costs).peaks[0].parameter_bytes == 11
    assert num_gathers(gathered, 0) == 4  # stage 1 stays beside each of the others
    whole = complete(schedule, costs, gathers=True, budget=11.0)
    assert simulate(whole, costs).peaks[0].parameter_bytes == 11


def test_a_stage_that_is_larger_than_the_budget_is_refused() -> None:
    with pytest.raises(ScheduleError) as error:
        add_gathers(make_schedule("1f1b", 2, 2), 50.0, [40.0, 60.0])
    assert str(error.value) == (
        "schedule 1f1b: expected parameters of stage 1 within the budget for gathered parameters, 50, found 60; "
        "raise the budget, or split the model over more stages"
    )


def test_gathers_are_not_added_twice() -> None:
    with pytest.raises(ScheduleError, match="schedule 1f1b: expected no gathers and releases, found some"):
        add_gathers(add_gathers(make_schedule("1f1b", 2, 2)))


def test_the_order_of_what_is_computed_stays() -> None:
    schedule = make_schedule("dualpipe-v", 3, 8)
    for row, gathered in zip(schedule.actions, add_gathers(schedule, 1).actions, strict=True):
        assert tuple(action for action in gathered if action.op in COMPUTE_OPS) == row
