"""What a run knows beside tensors: its random generators, the caller's own state, the options of the optimizer."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ..checkpoint.values import decode, encode
from .log import logger


def random_state() -> Any:
    """The random generators of this process: Python's, NumPy's, torch's, and that of its CUDA device."""
    states = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return encode(states, "random state")


def set_random_state(encoded: Any) -> None:
    """Makes the generators go on from where `random_state` was taken."""
    states = decode(encoded)
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def encode_client_state(state: Mapping[str, Any]) -> Any:
    """The caller's state as JSON. What has a `state_dict()`, such as a loader, gives that.

    Raises ValueError, with the place, for a value that is neither that nor plain data.
    """
    plain = {key: value.state_dict() if hasattr(value, "state_dict") else value for key, value in state.items()}
    return encode(plain, "client_state")


def restore_client_state(registered: dict[str, Any], saved: Mapping[str, Any]) -> None:
    """Brings saved values into the registered ones: by `load_state_dict` where they have it, else in their place."""
    for key, value in saved.items():
        if hasattr(registered.get(key), "load_state_dict"):
            registered[key].load_state_dict(value)
        elif key in registered:
            registered[key] = value


def restore_options(
    groups: Sequence[dict[str, Any]],
    saved: Sequence[Mapping[str, Any]],
    config_then: Mapping[str, Any],
    config_now: Mapping[str, Any],
) -> set[str]:
    """Gives the optimizer's groups the options that they had when they were saved.

    An option that the config now says otherwise than then keeps its new value; returns the names of those.
    """
    changed = {key for key, value in config_now.items() if key in config_then and config_then[key] != value}
    for key in sorted(changed):
        logger.info(
            "optimizer.params.%s: %s as the config says now, not %s as saved", key, config_now[key], config_then[key]
        )
    for group, options in zip(groups, saved, strict=True):
        group.update({key: value for key, value in options.items() if key in group and key not in changed})
    return changed
