"""Too little shared memory: an error on every rank where that route was asked for, sockets where none was."""

import errno
import os
from typing import Any
from unittest import mock

from lowtide.comm import Arrangement, CollectiveError, Mesh, World
from tests.ranks import RankPool


def create(route: str, patched: str, replacement: Any) -> tuple[str, str, list[str]]:
    """(route of the mesh, error, files left behind), with one function replaced."""
    arrangement = Arrangement((("shard", 2),), data=("shard",))
    before = set(os.listdir("/dev/shm"))
    with mock.patch(patched, replacement):
        try:
            mesh = Mesh.create(World.join("cpu", 20.0), arrangement, route, 1 << 20, "shard")
            return mesh.axes["shard"].route.name, "", []
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
    module = "lowtide.comm.shared_memory"
    for _, text, left in ranks(2, create, "shared_memory", f"{module}.os.posix_fallocate", has_no_room):
        assert text.startswith("shared memory for counters: expected ") and " free bytes in /dev/shm, found " in text
        assert '--shm-size), or set "communication": {"route": "sockets"}' in text and left == []


def test_shared_memory_that_cannot_be_made_is_an_error_on_every_rank(ranks: RankPool) -> None:
    for _, text, _ in ranks(2, create, "shared_memory", "lowtide.comm.shared_memory.os.open", may_not_create):
        assert "cannot create a file in /dev/shm" in text and "Permission denied" in text


def test_auto_takes_sockets_where_shared_memory_has_no_room(ranks: RankPool) -> None:
    found = ranks(2, create, "auto", "lowtide.comm.mesh.free_shared_bytes", nothing_free)
    assert [name for name, _, _ in found] == ["sockets", "sockets"]
