"""Which parts of a file are free: offsets and sizes only, no bytes."""

from __future__ import annotations

import bisect


class Regions:
    """Gives parts of a line that grows at its end, of exact size, and takes them back; free neighbours become one.

    A region takes the smallest free part that holds it, else the end of the line. Sizes are rounded up to `alignment`,
    so every offset is a multiple of it.
    """

    def __init__(self, alignment: int) -> None:
        self.alignment = alignment
        self.end = 0  # everything from here on is free
        self._offsets: list[int] = []  # of the free parts before the end, in order
        self._sizes: dict[int, int] = {}  # of those, by offset

    @property
    def free_bytes(self) -> int:
        """Of the free parts before the end."""
        return sum(self._sizes.values())

    def rounded(self, nbytes: int) -> int:
        return -(-nbytes // self.alignment) * self.alignment

    def take(self, nbytes: int) -> int:
        """The offset of a region of nbytes."""
        wanted = self.rounded(nbytes)
        if not wanted:
            return 0
        enough = [offset for offset in self._offsets if self._sizes[offset] >= wanted]
        if not enough:
            offset, self.end = self.end, self.end + wanted
            return offset
        offset = min(enough, key=self._sizes.__getitem__)
        left = self._sizes.pop(offset) - wanted
        self._offsets.remove(offset)
        if left:
            self._insert(offset + wanted, left)
        return offset

    def give(self, offset: int, nbytes: int) -> None:
        """Takes back a region that `take` gave for nbytes."""
        size = self.rounded(nbytes)
        if not size:
            return
        index = bisect.bisect(self._offsets, offset)
        if index < len(self._offsets) and self._offsets[index] == offset + size:
            size += self._sizes.pop(self._offsets.pop(index))
        if index and self._offsets[index - 1] + self._sizes[self._offsets[index - 1]] == offset:
            offset = self._offsets.pop(index - 1)
            size += self._sizes.pop(offset)
        if offset + size == self.end:
            self.end = offset
        else:
            self._insert(offset, size)

    def _insert(self, offset: int, size: int) -> None:
        bisect.insort(self._offsets, offset)
        self._sizes[offset] = size
