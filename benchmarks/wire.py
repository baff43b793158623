"""Step time and bytes on a cable between two hosts, with messages of fewer and fewer bits, beside DDP and FSDP2.

Hosts are network namespaces of this machine, two ranks on each, joined by a veth pair, the cable, which has the speed
that is asked for (tc tbf). Rows are compared by the median of their ratios to `plain` in the same round. Bytes are what
the kernel has counted on one end of the cable, headers included. Needs root.

Example:

    python benchmarks/wire.py --json wire.json --png wire.png
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch.distributed as dist
from _contenders import BUILDERS, Setup, lowtide
from _harness import Column, Contender, JobParser, Result, Row, by_name, compare, find, run_job
from _model import SIZES, build_batches, build_model
from _worker import sent_bytes

SPEEDS = {"10 Gbit/s": 1e10, "1 Gbit/s": 1e9, "100 Mbit/s": 1e8}
LEARNING_RATE = 1e-3
RANKS_OF_HOST = 2
ADDRESSES = ("10.78.0.1", "10.78.0.2")
SETTLED = 4  # steps; 1-bit Adam and PowerSGD begin with whole gradients

PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
PROGRAMS = ("ip", "tc", "unshare", "nsenter", "setpriv", "mount")
CABLE = "cable"
_HOST = "hostname {name} && mount -t tmpfs tmpfs /dev/shm && ip link set lo up && echo made && read -r line"
_WITH_THIS = ["setpriv", "--pdeathsig", "KILL", "--"]  # ends with this process
_APART = ["--net", "--uts", "--mount"]


def _lowtide(name: str, label: str, stage: int, zero: dict[str, Any] | None = None, **communication: Any) -> Contender:
    return lowtide(name, label, stage, zero, **IN_BF16, communication=communication)


# In every message that is not of fewer bits.
IN_BF16: dict[str, Any] = {"communication_data_type": "bf16", "seed": 1, "steps_per_print": 0}
ONE_BIT = {"type": "OneBitAdam", "params": {"lr": LEARNING_RATE, "freeze_step": 2}}
HPZ = {"zero_hpz_partition_size": 2}
CONTENDERS = by_name(
    _lowtide("plain", "", 3),
    _lowtide("hpz", ", hpZ", 3, HPZ),
    _lowtide("zero++", ", qwZ 8 + qgZ 4", 3, weight_bits=8, gradient_bits=4),
    _lowtide("zero++4", ", qwZ 4 + qgZ 4", 3, weight_bits=4, gradient_bits=4),
    _lowtide("hpz4", ", hpZ, differences 4 + qgZ 4", 3, HPZ, weight_bits=4, gradient_bits=4),
    _lowtide("plain2", "", 2),
    _lowtide("both4", ", differences 4 + qgZ 4", 2, weight_bits=4, gradient_bits=4),
    lowtide("onebit", ", 1-bit Adam", 0, **IN_BF16, optimizer=ONE_BIT),
    _lowtide("power_sgd", ", PowerSGD of rank 4", 0, power_sgd={"rank": 4, "start_step": 2}),
    Contender("ddp", "DDP, fp16 messages", "ddp", {"hook": "fp16"}),
    Contender("powersgd", "DDP, PowerSGD of rank 4", "ddp", {"hook": "powersgd"}),
    Contender("fsdp2", "FSDP2", "fsdp2", {"reduce_dtype": "bfloat16"}),
)


# -- two hosts -------------------------------------------------------------------------------------------------------


def fault() -> str | None:
    """Return why hosts cannot be made on this machine, or None."""
    if missing := [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]:
        return f"{', '.join(missing)} not found; Debian has them in iproute2, mount and util-linux"
    if os.getuid() != 0:
        return "network namespaces need root"
    trial = "mount -t tmpfs tmpfs /dev/shm && ip link add one type veth peer name two && "
    trial += "tc qdisc add dev one root tbf rate 1gbit burst 256kb latency 50ms"
    try:
        _run("unshare", *_APART, "sh", "-c", trial)
    except RuntimeError as error:
        return f"namespaces are not permitted here: {error}"
    return None


def set_speed(bits_per_second: float) -> None:
    """Limit what the host sends on which this is called."""
    burst = max(256 << 10, int(bits_per_second / 8 / 1000))  # of a millisecond, and more than a packet that waits
    rate = ["rate", f"{bits_per_second:.0f}bit", "burst", str(burst), "latency", "100ms"]
    _run("tc", "qdisc", "replace", "dev", CABLE, "root", "tbf", *rate)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PATH": PATH}, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


@contextlib.contextmanager
def two_hosts() -> Iterator[list[list[str]]]:
    """Give what stands before a command that runs on each of two hosts, joined by a cable."""
    hosts: list[subprocess.Popen[str]] = []
    try:
        for name in ("host0", "host1"):
            command = [*_WITH_THIS, "unshare", *_APART, "sh", "-c", _HOST.format(name=name)]
            environment, pipe = {**os.environ, "PATH": PATH}, subprocess.PIPE
            hosts.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment))
            stream = hosts[-1].stdout
            if stream is None or stream.readline() != "made\n":
                raise RuntimeError(f"{name} was not made: {fault()}")
        before = [[*_WITH_THIS, "nsenter", "--target", str(host.pid), *_APART] for host in hosts]
        second = str(hosts[1].pid)
        _run(*before[0], "ip", "link", "add", CABLE, "type", "veth", "peer", "name", CABLE, "netns", second)
        for address, on_host in zip(ADDRESSES, before, strict=True):
            _run(*on_host, "ip", "address", "add", f"{address}/24", "dev", CABLE)
            _run(*on_host, "ip", "link", "set", CABLE, "up")
        yield before
    finally:
        for host in hosts:
            host.kill()
            host.communicate()


# -- a rank ----------------------------------------------------------------------------------------------------------


def train(job: dict[str, Any]) -> dict[str, Any]:
    """On a rank: seconds and bytes of a step at each speed."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    batches = [(a[rank : rank + 1], b[rank : rank + 1]) for a, b in build_batches(SIZES[job["size"]], 8, ranks)]
    setup = Setup(dtype="bf16")
    setup.join()
    trainer = BUILDERS[job["kind"]](build_model(SIZES[job["size"]]), setup, **job["options"])
    for number in range(job["warmup"]):
        trainer.step(*batches[number % len(batches)])
    found = {}
    for speed in job["speeds"]:
        if os.environ["LOCAL_RANK"] == "0":
            set_speed(SPEEDS[speed])
        dist.barrier()
        before, started = sent_bytes(CABLE), time.perf_counter()
        for step in range(job["steps"]):
            loss = trainer.step(*batches[step % len(batches)])
        dist.barrier()  # a packet that waits still counts as the step's
        seconds, sent = time.perf_counter() - started, sent_bytes(CABLE) - before
        found[speed] = {"seconds": seconds / job["steps"], "bytes": sent / job["steps"]}
    return {"loss": float(loss), "speeds": found}


