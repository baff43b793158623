"""Blocks that are computed again in the backward, with whatever they were given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, noop_context_fn

from ...model.patches import ModelPatches
from ...model.recomputing import BufferValues, Recomputing, copy_states
from ...watch.log import logger
from ...zero.plan import UnitPlan


def checkpoint_activations(units: Sequence[UnitPlan], every: int, patches: ModelPatches) -> None:
    """Recomputes every `every`-th block in backward. Hooks lie outside of what is recomputed, so they run once.

    Not an embedding or a head: next to what a block keeps, they keep nothing that a recomputation would save.
    """
    if not every:
        return
    said = set[str]()
    for unit in [unit for unit in units if not (unit.is_root or unit.is_end)][::every]:
        around = partial(_recomputed, said, unit.module)
        patches.override(unit.module, "forward", Recomputing(around, unit.module.forward))


def _recomputed(said: set[str], module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """said: what the log has been told. module: whose forward it is."""
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    caches = [type(one).__name__ for one in (*args, *kwargs.values()) if _adds(one)]
    if caches:
        # What it adds it would add twice, and what it has added would keep what is not to be kept.
        forward = partial(_with_copies, forward)
        if not said:
            logger.info("activation_checkpointing: recomputed blocks add nothing to a %s while they train", caches[0])
        said.update(caches)
    buffers = BufferValues(module)
    # The recomputation finds them as the forward did, and leaves them as the forward has left them.
    contexts = (lambda: (nullcontext(), buffers)) if buffers.are_there else noop_context_fn
    return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)


def _adds(value: Any) -> bool:
    """Whether it is a cache of keys and values, as those of transformers are."""
    return type(value).__name__.endswith("Cache")


def _with_copies(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Of caches, as they are now: in the recomputation those that the forward saw."""
    args = tuple(copy_states(one) if _adds(one) else one for one in args)
    return forward(*args, **{key: copy_states(one) if _adds(one) else one for key, one in kwargs.items()})
