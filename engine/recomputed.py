"""Blocks that are computed again in the backward, with whatever they were given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from ..model.ledger import Ledger
from ..model.recomputing import Recomputing
from ..parallel.call_states import copy_states
from ..watch.log import logger
from ..zero.units import UnitPlan


def checkpoint_activations(units: Sequence[UnitPlan], every: int, ledger: Ledger) -> None:
    """Recomputes every `every`-th block in backward. Hooks lie outside of what is recomputed, so they run once.

    Not an embedding or a head: next to what a block keeps, they keep nothing that a recomputation would save.
    """
    if not every:
        return
    said = set[str]()
    for unit in [unit for unit in units if not (unit.is_rest or unit.is_end)][::every]:
        ledger.override(unit.module, "forward", Recomputing(partial(_recomputed, said), unit.module.forward))


def _recomputed(said: set[str], forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """said: what the log has been told."""
    caches = [type(one).__name__ for one in (*args, *kwargs.values()) if _adds(one)]
    if caches and torch.is_grad_enabled():
        # What it adds it would add twice, and what it has added would keep what is not to be kept.
        forward = partial(_with_copies, forward)
        if not said:
            logger.info("activation_checkpointing: recomputed blocks add nothing to a %s while they train", caches[0])
        said.update(caches)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def _adds(value: Any) -> bool:
    """Whether it is a cache of keys and values, as those of transformers are."""
    return type(value).__name__.endswith("Cache")


def _with_copies(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Of caches, as they are now: in the recomputation those that the forward saw."""
    args = tuple(copy_states(one) if _adds(one) else one for one in args)
    return forward(*args, **{key: copy_states(one) if _adds(one) else one for key, one in kwargs.items()})
