"""How much memory a call takes at its peak, as the kernel counts it (Linux)."""

import ctypes
from collections.abc import Callable
from pathlib import Path


def peak_growth(action: Callable[[], object]) -> int:
    """Bytes by which the process's resident memory grew at most during a second call; the first one warms up."""
    _warm_up(action)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from now on
    before = _bytes_of("VmRSS")
    action()
    return _bytes_of("VmHWM") - before


def lasting_growth(action: Callable[[], object]) -> int:
    """Bytes of the process's own that are resident after a second call and were not before it."""
    _warm_up(action)
    before = _bytes_of("RssAnon")
    action()
    return _bytes_of("RssAnon") - before


def own_bytes() -> int:
    """Bytes of the process's own that are resident: without pages of files."""
    return _bytes_of("RssAnon")


def _warm_up(action: Callable[[], object]) -> None:
    action()
    ctypes.CDLL(None).malloc_trim(0)  # what the first call has freed must be taken again


def _bytes_of(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key))
