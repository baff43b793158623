"""Whether the tests see small faults: each of tests/mutations.txt is put into a copy of the tree, and its test is run.

    python tests/mutations.py                          all of them: 20 minutes of two cores
    python tests/mutations.py --match pipe/            those with this text in their file, lines or test

A fault is caught where its test fails; it is a hang where the test takes more than `LIMIT` seconds. All tests that are
named must pass without a fault before.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "tests" / "mutations.txt"
LIMIT = 300.0
LEFT_OUT = shutil.ignore_patterns(".git", ".venv", ".*cache", "__pycache__", "*.egg-info")


@dataclass(frozen=True)
class Fault:
    """With `after` in the place of `before`, which stands once in `file`, something is wrong, and `test` fails."""

    file: str
    before: str
    after: str
    test: str

    def __str__(self) -> str:
        return f"{self.file}\n- {self.before}\n+ {self.after}\n= {self.test}"


def read_table(text: str) -> list[Fault]:
    """The faults in the order of the table."""
    faults, file, pair = [], "", list[str]()
    for line in text.splitlines():
        if line.startswith(("- ", "+ ")):
            pair.append(line[2:])
        elif line.startswith("= "):
            before, after = pair
            faults.append(Fault(file, before, after, line[2:]))
            pair = []
        elif line and not line.startswith("#"):
            file = line
    return faults


def copy_tree(folder: Path) -> Path:
    """A copy of the checkout, whose `lowtide` is its own and not the one that is installed."""
    tree = folder / "tree"
    shutil.copytree(ROOT, tree, ignore=LEFT_OUT)
    for path in [*ROOT.iterdir(), *(ROOT / "integrations").iterdir()]:
        if (path / "__init__.py").exists() and path.name not in ("lowtide", "tests"):
            (tree / "lowtide" / path.name).symlink_to(tree / path.relative_to(ROOT))
    return tree


def run_tests(tree: Path, tests: Sequence[str], seconds: float | None = None) -> tuple[int, str]:
    """What pytest left with, and its output; 0 is success. TimeoutExpired: it took longer than so many seconds."""
    environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tb=no", *tests]
    process = subprocess.Popen(
        command, cwd=tree, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        output = process.communicate(timeout=seconds)[0].decode(errors="replace")
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    return process.returncode, output


def look(tree: Path, fault: Fault) -> str:
    """Whether its test sees a fault: "caught", "missed" or "hang"; "out of date" where its line is not there once."""
    path = tree / fault.file
    source = path.read_text() if path.exists() else ""
    if source.count(fault.before) != 1:
        return "out of date"
    path.write_text(source.replace(fault.before, fault.after))
    try:
        return "caught" if run_tests(tree, [fault.test], LIMIT)[0] else "missed"
    except subprocess.TimeoutExpired:
        return "hang"
    finally:
        path.write_text(source)


def look_at_all(faults: Sequence[Fault]) -> Counter[str]:
    """How many of the faults are caught, missed and so on, each put into a tree of its own and shown at once."""
    counts = Counter[str]()
    with tempfile.TemporaryDirectory(prefix="lowtide-mutations-") as folder:
        tree = copy_tree(Path(folder))
        for fault in faults:
            started = time.monotonic()
            found = look(tree, fault)
            counts[found] += 1
            print(f"{found} in {time.monotonic() - started:.0f} s: {fault}", flush=True)
    return counts


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--match", default="", metavar="TEXT", help="faults with this text in their row alone")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="so many at a time, each in its own tree")
    given = parser.parse_args(arguments)
    chosen = [fault for fault in read_table(TABLE.read_text()) if given.match in str(fault)]
    status, output = run_tests(ROOT, [*dict.fromkeys(fault.test for fault in chosen)])
    if status:
        sys.exit(f"expected tests that pass without a fault, found that pytest left with {status}:\n{output[-3000:]}")
    with ThreadPoolExecutor(given.jobs) as threads:
        parts = threads.map(look_at_all, (chosen[job :: given.jobs] for job in range(given.jobs)))
        counts = sum(parts, Counter[str]())
    print(", ".join(f"{count} {name}" for name, count in counts.items()))
    return int(counts["caught"] < len(chosen))


if __name__ == "__main__":
    sys.exit(main())
