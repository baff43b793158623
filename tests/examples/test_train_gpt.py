"""The example script as a user runs it, at a size that takes a second."""

import json
import signal
import sys
from pathlib import Path

import pytest
import train_gpt
from gpt_model import GPTShape
from loss_curve import smoothed
from training_display import TrainingDisplay

from lowtide.checkpoint.folder import CheckpointFolder

SIZE = ["--layers", "1", "--heads", "2", "--width", "16", "--context", "16", "--batch-size-per-process", "4"]
SCRIPT = Path(train_gpt.__file__)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    for number in range(3):
        (folder / f"file{number}.py").write_text("def f(x):\n    return x\n" * 40, encoding="utf-8")
    return folder


@pytest.mark.parametrize("preset", ["zero0", "zero3"])
def test_training_leaves_curve_report_and_text(
    preset: str, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, report_file = tmp_path / "out", tmp_path / "report.json"
    files = ["--data", str(source), "--out", str(out), "--report", str(report_file)]
    train_gpt.main([*SIZE, *files, "--config", preset, "--steps", "30", "--print-every", "10", "--sample-bytes", "20"])
    report = json.loads(report_file.read_text(encoding="utf-8"))
    numel = GPTShape(num_layers=1, num_heads=2, width=16, context=16).num_parameters
    assert report["steps"] == 30
    assert report["final_loss"] < report["first_loss"]
    assert 12 * numel <= report["model_state_bytes"] < 12 * numel * 1.1  # no gradients at rest; groups are padded
    assert report["peak_bytes"] >= report["start_bytes"] > 0
    assert report["sample"].startswith("def read_file(self, path):\n")
    assert (out / "loss_curve.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert f"config {preset}" in printed
    assert [line.split()[1] for line in printed.splitlines() if line.startswith("step ")] == [
        "1/30",
        "10/30",
        "20/30",
        "30/30",
    ]
    assert "loss curve: " in printed
    assert " 0 tokens/s" not in printed
    first, *_, last = [line.split("loss ")[1].split()[0] for line in printed.splitlines() if line.startswith("step ")]
    assert f"training loss {first} -> {last}, validation loss {report['validation_loss']:.3f}" in printed


def test_a_second_run_goes_on_where_the_first_has_saved(source: Path, tmp_path: Path) -> None:
    report_file = tmp_path / "report.json"
    files = ["--data", str(source), "--out", str(tmp_path / "out"), "--report", str(report_file)]
    arguments = [*SIZE, *files, "--checkpoints", str(tmp_path / "saved"), "--sample-bytes", "0", "--steps"]
    train_gpt.main([*arguments, "15"])
    before = json.loads(report_file.read_text(encoding="utf-8"))
    train_gpt.main([*arguments, "20"])
    after = json.loads(report_file.read_text(encoding="utf-8"))
    assert after["steps"] == 20
    assert after["first_loss"] < before["first_loss"] - 0.1
    with pytest.raises(SystemExit, match="saved is at step 20 already; expected --steps above that, found 20"):
        train_gpt.main([*arguments, "20"])


def test_ctrl_c_saves_what_the_next_run_goes_on_from(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    shown = TrainingDisplay.update

    def update(display: TrainingDisplay, step: int, *numbers: float) -> None:
        shown(display, step, *numbers)  # type: ignore[arg-type]  # a loss and a number of bytes
        if step == 2:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(TrainingDisplay, "update", update)
    files = ["--data", str(source), "--out", str(tmp_path / "out"), "--checkpoints", str(tmp_path / "saved")]
    with pytest.raises(SystemExit) as ended:
        train_gpt.main([*SIZE, *files, "--steps", "100000"])
    assert ended.value.code == 130
    assert "lowtide: SIGINT: the step is finished and saved; a second one acts at once\n" in capfd.readouterr().err
    assert CheckpointFolder(tmp_path / "saved").tags() == ["global_step3"]


def test_the_config_of_a_run_keeps_the_preset_and_takes_the_flags() -> None:
    arguments = train_gpt.parse_arguments(["--config", "zero2", "--learning-rate", "0.5", "--steps", "100"])
    config = train_gpt.training_config(arguments)
    assert config["zero_optimization"]["stage"] == 2
    assert config["train_micro_batch_size_per_gpu"] == 16
    assert config["optimizer"]["params"]["lr"] == 0.5
    assert config["scheduler"]["type"] == "cosine"


def test_a_batch_that_accumulation_does_not_divide_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"gradient_accumulation_steps": 3}', encoding="utf-8")
    arguments = train_gpt.parse_arguments(["--config", str(file), "--batch-size-per-process", "16"])
    with pytest.raises(ValueError, match=r"--batch-size-per-process 16 is not divisible by .* \(3\); try 18"):
        train_gpt.training_config(arguments)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--save-every", "3"], "train_gpt.py: error: --save-every needs a folder to save in: give --checkpoints too"),
        (["--steps", "0"], "argument --steps: expected a number of at least 1, found 0"),
        (["--width", "10"], "train_gpt.py: --width 10 is not divisible by --heads 4"),
        (["--data", "/nowhere"], "train_gpt.py: expected the .py files of Python's standard library in /nowhere"),
    ],
)
def test_wrong_arguments_end_with_one_line(
    arguments: list[str], text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments])
    with pytest.raises(SystemExit) as ended:
        train_gpt.main()
    assert ended.value.code not in (None, 0)
    assert text in f"{capsys.readouterr().err}{ended.value.code}"


def test_smoothed_starts_at_the_first_loss_and_keeps_a_constant() -> None:
    assert smoothed([3.0, 3.0, 3.0]) == pytest.approx([3.0, 3.0, 3.0])
    assert smoothed([4.0, 2.0])[0] == pytest.approx(4.0) and smoothed([4.0]) == [4.0]


def test_smoothed_keeps_a_straight_line_and_takes_noise_away() -> None:
    line = [9.0 - 0.05 * step for step in range(120)]
    assert smoothed(line) == pytest.approx(line)  # a mean of the losses so far would be 0.45 too high
    rough = [value + 0.3 * (-1) ** step for step, value in enumerate(line)]
    assert max(abs(one - other) for one, other in zip(smoothed(rough), line, strict=True)) < 0.1
