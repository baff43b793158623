"""Logits a chunk of rows at a time, and the gradients that each chunk's part is added to.

[Note: sum of dweight] Products of bfloat16 chunks are added up in float32. The error of dweight relative to float64,
8192 rows, by the number of chunks (one, as without chunks: 0.0018):

    chunks                              4        16       64
    added up in bfloat16              0.0027   0.0049   0.0104
    added up in float32               0.0018   0.0018   0.0018
    the same, of rounded products     0.0025   0.0025   0.0024

The last row is for devices whose matrix product cannot write float32 from bfloat16. It costs 4 bytes an element of
weight during forward; `accumulate_dtype` can have them back.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .cross_entropy import gradient_of_rows, losses_of_rows
from .loss_terms import LossTerms

_ROWS_MULTIPLE = 128  # tiles of a matrix product are that high
_COLUMNS_MULTIPLE = 16  # rows of the buffer begin where wide loads can
_STRIP_BYTES = 16 * 2**20  # of dweight that are added at once where a product cannot add to float32 itself


@dataclass(frozen=True)
class Head:
    """The last linear layer and its input; weight and bias as products take them."""

    hidden: Tensor  # (num_rows, n), in the dtype of the input
    weight: Tensor  # (num_classes, n)
    bias: Tensor | None  # (num_classes,)

    @classmethod
    def cast(cls, hidden: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Head:
        return cls(hidden, weight.to(dtype), bias.to(dtype) if bias is not None else None)

    @property
    def num_rows(self) -> int:
        return self.hidden.shape[0]

    @property
    def num_classes(self) -> int:
        return self.weight.shape[0]


@dataclass(frozen=True)
class LogitChunks:
    """How rows are cut, and in which form and dtypes a chunk is computed."""

    terms: LossTerms
    on_triton: bool
    dtype: torch.dtype  # of products and logits
    sum_dtype: torch.dtype  # of what chunks add up to
    chunk_bytes: int  # bound of a chunk's logits

    @property
    def wide_dtype(self) -> torch.dtype:
        """Of losses and of all that is computed for a row."""
        return torch.promote_types(self.dtype, torch.float32)

    def columns(self, num_classes: int) -> int:
        """Of the buffer: those past num_classes are padding."""
        return -(-num_classes // _COLUMNS_MULTIPLE) * _COLUMNS_MULTIPLE

    def rows_per_chunk(self, num_rows: int, num_classes: int) -> int:
        """Chunks are of about one size, and none is above chunk_bytes, except of a single row."""
        most = max(1, self.chunk_bytes // (self.columns(num_classes) * self.dtype.itemsize))
        even = -(-num_rows // max(1, -(-num_rows // most)))
        rounded = -(-even // _ROWS_MULTIPLE) * _ROWS_MULTIPLE
        return max(1, min(rounded if rounded <= most else even, num_rows))

    def num_chunks(self, head: Head) -> int:
        return -(-head.num_rows // self.rows_per_chunk(head.num_rows, head.num_classes))

    def forward(
        self, head: Head, labels: Tensor, scale: Tensor | None, sums: DlogitsSums | None
    ) -> tuple[Tensor, Tensor]:
        """Losses and lse of all rows, (num_rows,). Adds scale, (), times the gradients to sums where both are given."""
        losses, lse = (head.hidden.new_empty(head.num_rows, dtype=self.wide_dtype) for _ in range(2))
        for part, hidden, logits in self._logits(head):
            losses[part], lse[part] = losses_of_rows(
                logits, head.num_classes, labels[part], self.terms, self.on_triton, scale
            )
            if sums is not None:
                sums.add(part, hidden, logits[:, : head.num_classes])
        return losses, lse

    def backward(self, head: Head, labels: Tensor, lse: Tensor, scale: Tensor, sums: DlogitsSums) -> None:
        """Adds the gradients to sums, of each row scale, () or (num_rows,), times its loss's. lse: from forward."""
        scale = scale.expand(head.num_rows)
        for part, hidden, logits in self._logits(head):
            gradient_of_rows(
                logits, head.num_classes, labels[part], lse[part], scale[part], self.terms, self.on_triton, logits
            )
            sums.add(part, hidden, logits[:, : head.num_classes])

    def _logits(self, head: Head) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Of each chunk: its rows, its hidden, and its logits, (rows, columns), in memory that the next one takes."""
        rows_per_chunk = self.rows_per_chunk(head.num_rows, head.num_classes)
        buffer = head.hidden.new_empty((rows_per_chunk, self.columns(head.num_classes)), dtype=self.dtype)
        for first in range(0, head.num_rows, rows_per_chunk):
            part = slice(first, min(first + rows_per_chunk, head.num_rows))
            hidden, logits = head.hidden[part].to(self.dtype), buffer[: part.stop - first]
            if head.bias is None:
                torch.mm(hidden, head.weight.t(), out=logits[:, : head.num_classes])
            else:
                torch.addmm(head.bias, hidden, head.weight.t(), out=logits[:, : head.num_classes])
            logits[:, head.num_classes :].fill_(float("-inf"))
            yield part, hidden, logits


class DlogitsSums:
    """The gradients of hidden, weight and bias, each None unless needed, from the gradient of the logits by chunks."""

    def __init__(
        self, head: Head, weight_dtype: torch.dtype, needed: tuple[bool, bool, bool], chunks: LogitChunks
    ) -> None:
        of_hidden, of_weight, of_bias = needed
        self._head = head
        # One chunk is rounded once, in whatever dtype it is summed.
        self._is_whole = chunks.num_chunks(head) == 1 and weight_dtype == chunks.dtype
        self.hidden = torch.empty_like(head.hidden, memory_format=torch.contiguous_format) if of_hidden else None
        self.weight, self.bias = None, None
        if of_weight:
            make = torch.empty if self._is_whole else torch.zeros
            dtype = weight_dtype if self._is_whole else chunks.sum_dtype
            self.weight = make(head.weight.shape, dtype=dtype, device=head.weight.device)
        if of_bias:
            self.bias = head.weight.new_zeros(head.num_classes, dtype=chunks.wide_dtype)

    def add(self, part: slice, hidden: Tensor, dlogits: Tensor) -> None:
        """hidden: (rows, n) and dlogits: (rows, num_classes) of the rows `part`, in the dtype of products."""
        if self.hidden is not None and self.hidden.dtype == dlogits.dtype:
            torch.mm(dlogits, self._head.weight, out=self.hidden[part])
        elif self.hidden is not None:
            self.hidden[part] = torch.mm(dlogits, self._head.weight)
        if self.weight is not None and self._is_whole:
            torch.mm(dlogits.t(), hidden, out=self.weight)
        elif self.weight is not None:
            add_product_(self.weight, dlogits, hidden)
        if self.bias is not None and (dlogits.device.type != "cpu" or self.bias.dtype == dlogits.dtype):
            self.bias += dlogits.sum(0, dtype=self.bias.dtype)
        elif self.bias is not None:  # on a CPU such a sum would copy the chunk to float32
            add_product_(self.bias[:, None], dlogits, dlogits.new_ones(len(dlogits), 1))

    def finished(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor | None, ...]:
        """The three, in the shapes and dtypes of those that they are gradients of. Nothing can be added after."""
        of_hidden = self.hidden.view(hidden.shape) if self.hidden is not None else None
        of_weight = self.weight.to(weight.dtype) if self.weight is not None else None
        of_bias = self.bias.to(bias.dtype) if self.bias is not None and bias is not None else None
        return of_hidden, of_weight, of_bias


def add_product_(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total, (m, n), += left^T right, of left: (rows, m) and right: (rows, n) in a dtype as wide or narrower."""
    if total.dtype == left.dtype:
        total.addmm_(left.t(), right)
    elif total.is_cuda and torch.version.hip is None and total.dtype == torch.float32:
        torch.addmm(total, left.t(), right, out_dtype=torch.float32, out=total)
    else:
        strip = max(1, _STRIP_BYTES // (right.shape[1] * right.dtype.itemsize))
        for first in range(0, total.shape[0], strip):
            total[first : first + strip] += torch.mm(left[:, first : first + strip].t(), right)
