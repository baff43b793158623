"""The example script as a user runs it, at a size that takes a second."""

import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import train_gpt
from gpt_model import GPTShape
from loss_curve import smoothed
from training_display import TrainingDisplay

from lowtide.checkpoint.folder import CheckpointFolder
from tests.kit.ranks import environment, free_port
from tests.kit.training import logged, refusal

SIZE = ["--layers", "1", "--heads", "2", "--width", "16", "--context", "16", "--batch-size-per-process", "4"]


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Options that name the folders and files of a run."""
    (tmp_path / "source").mkdir()
    for number in range(3):
        (tmp_path / "source" / f"file{number}.py").write_text("def f(x):\n    return x\n" * 40, encoding="utf-8")
    places = {"data": "source", "out": "out", "report": "report.json"}
    return [word for option, place in places.items() for word in (f"--{option}", str(tmp_path / place))]


def train(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    train_gpt.main([*SIZE, *arguments])
    report: dict[str, Any] = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    return report


def test_training_leaves_curve_report_and_text(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = ["--print-every", "10", "--sample-bytes", "20"]
    report = train(tmp_path, *files, "--config", "zero3", "--steps", "30", *shown)
    numel = GPTShape(num_layers=1, num_heads=2, width=16, context=16).num_parameters
    assert report["steps"] == 30 and report["final_loss"] < report["first_loss"]
    assert 12 * numel <= report["model_state_bytes"] < 12 * numel * 1.1  # no gradients at rest; groups are padded
    assert report["peak_bytes"] >= report["start_bytes"] > 0
    assert report["sample"].startswith("def read_file(self, path):\n")
    assert (tmp_path / "out" / "loss_curve.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "config zero3" in printed and "loss curve: " in printed and " 0 tokens/s" not in printed
    steps = [line for line in printed.splitlines() if line.startswith("step ")]
    assert [line.split()[1] for line in steps] == ["1/30", "10/30", "20/30", "30/30"]
    first, *_, last = [line.split("loss ")[1].split()[0] for line in steps]
    assert f"training loss {first} -> {last}, validation loss {report['validation_loss']:.3f}" in printed


def test_ctrl_c_saves_what_the_next_run_goes_on_from(
    files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """On half of the ranks, too, as after the loss of a host, with what the launcher tells every attempt."""
    shown, wide = TrainingDisplay.update, [*files, "--sample-bytes", "0", "--batch-size-per-process", "8"]
    wide += ["--steps", "8"]
    calm, saving = train(tmp_path, *wide), ["--checkpoints", str(tmp_path / "saved")]

    def update(display: TrainingDisplay, step: int, *numbers: float) -> None:
        shown(display, step, *numbers)  # type: ignore[arg-type]  # a loss and a number of bytes
        if step == 2:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as watched, pytest.raises(SystemExit) as ended:
        watched.setattr(TrainingDisplay, "update", update)
        train_gpt.main([*SIZE, *wide, *saving])
    assert ended.value.code == 130
    assert "lowtide: SIGINT: this step ends, then it is saved; a second one acts at once\n" in capfd.readouterr().err
    assert CheckpointFolder(tmp_path / "saved").tags() == ["global_step3"]
    for name, value in (environment(0, 1, free_port()) | {"LOWTIDE_FIRST_WORLD_SIZE": "2"}).items():
        monkeypatch.setenv(name, value)
    with logged() as messages:
        found = train(tmp_path, *wide, *saving, "--batch-size-per-process", "4")
    assert (
        "config: train_batch_size: stays 8 on 1 rank, as the job began on 2: microbatch x accumulation x data-parallel "
        "ranks is now 4 x 2 x 1, was 4 x 1 x 2"
    ) in messages
    for loss in ("final_loss", "validation_loss"):
        assert found[loss] == pytest.approx(calm[loss], abs=1e-5)
    assert found["steps"] == 8 and found["first_loss"] < calm["first_loss"]
    with pytest.raises(SystemExit, match="saved is at step 8 already; expected --steps above that, found 8"):
        train_gpt.main([*SIZE, *wide, *saving])


def test_the_config_of_a_run_keeps_the_preset_and_takes_the_flags(tmp_path: Path) -> None:
    arguments = train_gpt.parse_arguments(["--config", "zero2", "--learning-rate", "0.5", "--steps", "100"])
    config = train_gpt.training_config(arguments)
    assert (config["zero_optimization"]["stage"], config["train_micro_batch_size_per_gpu"]) == (2, 16)
    assert (config["optimizer"]["params"]["lr"], config["scheduler"]["type"]) == (0.5, "cosine")
    file = tmp_path / "config.json"
    file.write_text('{"gradient_accumulation_steps": 3}', encoding="utf-8")
    said = refusal(train_gpt.training_config, train_gpt.parse_arguments(["--config", str(file)]))
    assert "--batch-size-per-process 16 is not divisible by " in said and "(3); try 18" in said


@pytest.mark.parametrize(
    ("option", "value", "text"),
    [
        ("--save-every", "3", "train_gpt.py: error: --save-every needs a folder to save in: give --checkpoints too"),
        ("--steps", "0", "argument --steps: expected a number of at least 1, found 0"),
        ("--width", "10", "train_gpt.py: --width 10 is not divisible by --heads 4"),
        ("--data", "/nowhere", "train_gpt.py: expected the .py files of Python's standard library in /nowhere"),
    ],
)
def test_wrong_arguments_end_with_one_line(
    option: str, value: str, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [train_gpt.__file__, option, value])
    with pytest.raises(SystemExit) as ended:
        train_gpt.main()
    assert ended.value.code not in (None, 0)
    assert text in f"{capsys.readouterr().err}{ended.value.code}"


def test_smoothed_keeps_a_straight_line_and_takes_noise_away() -> None:
    assert smoothed([4.0, 2.0])[0] == pytest.approx(4.0) and smoothed([4.0]) == [4.0]
    line = [9.0 - 0.05 * step for step in range(120)]
    assert smoothed(line) == pytest.approx(line)  # a mean of the losses so far would be 0.45 too high
    rough = [value + 0.3 * (-1) ** step for step, value in enumerate(line)]
    assert max(abs(one - other) for one, other in zip(smoothed(rough), line, strict=True)) < 0.1
