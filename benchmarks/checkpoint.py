"""Saves, loads and exports the same training by lowtide, FSDP2 + torch.distributed.checkpoint, and DeepSpeed.

Each job trains a step and then saves, loads and exports a few times; a load counts only if training goes on with the
very same losses. Afterwards one process writes as many bytes and reads the job's own files: what the disk could do in
that minute. Speed is bytes of state over time: 12 a parameter, 4 for an export. A save or an export ends when every
file has been synced. Extra memory is the highest private memory of a rank above what it had before.

Example, the whole comparison and then a quick look:

    python benchmarks/checkpoint.py --size 85M --json checkpoint.json --png checkpoint.png
    python benchmarks/checkpoint.py --size 10M --contenders fsdp2 lowtide-3 --rounds 1 --memory none
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import _contenders
import torch.distributed as dist
from _contenders import BUILDERS, FSDP2, Setup, Trainer, wait_for_all
from _harness import Column, JobParser, Result, Row, by_name, compare, count, find, mib, run_job
from _model import SIZES, build_batches, build_model
from _worker import PeakSampler

STATE_BYTES, WEIGHT_BYTES = 12, 4  # of a parameter: with two moments, and alone
BLOCK_BYTES = 4 << 20
_COPIES = 4  # of the state that are on the disk at once, at most: two checkpoints, their exports, a scratch file
_NUM_REPLAYED = 2  # steps whose losses must be the same after a load: the second one also depends on the moments
_SAMPLE_SECONDS = 0.004
DEEPSPEED = "deepspeed-3"
_NAMES = [FSDP2, *(f"deepspeed-{stage}" for stage in (1, 2, 3)), *(f"lowtide-{stage}" for stage in (0, 1, 2, 3))]
CONTENDERS = by_name(*(_contenders.CONTENDERS[name] for name in _NAMES))
DEFAULT = [FSDP2, DEEPSPEED, "lowtide-3"]


# -- how a contender saves -------------------------------------------------------------------------------------------


Saver = tuple[Callable[[Path], object], Callable[[Path], object], Callable[[Path], object]]
"""Saves and loads a training's state, and exports full weights under the model's own names; called by all ranks."""


def fsdp2_saver(trainer: Trainer) -> Saver:
    """torch.distributed.checkpoint; the export is a gathered state dict in safetensors."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import state_dict

    model, optimizer = trainer.model, trainer.optimizer
    assert model is not None and optimizer is not None

    def save(folder: Path) -> None:
        model_state, optimizer_state = state_dict.get_state_dict(model, optimizer)
        dcp.save({"model": model_state, "optim": optimizer_state}, checkpoint_id=folder)

    def load(folder: Path) -> None:
        model_state, optimizer_state = state_dict.get_state_dict(model, optimizer)
        dcp.load({"model": model_state, "optim": optimizer_state}, checkpoint_id=folder)
        state_dict.set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)

    def export(folder: Path) -> None:
        from safetensors.torch import save_file

        options = state_dict.StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights: dict[str, Any] = state_dict.get_model_state_dict(model, options=options)
        if dist.get_rank() == 0:
            folder.mkdir(parents=True)
            save_file({name: value.contiguous() for name, value in weights.items()}, folder / "model.safetensors")
        dist.barrier()

    return save, load, export


def deepspeed_saver(trainer: Trainer) -> Saver:
    """The export is `save_16bit_model`, here in fp32 as the model is."""
    engine = trainer.engine

    def load(folder: Path) -> None:
        found, _ = engine.load_checkpoint(str(folder))
        if found is None:
            raise FileNotFoundError(f"DeepSpeed found no checkpoint in {folder}")

    return (
        (lambda folder: engine.save_checkpoint(str(folder))),
        load,
        lambda folder: engine.save_16bit_model(str(folder)),
    )


SAVERS: dict[str, Callable[[Trainer], Saver]] = {
    "lowtide": lambda trainer: (trainer.engine.save_checkpoint, trainer.engine.load_checkpoint, trainer.engine.export),
    "fsdp2": fsdp2_saver,
    "deepspeed": deepspeed_saver,
}


# -- a rank ----------------------------------------------------------------------------------------------------------


