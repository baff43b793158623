"""The parts of benchmarks/gpu.sh: what is measured on the device, and added to the record of each part."""

from __future__ import annotations

import functools
import gzip
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import _device
import torch
import torch.distributed as dist
from _contenders import ADAMW, lowtide_config, with_folder
from _gpu_part import Record
from _harness import MIB, loss_difference, mib
from _model import SIZES, build_batches, build_model
from torch import Tensor
from torch.profiler import profile, record_function

import lowtide
from lowtide.comm import native

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
    record.add(
        "kernels against float64",
        kernel=name,
        dtypes=", ".join(dtypes),
        comparisons=len(findings.checks),
        right=sum(check.is_right for check in findings.checks),
        largest_error_over_allowed=max((e for check in findings.checks for e in check.errors.values()), default=None),
    )
    for problem in findings.problems:
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
        filled: dict[str, Any] = with_folder(config, folder)
        return filled


def _place(device: str, **more: Any) -> dict[str, Any]:
    return {"device": device, **({"nvme_path": "FOLDER"} if device == "nvme" else {}), **more}


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


def train_case(case: Case, dtype: str, device: str, folder: str) -> tuple[list[float], float]:
    """Return losses and milliseconds of a step. Results are read when all steps were made."""
    _device.forget_memory()
    kind = _device.type_of_device() if device != "cpu" else "cpu"  # a batch that is not there yet would be waited for
    drawn = build_batches(SIZES[SIZE], WARMUP + TIMED, ROWS)
    batches = [(tokens.to(kind), targets.to(kind)) for tokens, targets in drawn]
    model = build_model(SIZES[SIZE])
    if case.compiles_blocks and device != "cpu":
        for block in model.blocks:
            block.compile(backend="eager" if IS_REHEARSAL else "inductor")
    losses, seconds = [], []
    with lowtide.initialize(model, case.config(dtype, device, folder)) as engine, warnings.catch_warnings():
        if case.compiles_blocks:
            warnings.simplefilter("ignore")  # of torch's compiler, about itself
        for batch in batches:
            took, _, result = _device.timed(functools.partial(engine.train_step, batch))
            losses.append(result.loss)
            seconds.append(took)
        return [float(loss) for loss in losses], statistics.median(seconds[WARMUP:]) * 1e3


def train(record: Record) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False  # it would be the difference from the CPU
    record.note(f"GPT {SIZE}, {ROWS} sequences a step, {WARMUP + TIMED} steps")

    @functools.cache
    def on_cpu(numbers: str, dtype: str) -> list[float]:
        case = next(one for one in CASES if one.numbers == numbers)
        return train_case(case, dtype, "cpu", folder)[0]

    with tempfile.TemporaryDirectory(prefix="offload-", dir=record.folder) as folder:
        for number, case in enumerate(CASES):
            # In a rehearsal each case has one precision, the next one the next.
            for dtype in [case.dtypes[number % len(case.dtypes)]] if IS_REHEARSAL else case.dtypes:
                what = f"{case.name}, {dtype}"
                if not record.wants(what):
                    continue
                with record.measuring(what):
                    losses, milliseconds = train_case(case, dtype, _device.config_name(), folder)
                    peaks = _device.peaks()
                    difference = loss_difference([losses], on_cpu(case.numbers, dtype))
                    record.add(
                        "one rank beside the CPU",
                        case=case.name,
                        dtype=dtype,
                        loss=losses[-1],
                        largest_difference=difference,
                        ms_a_step=milliseconds,
                        peak_MiB=mib(peaks.allocated),
                        reserved_MiB=mib(peaks.reserved),
                    )
                    if difference is None or not difference <= TOLERANCES[dtype]:
                        most = f"expected at most {TOLERANCES[dtype]} (relative) from the CPU's losses"
                        record.fail(what, f"{most}, found {difference}")


# -- part trace: one of eight simulated ranks ------------------------------------------------------------------------

# The process group is torch's fake one: collectives take no time and give no meaningful values; shapes, bytes, streams
# and kernels of this rank are those of a job of eight. What it shows is the host's part: where the device waits.

NUM_RANKS = 8
WARMUP_STEPS, TIMED_STEPS, PROFILED_STEPS = 3, 5, 2
STEP = "step"
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")

Event = Mapping[str, Any]


def trace(record: Record) -> None:
    size, microbatch = ("tiny", 1) if IS_REHEARSAL else ("350M", 4)
    length = SIZES[size].sequence_length
    record.note(f"GPT {size}, bf16, {microbatch} sequences of {length}, {NUM_RANKS} simulated ranks")
    if not _device.records_kernels():
        record.note("the profiler records no kernels of this device: the host's operations stand for them")
    for stage in (0, 2, 3):
        what = f"stage {stage}"
        if record.wants(what):
            with record.measuring(what), fake_group():
                trace_stage(record, stage, size, microbatch)


