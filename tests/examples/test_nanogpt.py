"""examples/nanogpt.py at a size that takes a second: its own loop trains, goes on, and samples."""

import json
from pathlib import Path
from typing import Any

import nanogpt
import pytest

from lowtide.checkpoint.folder import CheckpointFolder

SIZE = ["--layers", "1", "--width", "16", "--context", "16", "--eval-every", "4"]


def run(capsys: pytest.CaptureFixture[str], *options: str) -> list[dict[str, Any]]:
    nanogpt.main([*SIZE, *options])
    return [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]


def test_a_run_in_two_parts_is_one_in_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = run(capsys, "--out", str(tmp_path / "whole"), "--steps", "8")
    assert [line.get("step") for line in whole] == [4, 8, None]
    assert whole[1]["held_back"] < whole[0]["held_back"] and whole[2]["sample"].startswith("12+34=")
    parts = [run(capsys, "--out", str(tmp_path / "parts"), "--steps", steps) for steps in ("4", "8")]
    assert [parts[0][0], *parts[1]] == whole
    assert CheckpointFolder(tmp_path / "parts").open().manifest.step == 8