# -- the command -----------------------------------------------------------------------------------------------------


def run(options: argparse.Namespace, row: Row, _: str | None) -> Result:
    """Run one job. Raises JobError where a rank fails or the time is over."""
    with two_hosts() as before:

        def place(rank: int) -> tuple[list[str], dict[str, str]]:
            local = {"LOCAL_RANK": str(rank % RANKS_OF_HOST), "LOCAL_WORLD_SIZE": str(RANKS_OF_HOST)}
            return before[rank // RANKS_OF_HOST], {**local, "MASTER_ADDR": ADDRESSES[0], "GLOO_SOCKET_IFNAME": CABLE}

        found = run_job("wire:train", options, row, None, place=place)
    return Result([found[0]["loss"]], [], more=found[0]["speeds"])


def columns(rows: Sequence[Row], speeds: Sequence[str]) -> list[Column]:
    """Rates are compared with plain's in the same round."""

    def megabytes(row: Row) -> float:
        return float(statistics.median(one["bytes"] for job in row.timed.values() for one in job.more.values())) / 1e6

    def milliseconds(speed: str, row: Row) -> list[float]:
        return [job.more[speed]["seconds"] * 1e3 for job in row.timed.values()]

    def rates(speed: str, row: Row) -> list[float]:
        pairs = row.beside(find(rows, "plain"))
        return [plain.more[speed]["seconds"] / own.more[speed]["seconds"] for own, plain in pairs]

    found = [Column("MB sent by a\nhost in a step", megabytes, ".1f")]
    for speed in speeds:
        panel = f"{speed}: steps a second / plain stage 3's (more is better)"
        found.append(Column(f"{speed}\nms a step", partial(milliseconds, speed), ".0f"))
        found.append(Column(f"{speed}\nx plain's rate", partial(rates, speed), panel=panel, line=1.0))
    return found


def main(argv: list[str] | None = None) -> int:
    parser = JobParser(__doc__, CONTENDERS, steps=(SETTLED, 2))
    parser.add_argument("--speeds", nargs="+", choices=list(SPEEDS), default=list(SPEEDS))
    parser.add_argument("--size", choices=["tiny", "10M"], default="10M", help="of the model (default: 10M)")
    parser.set_defaults(ranks=2 * RANKS_OF_HOST)
    options = parser.check(parser.parse_args(argv))
    if why := fault():
        raise SystemExit(f"wire: expected a machine on which two hosts can be made, found none: {why}")
    title = f"GPT {options.size} in bf16, two hosts of {RANKS_OF_HOST} ranks"
    return compare(options, title, partial(run, options), lambda rows: {title: columns(rows, options.speeds)})


if __name__ == "__main__":
    sys.exit(main())
