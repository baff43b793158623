"""The first hour on a GPU, rehearsed: every part measures something and writes it down, and no part fails."""

import json
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from lowtide.engine.config.config import Config

Helper = Callable[[str], ModuleType]
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.sh"

# The tables of each part.
TABLES = {
    "checks": ["devices", "kernels against float64", "tests marked gpu"],
    "training": ["one rank beside the CPU"],
    "trace": ["memory in MiB", "steps", "gaps of a block"],
    "bandwidth": ["kernels beside their peers"],
    "models": ["models, bf16, one rank"],
    "largest": ["models tried", "the largest model"],
    "ranks": ["two ranks on one device"],
    "splits": ["two ranks on one device", "one of 8 ranks that share"],
    "compiled": ["compiled blocks, bf16, one rank"],
}
# Of trainings and traces those that differ in the code of their part: what an engine of each config does on the device
# is shown in tests/pretend.
TRAINED = ["stage 0", "stage 2", "update in backward", "cpu, overlap delayed", "states and parameters nvme"]
ONLY = ["tests", "rms_norm", "sum_of_squares", "tiny single", "lowtide-3-nvme", ", stage 3", *TRAINED]


def run(arguments: Sequence[str], **environment: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "GPU_PYTHON": sys.executable, **environment}
    command = [str(SCRIPT), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)


@pytest.mark.slow
def test_every_part_is_rehearsed(tmp_path: Path) -> None:
    ended = run(["--rehearse", "--only", *ONLY, "--out", str(tmp_path)])
    assert ended.returncode == 0, f"{ended.stdout}{ended.stderr}"
    found, lines = json.loads((tmp_path / "results.json").read_text()), (tmp_path / "results.md").read_text()
    assert list(found) == list(TABLES)
    for part, tables in TABLES.items():
        assert found[part]["status"] == "done" and found[part]["failures"] == []
        assert found[part]["settings"]["rehearsal"] is True and found[part]["settings"]["versions"]["torch"]
        for table in tables:
            rows = found[part]["tables"][table]
            assert rows and f"| {' | '.join(rows[0])} |" in lines
        assert f"### {part}\n\nA rehearsal: the numbers mean nothing." in lines
    trained = found["training"]["tables"]["one rank beside the CPU"]
    assert all(any(text in row["case"] for row in trained) for text in TRAINED)
    assert {row["dtype"] for row in trained} == {"fp32", "bf16", "fp16"}
    assert len(list(tmp_path.glob("trace_stage*.json.gz"))) == 2


def test_every_training_has_a_config_that_loads(helper: Helper) -> None:
    part = helper("_gpu_training")
    for case in [*part.PLAIN, *part.OTHERS]:
        for dtype in case.dtypes:
            config = Config.load(case.config(dtype, "cpu", part.Length.rows, "folder")).resolve(1)
            assert config.zero_optimization.stage == case.stage and config.train_batch_size == part.Length.rows


def test_a_part_that_takes_too_long_is_cut_off(tmp_path: Path) -> None:
    ended = run(["checks", "--rehearse", "--limit", "0.2", "--out", str(tmp_path)])
    assert ended.returncode == 1 and "checks     cut off after 0.2 s" in ended.stdout
    assert "- cut off after 0.2 s: what is above was measured before" in (tmp_path / "results.md").read_text()


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator here")
@pytest.mark.parametrize(
    ("python", "said"), [(sys.executable, "finds no accelerator"), ("no/such/python", "no/such/python: not found")]
)
def test_a_python_that_cannot_do_it_is_said(python: str, said: str, tmp_path: Path) -> None:
    ended = run(["--out", str(tmp_path)], GPU_PYTHON=python)
    assert ended.returncode == 2 and ended.stdout == ""
    assert "gpu.sh: expected a Python of version 3.11 or newer with torch and an accelerator" in ended.stderr
    assert said in ended.stderr and "GPU_PYTHON=/path/to/python" in ended.stderr


