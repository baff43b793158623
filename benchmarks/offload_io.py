"""Measures the disk store against fio, and how much of its transfers the window hides behind work.

A round does each of these once, so that they meet the same disk:

  fio write, fio read   O_DIRECT, libaio, blocks of the same size, as many at once as the store has threads, 4 at least
  save, load            a FileStore, in pieces of --unit
  work                  passes over a buffer in memory that take about as long as load and save; with --idle a sleep
  beside                fio, half reads and half writes, and the work, both at the same time
  window                load, work and save of every piece by a `Window`

The ideal time of the window is the longer one of load + save and work, as each was alone, and as both were beside each
other, when they have slowed each other down already. Ratios are by round; shown is their median.

Example:

    python benchmarks/offload_io.py --size 1024 --unit 32 --rounds 7 --json offload_io.json
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from _harness import MIB, Parser, begin, count, make_table, settings_of, write_json
from rich.table import Table
from torch import Tensor

from lowtide.offload import AioOptions, FileStore, HostPool, Offloadable, OffloadError, Transfer, Window

_NUM_BUFFERS = 3
_BESIDE_SECONDS = 3
_AIO = AioOptions()

Seconds = dict[str, list[float]]
"""Seconds of each thing by round."""


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
        return float(self.nbytes / self._bytes_per_second(self._start_fio(kind))[kind])

    def run_beside(self) -> tuple[float, float]:
        """Return the seconds of fio for its whole file, and of the work for all pieces, side by side."""
        self.work(self.buffers[0])
        process = self._start_fio("rw", f"--runtime={_BESIDE_SECONDS}", "--time_based")
        begin, num_pieces = time.perf_counter(), 0
        while process.poll() is None:
            self.work(self.buffers[num_pieces % _NUM_BUFFERS])
            num_pieces += 1
        work = (time.perf_counter() - begin) / num_pieces * len(self.keys)
        found = self._bytes_per_second(process)
        return 2 * self.nbytes / (found["read"] + found["write"]), work

    def _start_fio(self, kind: str, *more: str) -> subprocess.Popen[str]:
        assert self.fio is not None
        command = [self.fio, "--name=disk", f"--filename={self.scratch}", f"--rw={kind}", f"--size={self.nbytes}"]
        command += [f"--bs={_AIO.block_size}", "--direct=1", "--ioengine=libaio"]
        command += [f"--iodepth={max(_AIO.thread_count, 4)}", "--output-format=json", *more]
        # Huge pages, as a HostPool has them: with small ones fio, too, reaches half of it, and is no yardstick.
        environment = os.environ | {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)

    @staticmethod
    def _bytes_per_second(process: subprocess.Popen[str]) -> dict[str, float]:
        """Return the speed of reads and of writes, when fio has ended."""
        output, _ = process.communicate()
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, process.args, output)
        (job,) = json.loads(output[output.index("{") :])["jobs"]
        return {kind: float(job[kind]["bw_bytes"]) for kind in ("read", "write")}

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
        with Window(1) as window:
            window.expect(offloadables)
            for offloadable in offloadables:
                with window.use(offloadable) as buffer:
                    self.work(buffer)
        return time.perf_counter() - begin

    def warm_up(self) -> None:
        """Write every file once: a first write also looks for room on the disk."""
        if self.fio is not None:
            self.run_fio("write")
        self.run_transfers(self.store.save)

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
        if self.fio:
            found["fio beside"], found["work beside"] = self.run_beside()
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


def shares(seconds: Seconds) -> list[tuple[str, str, list[float]]]:
    """Return the name of a thing, what it is measured against, and its share of that speed by round."""

    def rounds(*names: str) -> list[tuple[float, ...]]:
        return list(zip(*(seconds[name] for name in names), strict=True))

    ideal = [max(load + save, work) / own for load, save, work, own in rounds("load", "save", "work", "window")]
    found = [("window", "the ideal overlap", ideal)]
    if "fio write" in seconds:
        found.append(("save", "fio write", [fio / own for fio, own in rounds("fio write", "save")]))
        found.append(("load", "fio read", [fio / own for fio, own in rounds("fio read", "load")]))
        beside = [max(fio, work) / own for fio, work, own in rounds("fio beside", "work beside", "window")]
        found.append(("window", "fio and work beside", beside))
    return found


def tables(seconds: Seconds, nbytes: int, title: str) -> list[Table]:
    def both(values: Sequence[float], form: str) -> list[str]:
        return [f"{statistics.median(values):{form}}", f"{max(values):{form}}"]

    speeds = [[name, *both([nbytes / 1e9 / one for one in found], ".2f")] for name, found in seconds.items()]
    against = [[name, other, *both(values, ".0%")] for name, other, values in shares(seconds)]
    return [
        make_table(title, ["", "GB/s, median", "best"], speeds),
        make_table("", ["", "against", "share, median", "best"], against, num_texts=2),
    ]


def main() -> int:
    options = parse_arguments()
    torch.set_num_threads(1)
    console = begin()
    fio = shutil.which("fio")
    if fio is None:
        console.print("fio is not installed (Debian: apt install fio): nothing to compare saves and loads with.")
    seconds: Seconds = {}
    try:
        disk = Disk(options, fio)
    except OffloadError as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        return 2
    try:
        disk.warm_up()
        for number in range(options.rounds):
            found = disk.measure()
            for name, one in found.items():
                seconds.setdefault(name, []).append(one)
            said = ", ".join(f"{name} {one:.2f} s" for name, one in found.items())
            console.print(f"round {number + 1}/{options.rounds}: {said}", highlight=False)
    finally:
        disk.close()
    title = (
        f"{disk.nbytes / 1e9:.2f} GB in pieces of {options.unit} MiB, blocks of {_AIO.block_size // MIB} MiB, "
        f"{_AIO.thread_count} threads, {'O_DIRECT' if disk.store.is_direct else 'page cache'}"
    )
    for table in tables(seconds, disk.nbytes, title):
        console.print(table)
    found_all = {"nbytes": disk.nbytes, "direct": disk.store.is_direct, "seconds": seconds}
    write_json(options, {"settings": settings_of(options, title), **found_all})
    return 0


if __name__ == "__main__":
    sys.exit(main())
