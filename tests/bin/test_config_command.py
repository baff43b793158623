"""`lowtide config`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lowtide.bin.config import main
from lowtide.engine.config.config import Config
from lowtide.engine.config.read import PRESETS

Capture = pytest.CaptureFixture[str]


def test_the_schema_is_printed(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the file: `test_config_schema.py`."""
    monkeypatch.setattr("lowtide.bin.config.schema_text", lambda: "the schema\n")
    assert main(["schema"]) == 0 and capsys.readouterr().out == "the schema\n"


def test_check_prints_notes_or_faults(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "run.json"
    path.write_text('{"train_batch_size": "auto", "gradient_clipping": 1, "wall_clock_breakdown": true}')
    assert main(["check", str(path), "--world-size", "2"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "note: wall_clock_breakdown: true has no effect here: read times in your loop or with torch.profiler",
        'note: train_batch_size: "auto" is 2: train_batch_size = microbatch x accumulation x ranks = 1 x 1 x 2 ranks',
        f"{path}: no faults for 2 ranks",
    ]
    assert main(["check", "zero3"]) == 0 and capsys.readouterr().out == "zero3: no faults\n"
    assert main(["check", "zero3-hybrid", "--world-size", "3"]) == 1
    out, error = capsys.readouterr()
    start = f"1 fault in {PRESETS / 'zero3-hybrid.json'}:\n  zero_optimization.shard_size"
    assert out == "" and error.startswith(start)


def test_show_prints_json_that_loads_again(tmp_path: Path, capsys: Capture) -> None:
    assert main(["show", "zero2", "--world-size", "2"]) == 0
    text = capsys.readouterr().out
    assert json.loads(text)["train_batch_size"] == 2
    path = tmp_path / "again.json"
    path.write_text(text)
    assert Config.load(path).as_dict() == Config.load("zero2").resolve(2).as_dict()
    assert main(["show"]) == 0
    assert json.loads(capsys.readouterr().out) == Config.load({}).as_dict()


def test_explain_says_what_each_key_is_and_where_it_comes_from(capsys: Capture, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"zero_optimization": {"stage": 1, "overlap_comm": true}, "quux": 1}')
    assert main(["explain", str(path), "--given"]) == 1
    out, error = capsys.readouterr()
    assert "zero_optimization.stage = 1  (set)\n    0 shards nothing, 1 the" in out and "pipeline" not in out
    assert error.startswith(f"1 fault in {path}:\n  quux: unknown key")
    assert main(["explain", "zero3", "--json", "--world-size", "4"]) == 0
    said = {one["path"]: one["value"] for one in json.loads(capsys.readouterr().out)}
    assert said["train_batch_size"] == 4 and said["zero_optimization.stage"] == 3


@pytest.mark.parametrize(
    ("other", "status", "text"),
    [
        ("zero2", 0, "zero2 and zero2 ask for the same\n"),
        ("zero3", 1, "zero_optimization.stage: 2 (set) -> 3 (set)\n"),
        ("nothing.json", 2, "no such file: nothing.json"),
    ],
)
def test_diff_compares(capsys: Capture, other: str, status: int, text: str) -> None:
    assert main(["diff", "zero2", other]) == status
    out, error = capsys.readouterr()
    assert text in error if status == 2 else out == text


def test_a_reader_that_has_enough_is_no_error() -> None:
    run = "import sys; from lowtide.bin.main import main; sys.exit(main(['--help']))"
    process = subprocess.Popen([sys.executable, "-c", run], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait() == 141
    process.stderr.close()
