"""Measures the disk store against fio, and how much of its transfers the window hides behind work.

A round does each of these once, so that they meet the same disk:

  fio write, fio read   O_DIRECT, libaio, blocks of the same size, as many at once as the store has threads, 4 at least
  save, load            a FileStore, in pieces of --unit
  work                  passes over a buffer in memory that take about as long as load and save; with --idle a sleep
  window                load, work and save of every piece by a `Window`

The ideal time of the window is the longer one of load + save and work, as each was alone. Ratios are by round; shown is
their median.

Example:

    python benchmarks/offload_io.py --size 1024 --unit 32 --rounds 7 --json offload_io.json
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

import torch
from _harness import MIB, Column, Parser, Row, begin, conclude, count, find, row_of
from torch import Tensor

from lowtide.offload import AioOptions, FileStore, HostPool, Offloadable, OffloadError, Transfer, Window

_NUM_BUFFERS = 3
_AIO = AioOptions()


class Disk:
    """What is measured: pieces of random bytes, a store that has them, and fio's own file beside it."""

    def __init__(self, options: argparse.Namespace, fio: str | None) -> None:
        self.fio = fio
        self.is_idle = options.idle
        self.unit_bytes = options.unit * MIB
        self.keys = [f"unit {index}" for index in range(options.size // options.unit)]
        self.nbytes = len(self.keys) * self.unit_bytes
        self.store = FileStore(options.folder, 0, _AIO)
        self.store.reserve([self.unit_bytes] * len(self.keys))
        self.pool = HostPool()
        self.buffers = [self.pool.take(self.unit_bytes) for _ in range(_NUM_BUFFERS)]
        for buffer in self.buffers:
            buffer.random_()
        self.scratch = options.folder / f"fio-{os.getpid()}.scratch"
        self.passes = 0
        self.idle_seconds = 0.0  # of a piece

    def close(self) -> None:
        self.store.close()
        self.scratch.unlink(missing_ok=True)

    def run_fio(self, kind: str) -> float:
        """Return the seconds that fio needs to write or read its whole file."""
        assert self.fio is not None
        command = [self.fio, "--name=disk", f"--filename={self.scratch}", f"--rw={kind}", f"--size={self.nbytes}"]
        command += [f"--bs={_AIO.block_size}", "--direct=1", "--ioengine=libaio"]
        command += [f"--iodepth={max(_AIO.thread_count, 4)}", "--output-format=json"]
        # Huge pages, as a HostPool has them: with small ones fio, too, reaches half of it, and is no yardstick.
        environment = os.environ | {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
        output = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=True).stdout
        (job,) = json.loads(output[output.index("{") :])["jobs"]
        return float(self.nbytes / job[kind]["bw_bytes"])

    def run_transfers(self, start: Callable[[str, Tensor], Transfer]) -> float:
        """Return the seconds to save or to load every piece, as many at a time as there are buffers."""
        begin = time.perf_counter()
        running: list[Transfer] = []
        for index, key in enumerate(self.keys):
            if index >= _NUM_BUFFERS:
                running[index - _NUM_BUFFERS].wait()
            running.append(start(key, self.buffers[index % _NUM_BUFFERS]))
        for transfer in running:
            transfer.wait()
        return time.perf_counter() - begin

    def work(self, buffer: Tensor) -> None:
        if self.is_idle:
            time.sleep(self.idle_seconds)
        values = buffer.view(torch.int32)
        for _ in range(self.passes):
            values.mul_(5)  # odd: no value is lost, so that every pass is like the first

    def run_work(self) -> float:
        begin = time.perf_counter()
        for index in range(len(self.keys)):
            self.work(self.buffers[index % _NUM_BUFFERS])
        return time.perf_counter() - begin

    def run_window(self) -> float:
        begin = time.perf_counter()
        take = partial(self.pool.take, self.unit_bytes)
        offloadables = [Offloadable.of(self.store, key, take, self.pool.give) for key in self.keys]
        with closing(Window()) as window:
            window.expect(offloadables)
            for offloadable in offloadables:
                with window.use(offloadable) as buffer:
                    self.work(buffer)
            window.wait()
        return time.perf_counter() - begin

    def choose_work(self, transfer_seconds: float) -> None:
        """Choose as much work as takes about that long."""
        if self.is_idle:
            self.idle_seconds = transfer_seconds / len(self.keys)
            return
        self.passes = 1
        self.passes = max(1, round(transfer_seconds / self.run_work()))

    def measure(self) -> dict[str, float]:
        """Return the seconds of one round."""
        found = {"fio write": self.run_fio("write")} if self.fio else {}
        found["save"] = self.run_transfers(self.store.save)
        if self.fio:
            found["fio read"] = self.run_fio("read")
        found["load"] = self.run_transfers(self.store.load)
        self.choose_work(found["load"] + found["save"])
        found["work"] = self.run_work()
        found["window"] = self.run_window()
        return found


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the checked command line; end the program with a message if it is not legal."""
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--size", type=count(), default=1024, metavar="MIB", help="bytes in all (default: 1024)")
    add("--unit", type=count(), default=32, metavar="MIB", help="bytes of a piece (default: 32)")
    add("--idle", action="store_true", help="work that takes time and no processor")
    add("--rounds", type=count(), default=5, help="(default: 5)")
    add("--folder", type=Path, default=Path.cwd(), help="on the disk to measure (default: the working directory)")
    options = parser.parse_args(arguments)
    if options.size < options.unit * (_NUM_BUFFERS + 1):
        sizes = f"{options.size} of {options.unit}"
        parser.error(f"--size: expected more than {_NUM_BUFFERS} pieces of --unit, found {sizes}")
    return options


def columns(rows: Sequence[Row], nbytes: int) -> list[Column]:
    """Speeds, and shares of the same round: of fio's speed, and of the ideal overlap."""

    def seconds(name: str) -> list[float]:
        row = find(rows, name)
        return [job.more["seconds"] for job in row.timed.values()] if row else []

    def of_fio(row: Row) -> list[float]:
        peer = {"save": "fio write", "load": "fio read"}.get(row.contender.name, "")
        return [fio / own for fio, own in zip(seconds(peer), seconds(row.contender.name), strict=False)]

    def of_ideal(row: Row) -> list[float]:
        if row.contender.name != "window":
            return []
        rounds = zip(*map(seconds, ("load", "save", "work", "window")), strict=True)
        return [max(load + save, work) / own for load, save, work, own in rounds]

    return [
        Column("GB/s", lambda row: [nbytes / 1e9 / one for one in seconds(row.contender.name)]),
        Column("of fio", of_fio, ".0%", "of fio's speed", 1.0),
        Column("of the ideal overlap", of_ideal, ".0%", "of the ideal overlap", 1.0),
    ]


def main() -> int:
    options = parse_arguments()
    torch.set_num_threads(1)
    console = begin()
    fio = shutil.which("fio")
    if fio is None:
        console.print("fio is not installed (Debian: apt install fio): nothing to compare saves and loads with.")
    try:
        disk = Disk(options, fio)
    except OffloadError as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        return 2
    rounds = []
    try:
        if fio is not None:
            disk.run_fio("write")
        disk.run_transfers(disk.store.save)  # every file once: a first write also looks for room on the disk
        for number in range(options.rounds):
            rounds.append(disk.measure())
            said = ", ".join(f"{name} {one:.2f} s" for name, one in rounds[-1].items())
            console.print(f"round {number + 1}/{options.rounds}: {said}", highlight=False)
    finally:
        disk.close()
    title = (
        f"{disk.nbytes / 1e9:.2f} GB in pieces of {options.unit} MiB, blocks of {_AIO.block_size // MIB} MiB, "
        f"{_AIO.thread_count} threads, {'O_DIRECT' if disk.store.is_direct else 'page cache'}"
    )
    rows = [row_of(name, *({"seconds": one[name]} for one in rounds)) for name in rounds[0]]
    return conclude(options, console, rows, {title: columns(rows, disk.nbytes)}, title)


if __name__ == "__main__":
    sys.exit(main())
