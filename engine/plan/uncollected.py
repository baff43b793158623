"""Work that makes many objects which all stay: Python's garbage collector would look at each again and again."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected(is_last: bool = False) -> Iterator[None]:
    """No garbage is looked for meanwhile; what nobody holds is freed at once as ever, but for cycles.

    A search makes a hundred thousand choices and bounds beside the half a million objects of torch's modules: 4 of its
    15 seconds were the collector's. is_last: the process ends after it, and nothing that there is is gone through then.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_last:
            gc.freeze()
        if was_enabled:
            gc.enable()
