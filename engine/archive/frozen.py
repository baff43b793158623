"""Parameters that no optimizer updates: what a checkpoint says of them in the place of their values.

[Note: digests]
The digest of a tensor is the sum of its elements' bits, each times an odd number that its place in the tensor gives,
modulo 2^64. So it is a sum over any parts, whoever holds them, at every number of ranks, stage and split; one element
that is another always changes it, and so do elements that have changed places. It finds a base that is not the one
that was trained beside, and is no proof against somebody who wants to be fooled.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...checkpoint.chunk_view import ChunkView, TensorInfo
from ...checkpoint.index import LeftOut
from ...comm import Mesh
from .named_state import NamedState

_ROW_NUMEL = 4096  # elements that have factors of their own; a row of them has one more
_NUM_ROWS = 64  # that are taken at a time: 2 MiB of words
_MASK = (1 << 64) - 1
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class FrozenValues:
    """What is known of the values of frozen parameters, by name, from the first step on."""

    digests: dict[str, str] = field(default_factory=dict)
    by_hand: set[str] = field(default_factory=set)
    """Those that the caller has changed: no file has them but a checkpoint."""

    def note_changed(self, names: Iterable[str]) -> None:
        """The caller has changed these."""
        for name in names:
            self.digests.pop(name, None)
            self.by_hand.add(name)

    def note_loaded(self, names: Iterable[str]) -> None:
        """These have come out of a file, or of a state_dict."""
        for name in names:
            self.digests.pop(name, None)
            self.by_hand.discard(name)


class Frozen:
    """The parameters that no optimizer updates, of the whole model. Every method is a collective."""

    def __init__(self, named: NamedState, mesh: Mesh, values: FrozenValues) -> None:
        self._named = named
        self._mesh = mesh
        self._values = values
        self.infos: Mapping[str, TensorInfo] = {
            name: info for name, info in named.catalog.parameters.items() if name not in named.catalog.state_keys
        }

    def to_leave_out(self) -> dict[str, LeftOut]:
        """What a checkpoint says of those that came with the model, and need not be written."""
        by_hand = self._mesh.world.broadcast_object(self._values.by_hand)
        digests = self.digests([name for name in self.infos if name not in by_hand])
        return {name: LeftOut(self.infos[name], digest) for name, digest in digests.items()}

    def digests(self, names: Sequence[str]) -> dict[str, str]:
        """Of the values that they have now; see [Note: digests]."""
        unknown = [name for name in names if name not in self._values.digests]
        self._values.digests |= self._computed({name: self.infos[name].dtype for name in unknown})
        return {name: self._values.digests[name] for name in names}

    def faults(self, left_out: Mapping[str, LeftOut]) -> list[str]:
        """What is not as it was when a checkpoint was saved without it. left_out: of this model, by name and shape."""
        same = [name for name, one in left_out.items() if one.info.dtype == self.infos[name].dtype]
        others = {name: one.info.dtype for name, one in left_out.items() if name not in set(same)}
        found = {**self.digests(same), **self._computed(others)}
        names = [name for name, one in left_out.items() if found[name] != one.digest]
        if not names:
            return []
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        then, now = left_out[names[0]].info.dtype, self.infos[names[0]].dtype
        return [
            f"it was saved without frozen parameters (checkpoint.exclude_frozen_parameters), and '{names[0]}'{more} "
            f"have other values here than beside it{f', as {now} and no {then}' if then != now else ''}: build the "
            "model from the weights that it was trained on"
        ]

    def note_read(self, before: Mapping[str, str]) -> None:
        """After a checkpoint has been read: what it has changed is in checkpoints alone. before: digests until then."""
        self._values.digests.clear()
        after = self.digests(list(before))
        changed = [name for name, digest in before.items() if digest != after[name]]
        self._values.by_hand.update(changed)

    def _computed(self, dtypes: Mapping[str, torch.dtype]) -> dict[str, str]:
        """The digests of parameters as they are in these dtypes, which all ranks name alike."""
        if not dtypes:
            return {}
        index_of = {name: index for index, name in enumerate(dtypes)}
        sums = [0] * len(dtypes)
        for chunk_view in self._named.weights(saves=True):
            if chunk_view.name in index_of:
                sums[index_of[chunk_view.name]] += _digest_of(chunk_view, dtypes[chunk_view.name])
        own = torch.tensor([_signed(one) for one in sums], dtype=torch.int64, device=self._mesh.world.device)
        total = self._mesh.sum_small(own, "the digests of frozen parameters").tolist()
        return {name: f"{total[index] & _MASK:016x}" for name, index in index_of.items()}


def _digest_of(chunk_view: ChunkView, dtype: torch.dtype) -> int:
    values, done, total = chunk_view.values.detach(), 0, 0
    for low, high in chunk_view.flat_ranges():
        total += digest_of(values[done : done + high - low], low, dtype)
        done += high - low
    return total


def digest_of(values: Tensor, start: int, dtype: torch.dtype) -> int:
    """The part of a digest that comes from these values, (n,), in `dtype`: elements from `start` on of the tensor."""
    columns = _factors(torch.arange(_ROW_NUMEL, device=values.device))
    total, done = 0, 0
    while done < values.numel():
        row, column = divmod(start + done, _ROW_NUMEL)
        count = values.numel() - done
        count = min(count, _ROW_NUMEL - column) if column or count < _ROW_NUMEL else count // _ROW_NUMEL * _ROW_NUMEL
        count = min(count, _NUM_ROWS * _ROW_NUMEL)
        words = values[done : done + count].to(dtype).contiguous().view(_BITS[dtype.itemsize]).to(torch.int64)
        num_rows = -(-count // _ROW_NUMEL)
        by_row = (words.view(num_rows, -1) * columns[column : column + count // num_rows]).sum(1)
        rows = torch.arange(row, row + num_rows, device=values.device)
        total += int((by_row * _factors(rows + _ROW_NUMEL)).sum())
        done += count
    return total & _MASK


def _factors(numbers: Tensor) -> Tensor:
    """An odd number for each. Source: the finalizer of splitmix64, Steele et al., 2014."""
    mixed = numbers.to(torch.int64) * _signed(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ ((mixed >> shift) & ((1 << (64 - shift)) - 1))) * _signed(factor)
    return (mixed ^ ((mixed >> 31) & ((1 << 33) - 1))) | 1


def _signed(word: int) -> int:
    """As int64 has these 64 bits."""
    word &= _MASK
    return word - (1 << 64) if word >> 63 else word
