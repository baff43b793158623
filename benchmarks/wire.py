"""Step time and bytes on a cable between two hosts, with messages of fewer and fewer bits, beside DDP and FSDP2.

Hosts are network namespaces of this machine, two ranks on each, and the cable has the speed that is asked for (tc tbf).
All contenders train in the same processes, a few steps of each in turn, so that they meet the same machine; rows are
compared by the median of their ratios to `plain` in the same round. Bytes are what the kernel has counted on one end of
the cable, headers included. A record has rank 0's processor seconds of a step too, which say what a loaded machine
leaves of its time. Needs root:

    python benchmarks/wire.py --json wire.json --markdown wire.md --image wire.png
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _namespaces import CABLE, Hosts, fault
from _wire_contenders import CONTENDERS, RANKS_OF_HOST, REFERENCE, SETTLED

WORKER = Path(__file__).with_name("_wire_worker.py")
SPEEDS = {"10 Gbit/s": 1e10, "1 Gbit/s": 1e9, "100 Mbit/s": 1e8}


def run(job: dict[str, Any], timeout_seconds: float) -> list[dict[str, Any]]:
    """What rank 0 has measured. Raises SystemExit where a rank fails or the time is over."""
    with Hosts() as hosts, tempfile.TemporaryDirectory(prefix="wire-") as name:
        folder = Path(name)
        description = folder / "job.json"
        description.write_text(json.dumps(job))
        ranks = 2 * RANKS_OF_HOST
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": CABLE, "WORLD_SIZE": str(ranks)}
        environment |= {"MASTER_ADDR": hosts.addresses[0], "MASTER_PORT": "29500"}
        environment["LOCAL_WORLD_SIZE"] = str(RANKS_OF_HOST)
        processes, logs = [], []
        for rank in range(ranks):
            ranked = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank % RANKS_OF_HOST)}
            logs.append(folder / f"rank{rank}.log")
            with logs[-1].open("wb") as stream:
                command = hosts.command(rank // RANKS_OF_HOST, [sys.executable, str(WORKER), str(description)])
                processes.append(subprocess.Popen(command, env=ranked, stdout=stream, stderr=stream))
        try:
            _wait(processes, logs, timeout_seconds)
        finally:
            for one in processes:
                one.kill()
                one.wait()
        found: list[dict[str, Any]] = json.loads((folder / "rank0.json").read_text())
        return found


def _wait(processes: Sequence[subprocess.Popen[bytes]], logs: Sequence[Path], timeout_seconds: float) -> None:
    deadline = time.monotonic() + timeout_seconds
    while any(one.poll() is None for one in processes):
        failed = [rank for rank, one in enumerate(processes) if one.poll()]
        if failed or time.monotonic() > deadline:
            why = f"rank {failed[0]} failed" if failed else f"not done after {timeout_seconds:.0f} s (--timeout)"
            text = logs[failed[0] if failed else 0].read_text(errors="replace")
            raise SystemExit(f"wire: {why}:\n{text[-3000:]}")
        time.sleep(0.1)
    if any(one.returncode for one in processes):
        failed = [rank for rank, one in enumerate(processes) if one.returncode]
        raise SystemExit(f"wire: rank {failed[0]} failed:\n{logs[failed[0]].read_text(errors='replace')[-3000:]}")


def summary(records: Sequence[dict[str, Any]], speeds: Sequence[float]) -> list[dict[str, Any]]:
    """A row for each contender: megabytes of a step, and at each speed its seconds and how much faster it is."""
    rows = []
    for name in dict.fromkeys(record["contender"] for record in records):
        own = [record for record in records if record["contender"] == name]
        row: dict[str, Any] = {"contender": name, "megabytes": statistics.median(r["bytes"] for r in own) / 1e6}
        for speed in speeds:
            seconds = {r["round"]: r["seconds"] for r in own if r["speed"] == speed}
            row[f"seconds at {speed:.0f}"] = statistics.median(seconds.values())
            first = {r["round"]: r["seconds"] for r in records if r["contender"] == REFERENCE and r["speed"] == speed}
            ratios = [first[number] / one for number, one in seconds.items() if number in first]
            row[f"times at {speed:.0f}"] = statistics.median(ratios) if ratios else None
        rows.append(row)
    return rows


def table(rows: Sequence[dict[str, Any]], speeds: dict[str, float]) -> str:
    """As Markdown."""
    lines = [
        "| | MB sent by a host in a step | "
        + " | ".join(f"{name}: ms a step (x plain's rate)" for name in speeds)
        + " |",
        "|---|---|" + "---|" * len(speeds),
    ]
    for row in rows:
        cells = [CONTENDERS[row["contender"]].label, f"{row['megabytes']:.1f}"]
        for speed in speeds.values():
            times = row[f"times at {speed:.0f}"]
            faster = "" if times is None else f" ({times:.2f} x)"
            cells.append(f"{1000 * row[f'seconds at {speed:.0f}']:.0f}{faster}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(rows: Sequence[dict[str, Any]], speeds: dict[str, float], path: Path) -> None:
    """The rate of each contender over plain's, at each speed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    labels = [CONTENDERS[row["contender"]].label for row in rows]
    colours = ["tab:blue" if CONTENDERS[row["contender"]].kind == "lowtide" else "tab:gray" for row in rows]
    figure, grid = pyplot.subplots(
        1, len(speeds), figsize=(4 * len(speeds) + 2, 1.5 + 0.35 * len(rows)), sharey=True, squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for axes, (name, speed) in zip(grid[0], speeds.items(), strict=True):
        axes.barh(range(len(rows)), [row[f"times at {speed:.0f}"] or 0.0 for row in rows], color=colours)
        axes.axvline(1.0, color="black", linewidth=0.8, linestyle=":")
        axes.set_title(name)
        axes.set_xlabel("steps a second / plain stage 3's (more is better)")
        axes.set_yticks(range(len(rows)), labels)
    grid[0][0].invert_yaxis()
    figure.savefig(path, dpi=110)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contenders", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS))
    parser.add_argument("--speeds", nargs="+", choices=list(SPEEDS), default=list(SPEEDS))
    parser.add_argument("--size", choices=["tiny", "10M"], default="10M", help="of the model (default: 10M)")
    parser.add_argument("--rows", type=int, default=1, help="pieces of text of a rank (default: 1)")
    warmup = f"steps before anything is measured (default: {SETTLED})"
    parser.add_argument("--warmup", type=int, default=SETTLED, help=warmup)
    parser.add_argument("--steps", type=int, default=2, help="of a contender in its turn (default: 2)")
    parser.add_argument("--rounds", type=int, default=3, help="turns at each speed (default: 3)")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds (default: 3600)")
    parser.add_argument("--json", type=Path, help="a file for the numbers")
    parser.add_argument("--markdown", type=Path, help="a file for the table")
    parser.add_argument("--image", type=Path, help="a file for the picture")
    options = parser.parse_args(argv)
    if why := fault():
        raise SystemExit(f"wire: expected a machine on which two hosts can be made, found none: {why}")
    speeds = {name: SPEEDS[name] for name in options.speeds}
    job = {
        "contenders": options.contenders,
        "speeds": list(speeds.values()),
        **{key: getattr(options, key) for key in ("size", "rows", "warmup", "steps", "rounds")},
    }
    records = run(job, options.timeout)
    rows = summary(records, list(speeds.values()))
    print(table(rows, speeds))
    if options.json is not None:
        options.json.write_text(json.dumps({"job": job, "records": records, "rows": rows}, indent=1) + "\n")
    if options.markdown is not None:
        options.markdown.write_text(table(rows, speeds) + "\n")
    if options.image is not None:
        draw(rows, speeds, options.image)


if __name__ == "__main__":
    main()