@contextmanager
def fake_group() -> Iterator[None]:
    """Make this process one rank of eight."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    devices = dist.Backend.backend_capability["fake"]
    if _device.type_of_device() not in devices:
        devices.append(_device.type_of_device())
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=NUM_RANKS)
    try:
        with nullcontext() if _reductions_write() else mock.patch.object(native, "_reduce_scatter", _reduce_zeros):
            yield
    finally:
        dist.destroy_process_group()


_reduce_scatter = native._reduce_scatter


def _reductions_write() -> bool:
    """Return whether reductions write their output. Else old memory would be a gradient, and may be not finite."""
    kind = _device.type_of_device()
    found = torch.full((1,), torch.nan, device=kind)
    world = dist.group.WORLD
    assert world is not None
    _reduce_scatter(found, torch.zeros(NUM_RANKS, device=kind), world)
    return not bool(found.isnan())


def _reduce_zeros(output: Tensor, given: Tensor, group: dist.ProcessGroup) -> dist.Work:
    output.zero_()
    return _reduce_scatter(output, given, group)


def trace_stage(record: Record, stage: int, size: str, microbatch: int) -> None:
    _device.forget_memory()
    config = lowtide_config(
        stage, train_micro_batch_size_per_gpu=microbatch, bf16={"enabled": True}, device=_device.config_name()
    )
    ((tokens, targets),) = build_batches(SIZES[size], 1, microbatch)
    batch = tokens.to(_device.type_of_device()), targets.to(_device.type_of_device())
    engine = lowtide.initialize(build_model(SIZES[size]), config)
    try:
        for _ in range(WARMUP_STEPS):
            engine.train_step(batch)
        milliseconds = timed_steps(engine, batch)
        events = profiled(engine, batch, record.folder / f"trace_stage{stage}.json.gz")
    finally:
        engine.close()
    add_step(record, stage, milliseconds, events)


def timed_steps(engine: lowtide.Engine, batch: Any) -> tuple[float, float]:
    """Return the milliseconds of a step, and until the host has launched all of it: medians."""
    found = [_device.timed(lambda: engine.train_step(batch)) for _ in range(TIMED_STEPS)]
    return statistics.median(one[0] for one in found) * 1e3, statistics.median(one[1] for one in found) * 1e3


def profiled(engine: lowtide.Engine, batch: Any, path: Path) -> list[Event]:
    """Return the events of some steps, and write them to a file that chrome://tracing and Perfetto open."""
    with profile(acc_events=True) as profiler:
        for _ in range(PROFILED_STEPS):
            with record_function(STEP):
                engine.train_step(batch)
        _device.synchronize()
    plain = path.with_suffix("")
    profiler.export_chrome_trace(str(plain))
    text = plain.read_text()
    plain.unlink()
    path.write_bytes(gzip.compress(text.encode(), compresslevel=6))
    events: list[Event] = json.loads(text)["traceEvents"]
    return events


def add_step(record: Record, stage: int, milliseconds: tuple[float, float], events: Sequence[Event]) -> None:
    kernels = kernels_of(events, _ON_DEVICE if _device.records_kernels() else ("cpu_op",))
    if not kernels:
        record.fail(f"stage {stage}", "expected kernels in the trace, found none")
        return
    waits = host_waits_of(events, STEP)
    record.add(
        "steps",
        stage=stage,
        ms_a_step=milliseconds[0],
        ms_until_launched=milliseconds[1],
        idle_share_while_profiled=idle_share(kernels),
        kernels_a_step=len(kernels) // PROFILED_STEPS,
        waits_a_step=len(waits) / PROFILED_STEPS,
        of_these=", ".join(sorted(set(waits))) or None,
    )


def kernels_of(events: Sequence[Event], categories: Sequence[str]) -> list[tuple[float, float]]:
    """Return start and end of the kernels of a Chrome trace in microseconds, by their start."""
    found = [one for one in events if one.get("ph") == "X" and one.get("cat") in categories]
    return sorted((one["ts"], one["ts"] + one["dur"]) for one in found)


def idle_share(kernels: Sequence[tuple[float, float]]) -> float:
    """Return the share of the time from the first start to the last end in which no kernel runs."""
    begin = busy_until = kernels[0][0]
    idle = 0.0
    for start, end in kernels:
        idle += max(0.0, start - busy_until)
        busy_until = max(busy_until, end)
    return idle / (busy_until - begin)


def host_waits_of(events: Sequence[Event], within: str) -> list[str]:
    """Return the CUDA calls that wait for the device inside ranges of a name."""
    ranges = [one for one in events if one.get("cat") == "user_annotation" and one.get("name") == within]
    return [
        str(call["name"])
        for call in events
        if call.get("cat") in _LAUNCHES
        and ("Synchronize" in call["name"] or call["name"] == "cudaMemcpy")
        and any(one["ts"] <= call["ts"] < one["ts"] + one["dur"] for one in ranges)
    ]
