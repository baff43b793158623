"""The shell commands: their help, their errors, and the summary of the quickstart."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from quickstart_summary import summary

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **environment})


@pytest.mark.parametrize("name", ["quickstart", "test"])
def test_help_is_shown_without_installing_anything(name: str) -> None:
    shown = run(ROOT / "bin" / name, "--help")
    assert shown.returncode == 0
    assert shown.stdout.startswith(f"usage: bin/{name}")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--stpes", "3"], 'quickstart: unknown argument "--stpes"; see bin/quickstart --help'),
        (["--steps"], "quickstart: --steps needs a number"),
        (["--steps", "many"], 'quickstart: --steps: expected a number of at least 1, found "many"'),
    ],
)
def test_wrong_arguments_are_named(arguments: list[str], text: str) -> None:
    ended = run(ROOT / "bin" / "quickstart", *arguments)
    assert ended.returncode == 1
    assert ended.stderr.strip() == text


def test_an_old_python_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    for name in ("quickstart", "environment.sh"):
        shutil.copy(ROOT / "bin" / name, tmp_path / "bin" / name)
    old = tmp_path / "python3.9"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "Python 3.9.1"\nexit 1\n', encoding="utf-8")
    old.chmod(0o755)
    ended = run(tmp_path / "bin" / "quickstart", PYTHON=str(old))
    assert ended.returncode == 1
    assert "expected Python 3.11 or newer in $PYTHON, found Python 3.9.1" in ended.stderr
    assert not (tmp_path / ".venv").exists()


def test_summary_says_loss_memory_curve_sample_and_what_next(tmp_path: Path) -> None:
    report = {
        "start_bytes": 300 << 20,
        "peak_bytes": 1000 << 20,
        "first_loss": 5.5,
        "final_loss": 1.75,
        "validation_loss": 1.875,
        "tokens_per_second": 12345.0,
        "curve": "runs/quickstart/train/loss_curve.png",
        "sample": "def f():\n    return 1",
    }
    for name, states in (("memory_stage_0", 400), ("memory_stage_3", 200), ("train", 10)):
        content = json.dumps({**report, "model_state_bytes": states << 20})
        (tmp_path / f"{name}.json").write_text(content, encoding="utf-8")
    lines = summary(tmp_path).splitlines()
    loss = "the loss fell: 5.500 -> 1.750 nats per byte (1.875 on files that were not trained on), 12,345 tokens/s"
    assert {loss, "the loss curve: runs/quickstart/train/loss_curve.png", "  |     return 1"} <= set(lines)
    assert [" ".join(line.split()) for line in lines if "stage" in line and "MiB" in line] == [
        "plain data parallelism (stage 0) 400 MiB 700 MiB 1,000 MiB",
        "ZeRO stage 3 200 MiB 700 MiB 1,000 MiB",
    ]
    assert len([line for line in lines if line.startswith(("  .venv/", "  ./bin/"))]) == 3
