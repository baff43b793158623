"""How often a job of so many devices fails, how often it should save, and what share of its time is then of use.

A device fails as often as those of Llama 3 405B, 419 unexpected interruptions of 16,384 devices in 54 days (arXiv
2407.21783, section 3.3.4). A checkpoint has 12 bytes a parameter, divided over hosts of 8 devices, and each writes its
part at --write and reads it at --read: defaults are what docs/performance.md measured on one disk.
With M seconds between failures, s to save and R to be back at work, of which --restart is not reading:

    Young (1974)    interval = sqrt(2 s M)
    Daly (2006)     interval = sqrt(2 s M) (1 + sqrt(s / 2M) / 3 + s / 2M / 9) - s,  M where s >= 2M
    of use          interval / (M exp(R / M) (exp((interval + s) / M) - 1))

Example:

    python benchmarks/failures.py --params 405e9 --devices 16384 100000
    python benchmarks/failures.py --params 2e12 --devices 100000 --restart 60
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from _harness import Parser, begin, job_of, make_table, write_json

DEVICE_HOURS = 16384 * 54 * 24 / 419  # between failures of one
DEVICES_OF_HOST = 8
STATE_BYTES = 12.0  # of a parameter, in a checkpoint


@dataclass(frozen=True)
class Failures:
    """Of a job: seconds between two failures, to save, and from a failure to the first step after it."""

    mean_seconds: float
    save_seconds: float
    restart_seconds: float

    @property
    def young_seconds(self) -> float:
        """Between the end of a save and the start of the next one, to first order."""
        return math.sqrt(2 * self.save_seconds * self.mean_seconds)

    @property
    def daly_seconds(self) -> float:
        """The same, where failures may come in a save too. J. T. Daly, FGCS 22 (2006), equation 37."""
        ratio = self.save_seconds / (2 * self.mean_seconds)
        if ratio >= 1:
            return self.mean_seconds
        return self.young_seconds * (1 + math.sqrt(ratio) / 3 + ratio / 9) - self.save_seconds

    def of_use(self, interval: float) -> float:
        """Share of the time that is kept, 0 to 1. Daly, equation 20: failures come at random, at any moment."""
        mean = self.mean_seconds
        return interval / (
            mean * math.exp(self.restart_seconds / mean) * math.expm1((interval + self.save_seconds) / mean)
        )


def failures_of(given: argparse.Namespace, num_devices: int) -> Failures:
    """Return the failures of the job of a command line."""
    of_host = given.params * STATE_BYTES / max(1, num_devices / DEVICES_OF_HOST)
    return Failures(
        mean_seconds=DEVICE_HOURS * 3600 / num_devices,
        save_seconds=max(of_host / given.write, 1e-3),
        restart_seconds=given.restart + of_host / given.read,
    )


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--params", type=float, required=True, help="of the model")
    add("--devices", type=int, nargs="+", default=[1024, 16384, 100000])
    add("--write", type=float, default=2.611e9, help="bytes/s of a host")
    add("--read", type=float, default=2.008e9, help="bytes/s of a host")
    add("--restart", type=float, default=600.0, help="seconds from a failure until reading begins")
    given = parser.parse_args(arguments)
    for name, value in job_of(given).items():
        for one in value if isinstance(value, list) else [value]:
            if one <= 0:
                parser.error(f"--{name}: expected more than 0, found {one:g}")
    return given


def main(arguments: Sequence[str] | None = None) -> int:
    given, lines = parse_arguments(arguments), []
    for num_devices in given.devices:
        found = failures_of(given, num_devices)
        numbers = (3600 / found.mean_seconds, found.save_seconds, found.young_seconds, found.daly_seconds)
        share = found.of_use(found.daly_seconds)
        lines.append([f"{num_devices:,}", *(f"{one:.3g}" for one in numbers), f"{share:.1%}"])
    headings = ["devices", "failures an hour", "save, s", "interval by Young, s", "by Daly, s", "of use"]
    begin().print(make_table("", headings, lines))
    write_json(given, [dict(zip(headings, line, strict=True)) for line in lines])
    return 0


if __name__ == "__main__":
    sys.exit(main())
