"""The parts of benchmarks/gpu.sh: what is measured on the device, and added to the record of each part."""

from __future__ import annotations

import functools
import gzip
import itertools
import json
import os
import re
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
from _contenders import ADAMW, FOLDER, filled, lowtide_config
from _gpu_part import Cell, Record
from _harness import MIB, JobError, Start, environment_of, loss_difference, mib, run_ranks, warm_start
from _model import SEED, SIZES, build_batches, build_model
from torch import Tensor, nn
from torch.profiler import profile, record_function

import lowtide
from lowtide.comm import native
from lowtide.engine.plan.llama import Gated, Llama, Shape

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
                        found = train_case(case, dtype, _device.config_name(), folder)
                        row = {"case": case.name, "dtype": dtype, "reserved_MiB": mib(found["reserved"])}
                        expected = on_cpu(case.numbers, dtype)
                        add_training(record, "one rank beside the CPU", what, row, [found], expected, TOLERANCES[dtype])


def add_training(
    record: Record,
    table: str,
    what: str,
    row: dict[str, Cell],
    found: Sequence[Mapping[str, Any]],
    expected: Sequence[float],
    tolerance: float,
) -> None:
    """Add the row of a training; it fails where losses of its ranks are not as expected. found: of each rank."""
    difference = loss_difference([one["losses"] for one in found], expected)
    record.add(
        table,
        **row,
        loss=found[0]["losses"][-1],
        largest_difference=difference,
        ms_a_step=max(one["ms"] for one in found),
        peak_MiB=mib(max((one["allocated"] for one in found if one["allocated"]), default=None)),
    )
    if difference is None or not difference <= tolerance:
        record.fail(what, f"expected losses at most {tolerance} (relative) from those of one rank, found {difference}")


# -- part trace: one of eight simulated ranks ------------------------------------------------------------------------

# The process group is torch's fake one: collectives take no time and give no meaningful values; shapes, bytes, streams
# and kernels of this rank are those of a job of eight. What it shows is the host's part: where the device waits.

NUM_RANKS = 8
WARMUP_STEPS, TRACED_STEPS, PROFILED_STEPS = 3, 5, 2
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
        batches = [batch] * (WARMUP_STEPS + TRACED_STEPS)
        found = _device.trained(lambda *batch: engine.train_step(batch).loss, batches, WARMUP_STEPS)
        events = profiled(engine, batch, record.folder / f"trace_stage{stage}.json.gz")
    finally:
        engine.close()
    add_step(record, stage, found, events)


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


def add_step(record: Record, stage: int, found: Mapping[str, Any], events: Sequence[Event]) -> None:
    kernels = kernels_of(events, _ON_DEVICE if _device.records_kernels() else ("cpu_op",))
    if not kernels:
        record.fail(f"stage {stage}", "expected kernels in the trace, found none")
        return
    waits = host_waits_of(events, STEP)
    record.add(
        "steps",
        stage=stage,
        ms_a_step=found["ms"],
        ms_until_launched=found["ms until launched"],
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


# -- part splits: states, layers, sequences and experts that two ranks on one device share ---------------------------

# Their losses are compared with those of one rank that has it all. Most versions of NCCL refuse two ranks on one GPU:
# then a row says so, and its other cases are not tried.

DATA, SPLITS = "data", ("tensor", "sequence", "expert")
SPLIT_STAGES = (3,) if IS_REHEARSAL else (0, 3)
SPLIT_ROWS, SPLIT_STEPS, NUM_EXPERTS = 2, 3, 8
MOST_SECONDS = 300.0 if IS_REHEARSAL else 40.0  # of a job: one that hangs leaves time for others
SHAPE = (
    Shape(layers=1, hidden=32, heads=8, vocabulary=256, sequence=16, mlp=128)
    if IS_REHEARSAL
    else Shape(layers=8, hidden=1024, heads=16, vocabulary=256, sequence=1024, mlp=4096)
)


class Experts(nn.Module):
    """Two experts for each token, of a list."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(SHAPE.hidden, NUM_EXPERTS, bias=False)
        self.experts = nn.ModuleList(Gated(SHAPE) for _ in range(NUM_EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        weights, choices = self.gate(rows).softmax(-1).topk(2)
        out = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            at, place = torch.where(choices == number)
            out = out.index_add(0, at, expert(rows[at]) * weights[at, place, None])
        return out.view_as(x)


def build_split(split: str, num_ranks: int, stage: int) -> lowtide.Engine:
    """Return an engine of the planner's Llama, with the same weights in every process."""
    torch.manual_seed(SEED)
    model = Llama(SHAPE)
    if split == "expert":
        for layer in model.layers:
            layer.mlp = Experts()
    config = {
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "adamw"},
        "gradient_clipping": 1.0,
        "parallel": {} if split == DATA else {split: num_ranks},
        "tensor_parallel": {"plan": {"embedding": "whole", "head": "whole"} if split == "tensor" else None},
        "kernels": {"fuse_modules": False},
        "device": _device.config_name(),
        "steps_per_print": 0,
    }
    return lowtide.initialize(model, config)


