"""What a run knows beside tensors: its random generators, the caller's own state, the options of the optimizer."""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from pydantic import TypeAdapter, ValidationError

from ...checkpoint.files import shortened
from ...checkpoint.index import Count, FileContent, Flag, Number, Text, first_fault
from ...checkpoint.values import decode, encode
from ...watch.log import logger
from ...zero.parameter_states import MISSED_STEPS


def random_state(device: torch.device) -> Any:
    """The random generators of this process: Python's, NumPy's, torch's, and that of the model's device."""
    states = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    if device.type != "cpu":
        states[device.type] = torch.get_device_module(device).get_rng_state(device)
    return encode(states, "random state")


def read_random_state(encoded: Any, device: torch.device) -> dict[str, Any]:
    """What `random_state` gave, for `set_random_state`. Raises ValueError for what no generator takes."""
    states = decode(encoded, "random state")
    try:
        random.Random().setstate(states["python"])
        np.random.RandomState().set_state(states["numpy"])
        torch.Generator().set_state(states["torch"])
        if device.type != "cpu" and device.type in states:
            torch.Generator(device).set_state(states[device.type])
    except Exception as error:  # what the three make of a state that is none
        raise ValueError(f"random state: expected the states of random generators; {shortened(str(error))}") from error
    return dict(states)


def set_random_state(states: Mapping[str, Any], device: torch.device) -> None:
    """Makes the generators go on from where `random_state` was taken."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if device.type != "cpu" and device.type in states:
        torch.get_device_module(device).set_rng_state(states[device.type], device)


def encode_client_state(state: Mapping[str, Any]) -> Any:
    """The caller's state as JSON. What has a `state_dict()`, such as a loader, gives that.

    Raises ValueError, with the place, for a value that is neither that nor plain data.
    """
    plain = {key: value.state_dict() if hasattr(value, "state_dict") else value for key, value in state.items()}
    return encode(plain, "client_state")


class _TrainingContent(FileContent):
    class LearningRates(FileContent):
        options: list[dict[str, Any]]
        base: list[Number]
        scheduler: dict[str, Any] | None
        members: list[list[Text]] | None = None  # of each group, by name; earlier versions had none

    class LossScaler(FileContent):
        is_dynamic: Flag
        scale: Number
        overflows_left: Count
        steps_without_overflow: Count

    class Averages(FileContent):
        decay: Number
        num_updates: Count

    global_step: Count
    num_steps: Count
    optimizer: Text
    learning_rates: LearningRates
    loss_scaler: LossScaler
    averages: Averages | None = None  # of weights; earlier versions had none
    outer: dict[str, Any] | None = None  # of an island, which earlier versions had


def read_training(encoded: Any) -> dict[str, Any]:
    """Where a run stood, as `Engine` gave it to be saved. Raises ValueError, with the place, for anything else."""
    training = decode(encoded, "training")
    _TrainingContent.parse(training)
    return {"averages": None, **training}


def read_scalars(encoded: Any) -> dict[int | str, dict[str, Any] | None]:
    """What a rank has said of its optimizer, by parameter or index of the parameter group. Raises ValueError."""
    _check_own_state(encoded)
    try:
        scalars = _SCALARS.validate_python(decode(encoded["scalars"], "optimizer state"))
    except ValidationError as error:
        raise ValueError(f"optimizer state: {first_fault(error)}") from None
    for key, states in scalars.items():
        count = (states or {}).get(MISSED_STEPS, 0)
        if not isinstance(count, int) or count < 0:
            where = f"{shortened(key)[1:-1] if isinstance(key, str) else key}.{MISSED_STEPS}"
            raise ValueError(f"optimizer state: {where}: expected a count, found {shortened(count)}")
    return scalars


def _check_own_state(encoded: Any) -> None:
    if not isinstance(encoded, dict) or not {"random", "client_state", "scalars"} <= encoded.keys():
        raise ValueError(f"expected the random, client_state and scalars of a rank, found {shortened(encoded)}")


def read_client_state(own_state: Any) -> dict[str, Any]:
    """What a rank has saved of the caller's own, from its part of a checkpoint. Raises ValueError."""
    _check_own_state(own_state)
    found = decode(own_state["client_state"], "client_state")
    if not isinstance(found, dict):
        raise ValueError(f"client_state: expected a dictionary, found {shortened(found)}")
    return found


_SCALARS = TypeAdapter(dict[int | str, dict[str, Any] | None])


