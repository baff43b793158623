"""Which device a rank takes: its own among those that the process sees."""

import pytest
import torch

from lowtide.comm.world import World, _choose_device


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Four devices, as far as torch says."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
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
    devices.setattr(torch.cuda, "device_count", lambda: 1)
    devices.setenv("LOCAL_RANK", local_rank)
    assert _choose_device("cuda") == torch.device("cuda", 0)


def test_a_named_device_is_taken_as_it_is(devices: pytest.MonkeyPatch) -> None:
    devices.setenv("LOCAL_RANK", "3")
    assert _choose_device("cuda:2") == torch.device("cuda", 2)
    assert _choose_device("cpu") == torch.device("cpu")


def test_more_ranks_than_devices_are_told(devices: pytest.MonkeyPatch) -> None:
    devices.setenv("LOCAL_RANK", "4")
    with pytest.raises(ValueError, match="expected a CUDA device for local rank 4, found 4 devices that this process"):
        _choose_device("auto")


def test_no_device_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match='expected a CUDA device, found none that torch can use; set "device": "cpu"'):
        World.join("cuda")
    assert _choose_device("auto") == torch.device("cpu")