def batch_of(engine: lowtide.Engine) -> dict[str, Tensor]:
    """Return this rank's rows of the same batch in every process."""
    numbers = torch.Generator().manual_seed(SEED)
    tokens = torch.randint(SHAPE.vocabulary, (SPLIT_ROWS, SHAPE.sequence + 1), generator=numbers)
    positions = torch.arange(SHAPE.sequence).expand(SPLIT_ROWS, -1)
    whole = {"input_ids": tokens[:, :-1], "position_ids": positions, "shift_labels": tokens[:, 1:].contiguous()}
    device = _device.type_of_device()
    return {name: value.chunk(engine.data_size)[engine.data_rank].to(device) for name, value in whole.items()}


def train_split(split: str, num_ranks: int, stage: int) -> dict[str, Any]:
    """Train on this rank; return what `_device.trained` does."""
    _device.forget_memory()
    with build_split(split, num_ranks, stage) as engine:
        return _device.trained(lambda batch: engine.train_step(batch).loss, [(batch_of(engine),)] * SPLIT_STEPS, 0)


def train_rank(job: dict[str, Any]) -> dict[str, Any]:
    """Train on a rank. job: "backend", "split", "stage"."""
    _device.prepare()
    if _device.count():
        torch.accelerator.set_device_index(0)
    dist.init_process_group(job["backend"])
    found = train_split(job["split"], 2, job["stage"])
    dist.barrier()
    return found


def compare_splits(record: Record) -> None:
    device = _device.type_of_device()
    start = warm_start("torch", "lowtide.engine.build")
    for backend in dict.fromkeys(("gloo", dist.get_default_backend_for_device(device))):
        is_refused = device not in dist.Backend.backend_capability[backend]
        for split, stage in itertools.product((DATA, *SPLITS), SPLIT_STAGES):
            what = f"{backend}, {split}, stage {stage}"
            if not is_refused and record.wants(what):
                with record.measuring(what):
                    is_refused = not compare_with_one_rank(record, what, backend, split, stage, start)


def compare_with_one_rank(record: Record, what: str, backend: str, split: str, stage: int, start: Start) -> bool:
    """Add a row; return False where NCCL does not start, which is no failure. That losses differ is one."""
    job = {"worker": "_gpu_parts:train_rank", "threads": 1, "backend": backend, "split": split, "stage": stage}
    environment = environment_of(1, None, _device.type_of_device())
    if _device.type_of_device() == "cuda":  # all ranks see one device alone
        environment["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    table = "two ranks on one device"
    row: dict[str, Cell] = {"split": split, "backend": backend, "stage": stage}
    try:
        found = run_ranks(job, 2, sys.executable, environment, MOST_SECONDS, start=start)
    except JobError as error:
        record.add(table, **row, outcome=f"refused: {error}")
        if backend == "nccl":
            return False
        raise
    expected = train_split(split, 1, 0)["losses"]
    add_training(record, table, what, {**row, "outcome": "trained"}, found, expected, TOLERANCES["fp32"])
    return True
