"""Recomputes blocks in the backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, noop_context_fn

from ...model.caches import is_cache
from ...model.patches import ModelPatches
from ...model.recomputing import BufferValues, Recomputing, copy_states
from ...watch.log import logger
from ...zero.plan import UnitPlan


def checkpoint_activations(units: Sequence[UnitPlan], every: int, patches: ModelPatches) -> None:
    """Recompute every `every`-th block in backward. Hooks lie outside of the recomputed part, so they run once.

    Embeddings and heads are left out: a recomputation would save almost nothing.
    """
    if not every:
        return
    said = set[str]()
    for unit in [unit for unit in units if not (unit.is_root or unit.is_end)][::every]:
        around = partial(_recomputed, said, unit.module)
        patches.override(unit.module, "forward", Recomputing(around, unit.module.forward))


def _recomputed(said: set[str], module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a forward under activation checkpointing. said: cache types that the log has reported."""
    # An evaluation keeps no activations, so it has nothing to recompute.
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    caches = [type(one).__name__ for one in (*args, *kwargs.values()) if is_cache(one)]
    if caches:
        # The recomputation would add keys twice, and a kept cache would keep activations alive.
        forward = partial(_with_copies, forward)
        if not said:
            logger.info("activation_checkpointing: recomputed blocks add nothing to a %s while they train", caches[0])
        said.update(caches)
    buffers = BufferValues(module)
    # The recomputation starts from the buffers of the forward, and its changes to them are dropped.
    contexts = (lambda: (nullcontext(), buffers)) if buffers.are_there else noop_context_fn
    return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)


def _with_copies(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a forward with copies of caches; the recomputation gets the caches as the forward saw them."""
    args = tuple(copy_states(one) if is_cache(one) else one for one in args)
    return forward(*args, **{key: copy_states(one) if is_cache(one) else one for key, one in kwargs.items()})
