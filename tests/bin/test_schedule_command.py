"""`lowtide schedule`: draws one schedule, ranks all of them; and docs/pipeline.md shows what it prints."""

import json
from pathlib import Path
from typing import Any

import pytest

from lowtide.bin.main import main as lowtide_main
from lowtide.bin.schedule import main
from lowtide.pipe.schedules.registry import KINDS, make_schedule
from lowtide.pipe.schedules.schedule import Schedule, ScheduleError
from lowtide.pipe.schedules.simulator import simulate
from tests.kit.training import refusal
from tests.pipe.pipelines import text_grid

Capture = pytest.CaptureFixture[str]
DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "pipeline.md").read_text(encoding="utf-8")


def table(text: str) -> list[list[str]]:
    """The cells of every row."""
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in text.splitlines() if "│" in line]


def config(folder: Path, **sections: Any) -> str:
    path = folder / "train.json"
    path.write_text(json.dumps(sections))
    return str(path)


def out_of(capsys: Capture, arguments: str, *paths: object, status: int = 0) -> str:
    """What is printed, or said to stderr where the status is not 0. PATH in the arguments is a path."""
    capsys.readouterr()
    given = iter(paths)
    assert main([str(next(given)) if word == "PATH" else word for word in arguments.split()]) == status
    out, err = capsys.readouterr()
    return err if status else out


def test_show_draws_the_grid_and_counts_what_each_rank_needs(capsys: Capture) -> None:
    assert lowtide_main(["schedule", "show", "1f1b", "--ranks", "2", "--microbatches", "3"]) == 0
    out = capsys.readouterr().out
    assert "rank 0  F0 F1 ..... B0--- F2 B1--- .. B2---" in out
    assert "1f1b: 2 ranks, 2 stages, 3 microbatches" in out
    assert "step 12; bubble 25.0% of the step, 33.3% of the work" in out
    assert table(out) == [["0", "0", "9", "3", "2", "2", "0"], ["1", "1", "9", "0", "1", "1", "0"]]


INTERLEAVED = {"schedule": "interleaved", "chunks": 3, "microbatches": 4}


@pytest.mark.parametrize(
    ("sections", "options", "text"),
    [
        ({"train_batch_size": 16, "pipeline": INTERLEAVED}, "", "interleaved: 2 ranks, 6 stages, 4 microbatches"),
        ({"pipeline": INTERLEAVED}, "--microbatches 6 --chunks 2", "interleaved: 2 ranks, 4 stages, 6 microbatches"),
        ({"gradient_accumulation_steps": 5}, "", "1f1b: 2 ranks, 2 stages, 5 microbatches"),
        ({"pipeline": {"schedule": "gpipe"}}, "--microbatches 4", "gpipe: 2 ranks, 2 stages, 4 microbatches"),
    ],
)
def test_show_reads_the_pipeline_of_a_config(
    tmp_path: Path, capsys: Capture, sections: dict[str, Any], options: str, text: str
) -> None:
    assert text in out_of(capsys, f"show PATH {options}", config(tmp_path, parallel={"pipeline": 2}, **sections))


@pytest.mark.parametrize(
    ("arguments", "axis", "text"),
    [
        ("show PATH", "pipeline", "schedule gpipe: expected a number of microbatches; add --microbatches N\n"),
        (
            "show PATH",
            "pipelines",
            'train.json:\n  parallel.pipelines: unknown key "pipelines"; did you mean "pipeline"?',
        ),
        ("show zero3 --microbatches 4", "", "schedule 1f1b: expected a number of ranks; add --ranks N"),
        ("show 1f1b", "", "schedule 1f1b: expected a number of ranks; add --ranks N"),
        ("show none.json", "", "none.json"),
        ("show dualpipe-v --ranks 4 --microbatches 4", "", "schedule dualpipe-v needs 2 microbatches for each rank"),
        ("show 1f1bb --ranks 4 --microbatches 4", "", 'unknown schedule "1f1bb"; did you mean "1f1b"?'),
        ("compare --ranks 4 --microbatches 8 --memory-limit 3", "", "no schedule fits in 3; the smallest needs 4"),
    ],
)
def test_what_is_not_said_or_cannot_be_is_an_error(
    tmp_path: Path, capsys: Capture, arguments: str, axis: str, text: str
) -> None:
    path = config(tmp_path, parallel={axis: 2}, pipeline={"schedule": "gpipe"})
    error = out_of(capsys, arguments, path, status=1)
    assert error.startswith("lowtide schedule: ") and text in error


