"""Every benchmark says how it is called, runs at its smallest size, and writes what it was asked for."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py") if not path.stem.startswith("_"))

# What each runs with. OUT is a folder for what it writes. Where a script is not here, a test of its own runs it.
RUNS = {
    "checkpoint": "--size tiny --contenders fsdp2 lowtide-3 --rounds 1 --repeats 1 --folder OUT"
    " --json OUT/j --png OUT/p.png",
    "compare": "--size tiny --contenders ddp lowtide-3-layered --rounds 1 --steps 1 --memory exact --memory-steps 2"
    " --accumulation 2 --drive-mb-per-second 900 --offload-folder OUT --json OUT/j --png OUT/p.png",
    "cpu_optimizer": "--numel 70000 --rounds 1 --steps 1 --contenders kernel-int8 copy-streamed"
    " --json OUT/j --png OUT/p.png",
    "fewer_bytes": "--steps 2 --layers 1 --width 32 --context 16 --seeds 0 --validation-batches 1"
    " --contenders kahan split --json OUT/j",
    "host_time": "--rounds 1 --steps 1 --depths 1 2 --contenders lowtide-3 fsdp2 --json OUT/j",
    "host_time of kernels": "--kernels --rounds 1 --json OUT/j",
    "largest": "--device cpu --size tiny --budget-mib 200 --max-layers 2 --contenders ddp"
    " --offload-folder OUT --json OUT/j --png OUT/p.png",
    "offload_io": "--size 4 --unit 1 --rounds 1 --folder OUT --json OUT/j",
    "parallel": "--contenders single lowtide-tensor --size tiny --rounds 1 --warmup 1 --steps 1 --memory none"
    " --json OUT/j --png OUT/p.png",
    "pipeline": "--mode sleep --ranks 2 --microbatches 2 --milliseconds 1 1 1 --rounds 1 --steps 1 --contenders 1f1b"
    " torch-1f1b --json OUT/j --png OUT/p.png",
}


@pytest.mark.parametrize("name", [name for name in SCRIPTS if name != "gpu"])
def test_help_has_an_example(name: str) -> None:
    said = (FOLDER / f"{name}.py").read_text()
    assert "Example" in said.split('"""')[1] and f"python benchmarks/{name}.py" in said.split('"""')[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_it_runs(name: str, tmp_path: Path) -> None:
    command = [sys.executable, str(FOLDER / f"{name.split()[0]}.py"), *RUNS[name].replace("OUT", str(tmp_path)).split()]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment, check=False)
    assert ended.returncode == 0, f"{ended.stdout}{ended.stderr}"
    asked = {word[4:] for word in RUNS[name].split() if word.startswith("OUT/")}
    assert all((tmp_path / file).stat().st_size > 0 for file in asked)
