"""How much work a launcher makes: counted in modules and processor time, which other programs do not change much."""

import resource
import subprocess
import sys
from pathlib import Path

from tests.launch.jobs import LAUNCH
from tests.launch.test_failures import agents, guards, started

TIMES_OF_PYTHON = 13.0  # measured: 8 (17 before agents were forked and psutil was imported late)
HEAVY = {"asyncio", "concurrent", "email.parser", "http", "lowtide.engine", "multiprocessing", "numpy", "psutil"}
HEAVY |= {"pydantic", "torch", "xml"}


def processor_seconds(*command: str) -> float:
    """Of the command and all that it starts; the least of a few runs."""
    found = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        found.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
    return min(found)


def test_a_job_of_one_host_imports_nothing_heavy(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("print('ok')")
    code = (
        "import sys; from lowtide.bin.main import main; status = main(sys.argv[1:]); "
        "print(*sys.modules, file=sys.stderr); sys.exit(status)"
    )
    command = [sys.executable, "-c", code, "launch", "--nproc", "1", str(tmp_path / "script.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (0, "ok\n")
    modules = done.stderr.split()
    assert "lowtide.launch.job.launcher" in modules
    assert {name for name in modules if any(name == heavy or name.startswith(heavy + ".") for heavy in HEAVY)} == set()


def test_the_agent_of_this_host_is_no_second_python(tmp_path: Path) -> None:
    job = started(tmp_path)
    own = [str(word) for word in job.process.args]  # type: ignore[union-attr]  # a list
    assert [process.cmdline() for process in (*guards(job), *agents(job))] == [own, own]
    job.process.terminate()
    job.finish()


def test_a_launcher_takes_little_beside_its_rank(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("")
    python = processor_seconds(sys.executable, str(script))
    launched = processor_seconds(*LAUNCH, "--nproc", "1", str(script))
    assert launched < TIMES_OF_PYTHON * python, f"{launched:.3f} s, and {python:.3f} s for the rank alone"
