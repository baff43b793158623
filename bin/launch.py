"""`lowtide launch`: runs a script on several ranks of this machine."""

import argparse
import importlib.machinery
import sys
from pathlib import Path

from ..launch.local import LocalJob, run

EPILOG = """examples:
  lowtide launch --nproc 2 examples/train_gpt.py --steps 100
  lowtide launch --nproc 4 --log-dir logs -m my_package.train --lr 1e-3
  lowtide launch --nproc 2 -- script.py --help

Options of lowtide stand before SCRIPT; everything after it belongs to the script.
"""


def parser() -> argparse.ArgumentParser:
    """The command line of `lowtide launch`."""
    result = argparse.ArgumentParser(
        prog="lowtide launch",
        description="Run a Python script as several ranks on this machine, with the environment that torchrun sets. "
        "If one rank fails, all are stopped and the exit status is that of the rank that failed first.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument("--nproc", type=int, required=True, metavar="N", help="how many ranks to start")
    result.add_argument("-m", "--module", action="store_true", help="SCRIPT is the name of a module, as in python -m")
    result.add_argument("--quiet-ranks", action="store_true", help="show the output of rank 0 only")
    result.add_argument(
        "--log-dir", type=Path, metavar="DIR", help="also write the output of each rank to DIR/rank0.log and so on"
    )
    result.add_argument(
        "--grace",
        type=float,
        default=LocalJob.grace_seconds,
        metavar="SECONDS",
        help="how long a rank may take to stop before it is killed (default: %(default)g)",
    )
    result.add_argument(
        "--master-port", type=int, metavar="PORT", help="the port where the ranks meet (default: a free one)"
    )
    result.add_argument("script", metavar="SCRIPT", help="a Python file, or a module with -m")
    result.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGS", help="passed to the script")
    return result


def fault(options: argparse.Namespace) -> str | None:
    """What is wrong with the parsed command line, or None."""
    if options.nproc < 1:
        return f"--nproc must be at least 1, found {options.nproc}"
    if options.grace < 0:
        return f"--grace must not be negative, found {options.grace:g}"
    if options.module:
        top = options.script.split(".")[0]
        if importlib.machinery.PathFinder.find_spec(top, [str(Path.cwd()), *sys.path]) is None:
            return f'no module "{top}" can be imported from {Path.cwd()}; check the name after -m'
    elif not Path(options.script).exists():
        return f'there is no script "{options.script}" in {Path.cwd()}; for a module write -m before its name'
    return None


def main(argv: list[str] | None = None) -> int:
    """Runs the command line `argv` (without "launch"); returns the exit status, 2 for a wrong command line."""
    command_line = parser()
    options = command_line.parse_args(argv)
    if text := fault(options):
        command_line.error(text)
    target = ["-m", options.script] if options.module else [options.script]
    return run(
        LocalJob(
            nproc=options.nproc,
            command=(sys.executable, *target, *options.arguments),
            quiet_ranks=options.quiet_ranks,
            log_dir=options.log_dir,
            grace_seconds=options.grace,
            master_port=options.master_port,
        )
    )
