"""The logger `lowtide`."""

from __future__ import annotations

import logging

logger = logging.getLogger("lowtide")


def configure() -> None:
    """Show log lines of `lowtide` on standard error, unless the program has configured logging."""
    if not logger.handlers and not logging.getLogger().handlers and logger.level == logging.NOTSET:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("lowtide: %(message)s"))
        handler.addFilter(lambda record: not logging.getLogger().handlers)  # a root handler added later shows the line
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
