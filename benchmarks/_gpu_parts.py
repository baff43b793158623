"""The parts of benchmarks/gpu.sh: what is measured on the device, and added to the record of each part."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import _device
import torch
from _contenders import ADAMW, FOLDER, filled, lowtide_config
from _gpu_part import Record
from _harness import MIB, loss_difference, mib
from _model import SIZES, build_batches, build_model

import lowtide

ROOT = Path(__file__).parents[1]
IS_REHEARSAL = _device.is_rehearsal()


# -- part checks: every kernel against float64, and the tests that are marked gpu ------------------------------------


MARK = "mark.gpu"
_REHEARSED_KERNELS = ("rms_norm", "sum_of_squares")


def check(record: Record) -> None:
    from _kernel_cases import CASES

    total = _device.total_bytes()
    if record.wants("devices"):
        with record.measuring("devices"):
            record.add("devices", device=_device.name(), number=_device.count(), MiB=total and total // MIB)
    if _device.type_of_device() != "cuda":
        record.note("Triton's kernels are not for this device: they were compared at tiny sizes in its interpreter")
    for name in CASES:
        if record.wants(name) and (name in _REHEARSED_KERNELS or not IS_REHEARSAL):
            with record.measuring(name):
                check_kernel(record, name)
    if record.wants("tests"):
        with record.measuring("tests marked gpu"):
            run_tests(record)


def check_kernel(record: Record, name: str) -> None:
    """Compare every size in each dtype, and a size that no block divides."""
    from rich.console import Console

    import kernels

    dtypes = ["bfloat16"] if IS_REHEARSAL else list(kernels.DTYPES)
    arguments = ["--kernels", name, "--check-only", "--dtypes", *dtypes]
    findings = kernels.run_all(kernels.parse_arguments(arguments), Console(width=170))
    errors = [error for check in findings.checks if check.timed for error in check.more.values()]
    record.add(
        "kernels against float64",
        kernel=name,
        dtypes=", ".join(dtypes),
        comparisons=len(findings.checks),
        right=sum(check.failure is None for check in findings.checks),
        largest_error_over_allowed=max(errors, default=None),
    )
    for problem in findings.wrong:
        record.fail(name, problem)


def run_tests(record: Record) -> None:
    """Run the tests that are marked gpu. Other files are not collected: their packages may be missing here."""
    files = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if MARK in path.read_text()]
    if IS_REHEARSAL:  # in which all are skipped
        files = files[:1]
    names = [str(path.relative_to(ROOT)) for path in files]
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    # lowtide comes from PYTHONPATH: the folder of that name in the checkout is not all of it.
    environment["PYTHONSAFEPATH"] = "1"
    start = "import sys, lowtide, pytest; sys.exit(pytest.main(sys.argv[1:]))"
    command = [sys.executable, "-c", start, "-q", "-m", "gpu", "-p", "no:cacheprovider", *names]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    print(ended.stdout, ended.stderr, sep="\n", flush=True)
    counted = {what: int(number) for number, what in re.findall(r"(\d+) (passed|skipped)\b", ended.stdout)}
    passed, skipped = counted.get("passed", 0), counted.get("skipped", 0)
    record.add("tests marked gpu", files=len(files), passed=passed, skipped=skipped, status=ended.returncode)
    if ended.returncode:
        said = [line for line in ended.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        record.fail("tests marked gpu", "; ".join(said) or ended.stderr.strip()[-300:] or ended.stdout.strip()[-300:])
    elif skipped and not IS_REHEARSAL:
        record.note(f"{skipped} tests marked gpu were skipped: log.txt says why")


# -- part training: one rank at each stage, precision and placement, beside the same on the CPU ----------------------


DTYPES = ("fp32", "bf16", "fp16")
TOLERANCES = {"fp32": 1e-4, "bf16": 2e-2, "fp16": 5e-3}  # relative, of a loss to the CPU's in the same precision
SIZE, ROWS = ("tiny", 2) if IS_REHEARSAL else ("10M", 4)  # the model, and the sequences of a step
WARMUP, TIMED = (2, 2) if IS_REHEARSAL else (3, 9)  # the first steps learn shapes, compile kernels and fill caches


@dataclass(frozen=True)
class Case:
    """A config without its precision: keys of zero_optimization, and more of it; "FOLDER" stands for a folder.

    numbers: cases of the same numbers have the same losses.
    """

    name: str
    zero: dict[str, Any]
    more: dict[str, Any] = field(default_factory=dict)
    dtypes: tuple[str, ...] = DTYPES
    numbers: str = "plain"
    compiles_blocks: bool = False

    def config(self, dtype: str, device: str, folder: str) -> dict[str, Any]:
        config = lowtide_config(gradient_clipping=1.0, zero_optimization=self.zero, device=device) | self.more
        config["optimizer"] = {"type": "adamw", "params": {**ADAMW, "lr": 1e-3}}
        config["train_micro_batch_size_per_gpu"] = ROWS // config.get("gradient_accumulation_steps", 1)
        if dtype != "fp32":
            config[dtype] = {"enabled": True}
        if dtype == "fp16":
            config[dtype]["initial_scale_power"] = 8  # no step is skipped on the one alone
        found: dict[str, Any] = filled(config, {FOLDER: folder})
        return found


def _place(device: str, **more: Any) -> dict[str, Any]:
    return {"device": device, **({"nvme_path": FOLDER} if device == "nvme" else {}), **more}


def _states(device: str, stage: int, overlap: str) -> Case:
    delay = {"delay_after_steps": 1} if overlap == "delayed" else {}
    zero = {"stage": stage, "offload_optimizer": _place(device, overlap=overlap, **delay)}
    numbers = "delayed" if overlap == "delayed" else "plain"
    return Case(f"stage {stage}, states {device}, overlap {overlap}", zero, numbers=numbers)


def _offloads(device: str) -> list[Case]:
    place = _place(device)
    activations = {"every": 1, "offload": _place(device, min_bytes=1024)}
    both = {"stage": 3, "offload_optimizer": place, "offload_param": place}
    return [
        *(_states(device, 3, overlap) for overlap in ("none", "speculative", "delayed")),
        Case(f"stage 3, parameters {device}", {"stage": 3, "offload_param": place}),
        Case(f"stage 3, states and parameters {device}", both),
        Case(f"stage 3, activations {device}", {"stage": 3}, {"activation_checkpointing": activations}),
    ]


# An update in the backward neither clips nor scales.
_IN_BACKWARD = Case(
    "stage 3, update in backward",
    {"stage": 3, "update_in_backward": True},
    {"gradient_clipping": 0.0},
    dtypes=("fp32", "bf16"),
    numbers="not clipped",
)
CASES = [
    *(Case(f"stage {stage}", {"stage": stage}) for stage in (0, 1, 2, 3)),
    Case("stage 2, accumulation 2", {"stage": 2}, {"gradient_accumulation_steps": 2}, numbers="accumulation"),
    _IN_BACKWARD,
    *_offloads("cpu"),
    *_offloads("nvme"),
    _states("cpu", 1, "none"),
    Case("stage 3, half of the states cpu", {"stage": 3, "offload_optimizer": _place("cpu", ratio=0.5)}),
    *(Case(f"stage {n}, compiled blocks", {"stage": n}, dtypes=("bf16",), compiles_blocks=True) for n in (0, 3)),
]


def train_case(case: Case, dtype: str, device: str, folder: str) -> dict[str, Any]:
    """Train on a device; return what `_device.trained` does."""
    _device.forget_memory()
    kind = _device.type_of_device() if device != "cpu" else "cpu"  # a batch that is not there yet would be waited for
    drawn = build_batches(SIZES[SIZE], WARMUP + TIMED, ROWS)
    batches = [(tokens.to(kind), targets.to(kind)) for tokens, targets in drawn]
    model = build_model(SIZES[SIZE])
    if case.compiles_blocks and device != "cpu":
        for block in model.blocks:
            block.compile(backend="eager" if IS_REHEARSAL else "inductor")
    with lowtide.initialize(model, case.config(dtype, device, folder)) as engine, warnings.catch_warnings():
        if case.compiles_blocks:
            warnings.simplefilter("ignore")  # of torch's compiler, about itself
        return _device.trained(lambda *batch: engine.train_step(batch).loss, batches, WARMUP)


def train(record: Record) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False  # it would be the difference from the CPU
    record.note(f"GPT {SIZE}, {ROWS} sequences a step, {WARMUP + TIMED} steps")

    @functools.cache
    def on_cpu(numbers: str, dtype: str) -> list[float]:
        case = next(one for one in CASES if one.numbers == numbers)
        losses: list[float] = train_case(case, dtype, "cpu", folder)["losses"]
        return losses

    with tempfile.TemporaryDirectory(prefix="offload-", dir=record.folder) as folder:
        for number, case in enumerate(CASES):
            # In a rehearsal each case has one precision, the next one the next.
            for dtype in [case.dtypes[number % len(case.dtypes)]] if IS_REHEARSAL else case.dtypes:
                what = f"{case.name}, {dtype}"
                if record.wants(what):
                    with record.measuring(what):
                        add_training(record, case, dtype, folder, on_cpu(case.numbers, dtype))


def add_training(record: Record, case: Case, dtype: str, folder: str, expected: Sequence[float]) -> None:
    """Train, and add a row, which fails where losses are not as expected."""
    device = "cpu" if _device.type_of_device() == "cpu" else "auto"
    found, tolerance = train_case(case, dtype, device, folder), TOLERANCES[dtype]
    difference = loss_difference([found["losses"]], expected)
    record.add(
        "one rank beside the CPU",
        case=case.name,
        dtype=dtype,
        reserved_MiB=mib(found["reserved"]),
        loss=found["losses"][-1],
        largest_difference=difference,
        ms_a_step=found["ms"],
        peak_MiB=mib(found["allocated"]),
    )
    if difference is None or not difference <= tolerance:
        what, most = f"{case.name}, {dtype}", f"at most {tolerance} (relative)"
        record.fail(what, f"expected losses {most} from those of the CPU, found {difference}")
