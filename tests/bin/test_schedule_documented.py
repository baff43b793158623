"""What docs/pipeline.md shows of schedules is what the code draws and says."""

from pathlib import Path

import pytest

from lowtide.bin.schedule import main
from lowtide.pipe.schedules.grid import text_grid
from lowtide.pipe.schedules.registry import KINDS, make_schedule
from lowtide.pipe.schedules.schedule import ScheduleError
from lowtide.pipe.schedules.simulator import simulate

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "pipeline.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", KINDS)
def test_every_schedule_is_drawn(name: str) -> None:
    assert f"### {name}\n" in TEXT
    assert f"```\n{text_grid(simulate(make_schedule(name, 4, 8)))}```\n" in TEXT
    assert f"![{name}, 4 ranks, 8 microbatches](images/schedule_{name}.png)" in TEXT
    assert (DOCS / f"images/schedule_{name}.png").is_file()


def test_the_comparison_is_that_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    command = "compare --ranks 8 --microbatches 32 --costs 1,1.2,0.9 --send 0.02"
    main(command.split())
    printed = "\n".join(line.rstrip() for line in capsys.readouterr().out.splitlines())
    assert f"$ lowtide schedule {command}\n{printed}\n```" in TEXT


def test_the_refusal_is_that_of_the_simulator() -> None:
    schedule = make_schedule("1f1b", 2, 4)
    row = list(schedule.actions[1])
    row[2], row[3] = row[3], row[2]
    with pytest.raises(ScheduleError) as error:
        simulate(schedule.replace_actions([schedule.actions[0], row]))
    assert f"```\n{error.value}\n```" in TEXT
