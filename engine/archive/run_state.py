"""The state of a run beside tensors: random generators, the caller's state, the options of the optimizer."""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from pydantic import TypeAdapter, ValidationError
from torch import nn

from ...checkpoint.files import Count, Flag, Number, Text, shortened
from ...checkpoint.index import FileContent, first_fault
from ...checkpoint.values import decode, encode
from ...watch.log import logger
from ...zero.parameter_states import MISSED_STEPS

ALONE = "engine.load_weights(folder) (load_module_only=True in lowtide.deepspeed) takes the parameters alone"


def random_state(device: torch.device) -> Any:
    """Return the states of the random generators of Python, NumPy, torch, and torch's device."""
    states = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    if device.type != "cpu":
        states[device.type] = torch.get_device_module(device).get_rng_state(device)
    return encode(states, "random state")


def read_random_state(encoded: Any, device: torch.device) -> dict[str, Any]:
    """Return a result of `random_state` for `set_random_state`. Raise ValueError if a generator refuses it."""
    states = decode(encoded, "random state")
    # Tried on new generators: a refused state must leave the run's generators as they are.
    try:
        random.Random().setstate(states["python"])
        np.random.RandomState().set_state(states["numpy"])
        torch.Generator().set_state(states["torch"])
        if device.type != "cpu" and device.type in states:
            torch.Generator(device).set_state(states[device.type])
    except Exception as error:  # the generators raise various errors
        raise ValueError(f"random state: expected the states of random generators; {shortened(str(error))}") from error
    return dict(states)


