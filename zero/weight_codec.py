"""How weights are written for their way to other ranks, and read there."""

from __future__ import annotations

import torch
from torch import Tensor

from ..comm import Axis, Pending
from ..kernels.quantized_blocks import dequantize, quantize, quantized_bytes


class WeightCodec:
    """Weights go as they are: what comes is put where it is used, without a copy."""

    is_exact = True
    """Whether others get the very bits of a shard."""

    def gather(self, axis: Axis, full: Tensor, part: Tensor, what: str) -> Pending:
        """full[part of q] = the `part` of rank q, for every q. full: (size * part.numel(),)."""
        return axis.route.gather(full, part, what)

    def refresh(self, axis: Axis, full: Tensor, part: Tensor, what: str) -> Pending:
        """As `gather`, where `full` has what was gathered before."""
        return self.gather(axis, full, part, what)


class QuantizedWeights(WeightCodec):
    """Weights go in blocks of few bits, rounded to the nearest; whoever sends takes what the others get.

    gather:    full = Q(part)                       each time anew: nothing adds up
    refresh:   full = full + Q(part - full)         what one message lacks is in the next one's difference

    So `full` is the same on all ranks, and the error of a refresh is that of its last difference alone. That is error
    feedback, whose memory is the rank's own part beside `full`. Sources: qwZ of ZeRO++, arXiv 2306.10209, section 3.1;
    weight differences of SDP4Bit, arXiv 2410.15526, section 3.1.
    """

    is_exact = False

    def __init__(self, bits: int) -> None:
        self._bits = bits

    def gather(self, axis: Axis, full: Tensor, part: Tensor, what: str) -> Pending:
        return self._sent(axis, full, part, None, what)

    def refresh(self, axis: Axis, full: Tensor, part: Tensor, what: str) -> Pending:
        return self._sent(axis, full, part, full.view(axis.size, -1)[axis.place], what)

    def _sent(self, axis: Axis, full: Tensor, part: Tensor, less: Tensor | None, what: str) -> Pending:
        nbytes = quantized_bytes(part.numel(), self._bits)
        messages = torch.empty(axis.size * nbytes, dtype=torch.uint8, device=part.device)
        own = messages.view(axis.size, nbytes)[axis.place]
        quantize(part, self._bits, own, less=less)
        pending = axis.route.gather(messages, own, what)

        def collect() -> None:
            pending.wait()
            for message, values in zip(messages.view(axis.size, nbytes), full.view(axis.size, -1), strict=True):
                dequantize(message, self._bits, values, adds=less is not None)

        return Pending(collect)