def test_a_package_that_is_missing_is_said(
    script: Helper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu = script("gpu")
    monkeypatch.setattr(gpu, "NEEDED", ("json", "no_such_package"))
    with pytest.raises(SystemExit, match=r"^2$"):
        gpu.parse_arguments(["--out", str(tmp_path)])
    said = f"expected no_such_package for {sys.executable}, found none; --help says how to bring them"
    assert capsys.readouterr().err.splitlines()[-1].endswith(said)


def test_what_was_measured_stays_beside_a_failure_and_other_parts(helper: Helper, tmp_path: Path) -> None:
    records = helper("_gpu_part")
    settings = {"date": "a day", "device": "one", "versions": {"torch": "2"}, "rehearsal": False}
    for part in ("trace", "models"):
        record = records.Record(tmp_path, part, settings, ["fits", "both"], 60.0)
        with record.measuring("a model"):
            record.add("sizes", layers=3, ms_a_step=0.123456, peak=None)
            raise ValueError("too\n large")
        record.end()
    assert record.wants("what fits") and not record.wants("what does not")
    found = json.loads((tmp_path / "results.json").read_text())
    assert [part["status"] for part in found.values()] == ["failed", "failed"]
    text = (tmp_path / "results.md").read_text()
    assert "Measured on a day, one; torch 2." in text
    assert "| layers | ms a step | peak |\n|---|---|---|\n| 3 | 0.1235 | - |\n" in text
    assert text.count("- **FAILED**: a model: ValueError: too large\n") == 2


def event(kind: str, name: str, start: float, duration: float, thread: int = 1, **arguments: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": kind, "name": name, "ts": start, "dur": duration, "tid": thread, "args": arguments}


def node(number: int) -> dict[str, Any]:
    return {"Sequence number": number}


TRACE = [
    event("user_annotation", "step", 0, 40),
    event("user_annotation", "block 0", 0, 9),
    event("cpu_op", "aten::mm", 1, 3, **node(7)),
    event("cuda_runtime", "cudaLaunchKernel", 2, 1, correlation=1),
    event("user_annotation", "block 1", 10, 9),
    event("cpu_op", "aten::mm", 11, 3, **node(8)),
    event("cuda_runtime", "cudaLaunchKernel", 12, 1, correlation=2),
    event("cpu_op", "aten::empty", 19.5, 0.1, **node(8)),  # its number means nothing
    event("cpu_op", "autograd::engine::evaluate_function: MmBackward0", 20, 5, thread=2, **node(8)),
    event("cuda_runtime", "cudaLaunchKernel", 21, 1, thread=2, correlation=3),
    event("cpu_op", "autograd::engine::evaluate_function: MmBackward0", 26, 5, thread=2, **node(7)),
    event("cuda_runtime", "cudaLaunchKernel", 27, 1, thread=2, correlation=4),
    event("cuda_runtime", "cudaStreamSynchronize", 30, 1),
    event("cuda_runtime", "cudaDeviceSynchronize", 50, 1),  # after the step
    event("kernel", "mm", 100, 10, thread=7, correlation=1),
    event("kernel", "reduce", 105, 10, thread=8),  # of nobody, beside it
    event("kernel", "mm", 120, 10, thread=7, correlation=2),
    event("kernel", "mm", 133, 10, thread=7, correlation=3),
    event("kernel", "mm", 150, 10, thread=7, correlation=4),
]


def test_idle_times_are_those_of_blocks(helper: Helper) -> None:
    gaps = helper("_gpu_trace")
    kernels = gaps.kernels_of(TRACE)
    assert [(one.block, one.is_backward) for one in kernels] == [
        ("block 0", False), ("", False), ("block 1", False), ("block 1", True), ("block 0", True),
    ]  # fmt: skip
    assert gaps.gaps_of(kernels) == [
        gaps.Gaps("block 0", False, 20, 5, 1, 5),
        gaps.Gaps("block 1", False, 10, 0, 0, 0.0),
        gaps.Gaps("block 1", True, 17, 7, 1, 7),
        gaps.Gaps("block 0", True, 10, 0, 0, 0.0),
    ]
    assert gaps.idle_times(kernels, 100, 160) == [5, 3, 7]
    assert gaps.host_waits_of(TRACE, "step") == ["cudaStreamSynchronize"]


def test_the_hosts_own_operations_stand_for_kernels(helper: Helper) -> None:
    gaps = helper("_gpu_trace")
    found = gaps.kernels_of(TRACE, host_as_device=True)
    assert [(one.start, one.block) for one in found] == [
        (1, "block 0"), (11, "block 1"), (19.5, ""), (20, "block 1"), (26, "block 0"),
    ]  # fmt: skip


def test_waits_of_cudas_debug_mode_are_told_by_their_place(helper: Helper, monkeypatch: pytest.MonkeyPatch) -> None:
    device, modes = helper("_device"), [0]
    monkeypatch.setattr(device, "type_of_device", lambda: "cuda")
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    text = "called a synchronizing CUDA operation (Triggered internally)"
    with device.host_waits() as waits:
        warnings.warn(text, stacklevel=1)
        beside = threading.Thread(target=warnings.warn, args=(text,))
        beside.start()
        beside.join()
    assert len(waits) == 1 and "test_waits_of_cudas_debug_mode_are_told_by_their_place" in waits[0]
    assert modes == [0, "warn", 0]
