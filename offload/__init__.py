"""Stores for bytes that are not in use, and the window that hides their transfers behind the computation."""

from .activations import ActivationOffload, in_storages_of
from .block_file import Checksum
from .file_store import AioOptions, FileStore
from .host_copies import HostCopies, OffloadedMemory, OnHost, bytes_in_memory, sent
from .host_memory import HostPool, OffloadError, allocate_host, host_is_pinned, keep_heap, trim_heap
from .pages import PagedBuffer, PagePool, TransientBuffer, huge_zeros
from .sequential_file import SequentialFile
from .staged_store import StagedStore
from .store import FINISHED, HostStore, Memory, Store, StoredRange, Transfer, use_device
from .tensor_chunk import TensorChunk, TensorShard, round_up
from .window import Offloadable, OldVersion, Window

__all__ = [
    "FINISHED",
    "ActivationOffload",
    "AioOptions",
    "Checksum",
    "FileStore",
    "HostCopies",
    "HostPool",
    "HostStore",
    "Memory",
    "OffloadError",
    "Offloadable",
    "OffloadedMemory",
    "OldVersion",
    "OnHost",
    "PagePool",
    "PagedBuffer",
    "SequentialFile",
    "StagedStore",
    "Store",
    "StoredRange",
    "TensorChunk",
    "TensorShard",
    "Transfer",
    "TransientBuffer",
    "Window",
    "allocate_host",
    "bytes_in_memory",
    "host_is_pinned",
    "huge_zeros",
    "in_storages_of",
    "keep_heap",
    "round_up",
    "sent",
    "trim_heap",
    "use_device",
]