def train(job: dict[str, Any]) -> dict[str, Any]:
    """Return seconds and extra bytes of every operation. Raises RuntimeError unless a load gives the same training."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    drawn = build_batches(SIZES[job["size"]], 1 + _NUM_REPLAYED, ranks)
    batches = [(tokens[rank::ranks], targets[rank::ranks]) for tokens, targets in drawn]
    trainer = BUILDERS[job["kind"]](build_model(SIZES[job["size"]]), Setup(), **job["options"])
    save, load, export = SAVERS[job["kind"]](trainer)
    trainer.step(*batches[0])
    seconds: dict[str, list[float]] = {name: [] for name in OPERATIONS}
    extra_bytes = dict.fromkeys(OPERATIONS, 0)

    def timed(name: str, work: Callable[[], object], then: Callable[[], object]) -> None:
        """Time `work` and `then`, and count the memory of `work`; each ends when all ranks are through."""
        sampler = PeakSampler(job["allocator"] is not None, _SAMPLE_SECONDS)
        wait_for_all()
        started = time.perf_counter()
        with sampler:
            work()
            wait_for_all()
        then()
        wait_for_all()
        seconds[name].append(time.perf_counter() - started)
        extra_bytes[name] = max(extra_bytes[name], sampler.peak_bytes - sampler.start_bytes)

    def on_rank_0(work: Callable[[], object]) -> None:
        if rank == 0:
            work()

    def into_new_folders(name: str, write: Callable[[Path], object]) -> Path:
        """Write into one new folder after the other, and return the last one, which stays."""
        folder = Path(job["folder"])
        for number in range(job["repeats"]):
            if number:
                on_rank_0(partial(shutil.rmtree, folder))
            folder = Path(job["folder"]) / f"{name}{number}"
            timed(name, partial(write, folder), partial(on_rank_0, partial(sync_folder, folder)))
        return folder

    folder = into_new_folders("save", save)
    expected = [float(trainer.step(*batch)) for batch in batches[1:]]
    for _ in range(job["repeats"]):
        on_rank_0(lambda: sync_files(files_below(folder), drops=True))
        timed("load cold", partial(load, folder), lambda: None)
        on_rank_0(lambda: _read(files_below(folder)))  # into the cache: a cold load may have read past it
        timed("load warm", partial(load, folder), lambda: None)
    found = [float(trainer.step(*batch)) for batch in batches[1:]]
    if found != expected:
        raise RuntimeError(f"expected the same losses after a load as before, {expected}, found {found}")
    into_new_folders("export", export)
    return {"seconds": seconds, "extra_bytes": extra_bytes}


# -- the disk --------------------------------------------------------------------------------------------------------


def files_below(folder: Path) -> list[Path]:
    """Return every file in the folder, at any depth."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def sync_folder(folder: Path) -> None:
    """Return when all below the folder, and its name, is on the disk."""
    sync_files([*folder.rglob("*"), folder])


