"""Where bytes live: memory that comes and goes without being returned to the system in between."""

from .pages import PagedBuffer, PagePool

__all__ = ["PagePool", "PagedBuffer"]
