"""Small picklable objects of all ranks, for start-up and error paths."""

from __future__ import annotations

import pickle
from typing import Any

import torch
import torch.distributed as dist

_LENGTH_BYTES = 8
_FIRST_BYTES = 256  # of each rank in the first collective; most of what ranks tell each other is shorter


def gather_objects(value: object, group: dist.ProcessGroup | None = None) -> list[Any]:
    """The value of every rank of the group, by rank.

    One collective where all of them are small, else a second one; `dist.all_gather_object` has two, one of sizes.
    """
    written = pickle.dumps(value)
    begins = len(written).to_bytes(_LENGTH_BYTES, "little") + written
    first = _gather_bytes(begins, _FIRST_BYTES, group)
    lengths = [_LENGTH_BYTES + int.from_bytes(one[:_LENGTH_BYTES], "little") for one in first]
    longest = max(lengths)
    whole = first if longest <= _FIRST_BYTES else _gather_bytes(begins, longest, group)
    return [pickle.loads(one[_LENGTH_BYTES:length]) for one, length in zip(whole, lengths, strict=True)]


def _gather_bytes(content: bytes, count: int, group: dist.ProcessGroup | None) -> list[bytes]:
    """So many bytes of every rank's content, which is filled with zeros, or cut off."""
    device = dist.distributed_c10d._get_object_coll_device(group)
    own = torch.frombuffer(bytearray(content[:count].ljust(count, b"\0")), dtype=torch.uint8).to(device)
    everyone = torch.empty(dist.get_world_size(group), count, dtype=torch.uint8, device=device)
    dist.all_gather(list(everyone), own, group=group)
    return [row.tobytes() for row in everyone.cpu().numpy()]