def in_own_groups(
    training: dict[str, Any], scalars: Mapping[int | str, Any], members: Sequence[Sequence[str]], scheduler: Any
) -> tuple[dict[str, Any], dict[int | str, Any]]:
    """What a checkpoint says by the number of a parameter group, by that of this run's groups; both are changed copies.

    An option belongs to the parameters of its group, whatever its number is. members: their names, of each of this
    run's groups. scheduler: of the caller, None: there is none. Raises ValueError where parameters of one group had
    other options than each other, where a group has none that was in one, and where the state of the scheduler, which
    has values by number, would be that of other groups.
    """
    saved = training["learning_rates"]
    if saved.get("members") is None or not len(saved["members"]) == len(saved["options"]) == len(saved["base"]):
        return training, dict(scalars)
    group_of = {name: number for number, names in enumerate(saved["members"]) for name in names}
    said = [
        {**options, "the first learning rate": base}
        for options, base in zip(saved["options"], saved["base"], strict=True)
    ]
    origins = []
    for number, names in enumerate(members):
        known: dict[int, str] = {}  # the first parameter here that was in each
        for name in names:
            if name in group_of:
                known.setdefault(group_of[name], name)
        if not known and (names or number >= len(said) or saved["members"][number]):
            raise ValueError(
                f"no parameter group of it has a parameter of group {number} here ({', '.join(names[:3]) or 'empty'})"
            )
        first, *others = known or [number]
        for other in others:
            key = next((key for key in said[first] if said[first][key] != said[other].get(key)), None)
            if key is not None:
                raise ValueError(
                    f"'{known[first]}' and '{known[other]}', of group {number} here, were in two groups, with {key} "
                    f"{shortened(said[first][key])} and {shortened(said[other].get(key))}; give them groups of their "
                    "own"
                )
        origins.append(first)
    if origins == list(range(len(said))):
        return training, dict(scalars)
    state = saved["scheduler"] if hasattr(scheduler, "load_state_dict") else None
    key = next((key for key, value in (state or {}).items() if isinstance(value, (list, tuple))), None)
    if key is not None:
        raise ValueError(
            f"the state of its {type(scheduler).__name__} has {key} for parameter groups of other numbers than here; "
            f"give the optimizer groups in the order of {[list(names[:3]) for names in saved['members']]}, or leave "
            "lr_scheduler out of initialize"
        )
    own = {name: [saved[name][origin] for origin in origins] for name in ("options", "base", "members")}
    found: dict[int | str, Any] = {name: states for name, states in scalars.items() if isinstance(name, str)}
    found |= {number: scalars[origin] for number, origin in enumerate(origins) if origin in scalars}
    return {**training, "learning_rates": {**saved, **own}}, found


def check_options(groups: Sequence[Mapping[str, Any]], training: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Raises ValueError where saved options, or those of the saved config, cannot take the place of the groups' own."""
    saved = training["learning_rates"]
    if not len(groups) == len(saved["options"]) == len(saved["base"]):
        raise ValueError(f"it has {len(saved['options'])} parameter groups, the optimizer {len(groups)}")
    optimizer = config.get("optimizer") or {}
    then = optimizer.get("params", {}) if isinstance(optimizer, Mapping) else None
    if not isinstance(then, Mapping) or not isinstance(then.get("lr", 0.0), (int, float)):
        raise ValueError(f"config.optimizer: expected a section with params, found {shortened(optimizer)}")
    for own, options in zip(groups, saved["options"], strict=True):
        for name, value in options.items():
            if name in own and name != "params" and not _is_alike(value, own[name]):
                raise ValueError(
                    f"the option {shortened(name)} is {shortened(value)} in it, {shortened(own[name])} in the optimizer"
                )


def _is_alike(value: Any, own: Any) -> bool:
    """True unless one is a number, or numbers, and the other is not."""
    if isinstance(own, (tuple, list)) and isinstance(value, (tuple, list)):
        return len(own) == len(value) and all(map(_is_alike, value, own))
    numbers = (bool, int, float, torch.Tensor, type(None))
    return isinstance(value, numbers) == isinstance(own, numbers) and (
        isinstance(value, (tuple, list)) == isinstance(own, (tuple, list))
    )


def load_states(registered: Mapping[Any, Any], saved: Mapping[Any, Any], undo: ExitStack) -> None:
    """Gives the caller's objects that have a `load_state_dict` what was saved of them, by key.

    undo: gets what gives them back the states that they have now.
    """
    for key, state in saved.items():
        one: Any = registered.get(key)
        if not hasattr(one, "load_state_dict") or state is None:
            continue
        if hasattr(one, "state_dict"):
            undo.callback(one.load_state_dict, copy.deepcopy(one.state_dict()))
        one.load_state_dict(state)


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