def sync_files(paths: Iterable[Path], drops: bool = False) -> None:
    """Return when files, or names in folders, are on the disk. drops: then take them out of the page cache."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            if drops:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def measure_disk(folder: Path, nbytes: int, files: list[Path], repeats: int) -> dict[str, float]:
    """Return the seconds of one process to write `nbytes` and sync, and to read the files, cold and warm: medians.

    Repeated as a contender's saves are: the first write into memory that a virtual machine has not touched for a while
    can take five times as long as the next.
    """
    found: dict[str, list[float]] = {"write": [], "read cold": [], "read warm": []}
    for _ in range(repeats):
        found["write"].append(_write(folder / "disk-speed", nbytes))
        sync_files(files, drops=True)
        found["read cold"].append(_read(files))
        found["read warm"].append(_read(files))
    return {name: statistics.median(values) for name, values in found.items()}


def _write(path: Path, nbytes: int) -> float:
    block = os.urandom(BLOCK_BYTES)
    started = time.perf_counter()
    with path.open("wb") as file:
        for start in range(0, nbytes, BLOCK_BYTES):
            file.write(block[: nbytes - start])
        os.fsync(file)
    seconds = time.perf_counter() - started
    path.unlink()
    return seconds


def _read(files: Iterable[Path]) -> float:
    block = bytearray(BLOCK_BYTES)
    started = time.perf_counter()
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(block):
                pass
    return time.perf_counter() - started


# -- what was found --------------------------------------------------------------------------------------------------

# What is timed: its label, its bytes of a parameter, and the disk's own work that it is held against.
OPERATIONS = {
    "save": ("save, on the disk", STATE_BYTES, "write"),
    "load cold": ("load, cold", STATE_BYTES, "read cold"),
    "load warm": ("load, warm", STATE_BYTES, "read warm"),
    "export": ("export, on the disk", WEIGHT_BYTES, "write"),
}


def columns(rows: Sequence[Row], key: str, num_params: int) -> list[Column]:
    """Of one operation. Ratios are of speeds, so that more is better, and of a round."""
    label, bytes_per_parameter, disk_work = OPERATIONS[key]
    nbytes = bytes_per_parameter * num_params

    def seconds(job: Result) -> float:
        return float(statistics.median(job.more["seconds"][key]))

    def best(row: Row) -> float | None:
        return max((nbytes / min(job.more["seconds"][key]) / 1e6 for job in row.timed.values()), default=None)

    def to_disk(row: Row) -> list[float]:
        """Return this contender's speed over the disk's own in the same minute, which was given the whole state."""
        scale = bytes_per_parameter / STATE_BYTES
        return [job.more["disk"][disk_work] * scale / seconds(job) for job in row.timed.values()]

    def to_peer(row: Row, name: str) -> list[float]:
        return [seconds(theirs) / seconds(own) for own, theirs in row.beside(find(rows, name))]

    def extra_bytes(row: Row) -> float | None:
        return next((mib(job.more["extra_bytes"][key]) for job in row.memory.values()), None)

    panel = f"{label}, x the disk's own work (more is better)"
    return [
        Column("MB/s", lambda row: [nbytes / seconds(job) / 1e6 for job in row.timed.values()], ".0f"),
        Column("MB/s\nbest", best, ".0f"),
        Column("x plain\nwrite or read", to_disk, panel=panel, line=1.0),
        Column("x FSDP2", partial(to_peer, name=FSDP2)),
        Column("x DeepSpeed", partial(to_peer, name=DEEPSPEED)),
        Column("extra MiB\na rank", extra_bytes, ".0f"),
    ]


# -- the command -----------------------------------------------------------------------------------------------------


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the checked command line; end the program with a message if it is not legal."""
    parser = JobParser(__doc__, CONTENDERS, memory="exact")
    add = parser.add_argument
    add("--ranks", type=count(), default=2, help="processes of a job (default: 2)")
    add("--size", choices=SIZES, default="10M", help="parameters of the model (default: 10M)")
    add("--repeats", type=count(), default=3, help="saves, loads and exports of a job (default: 3)")
    add("--folder", type=Path, help="where to write (default: a temporary folder in the working directory)")
    return parser.check(parser.parse_args(arguments), DEFAULT)


def run(options: argparse.Namespace, base: Path, state_bytes: int, row: Row, allocator: str | None) -> Result:
    """Run one job in a folder of its own; after a timed one measure the disk. Raises JobError."""
    folder = base / "job"
    folder.mkdir()
    repeats = 1 if allocator else options.repeats
    try:
        found = run_job("checkpoint:train", options, row, allocator, repeats=repeats, folder=str(folder))
        more: dict[str, Any] = {"seconds": found[0]["seconds"]}  # each ends when all ranks are through
        more["extra_bytes"] = {name: max(one["extra_bytes"][name] for one in found) for name in OPERATIONS}
        if not allocator:
            files = [file for saved in folder.glob("save*") for file in files_below(saved)]
            more["disk"] = measure_disk(folder, state_bytes, files, options.repeats)
        return Result([], [], more=more)
    finally:
        shutil.rmtree(folder)


@contextlib.contextmanager
def scratch_folder(wanted: Path | None, needed_bytes: int) -> Iterator[Path]:
    """Give a new folder that is removed at the end. Raises OSError where its file system has not enough room."""
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
    num_params = SIZES[options.size].num_parameters
    state_bytes = STATE_BYTES * num_params
    title = (
        f"GPT {options.size}, AdamW fp32, {state_bytes / 1e6:.0f} MB of state, "
        f"{options.ranks} ranks x {options.threads} thread(s), {options.rounds} round(s) x {options.repeats}"
    )

    def tables(rows: Sequence[Row]) -> dict[str, list[Column]]:
        return {label: columns(rows, key, num_params) for key, (label, *_) in OPERATIONS.items()}

    try:
        with scratch_folder(options.folder, _COPIES * state_bytes) as folder:
            return compare(options, title, partial(run, options, folder, state_bytes), tables)
    except OSError as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
