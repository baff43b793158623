"""Which device a rank takes: its own among those that the process sees."""

import re

import pytest
import torch

from lowtide.comm.rendezvous import backend_of
from lowtide.comm.world import World, _choose_device


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Four devices, as far as torch says."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    return monkeypatch


@pytest.mark.parametrize("device", ["auto", "cuda"])
@pytest.mark.parametrize(("local_rank", "index"), [(None, 0), ("0", 0), ("3", 3)])
def test_the_local_rank_numbers_the_devices(
    devices: pytest.MonkeyPatch, device: str, local_rank: str | None, index: int
) -> None:
    if local_rank is not None:
        devices.setenv("LOCAL_RANK", local_rank)
    assert _choose_device(device) == torch.device("cuda", index)


@pytest.mark.parametrize("local_rank", ["0", "3"])
def test_the_only_device_that_is_seen_is_taken(devices: pytest.MonkeyPatch, local_rank: str) -> None:
    devices.setattr(torch.accelerator, "device_count", lambda: 1)
    devices.setenv("LOCAL_RANK", local_rank)
    assert _choose_device("cuda") == torch.device("cuda", 0)


def test_a_named_device_is_taken_as_it_is(devices: pytest.MonkeyPatch) -> None:
    devices.setenv("LOCAL_RANK", "3")
    assert _choose_device("cuda:2") == torch.device("cuda", 2)
    assert _choose_device("cpu") == torch.device("cpu")


def test_more_ranks_than_devices_are_told(devices: pytest.MonkeyPatch) -> None:
    devices.setenv("LOCAL_RANK", "4")
    with pytest.raises(ValueError, match="expected a cuda device for local rank 4, but this process sees 4 devices"):
        _choose_device("auto")


ONLY_CPU = 'expected a {} device, but torch finds only the CPU. Set "device": "cpu".'
OTHER = 'expected a xpu device, but torch finds the CPU and "cuda". Set "device": "cpu".'
NO_FLOAT64 = 'device: "mps" has no float64, which norms need. Set "device": "cpu".'


@pytest.mark.parametrize(
    ("there", "device", "text"),
    [
        (None, "cuda", ONLY_CPU.format("cuda")),
        (None, "gpu", ONLY_CPU.format("gpu")),
        ("cuda", "xpu", OTHER),
        ("mps", "mps", NO_FLOAT64),
    ],
)
def test_a_device_that_is_not_there_is_told(
    monkeypatch: pytest.MonkeyPatch, there: str | None, device: str, text: str
) -> None:
    found = torch.device(there) if there else None
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: found)
    with pytest.raises(ValueError, match=re.escape(text)):
        World.join(device)


@pytest.mark.parametrize("there", [None, torch.device("mps")])
def test_without_one_the_cpu_is_taken(monkeypatch: pytest.MonkeyPatch, there: torch.device | None) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: there)
    assert _choose_device("auto") == torch.device("cpu")


@pytest.mark.parametrize(("device", "backend"), [("cpu", "gloo"), ("cuda", "nccl"), ("xpu", "xccl"), ("mtia", "gloo")])
def test_the_process_group_is_the_one_that_torch_has(
    monkeypatch: pytest.MonkeyPatch, device: str, backend: str
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert backend_of(torch.device(device)) == backend


def test_ranks_on_a_device_without_a_process_group_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="device: torch knows no process group backend for mtia"):
        backend_of(torch.device("mtia"))