def set_random_state(states: Mapping[str, Any], device: torch.device) -> None:
    """Set the random generators to states of `random_state`."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if device.type != "cpu" and device.type in states:
        torch.get_device_module(device).set_rng_state(states[device.type], device)


def encode_client_state(state: Mapping[str, Any]) -> Any:
    """Return the caller's state as JSON. An object with `state_dict()` (a loader, say) is saved by that method.

    Raises ValueError, with the place, for any other value that is no plain data.
    """
    plain = {key: value.state_dict() if hasattr(value, "state_dict") else value for key, value in state.items()}
    return encode(plain, "client_state")


def _with_extra_state(module: nn.Module) -> dict[str, nn.Module]:
    none = nn.Module.get_extra_state
    return {name: part for name, part in module.named_modules() if type(part).get_extra_state is not none}


def encode_extra_states(module: nn.Module) -> Any:
    """Return as JSON what parts of a module keep beside parameters and buffers (torch's `get_extra_state`), by name."""
    return encode({name: part.get_extra_state() for name, part in _with_extra_state(module).items()}, "extra state")


def load_extra_states(module: nn.Module, own_states: Sequence[Any], undo: ExitStack) -> None:
    """Load results of `encode_extra_states`; of two with a name, the later. undo: as in `load_states`."""
    saved = {name: one for own in own_states for name, one in decode(own.get("extra", {}), "extra state").items()}
    for name, part in _with_extra_state(module).items():
        if name in saved:
            undo.callback(part.set_extra_state, copy.deepcopy(part.get_extra_state()))
            part.set_extra_state(saved[name])


class _TrainingContent(FileContent):
    class LearningRates(FileContent):
        options: list[dict[str, Any]]
        base: list[Number]
        scheduler: dict[str, Any] | None
        members: list[list[Text]] | None = None  # parameter names of each group; None in earlier versions

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
    averages: Averages | None = None  # of weights; missing in earlier versions
    outer: dict[str, Any] | None = None  # of an island, a feature of earlier versions


def read_training(encoded: Any) -> dict[str, Any]:
    """Return the training state of a checkpoint. Raise ValueError, with the place, if it is damaged."""
    training = decode(encoded, "training")
    _TrainingContent.parse(training)
    return {"averages": None, **training}


def read_scalars(encoded: Any) -> dict[int | str, dict[str, Any] | None]:
    """Return a rank's optimizer scalars, by parameter name or index of the parameter group. Raise ValueError."""
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
    """Return a rank's saved client state. Raise ValueError if it is damaged."""
    _check_own_state(own_state)
    found = decode(own_state["client_state"], "client_state")
    if not isinstance(found, dict):
        raise ValueError(f"client_state: expected a dictionary, found {shortened(found)}")
    return found


_SCALARS = TypeAdapter(dict[int | str, dict[str, Any] | None])


def in_own_groups(
    training: dict[str, Any], scalars: Mapping[int | str, Any], members: Sequence[Sequence[str]], scheduler: Any
) -> tuple[dict[str, Any], dict[int | str, Any]]:
    """Return training state and scalars of a checkpoint by the parameter groups of this run, as changed copies.

    An option belongs to the parameters of its group, whatever the group's index. members: parameter names of each
    group of this run. scheduler: the caller's; None: no scheduler. Raises ValueError if parameters of a group of this
    run had different options, if a group has no parameter that was in a group, and if the scheduler's state has values
    by group index, which would then be of other groups.
    """
    saved = training["learning_rates"]
    # An earlier version has saved no names, so groups are compared by their index (`check_options`).
    if saved.get("members") is None or not len(saved["members"]) == len(saved["options"]) == len(saved["base"]):
        return training, dict(scalars)
    group_of = {name: number for number, names in enumerate(saved["members"]) for name in names}
    # Merged groups must have had the same options. The base of the schedule counts as an option: it may differ while
    # the present rates are equal, as at the start of a warmup.
    said = [
        {**options, "the first learning rate": base}
        for options, base in zip(saved["options"], saved["base"], strict=True)
    ]
    origins = []
    for number, names in enumerate(members):
        known: dict[int, str] = {}  # saved group -> its first parameter in this group
        for name in names:
            if name in group_of:
                known.setdefault(group_of[name], name)
        if not known and (names or number >= len(said) or saved["members"][number]):
            raise ValueError(
                f"no saved group has a parameter of group {number} here ({', '.join(names[:3]) or 'empty'})"
            )
        first, *others = known or [number]
        for other in others:
            key = next((key for key in said[first] if said[first][key] != said[other].get(key)), None)
            if key is not None:
                raise ValueError(
                    f"'{known[first]}' and '{known[other]}', of group {number} here, were in two groups, with {key} "
                    f"{shortened(said[first][key])} and {shortened(said[other].get(key))}; put them into separate "
                    "groups"
                )
        origins.append(first)
    if origins == list(range(len(said))):
        return training, dict(scalars)
    # A list in a scheduler's state, such as LambdaLR's `lr_lambdas`, has an entry for each group by its index.
    state = saved["scheduler"] if hasattr(scheduler, "load_state_dict") else None
    key = next((key for key, value in (state or {}).items() if isinstance(value, (list, tuple))), None)
    if key is not None:
        raise ValueError(
            f"the state of its {type(scheduler).__name__} has {key} by group index, and the groups have another order "
            f"here; give the optimizer groups in the order {[list(names[:3]) for names in saved['members']]}, or leave "
            "lr_scheduler out of initialize"
        )
    own = {name: [saved[name][origin] for origin in origins] for name in ("options", "base", "members")}
    found: dict[int | str, Any] = {name: states for name, states in scalars.items() if isinstance(name, str)}
    found |= {number: scalars[origin] for number, origin in enumerate(origins) if origin in scalars}
    return {**training, "learning_rates": {**saved, **own}}, found


def check_options(groups: Sequence[Mapping[str, Any]], training: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Raise ValueError if saved options, or options of the saved config, do not fit the optimizer's groups."""
    saved = training["learning_rates"]
    if not len(groups) == len(saved["options"]) == len(saved["base"]):
        raise ValueError(f"it has {len(saved['options'])} parameter groups, the optimizer {len(groups)}; {ALONE}")
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
    """Return False if exactly one value is a number, or a list of numbers."""
    if isinstance(own, (tuple, list)) and isinstance(value, (tuple, list)):
        return len(own) == len(value) and all(map(_is_alike, value, own))
    numbers = (bool, int, float, torch.Tensor, type(None))
    return isinstance(value, numbers) == isinstance(own, numbers) and (
        isinstance(value, (tuple, list)) == isinstance(own, (tuple, list))
    )


def load_states(registered: Mapping[Any, Any], saved: Mapping[Any, Any], undo: ExitStack) -> None:
    """Load saved states, by key, into the caller's objects that have a `load_state_dict`.

    undo: gets callbacks that load their present states again.
    """
    for key, state in saved.items():
        one: Any = registered.get(key)
        if not hasattr(one, "load_state_dict") or state is None:
            continue
        if hasattr(one, "state_dict"):
            # Before the load, so that a load that fails halfway is undone too. A copy, since a state_dict may hold live
            # objects.
            undo.callback(one.load_state_dict, copy.deepcopy(one.state_dict()))
        one.load_state_dict(state)


def restore_options(
    groups: Sequence[dict[str, Any]],
    saved: Sequence[Mapping[str, Any]],
    config_then: Mapping[str, Any],
    config_now: Mapping[str, Any],
) -> set[str]:
    """Give the optimizer's groups their saved options.

    If the config of an option has changed since then, the new value stays. Returns the names of these options.
    """
    changed = {key for key, value in config_now.items() if key in config_then and config_then[key] != value}
    for key in sorted(changed):
        logger.info(
            "optimizer.params.%s: %s as the config says now, not %s as saved", key, config_now[key], config_then[key]
        )
    for group, options in zip(groups, saved, strict=True):
        # A scheduler of the saved run may have added keys, for example `initial_lr`, that this run's groups lack.
        group.update({key: value for key, value in options.items() if key in group and key not in changed})
    return changed
