"""A schedule goes to text and back without loss; faults in a text are named by line and column."""

import pytest

from lowtide.pipe.schedules.passes import complete
from lowtide.pipe.schedules.registry import KINDS, make_schedule
from lowtide.pipe.schedules.schedule import Action, Op, Schedule
from tests.kit.training import refusal
from tests.pipe.pipelines import with_steps

TEXT = """\
name: two ranks
ranks: 2
stages: 2
microbatches: 2
rank of stage: 0 1
rank 0: 0F0 0F1 0B0 0B1
rank 1: 1F0 1B0 1F1 1B1
"""


@pytest.mark.parametrize("name", KINDS)
def test_every_schedule_survives_the_round_trip(name: str) -> None:
    for p, m in ((1, 2), (4, 8), (3, 7)):
        schedule = make_schedule(name, p, m)
        for variant in (schedule, with_steps(complete(schedule, gathers=True, budget=1))):
            assert Schedule.from_text(variant.to_text()) == variant


def test_the_text_of_a_schedule_is_a_line_for_each_rank() -> None:
    schedule = Schedule.from_text(TEXT)
    assert schedule.name == "two ranks" and schedule.rank_of_stage == (0, 1)
    assert schedule.actions[1] == tuple(Action(op, 1, at) for at in (0, 1) for op in (Op.F, Op.B))
    assert schedule.to_text() == TEXT


def test_comments_empty_lines_and_ranks_over_several_lines_are_read() -> None:
    text = TEXT.replace("0B0 0B1", "# warmup\n\nrank 0: 0B0 0B1 # the rest").replace("ranks: 2", "ranks :  2  # two")
    assert Schedule.from_text(text) == Schedule.from_text(TEXT)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("0B0", "0X0", 'line 6, column 17: unknown op "X" in "0X0"; the ops are F, B, I, W, SEND_F'),
        ("0B0", "0SEND_G0", 'line 6, column 17: unknown op "SEND_G" in "0SEND_G0"; did you mean "SEND_F"?'),
        ("0B0", "b0", 'line 6, column 17: expected an action like "2F0" (stage, op, microbatch), found "b0"'),
        ("0B0", "0B", 'line 6, column 17: B needs a microbatch, expected for example "0B0", found "0B"'),
        ("0B0", "0GATHER3", 'line 6, column 17: GATHER takes no microbatch, expected "0GATHER", '),
        ("1F1", "2F1", 'line 7, column 17: "2F1": expected a stage below 2, found 2'),
        ("1F1", "1F2", 'line 7, column 17: "1F2": expected a microbatch below 2, found 2'),
        ("rank 1:", "rank 2:", "line 7: expected a rank below 2 (ranks: 2), found 2"),
        ("rank 1:", "rank one:", 'line 7: unknown key "rank one"; did you mean "rank of stage"?'),
        ("rank 1:", "1:", 'line 7: unknown key "1"; the keys are name, ranks, stages, microbatches, rank of stage and'),
        ("stages: 2", "stagse: 2", 'line 3: unknown key "stagse"; did you mean "stages"?'),
        ("stages: 2", "stages: two", 'line 3: expected a whole number of stages, at least 1, found "two"'),
        ("stages: 2", "stages: 0", 'line 3: expected a whole number of stages, at least 1, found "0"'),
        ("stages: 2", "ranks: 2", 'line 3: "ranks" is already on line 2'),
        ("stages: 2\n", "", 'line 1: expected a line "stages: ..." at the top of the schedule, found none'),
        ("stages: 2", "stages 2", 'line 3: expected "key: value", found "stages 2"'),
        ("stage: 0 1", "stage: 0 2", 'line 5, column 18: expected a rank below 2 (ranks: 2), found "2"'),
        ("stage: 0 1", "stage: 0", "line 5: expected the rank of each of 2 stages (stages: 2), found 1 ranks"),
    ],
)
def test_a_fault_is_named_by_its_place(old: str, new: str, message: str) -> None:
    assert message in refusal(Schedule.from_text, TEXT.replace(old, new, 1))
