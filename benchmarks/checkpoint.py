"""Saves, loads and exports the same training by lowtide, FSDP2 + torch.distributed.checkpoint, and DeepSpeed.

A round runs every contender once, each as a fresh job of its own that trains a step and then saves, loads and exports a
few times; the next round begins with another contender. After each job one process writes as many bytes, plainly and
with O_DIRECT, and reads the job's own files: what the disk could do in that minute. Ratios are of speeds, so that more
is better, and compare within a round. A load counts only if training goes on with the very same losses after it.

Speed is bytes of state over time: 12 a parameter (the parameter and two moments, fp32), 4 for an export. "On the disk"
ends when every file has been synced, by whoever does it. Extra memory is the highest private memory of a rank above
what it had before, in jobs that are not timed.

Example, the whole comparison and then a quick look:

    python benchmarks/checkpoint.py --size 85M --json checkpoint.json --png checkpoint.png
    python benchmarks/checkpoint.py --size 10M --contenders fsdp2 lowtide-3 --rounds 1 --memory none
"""

from __future__ import annotations

import argparse
import contextlib
import mmap
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import _contenders
import torch.distributed as dist
from _contenders import BUILDERS, FSDP2, Setup, Trainer, lowtide
from _harness import (
    Column,
    JobError,
    Parser,
    Result,
    Row,
    add_job_options,
    by_name,
    check_job_options,
    compare,
    count,
    find,
    job_of,
    mib,
    python_of,
    run_job,
)
from _model import SIZES, build_batches, build_model
from _worker import PeakSampler, rank_bytes

STATE_BYTES_PER_PARAMETER = 12  # the parameter and two moments, fp32
WEIGHT_BYTES_PER_PARAMETER = 4
BLOCK_BYTES = 4 << 20
ALIGNMENT_BYTES = 4096
_COPIES = 4  # of the state that are on the disk at once, at most: two checkpoints, their exports, a scratch file
_POLL_SECONDS = 0.002
_NUM_REPLAYED = 2  # steps whose losses must be the same after a load: the second one also depends on the moments
_SAMPLE_SECONDS = 0.004


# -- how a contender saves -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Saver:
    """A training's state goes to disk and back. Every function is called by all ranks.

    save: returns when the contender lets the training go on; finish: when it says that the save is complete.
    export: full weights under the model's own names, for others to load.
    """

    save: Callable[[Path], object]
    load: Callable[[Path], object]
    export: Callable[[Path], object]
    finish: Callable[[Path], object]


def _nothing(folder: Path) -> None:
    pass


def lowtide_saver(trainer: Trainer) -> Saver:
    engine = trainer.engine

    def finish(folder: Path) -> None:
        while not (folder / "latest").exists():
            time.sleep(_POLL_SECONDS)

    return Saver(engine.save_checkpoint, engine.load_checkpoint, engine.export, finish)


