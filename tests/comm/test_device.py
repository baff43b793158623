"""Which device a rank takes: its own among those that the process sees."""

import pytest
import torch

from lowtide.comm.rendezvous import backend_of
from lowtide.comm.world import World, _choose_device
from tests.kit.training import refusal


def pretend(monkeypatch: pytest.MonkeyPatch, kind: str | None, count: int = 4, local_rank: str | None = None) -> None:
    """So many devices of a kind, as far as torch says."""
    there = torch.device(kind) if kind else None
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: there)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)


@pytest.mark.parametrize(
    ("kind", "count", "local_rank", "device", "expected"),
    [
        *(("cuda", 4, number, device, f"cuda:{number or 0}") for device in ("auto", "cuda") for number in (None, "3")),
        ("cuda", 1, "3", "cuda", "cuda:0"),  # the only one that is seen
        ("cuda", 4, "3", "cuda:2", "cuda:2"),  # a named one, as it is
        ("cuda", 4, "3", "cpu", "cpu"),
        (None, 0, None, "auto", "cpu"),
        ("mps", 1, None, "auto", "cpu"),
    ],
)
def test_the_local_rank_numbers_the_devices(
    monkeypatch: pytest.MonkeyPatch, kind: str | None, count: int, local_rank: str | None, device: str, expected: str
) -> None:
    pretend(monkeypatch, kind, count, local_rank)
    assert _choose_device(device) == torch.device(expected)


ONLY_CPU = 'expected a {} device, but torch finds only the CPU. Set "device": "cpu".'
OTHER = 'expected a xpu device, but torch finds the CPU and "cuda". Set "device": "cpu".'
NO_FLOAT64 = 'device: "mps" has no float64, but norms need it. Set "device": "cpu".'
MORE_RANKS = "expected a cuda device for local rank 4, but this process sees 4 devices"


@pytest.mark.parametrize(
    ("kind", "device", "text"),
    [
        (None, "cuda", ONLY_CPU.format("cuda")),
        (None, "gpu", ONLY_CPU.format("gpu")),
        ("cuda", "xpu", OTHER),
        ("mps", "mps", NO_FLOAT64),
        ("cuda", "auto", MORE_RANKS),
    ],
)
def test_a_device_that_is_not_there_is_told(
    monkeypatch: pytest.MonkeyPatch, kind: str | None, device: str, text: str
) -> None:
    pretend(monkeypatch, kind, local_rank="4")
    assert text in refusal(World.join, device)


def test_the_process_group_is_the_one_that_torch_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    expected = {"cpu": "gloo", "cuda": "nccl", "xpu": "xccl", "mtia": "gloo"}
    assert {kind: backend_of(torch.device(kind)) for kind in expected} == expected
    monkeypatch.setenv("WORLD_SIZE", "2")
    text = refusal(backend_of, torch.device("mtia"))
    assert "device: torch knows no process group backend for mtia" in text
