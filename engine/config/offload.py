"""The sections of the config about offload: what is kept outside of the model's memory, where, and how it moves."""

from typing import Literal

from pydantic import Field

from ...configs.section import Bool, Float, Folder, Int, Natural, Positive, Section

Device = Literal["none", "cpu", "nvme"]

DRIVE_BLOCK_BYTES = 4096
"""Direct reads and writes of a drive begin and end at multiples of this."""


class OffloadOptimizerConfig(Section):
    """Keep the optimizer state, with the fp32 master parameters, outside of the model's memory. Any stage."""

    device: Device = "none"
    """Where the state is kept. "none": with the model; "cpu": in host memory; "nvme": in files on a drive."""

    nvme_path: Folder = None
    """The folder for the files. Must be given with device "nvme". A relative path starts at the working directory."""

    ratio: Float = Field(default=1.0, ge=0, le=1)
    """The share of the state that is offloaded; the rest stays with the model."""

    pin_memory: Bool = True
    """Page-locked host buffers, where there is an accelerator that copies from them faster."""

    overlap: Literal["none", "speculative", "delayed"] = "none"
    """When units are updated. "none": after the last gradient. "speculative": as each gradient arrives, and again if
    the norm asks for it: the same numbers. "delayed": during the next step, which computes with parameters that are
    one update old (arXiv 2101.06840)."""

    delay_after_steps: Natural = 40
    """With overlap "delayed": the number of updates, from the first of the training on, that are waited for. The
    parameters change fast then, and a stale gradient hurts."""

    @property
    def is_used(self) -> bool:
        """Whether any of the state is offloaded."""
        return self.device != "none" and self.ratio > 0

    @property
    def is_delayed(self) -> bool:
        """Whether updates are made while the next step computes."""
        return self.is_used and self.overlap == "delayed"


class OffloadParamConfig(Section):
    """Keep the parameter shards of stage 3 outside of the model's memory."""

    device: Device = "none"
    """Where the shards are kept. "none": with the model; "cpu": in host memory; "nvme": in files on a drive."""

    nvme_path: Folder = None
    """The folder for the files. Must be given with device "nvme". A relative path starts at the working directory."""

    pin_memory: Bool = True
    """Page-locked host buffers, where there is an accelerator that copies from them faster."""


class ActivationOffloadConfig(Section):
    """Keep what backward needs of forward outside of the model's memory until it is needed."""

    device: Device = "none"
    """Where saved activations are kept. "none": with the model; "cpu": in host memory; "nvme": in files on a drive."""

    nvme_path: Folder = None
    """The folder for the files. Must be given with device "nvme". A relative path starts at the working directory."""

    min_bytes: Positive = 1 << 20
    """Smaller saved tensors stay with the model."""

    budget_bytes: Positive | None = None
    """At most so many bytes of saved activations stay with the model. null: three blocks, one that is computed,
    one that is kept for backward and one on its way."""


class AioConfig(Section):
    """How files on a drive are read and written, for every offload to "nvme"."""

    block_size: Int = Field(default=8 << 20, ge=DRIVE_BLOCK_BYTES, multiple_of=DRIVE_BLOCK_BYTES)
    """Bytes per request, a multiple of 4096."""

    thread_count: Positive = 4
    """Threads that read and write, each with one request in flight. `intra_op_parallelism` works too."""

    verify: Bool = True
    """Compare a checksum of what is read with that of what was written."""
