"""`lowtide env`: facts, and what works or why it does not; nothing by which machine or user are known."""

import getpass
import importlib.metadata
import json
import platform
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lowtide.bin import env
from lowtide.bin.main import main
from lowtide.engine.plan.measuring.measure import MeasuringError
from lowtide.kernels import cpu_build, optimizer_step
from lowtide.launch.hosts.host import Device, HostReport


@pytest.fixture(autouse=True)
def kernel_was_not_built() -> Iterator[None]:
    """Before the test, nor after it for others."""
    optimizer_step.cpu_kernel.cache_clear()
    yield
    optimizer_step.cpu_kernel.cache_clear()


def report(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> dict[str, Any]:
    assert main(["env", "--json", *arguments]) == status
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_versions_are_those_that_are_installed(capsys: pytest.CaptureFixture[str]) -> None:
    both = report(capsys)
    found = both["versions"]
    assert platform.release() in both["torch"]["python_platform"]
    for name in ("torch", "lowtide", "numpy"):
        assert found[name] == importlib.metadata.version(name)
    assert found["python"] == platform.python_version()


def test_quick_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["env", "--quick"])
    assert "--quick was removed; nothing is measured without --measure, so leave it out" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_fails_and_says_why(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = report(capsys, "--folder", str(tmp_path / "no" / "folder"), status=1)["works"]["offload to nvme"]
    assert not found["works"] and "No such file or directory; name an existing folder" in found["why"]


def test_a_folder_is_looked_at_and_left_as_it_was(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    works = report(capsys, "--folder", str(tmp_path))["works"]["offload to nvme"]
    assert works["works"] and works["why"].startswith(f"{tmp_path}: writable, ") and not list(tmp_path.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_each_thing_says_why_it_does_not_work(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # the kernels' tests, in the same process, set it
    works = report(capsys)["works"]
    assert not any(works[name]["works"] for name in ("cuda", "nccl", "triton kernels"))
    assert "CUDA" in works["cuda"]["why"]
    assert works["nccl"]["why"] == "needs CUDA devices; CPU ranks use gloo and shared memory"
    assert works["triton kernels"]["why"] == "needs a GPU; eager torch operations replace it"


@pytest.mark.skipif(torch.version.cuda is not None or torch.version.hip is not None, reason="torch is built for GPUs")
def test_a_torch_without_cuda_beside_accelerators_is_pointed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    there = HostReport("cuda", (Device(("0",), "H100"), Device(("1",), "H100")), ((0,),))
    monkeypatch.setattr(env, "report_host", lambda: there)
    found = env._cuda(there)
    assert not found.works and found.why.endswith("without CUDA, but this host has 2 accelerators; install a GPU build")


def test_a_missing_compiler_is_said_where_it_matters(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    works = report(capsys)["works"]
    why = "CXX is 'no-such-compiler', and this program does not exist"
    assert works["c++ compiler"] == {"works": False, "why": why}
    assert works["cpu update kernel"]["why"] == f"torch's kernels, chunk by chunk, because {why}"


def test_the_update_kernel_says_which_form_it_has(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        cpu_build.find_compiler()
    except cpu_build.BuildError as error:
        pytest.skip(str(error))
    monkeypatch.setenv("LOWTIDE_CPU_KERNEL", "portable")
    found = report(capsys)["works"]["cpu update kernel"]
    assert found == {"works": True, "why": "a C++ pass per shard, with portable instructions"}


def test_a_wrong_setting_is_said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWTIDE_CPU_KERNEL", "fast")
    found = report(capsys)["works"]["cpu update kernel"]
    assert found["why"] == "LOWTIDE_CPU_KERNEL: expected native, portable or torch, found 'fast'"


def test_a_machine_without_ssh_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    found = report(capsys)["works"]["ssh"]
    assert not found["works"] and "no `ssh` in the path; install OpenSSH's client" in found["why"]


def test_nothing_tells_who_and_where_this_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setenv("CXX", "/home/somebody/bin/c++")
    monkeypatch.setenv("LOWTIDE_TOKEN", "secret-token")
    monkeypatch.setenv("WANDB_API_KEY", "secret-key")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert main(["env", "--json"]) == 0
    text = capsys.readouterr().out
    assert "~/bin/c++" in text and '"OMP_NUM_THREADS": "3"' in text
    for secret in ("secret", "somebody", f'"{socket.gethostname()}"', f'"{getpass.getuser()}"'):
        assert secret not in text


def test_a_home_that_is_the_root_hides_no_paths(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "/home/somebody-else/bin/c++")
    for home in ("/", "/home/somebody"):
        monkeypatch.setenv("HOME", home)
        assert main(["env"]) == 0
        text = capsys.readouterr().out
        assert "/home/somebody-else/bin/c++" in text and "/dev/shm" in text


def test_the_text_has_the_same_with_units(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert main(["env", "--folder", str(tmp_path)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    heads = {line[0] for line in lines if len(line) == 1}
    assert {"versions", "torch", "machine", "works"} <= heads
    assert ["OMP_NUM_THREADS", "3"] in lines
    assert any(line[:1] == ["free_memory"] and line[-1] in ("GiB", "TiB") for line in lines)
    assert any(line[:2] == ["shared-memory", "transport"] and line[2] in ("yes", "no") for line in lines)


def test_what_cannot_be_measured_is_said(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise MeasuringError("rank 0 of 2 failed: no output")

    monkeypatch.setattr(env, "measure", fail)
    assert main(["env", "--measure", str(tmp_path / "machine.json")]) == 1
    assert "lowtide env: rank 0 of 2 failed: no output" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
