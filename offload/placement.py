"""Which memory holds bytes while they are not in use."""

from enum import Enum


class Placement(Enum):
    """Each says which memory is held between two uses; while in use, bytes are where the work is done."""

    DEVICE = "device"
    """In the memory of the device that computes: nothing is moved, and nothing is saved."""

    HOST = "host"
    """In host memory, pinned where there is an accelerator. Device memory is held only during a use."""

    NVME = "nvme"
    """In a file. Host memory is held only for the buffers of the window, device memory only during a use."""
