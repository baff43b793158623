"""The random generators that code on a device may draw from: the host's, and those of the device."""

from __future__ import annotations

import torch
from torch import Tensor


def random_states(device: torch.device) -> list[Tensor]:
    """Return the states of the generators; none for the meta device."""
    if device.type == "meta":
        return []
    host = [torch.get_rng_state()]
    return host if device.type == "cpu" else [*host, torch.get_device_module(device).get_rng_state(device)]


def set_random_states(device: torch.device, states: list[Tensor]) -> None:
    """Restore the states that `random_states` returned for the device."""
    if states:
        torch.set_rng_state(states[0])
    if states[1:]:
        torch.get_device_module(device).set_rng_state(states[1], device)


def seed_generators(device: torch.device, seed: int) -> None:
    """Seed all generators of the device alike."""
    torch.default_generator.manual_seed(seed)  # `torch.manual_seed` records a stack for each kind of absent device
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)
