"""The logger `lowtide`, and where its lines go."""

from __future__ import annotations

import logging

logger = logging.getLogger("lowtide")


def configure() -> None:
    """Lets the lines of `lowtide` be seen, on standard error, unless the program has set up logging itself."""
    if not logger.handlers and not logging.getLogger().handlers and logger.level == logging.NOTSET:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("lowtide: %(message)s"))
        handler.addFilter(lambda record: not logging.getLogger().handlers)  # one that came later shows the line too
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