def fsdp2_saver(trainer: Trainer) -> Saver:
    """torch.distributed.checkpoint; the export is a gathered state dict in safetensors."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        get_state_dict,
        set_state_dict,
    )

    model, optimizer = trainer.model, trainer.optimizer
    assert model is not None and optimizer is not None

    def save(folder: Path) -> None:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        dcp.save({"model": model_state, "optim": optimizer_state}, checkpoint_id=folder)

    def load(folder: Path) -> None:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        dcp.load({"model": model_state, "optim": optimizer_state}, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)

    def export(folder: Path) -> None:
        from safetensors.torch import save_file

        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights: dict[str, Any] = get_model_state_dict(model, options=options)
        if dist.get_rank() == 0:
            folder.mkdir(parents=True)
            save_file({name: value.contiguous() for name, value in weights.items()}, folder / "model.safetensors")
        dist.barrier()

    return Saver(save, load, export, _nothing)


def deepspeed_saver(trainer: Trainer) -> Saver:
    """The export is `save_16bit_model`, here in fp32 as the model is."""
    engine = trainer.engine

    def load(folder: Path) -> None:
        found, _ = engine.load_checkpoint(str(folder))
        if found is None:
            raise FileNotFoundError(f"DeepSpeed found no checkpoint in {folder}")

    def save(folder: Path) -> None:
        engine.save_checkpoint(str(folder))

    def export(folder: Path) -> None:
        engine.save_16bit_model(str(folder))

    return Saver(save, load, export, _nothing)


SAVERS: dict[str, Callable[[Trainer], Saver]] = {
    "lowtide": lowtide_saver,
    "fsdp2": fsdp2_saver,
    "deepspeed": deepspeed_saver,
}
DEEPSPEED = "deepspeed-3"
_NAMES = [FSDP2, *(f"deepspeed-{stage}" for stage in (1, 2, 3)), *(f"lowtide-{stage}" for stage in (0, 1, 2, 3))]
CONTENDERS = by_name(
    *(_contenders.CONTENDERS[name] for name in _NAMES),
    lowtide("lowtide-3-async", ", async", 3, checkpoint={"async": True}),
)
DEFAULT = [FSDP2, DEEPSPEED, "lowtide-3"]


# -- a rank ----------------------------------------------------------------------------------------------------------


def _barrier() -> None:
    """Waits for all ranks, where there are several."""
    if dist.is_initialized():
        dist.barrier()


class Stopwatch:
    """Times what all ranks do together, and in a memory job counts the bytes that it takes above what was there.

    cpu_seconds: of all threads of this rank, the wait for the others included, which polls little.
    """

    def __init__(self, ranks: int, counts_memory: bool) -> None:
        self.seconds: dict[str, list[float]] = {}
        self.cpu_seconds: dict[str, list[float]] = {}
        self.extra_bytes: dict[str, int] = {}
        self._ranks = ranks
        self._counts_memory = counts_memory

    def run(self, name: str, work: Callable[[], Any], then: Callable[[], Any] | None = None) -> None:
        """Times `work` as `name`, and both together as `name.done`; each ends when all ranks are through."""
        before = rank_bytes(self._ranks) if self._counts_memory else 0
        sampler = PeakSampler(self._ranks, _SAMPLE_SECONDS) if self._counts_memory else None
        _barrier()
        with sampler or nullcontext():
            started, cpu_started = time.perf_counter(), time.process_time()
            work()
            _barrier()
            returned = time.perf_counter()
        if then is not None:
            then()
            _barrier()
            self.seconds.setdefault(f"{name}.done", []).append(time.perf_counter() - started)
        self.cpu_seconds.setdefault(name, []).append(time.process_time() - cpu_started)
        self.seconds.setdefault(name, []).append(returned - started)
        if sampler:
            extra = max(sampler.peak_bytes - before, 0)
            self.extra_bytes[name] = max(self.extra_bytes.get(name, 0), extra)


def train(job: dict[str, Any]) -> dict[str, Any]:
    """On a rank: seconds and extra bytes of every operation, and whether training goes on the same after a load."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    batches = [
        (tokens[rank::ranks], targets[rank::ranks])
        for tokens, targets in build_batches(job["size"], argparse.__file__, 1 + _NUM_REPLAYED, ranks)
    ]
    trainer = BUILDERS[job["kind"]](build_model(job["size"], tied=False), Setup(), **job["options"])
    saver = SAVERS[job["kind"]](trainer)
    trainer.step(*batches[0])
    watch = Stopwatch(ranks, job["allocator"] is not None)

    def into_new_folders(name: str, write: Callable[[Path], object], finish: Callable[[Path], object]) -> Path:
        """Writes into one new folder after the other, and gives the last one, which stays."""
        folder = Path(job["folder"])
        for number in range(job["repeats"]):
            if rank == 0 and number:
                shutil.rmtree(folder)
            folder = Path(job["folder"]) / f"{name}{number}"

            def to_disk(folder: Path = folder) -> None:
                if rank == 0:
                    finish(folder)
                    sync_files(folder)

            watch.run(name, partial(write, folder), to_disk)
        return folder

    folder = into_new_folders("save", saver.save, saver.finish)
    expected = [float(trainer.step(*batch)) for batch in batches[1:]]
    for _ in range(job["repeats"]):
        if rank == 0:
            drop_from_cache(files_below(folder))
        watch.run("load cold", lambda: saver.load(folder))
        if rank == 0:
            _read(files_below(folder))  # into the cache: a cold load may have read past it
        watch.run("load warm", lambda: saver.load(folder))
    found = [float(trainer.step(*batch)) for batch in batches[1:]]
    into_new_folders("export", saver.export, _nothing)
    return {
        "seconds": watch.seconds,
        "cpu_seconds": watch.cpu_seconds,
        "extra_bytes": watch.extra_bytes,
        "losses_are_equal": expected == found,
    }


