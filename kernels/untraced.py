"""A call that a compiler leaves as it is. Only compiled code imports this: the decorator imports torch's compiler."""

from collections.abc import Callable
from typing import Any

import torch


@torch.compiler.disable  # type: ignore[untyped-decorator]
def untraced(function: Callable[..., Any], *args: Any, **given: Any) -> Any:
    """Return function(*args, **given). A compiler ends its graph before the call.

    For kernels that may write over their inputs.
    """
    return function(*args, **given)
