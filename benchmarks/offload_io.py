"""Measures the disk store against fio, and how much of its transfers the window hides behind work.

A round does each of these once, one right after the other, so that they meet the same disk:

  fio write, fio read   O_DIRECT, libaio, blocks of the same size, as many at once as the store has threads, 4 at least;
                        its buffers in huge pages, like those of a HostPool
  save, load            a FileStore, in pieces of --unit
  work                  passes over a buffer in memory, as many for a piece as take about as long as its load and save;
                        with --idle nothing but the time: as if another device worked
  beside                fio, half reads and half writes, and the work, both at the same time
  window                load, work and save of every piece by a `Window`

The ideal time of the window is the longer one of load + save and work; the first load and the last save, which nothing
can hide, are not in it. Once each is taken as it was alone in the same round, and once as fio and the work were beside
each other: then they have slowed each other down already, as the machine has it, and what is missing is the window's
own. Ratios are by round; shown is their median.

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
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from _harness import MIB, Parser, begin, count, make_table, settings_of, write_json
from rich.table import Table
from torch import Tensor

from lowtide.offload import AioOptions, FileStore, HostPool, Offloadable, OffloadError, Transfer, Window

_NUM_BUFFERS = 3
_BESIDE_SECONDS = 3
_DEFAULTS = AioOptions()


@dataclass
class Rounds:
    """Seconds of each thing by round."""

    seconds: dict[str, list[float]] = field(default_factory=dict)

    def add(self, name: str, seconds: float) -> None:
        self.seconds.setdefault(name, []).append(seconds)

    def gigabytes_per_second(self, name: str, nbytes: int) -> list[float]:
        return [nbytes / 1e9 / seconds for seconds in self.seconds[name]]

    def ratios(self, name: str, reference: str) -> list[float]:
        """Speed of one by the speed of the other, by round."""
        return [other / own for own, other in zip(self.seconds[name], self.seconds[reference], strict=True)]

    def ideal_shares(self) -> list[float]:
        """Ideal time by the window's time, by round: of what was measured alone."""
        columns = [self.seconds[name] for name in ("load", "save", "work", "window")]
        return [max(load + save, work) / window for load, save, work, window in zip(*columns, strict=True)]

    def ideal_shares_beside(self) -> list[float]:
        """The same, of what was measured at the same time."""
        columns = [self.seconds[name] for name in ("fio beside", "work beside", "window")]
        return [max(transfers, work) / window for transfers, work, window in zip(*columns, strict=True)]