def test_a_schedule_is_saved_changed_and_shown_again(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "own.txt"
    out = out_of(capsys, "show zb-h1 --ranks 2 --microbatches 4 --save PATH", path)
    assert f"schedule written to {path}" in out
    assert Schedule.from_text(path.read_text()) == make_schedule("zb-h1", 2, 4)
    assert "zb-h1: 2 ranks, 2 stages, 4 microbatches" in out_of(capsys, "show PATH", path)
    error = out_of(capsys, "show PATH --ranks 4", path, status=1)
    assert "expected 4 ranks, as in the config, found 2" in error
    path.write_text(path.read_text().replace(" 1W3", ""))
    error = out_of(capsys, "show PATH", path, status=1)
    assert "leak: the tensors for W are held to the end; 1W3 is missing" in error and ">1I3<" in error


def test_show_writes_a_picture(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "grid.png"
    arguments = "show zb-v --ranks 2 --microbatches 4 --png PATH"
    assert f"picture written to {path}" in out_of(capsys, arguments, path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_compare_ranks_every_schedule_the_fastest_first(capsys: Capture) -> None:
    rows = table(out_of(capsys, "compare --ranks 4 --microbatches 8 --chunks 2"))
    assert {row[1] for row in rows} == set(KINDS)
    assert [[*row[:5], row[6]] for row in rows] == [
        ["1", "zb-h1", "2", "25.5", "5.9%", "4"],
        ["2", "zb-v", "2", "25.5", "5.9%", "4"],
        ["3", "dualpipe-v", "2", "25.5", "5.9%", "4.5"],
        ["4", "zb-h1", "1", "27", "11.1%", "4"],
        ["5", "interleaved", "2", "28.5", "15.8%", "5.5"],
        ["6", "1f1b", "1", "33", "27.3%", "4"],
        ["7", "gpipe", "1", "33", "27.3%", "8"],
    ]


def test_what_is_above_the_memory_limit_comes_last_without_a_place(capsys: Capture) -> None:
    sizes = "--activation-bytes 1GB --parameter-bytes 2GB --memory-limit 6.2GB"
    out = out_of(capsys, f"compare --ranks 4 --microbatches 8 --chunks 2 {sizes}")
    assert "memory limit 6.2 GB" in out
    assert [(row[0], row[1], row[7], row[8]) for row in table(out)] == [
        ("1", "zb-h1", "6 GB", "yes"),
        ("2", "zb-v", "6 GB", "yes"),
        ("3", "zb-h1", "6 GB", "yes"),
        ("4", "1f1b", "6 GB", "yes"),
        ("", "dualpipe-v", "6.5 GB", "no"),
        ("", "interleaved", "7.5 GB", "no"),
        ("", "gpipe", "10 GB", "no"),
    ]


def test_costs_change_the_ranking(capsys: Capture) -> None:
    rows = table(out_of(capsys, "compare --ranks 4 --microbatches 8 --chunks 2 --costs 1,1,0.2 --send 2"))
    steps = [float(row[3]) for row in rows]
    assert steps == sorted(steps) and rows[0][1] == "gpipe"  # slow messages: few turns are best


def test_a_schedule_that_cannot_take_the_microbatches_is_named(capsys: Capture) -> None:
    out = out_of(capsys, "compare --ranks 4 --microbatches 6")
    assert "not possible: schedule dualpipe-v needs 2 microbatches for each rank, at least 8 on 4 ranks" in out
    assert "dualpipe-v" not in {row[1] for row in table(out)}


@pytest.mark.parametrize("costs", ["1,2", "0,0,0", "-1,1,1", "nan,1,1", "1,1,inf"])
def test_costs_that_are_no_times_are_refused(costs: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit):
        main(["compare", "--ranks", "2", "--microbatches", "2", f"--costs={costs}"])
    assert f'expected three times F,I,W, for example 1,1.2,0.8, found "{costs}"' in capsys.readouterr().err


# -- the help and the page ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KINDS)
def test_every_schedule_is_in_the_help_and_drawn_in_the_page(name: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    out = capsys.readouterr().out
    assert f"  {name}" in out and KINDS[name].summary in out
    assert f"### {name}\n" in TEXT
    grid = text_grid(simulate(make_schedule(name, 4, 8)))
    assert "\n\n" in grid or f"```\n{grid}```\n" in TEXT  # a grid in several parts is only a picture
    assert f"![{name}, 4 ranks, 8 microbatches](images/schedule_{name}.png)" in TEXT
    assert (DOCS / f"images/schedule_{name}.png").is_file()


def test_the_pages_comparison_and_refusal_are_those_of_the_code(capsys: Capture) -> None:
    command = "compare --ranks 8 --microbatches 32 --costs 1,1.2,0.9 --send 0.02"
    printed = "\n".join(line.rstrip() for line in out_of(capsys, command).splitlines())
    assert f"$ lowtide schedule {command}\n{printed}\n```" in TEXT
    schedule = make_schedule("1f1b", 2, 4)
    row = list(schedule.actions[1])
    row[2], row[3] = row[3], row[2]
    text = refusal(simulate, schedule.replace_actions([schedule.actions[0], row]), kind=ScheduleError)
    assert f"```\n{text}\n```" in TEXT
