"""Check that a checkpoint is of this model and of this optimizer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from ...checkpoint.checkpoint import Checkpoint
from ...checkpoint.chunk_view import TensorInfo
from ...checkpoint.files import CheckpointError, shortened
from ...checkpoint.reader import CheckpointReader
from ...zero.master_weights import REMAINDERS
from ...zero.optimizer import ShardedOptimizer
from ...zero.sign_update import is_rank_state
from .named_state import NamedState, is_extra_state
from .run_state import ALONE, check_options, in_own_groups
from .weights import kind_of


def check_fits(
    checkpoint: Checkpoint,
    training: dict[str, Any],
    scalars: dict[int | str, Any],
    named: NamedState,
    optimizer: ShardedOptimizer,
    scheduler: Any,
) -> tuple[dict[str, Any], dict[int | str, Any]]:
    """Check that the checkpoint fits. Return its training state and scalars, arranged by this run's groups.

    Raises CheckpointError, with every difference, if the checkpoint is of another model or optimizer.
    """
    catalog = named.catalog
    left_out = checkpoint.manifest.left_out
    faults = _differences({**checkpoint.weights.tensors, **left_out}, {**catalog.parameters, **catalog.buffers})
    faults += [
        f"'{name}' is trained here, and was left out of it as a frozen parameter (checkpoint.exclude_frozen_parameters)"
        for name in left_out
        if name in catalog.state_keys
    ]
    if optimizer.averages is not None and checkpoint.averages.tensors:
        expected = {name: catalog.parameters[name] for name in catalog.state_keys}
        averages = {name: info for name, info in checkpoint.averages.tensors.items() if name in expected}
        faults += [f"average: {fault}" for fault in _differences(averages, expected)]
    faults += [
        f"the state '{name}' has shape {info.shape} in it"
        for name, info in checkpoint.states.tensors.items()
        if (own := catalog.parameters.get(name.rpartition(".")[0])) is not None and own.shape != info.shape
    ]
    try:
        training, scalars = in_own_groups(training, scalars, named.option_groups, scheduler)
        check_options(optimizer.param_groups, training, checkpoint.manifest.config)
    except ValueError as error:
        faults.append(str(error))
    by_name = states_in(checkpoint)
    states = {state for one in by_name.values() for state in one}
    if training["num_steps"] and not optimizer.can_take(training["optimizer"], states):
        faults.append(
            f"it has the states of optimizer {training['optimizer']} ({', '.join(sorted(states)) or 'none'}), this "
            f"run has optimizer {optimizer.kind}; {ALONE}"
        )
    elif training["num_steps"]:
        # An optimizer of ours gives each parameter the same states. The `step` of an optimizer of torch makes any
        # states, and the class takes any states that it has made.
        each_has_all = not optimizer.can_take(training["optimizer"], ())
        faults += _parameters_without_states(by_name, named, each_has_all)
    if faults:
        raise CheckpointError(f"{checkpoint.path} does not fit: " + "; ".join(faults))
    return training, scalars


def states_in(checkpoint: Checkpoint) -> dict[str, dict[str, torch.dtype]]:
    """Return parameter name -> {state: dtype}.

    Remainders are left out, as they belong to the weights. So are states that a single rank had.
    """
    found: dict[str, dict[str, torch.dtype]] = {}
    for full_name, info in checkpoint.states.tensors.items():
        name, _, state = full_name.rpartition(".")
        if state in REMAINDERS or is_rank_state(state):
            continue
        found.setdefault(name, {})[state] = info.dtype
    return found


def is_new_remainder(name: str, states: CheckpointReader) -> bool:
    """Return True for a remainder that the checkpoint lacks: then its weights are complete without it."""
    return name.rpartition(".")[2] in REMAINDERS and name not in states.tensors


def _differences(found: Mapping[str, TensorInfo], expected: Mapping[str, TensorInfo]) -> list[str]:
    """Return the tensors that are missing, extra, of another shape, or of another kind of numbers."""
    faults = [f"'{name}' is not in it" for name in expected if name not in found]
    extra = [name for name in found if name not in expected and not is_extra_state(name)]
    faults += [f"{shortened(name)} is not in the model" for name in extra]
    for name, own in expected.items():
        if name in found and found[name].shape != own.shape:
            faults.append(f"'{name}' has shape {found[name].shape} in it, {own.shape} in the model")
        elif name in found and kind_of(found[name].dtype) != kind_of(own.dtype):
            faults.append(f"'{name}' is {found[name].dtype} in it, {own.dtype} in the model")
    return faults


def _parameters_without_states(
    found: Mapping[str, Mapping[str, torch.dtype]], named: NamedState, each_has_all: bool
) -> list[str]:
    """Return parameters without states that other parameters of the same group have.

    They were frozen, or in another group. each_has_all: each parameter has all states, in any group.
    """
    faults = []
    groups = named.option_groups
    if each_has_all:
        groups = (tuple(name for group in groups for name in group),)
    for group in groups:
        expected = {state for name in group for state in found.get(name, {})}
        faults += [
            f"'{name}' has no optimizer state in it ({', '.join(sorted(missing))}): it was not trained then"
            for name in group
            # A parameter without elements has no states.
            if (missing := expected - set(found.get(name, {}))) and math.prod(named.catalog.parameters[name].shape)
        ]
    return faults
