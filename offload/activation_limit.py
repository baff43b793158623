"""How many bytes of activations are held at most."""

from __future__ import annotations

BLOCKS_IN_MEMORY = 3  # one that is computed, one that is kept for backward, one on its way


class ActivationLimit:
    """A budget; without one, three blocks as large as the largest so far.

    A block is what is saved from one `begin_block` to the next (after the last one of a forward comes the head, which
    may be much larger, and counts only while it runs); without such calls, one saved tensor.
    """

    def __init__(self, budget_bytes: int | None) -> None:
        self.budget_bytes = budget_bytes
        self._block_bytes: int | None = None  # saved since the last begin_block of this forward
        self._largest_block_bytes = 0
        self._has_blocks = False

    @property
    def nbytes(self) -> int:
        """As of now."""
        return self.budget_bytes or BLOCKS_IN_MEMORY * max(self._largest_block_bytes, self._block_bytes or 0)

    def begin_block(self) -> None:
        """A block's forward begins."""
        if not self._has_blocks:  # until now each saved tensor was taken for one
            self._has_blocks, self._largest_block_bytes = True, 0
        self._largest_block_bytes = max(self._largest_block_bytes, self._block_bytes or 0)
        self._block_bytes = 0

    def add(self, nbytes: int) -> None:
        """So much is saved together."""
        if self._block_bytes is not None:
            self._block_bytes += nbytes
        elif not self._has_blocks:
            self._largest_block_bytes = max(self._largest_block_bytes, nbytes)

    def end_forward(self) -> None:
        """What comes next is of another forward."""
        self._largest_block_bytes = self._largest_block_bytes or self._block_bytes or 0
        self._block_bytes = None
