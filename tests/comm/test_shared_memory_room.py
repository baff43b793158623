"""Too little shared memory: an error on every rank where that transport was asked for, sockets where none was."""

import contextlib
import errno
import logging
import os
from typing import Any
from unittest import mock

import pytest
import torch

from lowtide.comm import CollectiveError, Mesh, ParallelDims, World
from tests.kit.ranks import RankPool


def create(transport: str, patched: str, replacement: Any) -> tuple[str, str, list[str]]:
    """(transport of the mesh, error, files left behind), with one function replaced."""
    parallel_dims = ParallelDims((("shard", 2),), data=("shard",))
    before = set(os.listdir("/dev/shm"))
    with mock.patch(patched, replacement):
        try:
            mesh = Mesh.create(World.join("cpu", 20.0), parallel_dims, transport, 1 << 20, "shard")
            return mesh.axes["shard"].transport.name, "", []
        except CollectiveError as error:
            left = [name for name in set(os.listdir("/dev/shm")) - before if name.startswith(f"lowtide-{os.getpid()}-")]
            return "", str(error), left


def has_no_room(*args: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def may_not_create(*args: Any) -> None:
    raise OSError(errno.EACCES, "Permission denied")


def nothing_free() -> int:
    return 0


def test_full_shared_memory_is_an_error_on_every_rank(ranks: RankPool) -> None:
    module = "lowtide.comm.shared_segment"
    for _, text, left in ranks(2, create, "shared_memory", f"{module}.os.posix_fallocate", has_no_room):
        assert text.startswith("shared memory for counters: expected ") and " free bytes in /dev/shm, found " in text
        assert '--shm-size), or set "communication": {"transport": "sockets"}' in text and left == []


def test_shared_memory_that_cannot_be_made_is_an_error_on_every_rank(ranks: RankPool) -> None:
    for _, text, _ in ranks(2, create, "shared_memory", "lowtide.comm.shared_segment.os.open", may_not_create):
        assert "cannot create a file in /dev/shm" in text and "Permission denied" in text


def is_read_only(path: str, *args: Any) -> int:
    if path.startswith("/dev/shm/lowtide-"):
        raise OSError(errno.EROFS, "Read-only file system")
    return REAL_OPEN(path, *args)


REAL_OPEN = os.open


def create_with_log(patched: str, replacement: Any) -> tuple[str, list[str]]:
    """(transport of the mesh, what was logged), on rank 1 with one function replaced."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lowtide").addHandler(handler)
    try:
        if os.environ["RANK"] == "0":
            return create("auto", "os.getpid", os.getpid)[0], said
        return create("auto", patched, replacement)[0], said
    finally:
        logging.getLogger("lowtide").removeHandler(handler)


@pytest.mark.parametrize(
    ("patched", "replacement", "why"),
    [
        ("free_shared_bytes", nothing_free, "/dev/shm has 0 bytes free, and 1,048,576 are needed"),
        ("FOLDER", "/nowhere", "/nowhere has 0 bytes free, and 1,048,576 are needed"),
        (
            "os.open",
            is_read_only,
            "shared memory for a first page: cannot create a file in /dev/shm ([Errno 30] Read-o",
        ),
        (
            "os.posix_fallocate",
            has_no_room,
            "shared memory for a first page: expected 4096 free bytes in /dev/shm, found",
        ),
    ],
)
def test_auto_takes_sockets_on_all_ranks_where_one_gets_no_shared_memory(
    ranks: RankPool, patched: str, replacement: Any, why: str
) -> None:
    found = ranks(2, create_with_log, f"lowtide.comm.shared_segment.{patched}", replacement)
    assert [name for name, _ in found] == ["sockets", "sockets"]
    assert [len(said) for _, said in found] == [1, 0]
    assert found[0][1][0].startswith(f'communication.transport: "auto" uses sockets, because on rank 1 {why}')


def cannot_map(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError("unable to open file: Permission denied (13)")


def test_shared_memory_that_one_rank_cannot_map_is_an_error_on_every_rank(ranks: RankPool) -> None:
    for _, text, left in ranks(2, create_on_rank_1, cannot_map):
        assert text.startswith("shared memory for counters: rank 1 cannot map /dev/shm/lowtide-") and left == []
        assert text.endswith(
            '(unable to open file: Permission denied (13)). Set "communication": {"transport": "sockets"}.'
        )


def create_on_rank_1(replacement: Any) -> tuple[str, str, list[str]]:
    return create("shared_memory", "torch.from_file", replacement if os.environ["RANK"] == "1" else torch.from_file)


def reserve_slots(patched: str, replacement: Any, rank: int) -> str:
    """The error of what is mapped after the counters, with one function replaced on `rank`."""
    mesh = Mesh.create(
        World.join("cpu", 20.0), ParallelDims((("shard", 2),), data=("shard",)), "shared_memory", 0, "shard"
    )
    fails = mock.patch(patched, replacement) if os.environ["RANK"] == str(rank) else contextlib.nullcontext()
    with fails, pytest.raises(CollectiveError) as error:
        mesh.axes["shard"].transport.reserve_slots(4096, 2)
    return str(error.value)


@pytest.mark.parametrize(
    ("patched", "replacement", "rank", "why"),
    [
        ("os.posix_fallocate", has_no_room, 0, "expected 16384 free bytes in /dev/shm, found"),
        ("torch.from_file", cannot_map, 1, "rank 1 cannot map /dev/shm/lowtide-"),
    ],
)
def test_what_is_mapped_later_is_an_error_on_every_rank_too(
    ranks: RankPool, patched: str, replacement: Any, rank: int, why: str
) -> None:
    first, second = ranks(2, reserve_slots, patched, replacement, rank)
    assert first == second and first.startswith(f"shared memory for gradients: {why}")
