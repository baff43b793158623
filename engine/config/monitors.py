"""Where numbers of each step are written, in DeepSpeed's words; and the steps that are profiled."""

from typing import Annotated, Any

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from ...configs.section import Bool, Folder, Int, Natural, NonNegative, Positive, Section


def _place(value: Any) -> Any:
    if value is not None and (not isinstance(value, str) or "\0" in value):
        raise PydanticCustomError("string_type", "expected the path of a folder")
    return value or ""


_Place = Annotated[str, BeforeValidator(_place)]


class TensorboardConfig(Section):
    """Event files for TensorBoard. Needs the package tensorboard."""

    enabled: Bool = False
    """Turns it on."""
    output_path: _Place = ""
    """The folder in which `job_name` is a folder. "": the working directory."""
    job_name: str = "run"
    """Name of the job, and of its folder."""


class WandbConfig(Section):
    """A run of Weights & Biases. Needs the package wandb; without a login, WANDB_MODE=offline writes files."""

    enabled: Bool = False
    """Turns it on."""
    group: str | None = None
    """Runs that are shown together."""
    team: str | None = None
    """Whose project it is."""
    project: str = "lowtide"
    """The project."""


class CsvMonitorConfig(Section):
    """A table `metrics.csv` with a row for each step."""

    enabled: Bool = False
    """Turns it on."""
    output_path: _Place = ""
    """The folder in which `job_name` is a folder. "": the working directory."""
    job_name: str = "run"
    """Name of the job, and of its folder."""


class ProfileConfig(Section):
    """Steps of which a trace, collectives, and operations by module are written: see docs/monitors.md."""

    enabled: Bool = False
    """Turns it on."""
    folder: Folder = None
    """Where the files go. null: only the log says it. A relative path starts at the working directory."""
    step: Positive = 2
    """The first step that is profiled."""
    steps: Positive = 1
    """How many are."""
    module_depth: Annotated[Int, Field(ge=-1)] = -1
    """Of the modules that are listed; -1: the deepest."""
    top_modules: Natural = 10
    """Modules of each depth that are listed; 0: all."""
    peak_tflops: Annotated[NonNegative | None, Field(gt=0)] = None
    """What the device can do in the dtype of the model; for model-flops utilisation. null: not known."""
