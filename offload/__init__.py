"""Where bytes live: host memory with a limit, files, pages that move; and the loop that hides moving them."""

from .activations import ActivationOffload, in_storages_of
from .box import Box, Portion
from .checksum import Checksum
from .errors import OffloadError
from .file_store import AioOptions, FileStore
from .host_copies import HostCopies, OnHost, StreamCopies, sent
from .host_memory import allocate_host, host_is_pinned, keep_heap, trim_heap
from .host_pool import HostPool
from .lent_memory import LentMemory, bytes_in_memory
from .pages import PagedBuffer, PagePool, TransientBuffer, huge_zeros
from .resident import OldVersion, Resident
from .sequential_file import SequentialFile
from .staged_store import StagedStore
from .store import HostStore, Store, Transfer
from .stored_range import Memory, StoredRange
from .window import Window

__all__ = [
    "ActivationOffload",
    "AioOptions",
    "Box",
    "Checksum",
    "FileStore",
    "HostCopies",
    "HostPool",
    "HostStore",
    "LentMemory",
    "Memory",
    "OffloadError",
    "OldVersion",
    "OnHost",
    "PagePool",
    "PagedBuffer",
    "Portion",
    "Resident",
    "SequentialFile",
    "StagedStore",
    "Store",
    "StoredRange",
    "StreamCopies",
    "Transfer",
    "TransientBuffer",
    "Window",
    "allocate_host",
    "bytes_in_memory",
    "host_is_pinned",
    "huge_zeros",
    "in_storages_of",
    "keep_heap",
    "sent",
    "trim_heap",
]
