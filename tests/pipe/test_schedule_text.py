"""A schedule is made by its name, from a text or a file, and drawn as it runs; faults are named by their place."""

import time
from pathlib import Path

import pytest

from lowtide.pipe.schedules.costs import Costs
from lowtide.pipe.schedules.grid import colour_grid
from lowtide.pipe.schedules.passes import complete
from lowtide.pipe.schedules.registry import KINDS, make_schedule
from lowtide.pipe.schedules.schedule import Action, Op, Schedule
from lowtide.pipe.schedules.simulator import simulate
from tests.kit.training import refusal
from tests.pipe.pipelines import text_grid, with_steps

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
        ("stages: 2", "ranks: 2", 'line 3: "ranks" is already on line 2'),
        ("stages: 2\n", "", 'line 1: expected a line "stages: ..." at the top of the schedule, found none'),
        ("stages: 2", "stages 2", 'line 3: expected "key: value", found "stages 2"'),
        ("stage: 0 1", "stage: 0 2", 'line 5, column 18: expected a rank below 2 (ranks: 2), found "2"'),
        ("stage: 0 1", "stage: 0", "line 5: expected the rank of each of 2 stages (stages: 2), found 1 ranks"),
    ],
)
def test_a_fault_is_named_by_its_place(old: str, new: str, message: str) -> None:
    assert message in refusal(Schedule.from_text, TEXT.replace(old, new, 1))


@pytest.mark.parametrize("name", KINDS)
def test_the_table_says_what_a_schedule_is_and_a_large_one_is_made_in_seconds(name: str) -> None:
    kind, start = KINDS[name], time.process_time()
    make_schedule(name, 64, 512)
    assert time.process_time() - start < 10
    schedule = make_schedule(name, 4, 8)
    assert schedule.num_stages == 4 * kind.min_chunks
    assert kind.splits_backward == any("I" in str(action) for actions in schedule.actions for action in actions)
    looped = tuple(range(4)) * kind.min_chunks
    assert schedule.rank_of_stage == ((0, 1, 2, 3, 3, 2, 1, 0) if kind.is_v else looped)


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        (("1f1", 4, 8), 'unknown schedule "1f1"; did you mean "1f1b"?'),
        (
            ("fast", 4, 8),
            'unknown schedule "fast"; the schedules are gpipe, 1f1b, interleaved, zb-h1, zb-v, dualpipe-v, '
            "or a path to a text file",
        ),
        (
            ("dualpipe-v", 4, 7),
            "schedule dualpipe-v needs 2 microbatches for each rank, at least 8 on 4 ranks, found 7; set "
            "pipeline.microbatches to 8 or more, or use a schedule for any number: gpipe, 1f1b, interleaved, zb-h1, "
            "zb-v",
        ),
        (("1f1b", 4, 0), "schedule 1f1b: expected at least 1 of microbatches, found 0"),
        (("1f1b", 0, 4), "schedule 1f1b: expected at least 1 of ranks, found 0"),
        (
            ("zb-v", 4, 8, 1),
            "schedule zb-v needs 2 chunks (stages on each rank), found 1; set pipeline.chunks to 2, or use a schedule "
            "for 1: gpipe, 1f1b, zb-h1",
        ),
        (
            ("1f1b", 4, 8, 3),
            "schedule 1f1b needs 1 chunk (stages on each rank), found 3; set pipeline.chunks to 1, or use a schedule "
            "for 3: interleaved, zb-h1",
        ),
        (("interleaved", 4, 8, 1), "schedule interleaved needs 2 or more chunks (stages on each rank), "),
        (("zb-h1", 4, 8, 0), "found 0; set pipeline.chunks to 1"),
    ],
)
def test_what_cannot_be_made_is_refused(wanted: tuple[str, int, int], text: str) -> None:
    assert text in refusal(make_schedule, *wanted)


WHOLE = make_schedule("1f1b", 2, 2).to_text()
NO_BACKWARD = "name: own\nranks: 1\nstages: 1\nmicrobatches: 1\nrank of stage: 0\nrank 0: 0F0\n"


