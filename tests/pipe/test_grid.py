"""A schedule is drawn as it runs: in text, in a terminal's colours with the same text, and as a picture."""

from pathlib import Path

import pytest

from lowtide.pipe.schedules.costs import Costs
from lowtide.pipe.schedules.grid import colour_grid, text_grid, write_png
from lowtide.pipe.schedules.passes import complete
from lowtide.pipe.schedules.registry import KINDS, make_schedule
from lowtide.pipe.schedules.simulator import simulate
from tests.pipe.pipelines import with_steps


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
def test_colours_leave_the_text_as_it_is(name: str) -> None:
    simulation = simulate(make_schedule(name, 3, 6))
    colours = colour_grid(simulation, 80)
    assert [line.rstrip() for line in colours.plain.splitlines()] == text_grid(simulation, 80).splitlines()
    kinds, chunks = 2 + KINDS[name].splits_backward * (1 + (name == "dualpipe-v")), simulation.schedule.num_stages // 3
    assert len({str(span.style) for span in colours.spans} - {""}) == kinds * chunks


def test_the_picture_is_a_png(tmp_path: Path) -> None:
    path = tmp_path / "grid.png"
    write_png(simulate(make_schedule("dualpipe-v", 4, 8)), path)
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000
