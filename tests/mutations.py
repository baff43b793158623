"""Whether the tests see small faults: each of tests/mutations.txt is put into a copy of the tree, and tests are run.

    python tests/mutations.py                          all of them: hours
    python tests/mutations.py --folder pipe --every 5  each fifth of those in pipe/
    python tests/mutations.py --tests ../old/tests     the same faults, seen by other tests

A fault is caught where a test fails; it is a hang where the tests take more than three times as long as without it, and
out of date where its line is not there once. The laws at small size of its folder (tests/quick.txt) are asked first,
then all its tests, then those of a folder above it. Each of these lists must pass without a fault before.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "tests" / "mutations.txt"
# What is asked about a folder after its quick laws, in this order.
ASKED = {
    "zero": [
        ["tests/zero"],
        ["tests/laws"],
        [
            "tests/pipe/test_pipeline_training.py",
            "tests/pretend/test_parity.py",
            "tests/pretend/test_host_update.py",
            "tests/pretend/test_delayed_update.py",
        ],
        ["tests/engine"],
    ],
    "comm": [
        ["tests/comm"],
        ["tests/engine/test_lost_ranks.py", "tests/engine/test_bad_input.py"],
        ["tests/zero"],
    ],
    "model": [["tests/engine/test_float8.py", "tests/engine/test_compile.py"]],
    "pipe": [["tests/pipe"]],
    "parallel": [["tests/parallel"]],
    "engine": [
        ["tests/laws"],
        [
            "tests/engine/test_join.py",
            "tests/engine/test_speculative_update.py",
            "tests/engine/test_losses_beside_the_model.py",
            "tests/engine/test_any_loop.py",
            "tests/engine/test_deferred_model.py",
        ],
        ["tests/engine/test_start.py", "tests/zero/test_delayed_update.py"],
        [
            "tests/plan/test_planned_peak.py",
            "tests/pretend/test_lent_states.py",
            "tests/pretend/test_graphs.py",
        ],
    ],
    "kernels": [["tests/kernels"], ["tests/zero"]],
    "offload": [
        ["tests/offload"],
        ["tests/zero", "tests/engine", "-k", "offload or host or delayed or speculative"],
        [
            "tests/parallel/test_split_plan.py",
            "tests/pretend/test_parity.py",
            "tests/pretend/test_host_update.py",
            "tests/pretend/test_host_waits.py",
        ],
    ],
    "integrations": [["tests/integrations/huggingface/test_parity.py"]],
    "checkpoint": [["tests/checkpoint"], ["tests/engine", "-k", "checkpoint or export or load or adapter"]],
}
NOT_FOUND, NOTHING_RUN = 4, 5  # what pytest leaves with where there is no test of a name, and where none is left
LEFT_OUT = shutil.ignore_patterns(".git", ".venv", ".*cache", "__pycache__", "*.egg-info")


@dataclass(frozen=True)
class Fault:
    """With `after` in the place of `before`, which stands once in `file`, something is wrong."""

    file: str
    before: str
    after: str

    @property
    def folder(self) -> str:
        return self.file.split("/")[0]

    def __str__(self) -> str:
        return f"{self.file}\n  - {self.before}\n  + {self.after}"


def read_table(text: str) -> list[Fault]:
    """The faults in the order of the table."""
    faults, file, before = [], "", ""
    for line in text.splitlines():
        if line.startswith("- "):
            before = line[2:]
        elif line.startswith("+ "):
            faults.append(Fault(file, before, line[2:]))
        elif line and not line.startswith("#"):
            file = line
    return faults


def copy_tree(tests: Path, folder: Path) -> Path:
    """A copy of the checkout with these tests, whose `lowtide` is its own and not the one that is installed."""
    tree = folder / "tree"
    shutil.copytree(ROOT, tree, ignore=LEFT_OUT)
    shutil.rmtree(tree / "tests")
    shutil.copytree(tests, tree / "tests", ignore=LEFT_OUT)
    for path in [*ROOT.iterdir(), *(ROOT / "integrations").iterdir()]:
        if (path / "__init__.py").exists() and path.name not in ("lowtide", "tests"):
            (tree / "lowtide" / path.name).symlink_to(tree / path.relative_to(ROOT))
    return tree


def run_tests(tree: Path, arguments: Sequence[str], seconds: float | None = None) -> tuple[int, str]:
    """What pytest left with, and its output; 0 is success. TimeoutExpired: it took longer than so many seconds."""
    environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tb=no", *arguments]
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


def limit_of(tree: Path, arguments: Sequence[str], may_lack: bool) -> float | None:
    """Seconds after which these tests hang. None: the tree lacks some of them, as it may. SystemExit: they fail."""
    started = time.monotonic()
    status, output = run_tests(tree, arguments)
    if status in (NOT_FOUND, NOTHING_RUN) and may_lack:
        return None
    if status:
        sys.exit(f"expected tests that pass without a fault, found that pytest left with {status}:\n{output[-3000:]}")
    return 60 + 3 * (time.monotonic() - started)


def look(tree: Path, arguments: Sequence[str], seconds: float) -> tuple[str, str]:
    """Whether tests that pass without the fault see it: "caught", "missed" or "hang"; and the test that fails first."""
    try:
        status, output = run_tests(tree, arguments, seconds)
    except subprocess.TimeoutExpired:
        return "hang", f"more than {seconds:.0f} s"
    if status == 0:
        return "missed", ""
    told = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return "caught", told[0].split(" - ")[0] if told else f"pytest left with {status}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", choices=sorted(ASKED), help="faults of this folder alone")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="each N-th fault alone")
    parser.add_argument("--laws", action="store_true", help="ask the laws at small size alone")
    parser.add_argument("--match", default="", metavar="TEXT", help="faults with this text in their line or file alone")
    parser.add_argument("--tests", type=Path, default=ROOT / "tests", help="the folder of tests that are asked")
    given = parser.parse_args(arguments)
    chosen = [fault for fault in read_table(TABLE.read_text()) if given.folder in (None, fault.folder)]
    chosen = [fault for fault in chosen if given.match in f"{fault.file} {fault.before}"][:: given.every]
    laws = [line for line in (ROOT / "tests" / "quick.txt").read_text().splitlines() if line.startswith("tests/")]
    may_lack = given.tests != ROOT / "tests"
    counts = {"caught": 0, "missed": 0, "hang": 0, "out of date": 0}
    with tempfile.TemporaryDirectory(prefix="lowtide-mutations-") as folder:
        tree = copy_tree(given.tests, Path(folder))
        asked: dict[str, list[tuple[list[str], float]]] = {}  # of each folder: tests, and when they hang
        for name in dict.fromkeys(fault.folder for fault in chosen):
            quick = [law for law in laws if law.startswith(f"tests/{name}/")]
            limits = [(one, limit_of(tree, one, may_lack)) for one in [quick, *([] if given.laws else ASKED[name])]]
            asked[name] = [(one, limit) for one, limit in limits if limit is not None]
        for fault in chosen:
            path, started = tree / fault.file, time.monotonic()
            source = path.read_text() if path.exists() else ""
            found, by = "out of date", ""
            if source.count(fault.before) == 1:
                path.write_text(source.replace(fault.before, fault.after))
                looks = (look(tree, one, seconds) for one, seconds in asked[fault.folder])
                found, by = next((seen for seen in looks if seen[0] != "missed"), ("missed", ""))
                path.write_text(source)
            counts[found] += 1
            print(f"{found} in {time.monotonic() - started:.0f} s: {fault}\n  {by}", flush=True)
    print(", ".join(f"{count} {name}" for name, count in counts.items()))
    return int(counts["caught"] < len(chosen))


if __name__ == "__main__":
    sys.exit(main())
