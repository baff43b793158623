"""Tensors in blocks of codes of 8 and 4 bits: the formats, and the memory that they take.

A block of block_numel elements, with m its largest magnitude, has one float32 scale s and a code c for each element:

    int8   s = m / 127   c in [-127, 127]   x^ = s c             one byte an element
    int4   s = m / 7     c in [-7, 7]       x^ = s c             half a byte, c + 8 in [1, 15]
    nf4    s = m         c in [0, 15]       x^ = s NF4_LEVELS[c] half a byte; levels: quantiles of a normal distribution

Element 2i is the lower half of byte i, element 2i + 1 the upper one. Sources: arXiv 2110.02861, section 2.1 (blocks);
QLoRA, arXiv 2305.14314, section 3 and appendix E (nf4).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

Format = Literal["int8", "int4", "nf4"]
TOP_CODES: dict[Format, int] = {"int8": 127, "int4": 7, "nf4": 1}
MIN_BLOCK_NUMEL, MAX_BLOCK_NUMEL = 64, 2048

NF4_LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
NF4_FIXED = tuple(round(level * 2**23) for level in NF4_LEVELS)
NEAREST_BITS = 1 << 31  # in place of random bits: a threshold in the middle of two levels
LEAST_BITS = (127 - 118) << 23  # of 2^-118 in float32
BROKEN_BITS = (127 + 126) << 23  # of 2^126: from there on an inverse is denormal


@dataclass(frozen=True)
class Quantized:
    """A tensor in blocks of codes."""

    payload: Tensor  # (n,) int8; for 4 bits (ceil(n / 2),) uint8
    scale: Tensor  # (ceil(n / block_numel),) float32
    shape: tuple[int, ...]
    format: Format
    block_numel: int

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    @classmethod
    def empty(cls, shape: tuple[int, ...], format: Format, block_numel: int, device: torch.device | str) -> Quantized:
        """Memory for a tensor of that shape. Raises ValueError for other formats and blocks."""
        if format not in get_args(Format):
            choices = ", ".join(f'"{name}"' for name in get_args(Format))
            raise ValueError(f'quantize: expected format to be one of {choices}, found "{format}"')
        if not MIN_BLOCK_NUMEL <= block_numel <= MAX_BLOCK_NUMEL or block_numel & (block_numel - 1):
            raise ValueError(
                f"quantize: expected block_numel to be a power of 2 from {MIN_BLOCK_NUMEL} to {MAX_BLOCK_NUMEL}, found "
                f"{block_numel}"
            )
        numel = torch.Size(shape).numel()
        is_8_bit = format == "int8"
        payload_numel, dtype = (numel, torch.int8) if is_8_bit else (-(-numel // 2), torch.uint8)
        payload = torch.empty(payload_numel, dtype=dtype, device=device)
        scale = torch.empty(-(-numel // block_numel), dtype=torch.float32, device=device)
        return cls(payload, scale, tuple(shape), format, block_numel)