class Disk:
    """What is measured: pieces of random bytes, a store that has them, and fio's own file beside it."""

    def __init__(self, options: argparse.Namespace, fio: str | None) -> None:
        self.options = options
        self.fio = fio
        self.unit_bytes = options.unit * MIB
        self.keys = [f"unit {index}" for index in range(options.size // options.unit)]
        self.nbytes = len(self.keys) * self.unit_bytes
        self.store = FileStore(options.folder, 0, AioOptions(options.block * MIB, options.io_threads, options.verify))
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
        """Seconds that fio needs to write or read its whole file."""
        return float(self.nbytes / self._bytes_per_second(self._start_fio(kind))[kind])

    def run_beside(self) -> tuple[float, float]:
        """Seconds that fio needs to read and to write its whole file, and the work for all pieces, side by side."""
        self.work(0, self.buffers[0])
        process = self._start_fio("rw", f"--runtime={_BESIDE_SECONDS}", "--time_based")
        begin, num_pieces = time.perf_counter(), 0
        while process.poll() is None:
            self.work(num_pieces, self.buffers[num_pieces % _NUM_BUFFERS])
            num_pieces += 1
        work = (time.perf_counter() - begin) / num_pieces * len(self.keys)
        found = self._bytes_per_second(process)
        return 2 * self.nbytes / (found["read"] + found["write"]), work

    def _start_fio(self, kind: str, *more: str) -> subprocess.Popen[str]:
        options = self.options
        assert self.fio is not None
        command = [self.fio, "--name=disk", f"--filename={self.scratch}", f"--rw={kind}", f"--size={self.nbytes}"]
        command += [
            f"--bs={options.block}m",
            "--direct=1",
            "--ioengine=libaio",
            f"--iodepth={max(options.io_threads, 4)}",
        ]
        command += ["--output-format=json", *more]
        # Huge pages, as a HostPool has them: with small ones fio, too, reaches half of it, and is no yardstick.
        environment = os.environ | {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)

    @staticmethod
    def _bytes_per_second(process: subprocess.Popen[str]) -> dict[str, float]:
        """Of reads and of writes, when fio has ended."""
        output, _ = process.communicate()
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, process.args, output)
        (job,) = json.loads(output[output.index("{") :])["jobs"]
        return {kind: float(job[kind]["bw_bytes"]) for kind in ("read", "write")}

    def run_transfers(self, start: Callable[[str, Tensor], Transfer]) -> float:
        """Seconds to save or to load every piece, as many at a time as there are buffers."""
        begin = time.perf_counter()
        running: list[Transfer] = []
        for index, key in enumerate(self.keys):
            if index >= _NUM_BUFFERS:
                running[index - _NUM_BUFFERS].wait()
            running.append(start(key, self.buffers[index % _NUM_BUFFERS]))
        for transfer in running:
            transfer.wait()
        return time.perf_counter() - begin

    def work(self, index: int, buffer: Tensor) -> None:
        if self.options.idle:
            time.sleep(self.idle_seconds)
        values = buffer.view(torch.int32)
        for _ in range(self.passes):
            values.mul_(5)  # odd: no value is lost, so that every pass is like the first

    def run_work(self) -> float:
        """Seconds of the work alone."""
        begin = time.perf_counter()
        for index in range(len(self.keys)):
            self.work(index, self.buffers[index % _NUM_BUFFERS])
        return time.perf_counter() - begin

    def run_window(self) -> float:
        begin = time.perf_counter()
        take = partial(self.pool.take, self.unit_bytes)
        offloadables = [Offloadable.of(self.store, key, take, self.pool.give) for key in self.keys]
        with Window(self.options.depth) as window:
            window.expect(offloadables)
            for index, offloadable in enumerate(offloadables):
                with window.use(offloadable) as buffer:
                    self.work(index, buffer)
        return time.perf_counter() - begin

    def warm_up(self) -> None:
        """Writes every file once: a first write also looks for room on the disk."""
        if self.fio is not None:
            self.run_fio("write")
        self.run_transfers(self.store.save)

    def choose_work(self, transfer_seconds: float) -> None:
        """As much as takes about that long."""
        if self.options.idle:
            self.idle_seconds = transfer_seconds / len(self.keys)
            return
        self.passes = 1
        self.passes = max(1, round(transfer_seconds / self.run_work()))

    def measure(self, rounds: Rounds) -> None:
        """One round."""
        if self.fio is not None:
            rounds.add("fio write", self.run_fio("write"))
        rounds.add("save", self.run_transfers(self.store.save))
        if self.fio is not None:
            rounds.add("fio read", self.run_fio("read"))
        rounds.add("load", self.run_transfers(self.store.load))
        self.choose_work(rounds.seconds["load"][-1] + rounds.seconds["save"][-1])
        rounds.add("work", self.run_work())
        if self.fio is not None:
            for name, seconds in zip(("fio beside", "work beside"), self.run_beside(), strict=True):
                rounds.add(name, seconds)
        rounds.add("window", self.run_window())


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Gives the checked command line; ends the program with a message where it is not legal."""
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--size", type=count(), default=1024, metavar="MIB", help="bytes in all (default: 1024)")
    add("--unit", type=count(), default=32, metavar="MIB", help="bytes of a piece (default: 32)")
    add(
        "--block",
        type=count(),
        default=_DEFAULTS.block_size // MIB,
        metavar="MIB",
        help="of a request (default: %(default)s)",
    )
    add("--io-threads", type=count(), default=_DEFAULTS.thread_count, help="of the store (default: %(default)s)")
    add("--work-threads", type=count(), default=1, help="of the work (default: 1)")
    add("--idle", action="store_true", help="work that takes time and no processor")
    add("--depth", type=int, default=1, help="pieces that the window loads ahead (default: 1)")
    add("--rounds", type=count(), default=5, help="(default: 5)")
    add("--no-verify", dest="verify", action="store_false", help="without checksums")
    add("--folder", type=Path, default=Path.cwd(), help="on the disk to measure (default: the working directory)")
    options = parser.parse_args(arguments)
    if options.size < options.unit * (_NUM_BUFFERS + 1):
        parser.error(
            f"--size: expected more than {_NUM_BUFFERS} pieces of --unit, found {options.size} of {options.unit}"
        )
    return options


def table(rounds: Rounds, nbytes: int, title: str) -> Table:
    """Rows: what was measured. Columns: speeds, and the share of what it is measured against."""
    shares = {"window": ("the ideal overlap", rounds.ideal_shares())}
    if "fio write" in rounds.seconds:
        shares |= {
            "save": ("fio write", rounds.ratios("save", "fio write")),
            "load": ("fio read", rounds.ratios("load", "fio read")),
        }
    names = ("fio write", "save", "fio read", "load", "work", "fio beside", "work beside", "window")
    lines = []
    for name in [name for name in names if name in rounds.seconds]:
        speeds = rounds.gigabytes_per_second(name, nbytes)
        against, values = shares.get(name, ("", []))
        lines.append([name, against, f"{statistics.median(speeds):.2f}", f"{max(speeds):.2f}", *_in_percent(values)])
    if "fio beside" in rounds.seconds:
        lines.append(["", "fio and work beside", "", "", *_in_percent(rounds.ideal_shares_beside())])
    headings = ["", "against", "GB/s, median", "GB/s, best", "share, median", "share, best"]
    return make_table(title, headings, lines, num_texts=2)


def _in_percent(values: Sequence[float]) -> list[str]:
    """The median and the best."""
    return [f"{100 * value:.0f} %" for value in (statistics.median(values), max(values))] if values else ["", ""]


def main() -> int:
    options = parse_arguments()
    torch.set_num_threads(options.work_threads)
    console = begin()
    fio = shutil.which("fio")
    if fio is None:
        console.print("fio is not installed (Debian: apt install fio): nothing to compare saves and loads with.")
    rounds = Rounds()
    try:
        disk = Disk(options, fio)
    except OffloadError as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        return 2
    try:
        disk.warm_up()
        for number in range(options.rounds):
            disk.measure(rounds)
            seconds = ", ".join(f"{name} {values[-1]:.2f} s" for name, values in rounds.seconds.items())
            console.print(f"round {number + 1}/{options.rounds}: {seconds}", highlight=False)
    finally:
        disk.close()
    title = (
        f"{disk.nbytes / 1e9:.2f} GB in pieces of {options.unit} MiB, blocks of {options.block} MiB, "
        f"{options.io_threads} threads, {'with' if options.verify else 'without'} checksums, "
        f"{'O_DIRECT' if disk.store.is_direct else 'page cache'}"
    )
    console.print(table(rounds, disk.nbytes, title))
    found = {"nbytes": disk.nbytes, "direct": disk.store.is_direct, "seconds": rounds.seconds}
    write_json(options, {"settings": settings_of(options, title), **found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
