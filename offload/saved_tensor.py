"""What stands in autograd's graph for a saved tensor."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .saved_memory import SavedMemory


class KeptTensor:
    """A saved tensor that stays in memory. Torch does not check versions under hooks, so this does."""

    __slots__ = ("_origin", "_version", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        # A leaf is kept itself, since its memory may be exchanged; anything else would hold its own graph.
        self.tensor = tensor if tensor.is_leaf else tensor.detach()
        self._version = tensor._version
        self._origin = _origin(tensor)

    def check_version(self) -> None:
        """Raises torch's error where the tensor was changed in place since."""
        if self.tensor._version != self._version:
            raise _changed(self.tensor.type(), self.tensor.shape, self._origin, self.tensor._version, self._version)


class OffloadedTensor:
    """A view of a `SavedMemory`: all of a saved tensor but its bytes."""

    __slots__ = ("_dtype", "_kind", "_offset", "_on_freed", "_origin", "_shape", "_stride", "memory")

    def __init__(self, tensor: Tensor, memory: SavedMemory, on_freed: Callable[[SavedMemory], None]) -> None:
        self.memory = memory
        self._on_freed = on_freed
        self._kind = tensor.type()
        self._dtype, self._shape, self._stride = tensor.dtype, tensor.shape, tensor.stride()
        self._offset = tensor.storage_offset() - memory.start // tensor.element_size()
        self._origin = _origin(tensor)

    def check_version(self) -> None:
        """Raises torch's error where the tensor was changed in place since."""
        found, expected = self.memory.versions
        if found != expected:
            raise _changed(self._kind, self._shape, self._origin, found, expected)

    def view_of(self, content: Tensor) -> Tensor:
        """The saved tensor, in the bytes of its memory, (nbytes,) uint8."""
        offset = content.storage_offset() // self._dtype.itemsize + self._offset
        tensor = torch.empty(0, dtype=self._dtype, device=content.device)
        return tensor.set_(content.untyped_storage(), offset, self._shape, self._stride)

    def __del__(self) -> None:
        self._on_freed(self.memory)


def _origin(tensor: Tensor) -> str:
    """The node that made it, as torch's message has it."""
    return f", which is output {tensor.output_nr} of {tensor.grad_fn.name()}," if tensor.grad_fn is not None else ""


def _changed(kind: str, shape: torch.Size, origin: str, found: int, expected: int) -> RuntimeError:
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{kind} {list(shape)}]{origin} is at version {found}; expected version {expected} instead. Hint: enable "
        "anomaly detection to find the operation that failed to compute its gradient, with "
        "torch.autograd.set_detect_anomaly(True)."
    )