@pytest.mark.parametrize(
    ("content", "counts", "text"),
    [
        (WHOLE, (4, 2), ": expected 4 ranks, as in the config, found 2; change the file or the config"),
        (WHOLE, (2, 8), "expected 8 microbatches, as in the config, found 2"),
        (WHOLE, (2, 2, 2), "expected 4 stages, as in the config, found 2"),
        (None, (2, 2), " cannot be read: No such file or directory"),
        (b"\xff\xfe", (2, 2), " cannot be read: "),
        (
            WHOLE.replace("1B1", ""),
            (2, 2),
            "rank 1, action 2 (1F1): leak: its activations are held to the end; 1B1 is missing",
        ),
        (WHOLE.replace("1B1", "1Z1"), (2, 2), ': line 7, column 21: unknown op "Z"'),
        (NO_BACKWARD, (1, 1), ": found no backward; a training step needs B, or I and W"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(
    tmp_path: Path, content: str | bytes | None, counts: tuple[int, int], text: str
) -> None:
    path = tmp_path / "own.txt"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    found = refusal(make_schedule, str(path), *counts)
    assert found.startswith(f"schedule file {path}") and text in found


@pytest.mark.parametrize(
    ("name", "microbatches", "costs", "rows"),
    [
        ("1f1b", 3, None, ["F0 F1 ..... B0--- F2 B1--- .. B2---", ".. F0 B0--- F1 B1--- F2 B2--- ....."]),
        (  # stages are named where a rank has several
            "zb-v",
            3,
            None,
            [
                "0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2 ...",
                "... 1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2",
            ],
        ),
        (
            "1f1b",
            1,
            Costs.uniform(2, forward=1.0, backward=2.5, send=0.5),
            ["F0 ............ B0-----", "... F0- B0---- ........"],
        ),
    ],
)
def test_a_cell_is_as_long_as_its_action_and_dots_are_idle_time(
    name: str, microbatches: int, costs: Costs | None, rows: list[str]
) -> None:
    found = text_grid(simulate(make_schedule(name, 2, microbatches), costs)).splitlines()
    assert found == [f"rank {rank}  {row}" for rank, row in enumerate(rows)]


def test_an_idle_time_of_one_column_is_a_space() -> None:
    """Rank 1's F1 begins at 2.6, column 8; its F0 ends at 2.3, column 7."""
    ones = (1.0, 1.0)
    costs = Costs((1.3, 1.0), (2.0, 2.0), ones, ones, ones, ones, ones)
    assert text_grid(simulate(make_schedule("gpipe", 2, 2), costs)).splitlines()[1].startswith("rank 1  ... F0  F1 B0")


def test_all_that_passes_add_takes_no_room() -> None:
    schedule = make_schedule("interleaved", 2, 4)
    whole = with_steps(complete(schedule, gathers=True))
    assert text_grid(simulate(whole)) == text_grid(simulate(schedule))


def test_a_wide_grid_goes_on_in_panels_of_one_width() -> None:
    simulation = simulate(make_schedule("gpipe", 2, 8))
    whole = text_grid(simulation, width=1000).splitlines()
    panels = [panel.splitlines() for panel in text_grid(simulation, width=40).split("\n\n")]
    assert len(panels) == 3 and all(len(line) <= 40 for panel in panels for line in panel)
    for rank in range(2):
        joined = "".join(f"{panel[rank].removeprefix(f'rank {rank}  '):<27}" for panel in panels)
        assert joined.rstrip() == whole[rank].removeprefix(f"rank {rank}  ")


def test_a_long_grid_is_drawn_to_a_smaller_scale() -> None:
    text = text_grid(simulate(make_schedule("1f1b", 2, 2000)), width=100)
    assert text.count("\n\n") < 12 and max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize("name", KINDS)
def test_ops_and_chunks_have_colours(name: str) -> None:
    simulation = simulate(make_schedule(name, 3, 6))
    colours = colour_grid(simulation, 80)
    kinds, chunks = 2 + KINDS[name].splits_backward * (1 + (name == "dualpipe-v")), simulation.schedule.num_stages // 3
    assert len({str(span.style) for span in colours.spans} - {""}) == kinds * chunks
