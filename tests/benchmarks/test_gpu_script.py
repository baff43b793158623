"""A quarter of an hour on a GPU, rehearsed: every part measures something and writes it down, and no part fails."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from lowtide.engine.config.config import Config
from tests.benchmarks import Helper

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.sh"

# The tables of each part.
TABLES = {
    "language_models": ["language models, bf16, one rank"],
    "checks": ["devices", "kernels against float64", "tests marked gpu"],
    "training": ["one rank beside the CPU"],
}
# Of trainings and language models those that differ in the code of their part: what an engine of each config
# does on the device is shown in tests/pretend.
TRAINED = ["stage 0, fp32", "stage 2, fp16", "states and parameters nvme, bf16", "stage 3, compiled blocks, bf16"]
LANGUAGE_MODELS = ["torch-compiled", "fsdp2-compiled", "lowtide-compiled", "lowtide-7-bytes-fp8"]
ONLY = ["devices", "tests", "sum_of_squares", "tiny, 1 x", *LANGUAGE_MODELS, *TRAINED]


def run(arguments: Sequence[str], **environment: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "GPU_PYTHON": sys.executable, **environment}
    command = [str(SCRIPT), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)


@pytest.mark.slow
def test_every_part_is_rehearsed(tmp_path: Path) -> None:
    ended = run(["--rehearse", "--only", *ONLY, "--out", str(tmp_path)])
    assert ended.returncode == 0, f"{ended.stdout}{ended.stderr}"
    found = json.loads((tmp_path / "results.json").read_text())
    assert list(found) == list(TABLES)
    for part, tables in TABLES.items():
        assert found[part]["status"] == "done" and found[part]["failures"] == []
        assert found[part]["settings"]["rehearsal"] is True and found[part]["settings"]["versions"]["torch"]
        assert all(found[part]["tables"][table] for table in tables)
    trained = found["training"]["tables"]["one rank beside the CPU"]
    names = [f"{row['case']}, {row['dtype']}" for row in trained]
    assert [next(text for text in TRAINED if name.endswith(text)) for name in names] == TRAINED
    rows = found["language_models"]["tables"]["language models, bf16, one rank"]
    trained = [row for row in rows if row["outcome"] == "trained" and "recomputed" not in row["model"]]
    last = {row["contender"]: float(row["losses"].split()[-1]) for row in trained}
    assert {"FSDP2, blocks compiled", "lowtide stage 3, blocks compiled"} <= set(last)
    assert max(abs(loss - last["torch, blocks compiled"]) for loss in last.values()) < 3e-3
    assert all("Error" in row["outcome"] for row in rows if row["outcome"] != "trained")


def test_every_training_has_a_config_that_loads(helper: Helper) -> None:
    part = helper("_gpu_parts")
    for case in part.CASES:
        for dtype in case.dtypes:
            config = Config.load(case.config(dtype, "cpu", "folder")).resolve(1)
            assert config.zero_optimization.stage == case.zero["stage"] and config.train_batch_size == part.ROWS
    for contender in helper("_gpu_language_models").CONTENDERS.values():
        if contender.kind == "lowtide":
            options = {"zero_optimization": contender.options["zero"], **contender.options["more"]}
            assert Config.load({"optimizer": {"type": "adamw"}, "bf16": {"enabled": True}, **options}).resolve(1)


def test_a_part_that_takes_too_long_is_cut_off(tmp_path: Path) -> None:
    ended = run(["checks", "--rehearse", "--seconds", "0.2", "--out", str(tmp_path)])
    assert ended.returncode == 1 and "checks          cut off after 0.2 s" in ended.stdout
    assert json.loads((tmp_path / "results.json").read_text())["checks"]["status"] == "cut off after 0.2 s"


@pytest.mark.parametrize(
    ("python", "said"), [(sys.executable, "torch 2.99 finds no accelerator"), ("no/such/python", "python: not found")]
)
def test_a_python_that_cannot_do_it_is_said(python: str, said: str, tmp_path: Path) -> None:
    """With a torch that has no accelerator, and takes no time to import."""
    (tmp_path / "torch.py").write_text("__version__ = '2.99'\nclass accelerator:\n    is_available = lambda: False\n")
    ended = run(["--out", str(tmp_path / "out")], GPU_PYTHON=python, PYTHONPATH=str(tmp_path))
    assert ended.returncode == 2 and ended.stdout == ""
    assert "gpu.sh: expected a Python of version 3.11 or newer with torch and an accelerator" in ended.stderr
    assert said in ended.stderr and "GPU_PYTHON=/path/to/python" in ended.stderr


def test_a_package_that_is_missing_is_said(
    helper: Helper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu = helper("gpu")
    monkeypatch.setattr(gpu, "NEEDED", ("json", "no_such_package"))
    with pytest.raises(SystemExit, match=r"^2$"):
        gpu.parse_arguments(["--out", str(tmp_path)])
    said = f"expected no_such_package for {sys.executable}, found none; --help says how to bring them"
    assert capsys.readouterr().err.splitlines()[-1].endswith(said)


def test_what_was_measured_stays_beside_a_failure_and_other_parts(helper: Helper, tmp_path: Path) -> None:
    records = helper("_gpu_part")
    settings = {"date": "a day", "device": "one", "versions": {"torch": "2"}, "rehearsal": False}
    for part in ("checks", "training"):
        record = records.Record(tmp_path, part, settings, ["fits", "both"])
        with record.measuring("a model"):
            record.add("sizes", layers=3, ms_a_step=0.123456, peak=None)
            raise ValueError("too\n large")
        record.end()
    assert record.wants("what fits") and not record.wants("what does not")
    found = json.loads((tmp_path / "results.json").read_text())
    assert [part["status"] for part in found.values()] == ["failed", "failed"]
    assert found["training"]["tables"] == {"sizes": [{"layers": 3, "ms a step": 0.123456, "peak": None}]}
    assert [part["failures"] for part in found.values()] == 2 * [["a model: ValueError: too large"]]


def test_a_part_that_was_stopped_goes_on_and_one_that_was_done_begins_anew(helper: Helper, tmp_path: Path) -> None:
    parts = helper("_gpu_part")

    def run(wanted: str, checkout: str = "a", seconds: float = 100.0) -> list[str]:
        """Measure `wanted` of two things in a run; return the rows that are there then."""
        parts.begin(tmp_path, "checks")
        record = parts.Record(tmp_path, "checks", {"date": wanted, "checkout": checkout}, [], seconds)
        for name in ("one", "two"):
            if record.wants(name):
                with record.measuring(name):
                    if name not in wanted:
                        raise parts.OutOfTime
                    record.add("rows", name=name, run=wanted)
        record.end()
        return [f"{row['name']} in {row['run']}" for row in parts.read(tmp_path)["checks"]["tables"].get("rows", [])]

    assert run("two") == ["two in two"]
    assert run("one and two", seconds=parts.LEAVING_SECONDS) == ["two in two"]
    assert run("one and two") == ["two in two", "one in one and two"]
    assert run("one") == ["one in one"]
    assert run("two", checkout="b") == ["two in two"]


def test_the_weights_of_language_models_are_counted(helper: Helper) -> None:
    for name, shape in helper("_gpu_language_models").SHAPES.items():
        linear = [one for one in shape.build("meta").modules() if isinstance(one, torch.nn.Linear)]
        assert shape.matrix_numel == sum(one.weight.numel() for one in linear), name


@pytest.mark.parametrize(
    "outcome", ["out of memory", "lowtide.engine.config.errors.ConfigError: 1 fault", "ValueError: no"]
)
def test_what_is_refused_with_words_is_no_failure(helper: Helper, outcome: str) -> None:
    part = helper("_gpu_language_models")
    assert part.is_refusal(outcome) and not part.is_refusal("RuntimeError: ValueError: no")
