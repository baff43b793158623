"""`lowtide report`: which rank was the fullest, and what it held."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import lowtide
from lowtide.bin.report import main
from lowtide.engine.report.memory_report import MemoryReport, reports_in
from tests.kit import models
from tests.kit.training import ADAMW

PLAIN = {"optimizer": ADAMW, "steps_per_print": 0}
ROWS = 8


def test_the_command_shows_the_fullest_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {**PLAIN, "train_micro_batch_size_per_gpu": ROWS, "memory_report": {"folder": str(tmp_path), "step": 2}}
    with lowtide.initialize(models.TinyGPT(width=64, layers=3), config) as engine:
        for number in range(2):
            engine.train_step(models.token_batch(number, ROWS))
    picture = tmp_path / "timeline.png"
    assert main([str(tmp_path), "--png", str(picture)]) == 0 and picture.stat().st_size > 1000
    said = capsys.readouterr().out
    for part in (
        "rank 0, after step 2",
        "predicted",
        "the peak was in: ",
        "forward of blocks.0",
        "model states by unit",
    ):
        assert part in said, part
    assert main([str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["peak_bytes"] == reports_in(tmp_path)[0].peak_bytes
    assert main([str(tmp_path), "--rank", "7"]) == 1
    assert "expected a rank of 0, found --rank 7" in capsys.readouterr().err


def saved(folder: Path, rank: int, world_size: int) -> None:
    MemoryReport(rank, world_size, 3, {"parameter_bytes": rank}, {}, {}, why_not="[/no] markup").save(folder)


def test_ranks_of_a_larger_run_before_are_not_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank, world_size in ((0, 2), (1, 2), (2, 4), (3, 4)):
        saved(tmp_path, rank, world_size)
    assert main([str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "rank 1, the fullest of 2, after step 3" in said and "[/no] markup" in said
    assert main([str(tmp_path), "--rank", "0"]) == 0  # which is not
    assert "rank 0, after step 3" in capsys.readouterr().out
    (tmp_path / "memory-rank1.json").unlink()
    assert main([str(tmp_path)]) == 0
    assert "rank 0 of 2 ranks (some have no file here), after step 3" in capsys.readouterr().out


def test_a_picture_that_cannot_be_drawn_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(tmp_path, 0, 1)
    found = replace(reports_in(tmp_path)[0], samples=[("forward", {"parameter_bytes": 1})])
    found.save(tmp_path)
    assert main([str(tmp_path), "--png", str(tmp_path / "no" / "a.png")]) == 1
    assert "lowtide report: [Errno 2] No such file or directory" in capsys.readouterr().err
    assert main([str(tmp_path), "--png", str(tmp_path / "a.pgn")]) == 1
    assert "lowtide report: Format 'pgn' is not supported" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main([str(tmp_path), "--png", str(tmp_path / "a.png")]) == 1
    assert 'a picture needs matplotlib: pip install "lowtide[examples]"' in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "expected memory-rank0.json and so on, found none; to record a step, set"),
        ("{}", "expected a file that engine.memory_report().save() has written"),
    ],
)
def test_a_folder_without_reports(text: str | None, said: str, tmp_path: Path, capsys: Any) -> None:
    if text is not None:
        (tmp_path / "memory-rank0.json").write_text(text)
    assert main([str(tmp_path)]) == 1
    assert said in capsys.readouterr().err
