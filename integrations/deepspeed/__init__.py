"""DeepSpeed's public names on lowtide's engine: `import lowtide.deepspeed as deepspeed`.

A script for DeepSpeed changes only this line. The names here behave as in DeepSpeed 0.19, with its defaults. Using a
name that is missing raises an error with the reason. See docs/deepspeed.md.

Names are imported on first use: a config with DeepSpeed's keys needs only `dialect.py`, and no torch.
"""

from typing import TYPE_CHECKING, Any

from . import names

if TYPE_CHECKING:
    from . import comm as comm
    from .accelerator import get_accelerator as get_accelerator
    from .comm import init_distributed as init_distributed
    from .config import DeepSpeedConfig as DeepSpeedConfig
    from .engine import DeepSpeedEngine as DeepSpeedEngine
    from .messages import log_dist as log_dist, logger as logger
    from .start import add_config_arguments as add_config_arguments, initialize as initialize

names.install()

__version__ = "0.19.8"  # the DeepSpeed that these names come from: scripts compare it
version = __version__
git_hash = git_branch = None
HAS_TRITON = False

__all__ = [
    "DeepSpeedConfig",
    "DeepSpeedEngine",
    "add_config_arguments",
    "comm",
    "get_accelerator",
    "init_distributed",
    "initialize",
    "log_dist",
    "logger",
]


def __getattr__(name: str) -> Any:
    """Find any further public name of DeepSpeed."""
    return names.find(".", name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *names.listed()["."]})
