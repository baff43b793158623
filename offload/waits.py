"""Who is told when the host waits for bytes on their way; nobody else pays for it."""

from __future__ import annotations

import threading
from collections.abc import Callable

from .store import Transfer

_Listener = tuple[int, Callable[[str], None], Callable[[], None]]
_listeners: list[_Listener] = []


def listen(on_wait: Callable[[str], None], on_go_on: Callable[[], None]) -> Callable[[], None]:
    """Tells of each wait of this thread, "transfer of layers.7", and of its end, until the result is called."""
    listener = (threading.get_ident(), on_wait, on_go_on)
    _listeners.append(listener)

    def stop() -> None:
        if listener in _listeners:
            _listeners.remove(listener)

    return stop


def wait_for(transfer: Transfer, what: str) -> None:
    """As `transfer.wait()`. what: the name of what is moved."""
    if not _listeners or transfer.is_done:
        transfer.wait()
        return
    here = threading.get_ident()
    told = [listener for listener in _listeners if listener[0] == here]
    for _, on_wait, _ in told:
        on_wait(f"transfer of {what}")
    try:
        transfer.wait()
    finally:
        for _, _, on_go_on in told:
            on_go_on()
