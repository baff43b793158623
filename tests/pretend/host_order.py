"""The order of events in a step whose updates run on the host, of a simulation or a device."""

from collections.abc import Sequence

Event = tuple[str, str]
"""What has ended, and the name of a unit: leaves, norm, update, returns, forward."""


def check_order(events: Sequence[Event], names: Sequence[str], speculative: bool) -> None:
    """Check that nothing waits for more than it needs. names: of the units, in the order of the forward."""

    def of_kind(what: str) -> list[str]:
        return [name for kind, name in events if kind == what]

    forwards, backwards = list(names), list(reversed(names))
    assert of_kind("leaves") == backwards and of_kind("forward") == forwards, events
    assert of_kind("update") == of_kind("returns") == (backwards if speculative else forwards), events
    norm = events.index(("norm", ""))
    for name in names:
        parts = [events.index((what, name)) for what in ("leaves", "update", "returns", "forward")]
        assert parts == sorted(parts), (name, events)
        assert speculative or parts[1] > norm, (name, events)
    first, last = events.index(("forward", names[0])), events.index(("update", names[-1]))
    assert last < events.index(("leaves", names[0])) if speculative else first < last, events