# -- the disk --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DiskSpeed:
    """Seconds of one process for plain work on as many bytes as a checkpoint has, at the median of some repeats."""

    write: float  # write() and fsync
    write_direct: float | None  # the same with O_DIRECT; None where the file system refuses it
    read_cold: float  # read() of the checkpoint's own files, out of the page cache
    read_warm: float  # the same again, from the page cache


def files_below(folder: Path) -> list[Path]:
    """Every file in the folder, at any depth."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def sync_files(folder: Path) -> None:
    """Returns when every file below the folder, and its name, is on the disk."""
    for path in [*files_below(folder), *(path for path in folder.rglob("*") if path.is_dir()), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def drop_from_cache(paths: Iterable[Path]) -> None:
    """Takes files out of the page cache; what is not on the disk yet is written first."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def measure_disk(folder: Path, nbytes: int, files: list[Path], repeats: int) -> DiskSpeed:
    """Writes `nbytes` into a file of its own in the folder, both ways, and reads the given files, cold and warm.

    Repeated as a contender's saves are: the first write into memory that a virtual machine has not touched for a while
    can take five times as long as the next.
    """
    found: dict[str, list[float]] = {"write": [], "write_direct": [], "read_cold": [], "read_warm": []}
    scratch = folder / "disk-speed"
    for _ in range(repeats):
        found["write"].append(_written(scratch, nbytes, 0))
        with contextlib.suppress(OSError):  # some file systems refuse it
            found["write_direct"].append(_written(scratch, nbytes, os.O_DIRECT))
        drop_from_cache(files)
        found["read_cold"].append(_read(files))
        found["read_warm"].append(_read(files))
    medians: dict[str, Any] = {name: statistics.median(values) if values else None for name, values in found.items()}
    return DiskSpeed(**medians)


def _written(path: Path, nbytes: int, flags: int) -> float:
    try:
        return _write(path, nbytes, flags)
    finally:
        path.unlink(missing_ok=True)


def _write(path: Path, nbytes: int, flags: int) -> float:
    block = mmap.mmap(-1, BLOCK_BYTES)  # begins at a page, as O_DIRECT wants it
    block[:] = os.urandom(BLOCK_BYTES)
    view = memoryview(block)
    started = time.perf_counter()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | flags, 0o666)
    try:
        left = -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        while left:
            left -= os.write(descriptor, view[: min(left, BLOCK_BYTES)])
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return time.perf_counter() - started


def _read(files: Iterable[Path]) -> float:
    block = bytearray(BLOCK_BYTES)
    started = time.perf_counter()
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(block):
                pass
    return time.perf_counter() - started


# -- what was found --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Operation:
    """One thing that is timed. plain, direct: the seconds of the disk's own work that it is held against."""

    key: str  # of what a job found, "seconds"
    label: str
    bytes_per_parameter: int
    plain: Callable[[DiskSpeed], float]
    direct: Callable[[DiskSpeed], float | None] = lambda disk: None

    @property
    def work_key(self) -> str:
        """The key of "extra_bytes" and "cpu_seconds", which know no difference before and after the return."""
        return self.key.removesuffix(".done")


