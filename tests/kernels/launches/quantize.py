"""Launches of block-wise quantization."""

import torch

from lowtide.kernels.quantized import Format, Quantized
from lowtide.kernels.triton import quantize


def there(format: Format, block_numel: int, dtype: torch.dtype, seed: int | None = None, size: int = 1 << 16) -> None:
    out = Quantized.empty((size,), format, block_numel, "meta")
    quantize.quantize(torch.empty(size, dtype=dtype, device="meta"), out, seed, 0)


def back(format: Format, block_numel: int, dtype: torch.dtype, adds: bool = False, size: int = 1 << 16) -> None:
    quantized = Quantized.empty((size,), format, block_numel, "meta")
    quantize.dequantize(quantized, torch.empty(size, dtype=dtype, device="meta"), adds)


CASES = {
    "int8": lambda dtype: there("int8", 2048, dtype),
    "int8, at random": lambda dtype: there("int8", 64, dtype, seed=5),
    "int4": lambda dtype: there("int4", 64, dtype),
    "int4, at random": lambda dtype: there("int4", 2048, dtype, seed=-5),
    "nf4": lambda dtype: there("nf4", 64, dtype),
    "nf4, at random": lambda dtype: there("nf4", 2048, dtype, seed=5),
    "nf4, more than 2^32 elements": lambda dtype: there("nf4", 64, dtype, seed=5, size=1 << 33),
    "int8, one element": lambda dtype: there("int8", 64, dtype, seed=1, size=1),
    "int8, back": lambda dtype: back("int8", 64, dtype),
    "int8, back, more than 2^32 elements": lambda dtype: back("int8", 2048, dtype, size=1 << 33),
    "int8, back, added": lambda dtype: back("int8", 2048, dtype, adds=True),
    "int4, back": lambda dtype: back("int4", 64, dtype),
    "nf4, back": lambda dtype: back("nf4", 2048, dtype),
    "nf4, back, added": lambda dtype: back("nf4", 64, dtype, adds=True),
    "nf4, back, one element": lambda dtype: back("nf4", 64, dtype, size=1),
}
NOT_VECTORIZED = {
    "int8, one element": "there are no 16 bytes",
    "nf4, back, one element": "there are no 16 bytes",
    "int4, back": "4 bytes of codes are the 16 bytes and more that a thread writes",
    "nf4, back": "4 bytes of codes are the 16 bytes and more that a thread writes",
}
