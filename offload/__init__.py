"""Where bytes live: host memory with a limit, files, pages that move; and the loop that hides moving them."""

from .checksum import Checksum
from .errors import OffloadError
from .file_store import AioOptions, FileStore
from .host_pool import HostPool
from .pages import PagedBuffer, PagePool, TransientBuffer
from .placement import Placement
from .sequential_file import SequentialFile
from .store import DeviceStore, HostStore, Store, Transfer
from .stored_range import Memory, StoredRange
from .window import Window, run_window

__all__ = [
    "AioOptions",
    "Checksum",
    "DeviceStore",
    "FileStore",
    "HostPool",
    "HostStore",
    "Memory",
    "OffloadError",
    "PagePool",
    "PagedBuffer",
    "Placement",
    "SequentialFile",
    "Store",
    "StoredRange",
    "Transfer",
    "TransientBuffer",
    "Window",
    "run_window",
]
