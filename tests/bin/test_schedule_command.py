"""`lowtide schedule`: draws one schedule, ranks all of them."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from lowtide.bin.main import main as lowtide_main
from lowtide.bin.schedule import main
from lowtide.pipe.schedules.registry import KINDS, make_schedule
from lowtide.pipe.schedules.schedule import Schedule


def table(text: str) -> list[list[str]]:
    """The cells of every row."""
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in text.splitlines() if "│" in line]


def config(folder: Path, **sections: Any) -> str:
    path = folder / "train.json"
    path.write_text(json.dumps(sections))
    return str(path)


def test_show_draws_the_grid_and_counts_what_each_rank_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert lowtide_main(["schedule", "show", "1f1b", "--ranks", "2", "--microbatches", "3"]) == 0
    out = capsys.readouterr().out
    assert "rank 0  F0 F1 ..... B0--- F2 B1--- .. B2---" in out
    assert "1f1b: 2 ranks, 2 stages, 3 microbatches" in out
    assert "step 12; bubble 25.0% of the step, 33.3% of the work" in out
    assert table(out) == [["0", "0", "9", "3", "2", "2", "0"], ["1", "1", "9", "0", "1", "1", "0"]]


def test_show_reads_the_pipeline_of_a_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = config(
        tmp_path,
        train_batch_size=16,
        parallel={"pipeline": 2},
        pipeline={"schedule": "interleaved", "chunks": 3, "microbatches": 4},
    )
    assert main(["show", path]) == 0
    assert "interleaved: 2 ranks, 6 stages, 4 microbatches" in capsys.readouterr().out
    assert main(["show", path, "--microbatches", "6", "--chunks", "2"]) == 0
    assert "interleaved: 2 ranks, 4 stages, 6 microbatches" in capsys.readouterr().out


def test_microbatches_are_gradient_accumulation_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = config(tmp_path, gradient_accumulation_steps=5, parallel={"pipeline": 2})
    assert main(["show", path]) == 0
    assert "1f1b: 2 ranks, 2 stages, 5 microbatches" in capsys.readouterr().out


def test_what_a_config_does_not_say_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = config(tmp_path, parallel={"pipeline": 2}, pipeline={"schedule": "gpipe"})
    assert main(["show", path]) == 1
    assert (
        capsys.readouterr().err
        == "lowtide schedule: schedule gpipe: expected a number of microbatches; add --microbatches N\n"
    )
    assert main(["show", path, "--microbatches", "4"]) == 0
    assert main(["show", "zero3", "--microbatches", "4"]) == 1
    assert "lowtide schedule: schedule 1f1b: expected a number of ranks; add --ranks N" in capsys.readouterr().err


def test_a_config_with_a_fault_or_none_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", config(tmp_path, parallel={"pipelines": 2})]) == 1
    err = capsys.readouterr().err
    assert "train.json" in err and 'did you mean "pipeline"?' in err
    assert main(["show", str(tmp_path / "none.json")]) == 1
    assert "none.json" in capsys.readouterr().err


def test_a_schedule_is_saved_changed_and_shown_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "own.txt"
    assert main(["show", "zb-h1", "--ranks", "2", "--microbatches", "4", "--save", str(path)]) == 0
    assert f"schedule written to {path}" in capsys.readouterr().out
    assert Schedule.from_text(path.read_text()) == make_schedule("zb-h1", 2, 4)
    assert main(["show", str(path)]) == 0
    assert "zb-h1: 2 ranks, 2 stages, 4 microbatches" in capsys.readouterr().out
    assert main(["show", str(path), "--ranks", "4"]) == 1
    assert "expected 4 ranks, as in the config, found 2" in capsys.readouterr().err
    path.write_text(path.read_text().replace(" 1W3", ""))
    assert main(["show", str(path)]) == 1
    err = capsys.readouterr().err
    assert "leak: the tensors for W are held to the end; 1W3 is missing" in err and ">1I3<" in err


def test_show_writes_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "grid.png"
    assert main(["show", "zb-v", "--ranks", "2", "--microbatches", "4", "--png", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    assert f"picture written to {path}" in capsys.readouterr().out


def test_a_picture_without_matplotlib_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["show", "zb-v", "--ranks", "2", "--microbatches", "4", "--png", str(tmp_path / "grid.png")]) == 1
    assert '--png needs matplotlib: pip install "lowtide[examples]"' in capsys.readouterr().err


def test_what_a_schedule_cannot_take_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "dualpipe-v", "--ranks", "4", "--microbatches", "4"]) == 1
    assert "lowtide schedule: schedule dualpipe-v needs 2 microbatches for each rank" in capsys.readouterr().err
    assert main(["show", "1f1bb", "--ranks", "4", "--microbatches", "4"]) == 1
    assert 'unknown schedule "1f1bb"; did you mean "1f1b"?' in capsys.readouterr().err
    assert main(["show", "1f1b"]) == 1
    assert "schedule 1f1b: expected a number of ranks; add --ranks N" in capsys.readouterr().err


def test_compare_ranks_every_schedule_the_fastest_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "--ranks", "4", "--microbatches", "8", "--chunks", "2"]) == 0
    rows = table(capsys.readouterr().out)
    assert {row[1] for row in rows} == set(KINDS)
    assert [row[:5] for row in rows] == [
        ["1", "zb-h1", "2", "25.5", "5.9%"],
        ["2", "zb-v", "2", "25.5", "5.9%"],
        ["3", "dualpipe-v", "2", "25.5", "5.9%"],
        ["4", "zb-h1", "1", "27", "11.1%"],
        ["5", "interleaved", "2", "28.5", "15.8%"],
        ["6", "1f1b", "1", "33", "27.3%"],
        ["7", "gpipe", "1", "33", "27.3%"],
    ]
    assert [row[6] for row in rows] == ["4", "4", "4.5", "4", "5.5", "4", "8"]


def test_what_is_above_the_memory_limit_comes_last_without_a_place(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--activation-bytes", "1GB", "--parameter-bytes", "2GB", "--memory-limit", "6.2GB"]
    assert main(["compare", "--ranks", "4", "--microbatches", "8", "--chunks", "2", *sizes]) == 0
    out = capsys.readouterr().out
    assert "memory limit 6.2 GB" in out
    rows = table(out)
    assert [(row[0], row[1], row[8]) for row in rows] == [
        ("1", "zb-h1", "yes"),
        ("2", "zb-v", "yes"),
        ("3", "zb-h1", "yes"),
        ("4", "1f1b", "yes"),
        ("", "dualpipe-v", "no"),
        ("", "interleaved", "no"),
        ("", "gpipe", "no"),
    ]
    assert [row[7] for row in rows] == ["6 GB", "6 GB", "6 GB", "6 GB", "6.5 GB", "7.5 GB", "10 GB"]


def test_costs_change_the_ranking(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--ranks", "4", "--microbatches", "8", "--chunks", "2", "--costs", "1,1,0.2", "--send", "2"]
    assert main(["compare", *options]) == 0
    rows = table(capsys.readouterr().out)
    steps = [float(row[3]) for row in rows]
    assert steps == sorted(steps) and rows[0][1] == "gpipe"  # slow messages: few turns are best


def test_a_schedule_that_cannot_take_the_microbatches_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "--ranks", "4", "--microbatches", "6"]) == 0
    out = capsys.readouterr().out
    assert "not possible: schedule dualpipe-v needs 2 microbatches for each rank, at least 8 on 4 ranks" in out
    assert "dualpipe-v" not in {row[1] for row in table(out)}


def test_a_limit_below_every_schedule_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "--ranks", "4", "--microbatches", "8", "--memory-limit", "3"]) == 1
    assert "lowtide schedule: no schedule fits in 3; the smallest needs 4" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--costs", "1,2"], 'expected three times F,I,W, for example 1,1.2,0.8, found "1,2"'),
        (["--costs", "1,-1,1"], 'expected three times F,I,W, for example 1,1.2,0.8, found "1,-1,1"'),
        (["--costs", "0,0,0"], 'expected three times F,I,W, for example 1,1.2,0.8, found "0,0,0"'),
        (["--send", "soon"], 'expected a time of 0 or more, found "soon"'),
        (["--send", "nan"], 'expected a time of 0 or more, found "nan"'),
        (["--activation-bytes", "4 apples"], 'expected a size, for example 80GB, 1.5GiB or 450e12, found "4 apples"'),
        (["--ranks", "0"], 'expected a whole number of at least 1, found "0"'),
    ],
)
def test_options_that_are_none_are_refused(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["show", "1f1b", "--ranks", "4", "--microbatches", "8", *options])
    assert message in capsys.readouterr().err


def test_help_has_examples_and_every_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_status:
        main(["--help"])
    assert exit_status.value.code == 0
    out = capsys.readouterr().out
    assert "lowtide schedule compare --ranks 8 --microbatches 32" in out
    assert all(f"  {kind.name}" in out and kind.summary in out for kind in KINDS.values())
