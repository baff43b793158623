"""Frozen parameters: a checkpoint may have a digest of them in the place of their values.

[Note: digests] The digest of a tensor is the sum of its elements' bits, each times an odd number that depends on the
element's index, modulo 2^64. It is a sum over any parts, so it is the same at every number of ranks, stage and split.
A single changed element always changes it: an odd factor is invertible modulo 2^64. Several changes, or swapped
elements, cancel only by chance. It detects a wrong base model. It is no proof against somebody who wants to deceive.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from ...checkpoint.chunk_view import ChunkView, TensorInfo
from ...checkpoint.index import LeftOut
from .named_state import NamedState

_ROW_NUMEL = 4096  # elements with separate factors; each row has a factor too
_NUM_ROWS = 64  # at a time: 2 MiB of words
_MASK = (1 << 64) - 1
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Frozen:
    """The frozen parameters of the whole model. Methods are collectives, except `note_changed` and `note_loaded`."""

    def __init__(self, named: NamedState, earlier: Frozen | None) -> None:
        """earlier: of the same model, before parameter groups were added."""
        self._named, self._mesh = named, named.mesh
        self._digests: dict[str, str] = {} if earlier is None else earlier._digests
        # Changed by the caller: only checkpoints have these values.
        self.by_hand: set[str] = set() if earlier is None else earlier.by_hand
        self.infos: Mapping[str, TensorInfo] = {
            name: info for name, info in named.catalog.parameters.items() if name not in named.catalog.state_keys
        }

    def note_changed(self, names: Iterable[str]) -> None:
        """Note that the caller has changed these parameters."""
        for name in names:
            self._digests.pop(name, None)
            self.by_hand.add(name)

    def note_loaded(self, names: Iterable[str]) -> None:
        """Note that these parameters were loaded from a file or a state_dict."""
        for name in names:
            self._digests.pop(name, None)
            self.by_hand.discard(name)

    def to_leave_out(self) -> dict[str, LeftOut]:
        """Return digests of the parameters that came with the model, so need not be written."""
        # Rank 0's set: `digests` is a collective, and needs the same names on all ranks.
        by_hand = self._mesh.world.broadcast_object(self.by_hand)
        digests = self.digests([name for name in self.infos if name not in by_hand])
        return {
            name: LeftOut(self.infos[name].shape, self.infos[name].dtype, digest) for name, digest in digests.items()
        }

    def digests(self, names: Sequence[str]) -> dict[str, str]:
        """Return the digests of the current values. See [Note: digests]."""
        unknown = [name for name in names if name not in self._digests]
        self._digests |= self._computed({name: self.infos[name].dtype for name in unknown})
        return {name: self._digests[name] for name in names}

    def faults(self, left_out: Mapping[str, LeftOut]) -> list[str]:
        """Return why frozen parameters differ from those of a checkpoint that was saved without them; [] if they agree.

        left_out: entries that fit this model by name and shape.
        """
        same = [name for name, one in left_out.items() if one.dtype == self.infos[name].dtype]
        others = {name: one.dtype for name, one in left_out.items() if one.dtype != self.infos[name].dtype}
        found = {**self.digests(same), **self._computed(others)}
        names = [name for name, one in left_out.items() if found[name] != one.digest]
        if not names:
            return []
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        then, now = left_out[names[0]].dtype, self.infos[names[0]].dtype
        return [
            f"frozen parameter '{names[0]}'{more} differs from the checkpoint's base model"
            f"{f': {now} here, {then} there' if then != now else ''}. The checkpoint has no frozen "
            "parameters (checkpoint.exclude_frozen_parameters): load the base weights that it was trained on first"
        ]

    def note_read(self, before: Mapping[str, str]) -> None:
        """Note that values changed by a checkpoint are in checkpoints alone. before: digests before it was read."""
        # The weights have changed, so the known digests are of other values.
        self._digests.clear()
        after = self.digests(list(before))
        changed = [name for name, digest in before.items() if digest != after[name]]
        self.by_hand.update(changed)

    def _computed(self, dtypes: Mapping[str, torch.dtype]) -> dict[str, str]:
        """Return the digests of parameters in these dtypes. All ranks give the same names."""
        if not dtypes:
            return {}
        index_of = {name: index for index, name in enumerate(dtypes)}
        sums = [0] * len(dtypes)
        # `saves`: without replicas each element counts once in the sum over ranks.
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
    """Return the digest of values, (n,), cast to `dtype`: elements of a tensor from index `start` on."""
    columns = _factors(torch.arange(_ROW_NUMEL, device=values.device))
    total, done = 0, 0
    while done < values.numel():
        row, column = divmod(start + done, _ROW_NUMEL)
        # The rest of a row that began before, or a last part of a row; else as many full rows as fit.
        count = values.numel() - done
        count = min(count, _ROW_NUMEL - column) if column or count < _ROW_NUMEL else count // _ROW_NUMEL * _ROW_NUMEL
        count = min(count, _NUM_ROWS * _ROW_NUMEL)
        words = values[done : done + count].to(dtype).contiguous().view(_BITS[dtype.itemsize]).to(torch.int64)
        num_rows = -(-count // _ROW_NUMEL)
        # int64 products and sums wrap modulo 2^64, as the digest is defined.
        by_row = (words.view(num_rows, -1) * columns[column : column + count // num_rows]).sum(1)
        rows = torch.arange(row, row + num_rows, device=values.device)
        # Rows take their factors from numbers behind those of the columns.
        total += int((by_row * _factors(rows + _ROW_NUMEL)).sum())
        done += count
    return total & _MASK


def _factors(numbers: Tensor) -> Tensor:
    """Return an odd factor for each index. Source: the finalizer of splitmix64, Steele et al., 2014."""
    mixed = numbers.to(torch.int64) * _signed(0x9E3779B97F4A7C15)
    # The masks make logical shifts: torch shifts int64 arithmetically.
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ ((mixed >> shift) & ((1 << (64 - shift)) - 1))) * _signed(factor)
    return (mixed ^ ((mixed >> 31) & ((1 << 33) - 1))) | 1


def _signed(word: int) -> int:
    """Return the int64 with these 64 bits."""
    word &= _MASK
    return word - (1 << 64) if word >> 63 else word
