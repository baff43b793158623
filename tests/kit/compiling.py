"""torch's compiler as it is before its first call, and without what takes long in it and says nothing to a test."""

import warnings
from typing import Any

import torch
import torch._dynamo.backends.debugging  # with what a first compilation imports: ranks are forked with it
import torch._dynamo.guards
from torch._dynamo.utils import counters


def with_a_new_compiler() -> None:
    """No graph is known, none has been counted, and what it says about itself is not heard."""
    torch._dynamo.reset()
    counters.clear()
    warnings.simplefilter("ignore")
    # How long the guards of each graph take, for a log. It empties the caches of the processor, which takes 45 ms.
    vars(torch._dynamo.guards)["profile_guard_manager"] = no_latency


def no_latency(*arguments: Any) -> float:
    return 0.0


def ignore_warning_of_compiler() -> None:
    """Ignore the warnings of torch's compiler when it looks at an input of a block that has a graph, or into hooks."""
    warnings.filterwarnings("ignore", "The .grad attribute")
    warnings.filterwarnings("ignore", "Dynamo detected a call to a `functools.lru_cache`")