OPERATIONS = [
    Operation("save.done", "save, on the disk", STATE_BYTES_PER_PARAMETER, lambda d: d.write, lambda d: d.write_direct),
    Operation("save", "save, returned", STATE_BYTES_PER_PARAMETER, lambda d: d.write, lambda d: d.write_direct),
    Operation("load cold", "load, cold", STATE_BYTES_PER_PARAMETER, lambda d: d.read_cold),
    Operation("load warm", "load, warm", STATE_BYTES_PER_PARAMETER, lambda d: d.read_warm),
    Operation("export.done", "export, on the disk", WEIGHT_BYTES_PER_PARAMETER, lambda d: d.write),
    Operation("export", "export, returned", WEIGHT_BYTES_PER_PARAMETER, lambda d: d.write),
]


def columns(rows: Sequence[Row], operation: Operation, num_params: int) -> list[Column]:
    """Of one operation. Ratios are of speeds, so that more is better, and of a round."""
    nbytes, key = operation.bytes_per_parameter * num_params, operation.key

    def repeats(row: Row, kind: str = "seconds", name: str = key) -> list[float]:
        return [value for job in row.timed.values() for value in job.more[kind][name]]

    def seconds(row: Row | None) -> dict[int, float]:
        """The median of each round."""
        return {number: statistics.median(job.more["seconds"][key]) for number, job in row.timed.items()} if row else {}

    def to_disk(row: Row, work: Callable[[DiskSpeed], float | None]) -> list[float]:
        """This contender's speed over the disk's own in the same minute, which was given the whole state."""
        scale = operation.bytes_per_parameter / STATE_BYTES_PER_PARAMETER
        found = [(work(row.timed[number].more["disk"]), value) for number, value in seconds(row).items()]
        return [disk * scale / value for disk, value in found if disk is not None]

    def to_peer(row: Row, name: str) -> list[float]:
        own, theirs = seconds(row), seconds(find(rows, name))
        return [theirs[number] / own[number] for number in sorted(own.keys() & theirs.keys())]

    def extra_bytes(row: Row) -> float | None:
        return next((mib(job.more["extra_bytes"].get(operation.work_key)) for job in row.memory.values()), None)

    is_drawn = operation.key not in ("save", "export")
    return [
        Column("MB/s", lambda row: [nbytes / one / 1e6 for one in seconds(row).values()], ".0f"),
        Column("MB/s\nbest", lambda row: nbytes / min(repeats(row)) / 1e6 if row.timed else None, ".0f"),
        Column(
            "x plain\nwrite or read",
            lambda row: to_disk(row, operation.plain),
            panel=f"{operation.label}, x the disk's own work (more is better)" if is_drawn else None,
            line=1.0,
        ),
        Column("x O_DIRECT\nwrite", lambda row: to_disk(row, operation.direct)),
        Column("x FSDP2", lambda row: to_peer(row, FSDP2)),
        Column("x DeepSpeed", lambda row: to_peer(row, DEEPSPEED)),
        # Others on the machine hardly change it.
        Column("CPU s\nall ranks", lambda row: repeats(row, "cpu_seconds", operation.work_key)),
        Column("extra MiB\na rank", extra_bytes, ".0f"),
    ]


def disk_columns(state_bytes: int) -> list[Column]:
    """What the disk itself did after each job of a contender, MB/s."""

    def speeds(row: Row, work: Callable[[DiskSpeed], float | None]) -> list[float]:
        found = [work(job.more["disk"]) for job in row.timed.values()]
        return [state_bytes / value / 1e6 for value in found if value is not None]

    return [
        Column("plain write\nand fsync", lambda row: speeds(row, lambda disk: disk.write), ".0f"),
        Column("the same\nwith O_DIRECT", lambda row: speeds(row, lambda disk: disk.write_direct), ".0f"),
        Column("plain read,\ncold", lambda row: speeds(row, lambda disk: disk.read_cold), ".0f"),
        Column("plain read,\npage cache", lambda row: speeds(row, lambda disk: disk.read_warm), ".0f"),
    ]


