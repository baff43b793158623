"""The bytes that a store keeps."""

from lowtide.offload import FileStore, HostStore, StagedStore, Store
from tests.offload.slow_store import SlowStore


def bytes_held(store: Store) -> int:
    """The sum of the sizes that were saved and not dropped."""
    if isinstance(store, HostStore):
        return sum(kept.numel() for kept in store._kept.values())
    if isinstance(store, FileStore):
        return sum(entry.nbytes for entry in store._entries.values())
    if isinstance(store, StagedStore):
        return sum(store._sizes.values())
    assert isinstance(store, SlowStore)
    return sum(kept.numel() for kept in store.kept.values())
