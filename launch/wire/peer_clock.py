"""How the clock of a peer differs from that of this process."""


class PeerClock:
    """offset: the peer's time.monotonic() minus ours. uncertainty: of it, in seconds; infinite before an answer."""

    def __init__(self) -> None:
        self.offset = 0.0
        self.uncertainty = float("inf")

    def hear(self, sent: float, answered: float, received: float) -> None:
        """answered: by the peer's clock. The quicker the answer, the more exact the offset."""
        if (received - sent) / 2 < self.uncertainty:
            self.uncertainty = (received - sent) / 2
            self.offset = answered - (sent + received) / 2
