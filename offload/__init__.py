"""Where bytes live: memory that comes and goes without being returned to the system in between."""

from .pages import PagedBuffer, PagePool, TransientBuffer

__all__ = ["PagePool", "PagedBuffer", "TransientBuffer"]
