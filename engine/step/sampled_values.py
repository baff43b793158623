"""A few elements of each parameter, as they were when the last step ended."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...zero.group import ShardedGroup

_NUM_SAMPLED = 4  # of a parameter
_Look = tuple[list[Tensor], list[Tensor]]
"""Values as they were remembered, and as they were found: where several times, the first that were others."""


class SampledValues:
    """Tells which parameter of the groups has changed since. Where they are on a device, the host does not wait."""

    def __init__(self, groups: Sequence[ShardedGroup]) -> None:
        dtypes = dict.fromkeys(group.plan.dtype for group in groups)
        self._samples = [_Samples([group for group in groups if group.plan.dtype == dtype]) for dtype in dtypes]
        self._values: list[Tensor] | None = None
        self._memory: list[Tensor] = []  # of the values that were remembered last
        self._seen: Tensor | None = None  # () bool on a device: a value was found changed there
        self._looks: list[_Look] = []
        self._told: list[_Look] = []  # those of which `take_seen` has told

    def __len__(self) -> int:
        """Of how many dtypes they are."""
        return len(self._samples)

    def remember(self) -> None:
        """The step has ended: nobody changes values now."""
        self._told = []
        is_looked_at = self._looks and any(values is self._memory for values, _ in self._looks)
        if self._samples and (is_looked_at or not self._memory):
            with torch.inference_mode(False):  # it is written to later
                self._memory = [sample.take() for sample in self._samples]
        else:  # at the addresses of the last step, so that what is taken beside them has its own again as well
            for sample, out in zip(self._samples, self._memory, strict=True):
                sample.take(out)
        self._values = self._memory

    def expect_update(self) -> None:
        """From now on they may change, until they are remembered."""
        self._values = None

    def changed(self) -> str:
        """The name of a parameter that has changed; "" where there is none, and on a device: `take_seen` tells."""
        if not self._samples:
            return ""
        if self._values is None:
            self.remember()
            return ""
        now = [sample.take() for sample in self._samples]
        differs = [(old != new).any() for old, new in zip(self._values, now, strict=True)]
        if not differs:
            return ""
        if differs[0].device.type == "cpu":
            return self._first_difference(self._values, now) if any(map(bool, differs)) else ""
        if self._looks and self._looks[-1][0] is self._values:  # one look, however many microbatches a step has
            _, earlier = self._looks.pop()
            changed = zip(self._values, earlier, now, strict=True)
            now = [torch.where(then != old, then, last) for old, then, last in changed]
        self._looks.append((self._values, now))
        differs += [] if self._seen is None else [self._seen]
        self._seen = torch.stack(differs).any()
        return ""

    def take_seen(self) -> Tensor | None:
        """() bool on a device: `changed` has found a changed value there since this was asked last.

        The host need not know before the step ends. None where nothing was looked at, and on the CPU, where it knows.
        """
        seen, self._seen = self._seen, None
        self._told, self._looks = self._looks, []
        return seen

    def told(self) -> str:
        """The name of a parameter of which `take_seen` has told last, or ""; the host waits."""
        for old, new in self._told:
            if name := self._first_difference(old, new):
                self._values = old  # the next step is not to take it for right
                return name
        return ""

    def _first_difference(self, old: Sequence[Tensor], new: Sequence[Tensor]) -> str:
        for sample, before, now in zip(self._samples, old, new, strict=True):
            if not torch.equal(before, now):
                return sample.first_difference(before, now)
        return ""


class _Samples:
    """The bits of some elements of each parameter of a dtype. A change of whole tensors or first rows shows there."""

    def __init__(self, groups: Sequence[ShardedGroup]) -> None:
        self._bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[groups[0].plan.dtype.itemsize]
        slots = [(group.full, slot) for group in groups for slot in group.layout.slots if slot.numel]
        self._views = [
            full[slot.offset_in_flat : slot.end_in_flat][:: max(1, (slot.numel - 1) // (_NUM_SAMPLED - 1))]
            for full, slot in slots
        ]
        self._names = [slot.name for (_, slot), view in zip(slots, self._views, strict=True) for _ in view]

    def take(self, out: Tensor | None = None) -> Tensor:
        """out: of an earlier time, that is written to."""
        if out is None:
            return torch.cat(self._views).view(self._bits)
        torch.cat(self._views, out=out.view(self._views[0].dtype))
        return out

    def first_difference(self, old: Tensor, new: Tensor) -> str:
        return self._names[int((old != new).nonzero()[0])]
