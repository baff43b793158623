"""Where bytes live: memory that comes and goes without being returned to the system in between, and files."""

from .pages import PagedBuffer, PagePool, TransientBuffer
from .sequential_file import SequentialFile

__all__ = ["PagePool", "PagedBuffer", "SequentialFile", "TransientBuffer"]
