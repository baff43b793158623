"""`lowtide env`: facts, and what works or why it does not; nothing by which machine or user are known."""

import functools
import getpass
import importlib.metadata
import json
import platform
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import collect_env

from lowtide.bin import env
from lowtide.bin.main import main
from lowtide.engine.plan.measured import Measured
from lowtide.kernels.cpu_build import BuildError, find_compiler
from tests.kit.training import refusal

Capture = pytest.CaptureFixture[str]
collected_once = functools.cache(collect_env.get_env_info)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch asks pip and others for its facts, for seconds, and they stay the same."""
    monkeypatch.setattr(collect_env, "get_env_info", collected_once)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def report(capsys: Capture, *arguments: str, status: int = 0) -> dict[str, Any]:
    assert main(["env", "--json", *arguments]) == status
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


WITHOUT_GPU = {
    "cuda": "CUDA",
    "nccl": "needs CUDA devices; CPU ranks use gloo and shared memory",
    "triton kernels": "needs a GPU; eager torch operations replace it",
}


def test_versions_are_those_that_are_installed_and_a_folder_is_left_as_it_was(capsys: Capture, tmp_path: Path) -> None:
    found = report(capsys, "--folder", str(tmp_path))
    assert platform.release() in found["torch"]["python_platform"]
    expected = {name: importlib.metadata.version(name) for name in ("torch", "lowtide", "numpy")}
    expected["python"] = platform.python_version()
    assert expected.items() <= found["versions"].items()
    works = found["works"]["offload to nvme"]
    assert works["works"] and works["why"].startswith(f"{tmp_path}: writable, ") and not list(tmp_path.iterdir())
    if not torch.cuda.is_available():
        for name, why in WITHOUT_GPU.items():
            assert why in found["works"][name]["why"] and not found["works"][name]["works"]


def test_what_cannot_be_written_or_measured_is_said(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    works = report(capsys, "--folder", str(tmp_path / "no" / "folder"), status=1)["works"]["offload to nvme"]
    assert not works["works"] and "No such file or directory; name an existing folder" in works["why"]

    def fail(*_: object) -> None:
        raise ChildProcessError("rank 0 of 2 failed: no output")

    monkeypatch.setattr(env, "measure", fail)
    assert main(["env", "--measure", str(tmp_path / "machine.json")]) == 1
    assert "lowtide env: rank 0 of 2 failed: no output" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    (tmp_path / "machine.json").write_text("{")  # damaged: the planner's error says to measure again
    monkeypatch.setattr(env, "measure", lambda *_: Measured({}))
    assert main(["env", "--measure", str(tmp_path / "machine.json")]) == 0
    assert '"format"' in (tmp_path / "machine.json").read_text()


NO_COMPILER = "CXX is 'no-such-compiler', and this program does not exist"
NO_KERNEL = f"torch's kernels, chunk by chunk, because {NO_COMPILER}"
SETTING = "LOWTIDE_CPU_KERNEL: expected native, portable or torch, found 'fast'"


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("CXX", "no-such-compiler", {"c++ compiler": NO_COMPILER, "cpu update kernel": NO_KERNEL}),
        ("LOWTIDE_CPU_KERNEL", "portable", {"cpu update kernel": "a C++ pass per shard, with portable instructions"}),
        ("LOWTIDE_CPU_KERNEL", "fast", {"cpu update kernel": SETTING}),
        ("PATH", "/nowhere", {"ssh": "no `ssh` in the path; install OpenSSH's client"}),
    ],
    ids=["compiler", "kernel", "setting", "ssh"],
)
def test_what_does_not_work_says_why(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, expected: dict[str, str]
) -> None:
    if value == "portable":
        try:
            find_compiler()
        except BuildError as error:
            pytest.skip(str(error))
    monkeypatch.setenv(variable, value)
    works = report(capsys)["works"]
    for name, why in expected.items():
        assert why in works[name]["why"] and works[name]["works"] == (value == "portable")


@pytest.mark.skipif(torch.version.cuda is not None or torch.version.hip is not None, reason="torch is built for GPUs")
def test_a_torch_without_cuda_beside_accelerators_is_pointed_out() -> None:
    why = refusal(env._cuda, 2)
    assert why.endswith("without CUDA, but this host has 2 accelerators; install a GPU build")


def test_nothing_tells_who_and_where_this_is_and_other_paths_are_not_hidden(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    secrets = {"LOWTIDE_TOKEN": "secret-token", "WANDB_API_KEY": "secret-key"}
    for name, value in {**secrets, "HOME": "/home/somebody", "PYTORCH_ALLOC_CONF": "backend:native"}.items():
        monkeypatch.setenv(name, value)
    for home, shown in (("/home/somebody", "~"), ("/home/somebody-else", "/home/somebody-else")):
        monkeypatch.setenv("CXX", f"{home}/bin/c++")
        assert main(["env", "--json"]) == 0
        text = capsys.readouterr().out
        assert f"{shown}/bin/c++" in text and '"PYTORCH_ALLOC_CONF": "backend:native"' in text
        for secret in ("secret", '/somebody"', f'"{socket.gethostname()}"', f'"{getpass.getuser()}"'):
            assert secret not in text
    assert "/home/somebody/" not in text
    monkeypatch.setenv("HOME", "/")  # of users of many containers
    assert main(["env"]) == 0
    text = capsys.readouterr().out
    assert "/home/somebody-else/bin/c++" in text and "/dev/shm" in text
    lines = [line.split() for line in text.splitlines()]
    assert {"versions", "torch", "machine", "works"} <= {line[0] for line in lines if len(line) == 1}
    assert ["PYTORCH_ALLOC_CONF", "backend:native"] in lines
    assert any(line[:1] == ["free_memory"] and line[-1] in ("GiB", "TiB") for line in lines)
    assert any(line[:2] == ["shared-memory", "transport"] and line[2] in ("yes", "no") for line in lines)
