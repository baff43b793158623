"""Memory-optimized training for PyTorch: ZeRO, offload, pipelines and fused kernels from one JSON file.

The names are loaded on first use, so that a command such as `lowtide launch` starts without torch.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # "as" exports a name
    __version__: str

    from .checkpoint.files import CheckpointError as CheckpointError, NoCheckpointError as NoCheckpointError
    from .comm.errors import CollectiveError as CollectiveError
    from .engine.build import initialize as initialize
    from .engine.config.config import Config as Config
    from .engine.config.errors import ConfigError as ConfigError
    from .engine.engine import Engine as Engine
    from .engine.plan.machine import Machine as Machine
    from .engine.plan.plan import Plan as Plan, plan as plan
    from .engine.step.features import StepResult as StepResult
    from .engine.step.step_sums import NonFiniteGradientError as NonFiniteGradientError
    from .offload.host_memory import OffloadError as OffloadError
    from .zero.loss_scale import LossScaleError as LossScaleError
    from .zero.released import ReleasedParameterError as ReleasedParameterError

_HOME = {
    "CheckpointError": ".checkpoint.files",
    "CollectiveError": ".comm.errors",
    "Config": ".engine.config.config",
    "ConfigError": ".engine.config.errors",
    "Engine": ".engine.engine",
    "LossScaleError": ".zero.loss_scale",
    "Machine": ".engine.plan.machine",
    "NoCheckpointError": ".checkpoint.files",
    "NonFiniteGradientError": ".engine.step.step_sums",
    "OffloadError": ".offload.host_memory",
    "Plan": ".engine.plan.plan",
    "ReleasedParameterError": ".zero.released",
    "StepResult": ".engine.step.features",
    "initialize": ".engine.build",
    "plan": ".engine.plan.plan",
}
__all__ = list(_HOME)

# Set by `lowtide launch`: stacks of a hanging rank are available from the import on, before `initialize`.
if "LOWTIDE_PROGRESS_FILE" in os.environ:
    from .watch.stacks import claim_as_asked

    claim_as_asked()


def __getattr__(name: str) -> object:
    """Import the public object `name` from its module, and keep it here."""
    if name == "__version__":
        return import_module("importlib.metadata").version("lowtide")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    value: object = getattr(import_module(_HOME[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
