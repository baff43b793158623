"""Launches of block-wise quantization."""

from itertools import product

import torch

from lowtide.kernels.quantize import Format, Quantized
from lowtide.kernels.triton import quantize

SIZE = 1 << 16


def there(dtype: torch.dtype, format: Format, block_numel: int, seed: int | None) -> None:
    out = Quantized.empty((SIZE,), format, block_numel, "meta")
    quantize.quantize(torch.empty(SIZE, dtype=dtype, device="meta"), out, seed, 0)


def back(dtype: torch.dtype, format: Format, block_numel: int, accumulate: bool) -> None:
    quantized = Quantized.empty((SIZE,), format, block_numel, "meta")
    quantize.dequantize(quantized, torch.empty(SIZE, dtype=dtype, device="meta"), accumulate)


FORMATS: tuple[Format, ...] = ("int8", "int4", "nf4")
CASES = {
    **{
        f"{format}, blocks of {block_numel}, seed {seed}": lambda dtype, args=(format, block_numel, seed): there(
            dtype, *args
        )
        for format, block_numel, seed in product(FORMATS, (64, 2048), (None, 5))
    },
    **{
        f"{format}, blocks of {block_numel}, back{', to add' if adds else ''}": (
            lambda dtype, args=(format, block_numel, adds): back(dtype, *args)
        )
        for format, block_numel, adds in product(FORMATS, (64, 2048), (False, True))
    },
}
