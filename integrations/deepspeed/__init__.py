"""The public names of DeepSpeed on lowtide's engine: `import lowtide.deepspeed as deepspeed`.

A script for DeepSpeed changes this one line. What is here does what DeepSpeed 0.19 does, with its defaults; each name
that is not here says so, and why, when it is used. See docs/deepspeed.md.

Names are found when they are asked for: a config with keys of DeepSpeed needs `dialect.py` alone, and no torch.
"""

from typing import TYPE_CHECKING, Any

from . import names

if TYPE_CHECKING:
    from . import comm as comm
    from .accelerator import get_accelerator as get_accelerator
    from .comm import init_distributed as init_distributed
    from .config import DeepSpeedConfig as DeepSpeedConfig
    from .engine import DeepSpeedEngine as DeepSpeedEngine
    from .messages import log_dist as log_dist
    from .messages import logger as logger
    from .start import add_config_arguments as add_config_arguments
    from .start import initialize as initialize

names.install()

__version__ = "0.19.8"
"""That of the DeepSpeed whose names these are: scripts ask for it."""
__version_major__, __version_minor__, __version_patch__ = 0, 19, 8
__git_hash__ = __git_branch__ = None
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
    """Any other public name of DeepSpeed, found when it is asked for."""
    found = names.find(".", name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *names.listed()["."]})
