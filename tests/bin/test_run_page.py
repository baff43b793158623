"""`lowtide report RUN --html FILE`: one file with all that a run has written, as a browser shows it."""

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import lowtide
from lowtide.bin.report import main, page_of
from tests.kit import models


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
    config: dict[str, Any] = {
        "optimizer": {"type": "sgd", "params": {"lr": 0.1}},
        "steps_per_print": 0,
        "csv_monitor": {"enabled": True, "output_path": str(folder)},
        "profile": {"enabled": True, "folder": str(folder / "profile"), "step": 2},
    }
    with lowtide.initialize(models.tiny_gpt(), config) as engine:
        for step in range(5):
            engine.train_step(models.token_batch(step, 2))
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
    assert (
        f"<h1>{tmp_path.name}</h1>" in page and "This folder has more runs; write a page for each: second</p>" in page
    )


def test_the_command_writes_it(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run), "--html", str(tmp_path / "page.html")]) == 0
    assert capsys.readouterr().out == f"page: {tmp_path / 'page.html'}\n"
    assert main([str(tmp_path / "none"), "--html", str(tmp_path / "other.html")]) == 1
    assert "expected a folder with metrics.csv (csv_monitor), a profile or a memory" in capsys.readouterr().err


def test_a_browser_shows_it(run: Path, tmp_path: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("there is no chromium here (apt-get install chromium)")
    page, picture = tmp_path / "page.html", tmp_path / "page.png"
    page.write_text(page_of(run), encoding="utf-8")
    options = ["--headless", "--no-sandbox", "--hide-scrollbars", f"--user-data-dir={tmp_path / 'user'}"]
    size = ["--window-size=1160,1600", f"--screenshot={picture}", page.as_uri()]
    subprocess.run([browser, *options, *size], check=True, capture_output=True, timeout=100)
    image = pytest.importorskip("matplotlib.image").imread(picture)
    assert image.shape[:2] == (1600, 1160)
    blue = abs(image[:, :, :3] - [0x2B / 255, 0x6C / 255, 0xB0 / 255]).max(axis=2) < 0.02
    assert blue.sum() > 500  # lines are drawn
    assert blue[:, :580].any() and blue[:, 580:].any()  # in two columns
