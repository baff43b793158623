"""Every benchmark says how it is called, runs at its smallest size, and writes what it was asked for."""

import importlib
import runpy
import sys
import warnings
from pathlib import Path
from unittest import mock

import pytest

from tests.kit.ranks import in_a_new_process

FOLDER = Path(__file__).parents[2] / "benchmarks"
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py") if not path.stem.startswith("_"))

# What each runs with. OUT is a folder for what it writes. Where a script is not here, a test of its own runs it.
RUNS = {
    "checkpoint": "--size tiny --contenders fsdp2 lowtide-3 --rounds 1 --repeats 1 --folder OUT"
    " --json OUT/j --png OUT/p.png",
    "compare": "--size tiny --contenders ddp lowtide-3-nvme --rounds 1 --steps 1 --memory exact --memory-steps 2"
    " --accumulation 2 --offload-folder OUT --json OUT/j --png OUT/p.png",
    "cpu_optimizer": "--numel 70000 --rounds 1 --steps 1 --contenders kernel-int8 copy --json OUT/j --png OUT/p.png",
    "fewer_bytes": "--steps 2 --layers 1 --width 32 --context 16 --seeds 0 --validation-batches 1"
    " --contenders split* --json OUT/j --png OUT/p.png",
    "host_time": "--rounds 1 --steps 1 --depths 1 2 --contenders lowtide-3 fsdp2 --json OUT/j",
    "host_time of kernels": "--kernels --rounds 1 --json OUT/j",
    "largest": "--size tiny --budget-mib 200 --max-layers 2 --contenders ddp"
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


# What each of a script's ranks would import by itself.
IMPORTED = {"checkpoint": "torch.distributed.fsdp", "parallel": "transformers.models.llama.modeling_llama"}


def status_of(name: str, arguments: list[str]) -> object:
    """Run a script as Python would, but for its jobs of memory, which are forks too."""
    warnings.resetwarnings()
    for module in ("lowtide.engine.build", *filter(None, [IMPORTED.get(name)])):
        importlib.import_module(module)
    sys.path.insert(0, str(FOLDER))
    sys.argv = [f"{name}.py", *arguments]
    with mock.patch.object(importlib.import_module("_harness"), "can_fork", lambda *_: True):
        try:
            runpy.run_path(str(FOLDER / sys.argv[0]), run_name="__main__")
        except SystemExit as ended:
            return ended.code or 0
    return 0


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_it_runs(name: str, tmp_path: Path) -> None:
    arguments = RUNS[name].replace("OUT", str(tmp_path)).split()
    assert in_a_new_process(status_of, name.split()[0], arguments, timeout=600) == 0
    asked = {word[4:] for word in RUNS[name].split() if word.startswith("OUT/")}
    assert all((tmp_path / file).stat().st_size > 0 for file in asked)
