"""Chunks that are worked on where they rest."""

import pytest

from lowtide.offload import HostChunks, HostPool, OffloadError


def test_a_key_keeps_its_buffer_and_its_bytes() -> None:
    pool = HostPool(pinned=False)
    chunks = HostChunks(pool, {"a": 100, "b": 5000})
    first = chunks.create("a")
    first.fill_(7)
    chunks.release("a", True)
    assert chunks.prefetch("a") and chunks.acquire("a").data_ptr() == first.data_ptr()
    assert chunks.create("a").data_ptr() == first.data_ptr()
    assert chunks.create("b").numel() == 5000 and bool((chunks.acquire("a") == 7).all())
    chunks.wait()
    assert pool.bytes_in_use == pool.rounded(100) + pool.rounded(5000)
    chunks.close()
    assert pool.bytes_held == 0


def test_a_pool_without_room_says_so() -> None:
    chunks = HostChunks(HostPool(4096, pinned=False), {"a": 4096, "b": 1})
    chunks.create("a")
    with pytest.raises(OffloadError, match="4,096 bytes in use"):
        chunks.create("b")


def test_a_key_that_was_never_made_is_an_error() -> None:
    with pytest.raises(KeyError):
        HostChunks(HostPool(pinned=False), {"a": 1}).acquire("a")
