"""Launches of messages of quantized blocks, there and back."""

import torch

from lowtide.kernels.quantized_blocks import quantized_bytes
from lowtide.kernels.triton import quantized_blocks
from lowtide.kernels.weight_rounding import Rounding

NUMEL = 1 << 20


def there(dtype: torch.dtype, bits: int, is_drawn: bool, has_less: bool, numel: int = NUMEL) -> None:
    values = torch.empty(numel, dtype=dtype, device="meta")
    message = torch.empty(quantized_bytes(numel, bits), dtype=torch.uint8, device="meta")
    less = torch.empty_like(values) if has_less else None
    quantized_blocks.quantize(values, bits, message, less, Rounding(1, 0) if is_drawn else None, 3)


def back(dtype: torch.dtype, bits: int, adds: bool, numel: int = NUMEL) -> None:
    message = torch.empty(quantized_bytes(numel, bits), dtype=torch.uint8, device="meta")
    quantized_blocks.dequantize(message, bits, torch.empty(numel, dtype=dtype, device="meta"), adds)


CASES = {
    "gradients, 4 bits": lambda dtype: there(dtype, 4, True, False),
    "gradients, 8 bits": lambda dtype: there(dtype, 8, True, False),
    "weights, 8 bits": lambda dtype: there(dtype, 8, False, False, 128),
    "differences, 4 bits": lambda dtype: there(dtype, 4, False, True),
    "sum, 4 bits": lambda dtype: back(dtype, 4, True),
    "weights back, 8 bits": lambda dtype: back(dtype, 8, False, 128),
}