# -- the command -----------------------------------------------------------------------------------------------------


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Gives the checked command line; ends the program with a message where it is not legal."""
    parser = Parser(__doc__)
    add_job_options(parser, CONTENDERS, memory="exact")
    add = parser.add_argument
    add("--size", choices=SIZES, default="10M", help="parameters of the model (default: 10M)")
    add("--repeats", type=count(), default=3, help="saves, loads and exports of a job (default: 3)")
    add("--ranks", type=count(), default=2, help="processes of a job (default: 2)")
    add("--folder", type=Path, help="where to write (default: a temporary folder in the working directory)")
    options = parser.parse_args(arguments)
    check_job_options(parser, options, CONTENDERS, default=DEFAULT)
    return options


def run(row: Row, options: argparse.Namespace, base: Path, state_bytes: int, allocator: str | None) -> Result:
    """One job in a folder of its own; after a timed one what the disk does. Raises JobError."""
    folder = base / "job"
    folder.mkdir()
    job = job_of(options, repeats=1 if allocator else options.repeats, folder=str(folder))
    try:
        found = run_job("checkpoint:train", row.contender, job, python_of(row.contender, options), allocator)
        if not all(one["losses_are_equal"] for one in found):
            raise JobError("expected the same losses after a load as before, found others")

        def over_ranks(key: str, combine: Callable[[Iterable[float]], float]) -> dict[str, list[float]]:
            columns = {name: zip(*(one[key][name] for one in found), strict=True) for name in found[0][key]}
            return {name: [combine(of_ranks) for of_ranks in column] for name, column in columns.items()}

        extra_bytes = {name: max(one["extra_bytes"][name] for one in found) for name in found[0]["extra_bytes"]}
        more: dict[str, Any] = {
            "seconds": over_ranks("seconds", max),
            "cpu_seconds": over_ranks("cpu_seconds", sum),
            "extra_bytes": extra_bytes,
        }
        if allocator is None:
            files = [file for saved in folder.glob("save*") for file in files_below(saved)]
            more["disk"] = measure_disk(folder, state_bytes, files, options.repeats)
        return Result([], [], more=more)
    finally:
        shutil.rmtree(folder)


@contextlib.contextmanager
def scratch_folder(wanted: Path | None, needed_bytes: int) -> Iterator[Path]:
    """A new folder that is removed at the end. Raises OSError where its file system has not enough room."""
    base = wanted or Path.cwd()
    base.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(base).free
    if free < needed_bytes:
        raise OSError(
            f"{base}: expected {needed_bytes / 1e9:.1f} GB of free space, found {free / 1e9:.1f}; "
            "name another place with --folder, or take a smaller --size"
        )
    with tempfile.TemporaryDirectory(prefix="checkpoint-benchmark-", dir=base) as name:
        yield Path(name).resolve()


def main() -> int:
    options = parse_arguments()
    rows = [Row(contender) for contender in options.contenders]
    num_params = SIZES[options.size].num_parameters
    state_bytes = STATE_BYTES_PER_PARAMETER * num_params
    title = (
        f"GPT {options.size}, AdamW fp32, {state_bytes / 1e6:.0f} MB of state, "
        f"{options.ranks} ranks x {options.threads} thread(s), {options.rounds} round(s) x {options.repeats}"
    )
    tables = {operation.label: columns(rows, operation, num_params) for operation in OPERATIONS}
    try:
        with scratch_folder(options.folder, _COPIES * state_bytes) as folder:

            def run_row(row: Row, allocator: str | None) -> Result:
                return run(row, options, folder, state_bytes, allocator)

            return compare(options, rows, run_row, {**tables, f"{title}: the disk": disk_columns(state_bytes)}, title)
    except OSError as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
