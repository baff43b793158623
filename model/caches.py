"""Key-value caches of Hugging Face's models: to find them, and to do without them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn


def is_cache(value: Any) -> bool:
    """Return whether a value is a key-value cache, as in transformers."""
    # By name, since transformers need not be installed.
    return type(value).__name__.endswith("Cache")


def configs_of(model: nn.Module) -> list[Any]:
    """Return the values of `module.config` in a model, each once."""
    found = (getattr(module, "config", None) for module in model.modules())
    return list({id(config): config for config in found}.values())


@contextmanager
def without_caches(configs: Sequence[Any]) -> Iterator[None]:
    """Turn `config.use_cache` off within the context. A call with use_cache=True still gets a cache."""
    caching = [config for config in configs if getattr(config, "use_cache", None) is True]
    for config in caching:
        config.use_cache = False
    try:
        yield
    finally:
        for config in caching:
            config.use_cache = True
