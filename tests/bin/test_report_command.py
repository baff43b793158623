"""`lowtide report`: which rank was the fullest, and what it held; and a page with all that a run has written."""

import json
import re
import shutil
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import lowtide
from lowtide.bin.report import main, page_of
from lowtide.engine.report.memory_report import MemoryReport, reports_in
from tests.kit.models import TinyGPT, tiny_gpt, token_batch
from tests.kit.training import settings

Capture = pytest.CaptureFixture[str]


def test_the_command_shows_the_fullest_rank(tmp_path: Path, capsys: Capture) -> None:
    config = settings(train_micro_batch_size_per_gpu=8, memory_report={"folder": str(tmp_path), "step": 2})
    with lowtide.initialize(TinyGPT(width=64), config) as engine:
        for number in range(2):
            engine.train_step(token_batch(number, 8))
    picture = tmp_path / "timeline.png"
    assert main([str(tmp_path), "--png", str(picture)]) == 0 and picture.stat().st_size > 1000
    said = capsys.readouterr().out
    parts = ["rank 0, after step 2", "predicted", "the peak was in: ", "forward of blocks.0", "model states by unit"]
    assert [part for part in parts if part not in said] == []
    assert main([str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["peak_bytes"] == reports_in(tmp_path)[0].peak_bytes
    assert main([str(tmp_path), "--rank", "7"]) == 1
    assert "expected a rank of 0, found --rank 7" in capsys.readouterr().err


def saved(folder: Path, rank: int, world_size: int) -> None:
    MemoryReport(rank, world_size, 3, {"parameter_bytes": rank}, {}, {}, why_not="[/no] markup").save(folder)


def test_ranks_of_a_larger_run_before_are_not_shown(tmp_path: Path, capsys: Capture) -> None:
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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.backend_bases", None)
    with pytest.raises(SystemExit):
        main([str(tmp_path), "--png", str(tmp_path / "a.png")])
    assert 'argument --png: a picture needs matplotlib: pip install "lowtide[examples]"' in capsys.readouterr().err


def test_a_folder_without_reports(tmp_path: Path, capsys: Capture) -> None:
    assert main([str(tmp_path)]) == 1
    assert "expected memory-rank0.json and so on, found none; to record a step, set" in capsys.readouterr().err
    (tmp_path / "memory-rank0.json").write_text("{}")
    assert main([str(tmp_path)]) == 1
    assert "expected a file that engine.memory_report().save() has written" in capsys.readouterr().err
    for name, content, text in (
        ("metrics.csv", "epoch,loss\n0,1.5\n", "expected a folder with metrics.csv (csv_monitor), a profile or a"),
        ("profile-rank0.json", "{", "profile-rank0.json: expected a profile that lowtide has written"),
    ):
        (tmp_path / name).write_text(content)
        assert main([str(tmp_path), "--html", str(tmp_path / "run.html")]) == 1
        assert text in capsys.readouterr().err


# -- `--html FILE`: one file, as a browser shows it ------------------------------------------------------------------


class Reader(HTMLParser):
    """What is opened, and the text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("a<b>run")
    config = settings(
        optimizer={"type": "sgd", "params": {"lr": 0.1}},
        csv_monitor={"enabled": True, "output_path": str(folder)},
        profile={"enabled": True, "folder": str(folder / "profile"), "step": 2},
    )
    with lowtide.initialize(tiny_gpt(), config) as engine:
        for step in range(5):
            engine.train_step(token_batch(step, 2))
    return folder


def test_the_page_has_charts_and_tables_and_loads_nothing(run: Path) -> None:
    page = page_of(run)
    reader = Reader()
    reader.feed(page)
    text = " ".join(reader.text)
    assert reader.open == [] and reader.tags.count("svg") >= 7 and "script" not in reader.tags
    assert "5 steps, 1 to 5" in text and "Profile of rank 0: 1 step from step 2 on" in text and "a<b>run" in text
    started = json.loads((run / "run" / "run.json").read_text())["started"]
    assert f"started {started}; 1 rank; 5 steps, 1 to 5; folder " in text and "lowtide: run: " in text
    assert '"type": "sgd"' in text and "fp16" not in text  # of the config, no defaults
    assert not re.search(r"(src|href)=|url\(|https?://", page)


def test_a_folder_of_several_runs_names_the_others(run: Path, tmp_path: Path) -> None:
    for name in ("first", "second"):
        shutil.copytree(run / "run", tmp_path / name)
    (tmp_path / "first" / "run.json").unlink()  # of a version that wrote none
    page = page_of(tmp_path)
    assert f"<h1>{tmp_path.name}</h1>" in page
    assert "This folder has more runs; write a page for each: second</p>" in page


def test_the_command_writes_the_page(run: Path, tmp_path: Path, capsys: Capture) -> None:
    assert main([str(run), "--html", str(tmp_path / "page.html")]) == 0
    assert capsys.readouterr().out == f"page: {tmp_path / 'page.html'}\n"
