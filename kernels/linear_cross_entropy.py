"""The last linear layer and its cross-entropy, without the full logits (`linear_cross_entropy`).

    logits = hidden weight^T + bias,  loss as in `cross_entropy.py`,  d = the gradient of the loss by the logits
    dhidden = d weight         dweight = d^T hidden         dbias = sum over rows of d

Rows are processed in chunks. torch's matrix product writes a chunk's logits into a buffer that all chunks share. Their
gradient replaces them there, and the products above use it before the next chunk. So at most chunk_bytes are held, and
not rows x vocabulary. All of this happens in forward, so nothing is computed twice; backward multiplies by the incoming
gradient. Sources: arXiv 2410.10989, section 3.2; github.com/mgmalek/efficient_cross_entropy.

[Note: gradient in backward] In two cases the gradient must wait for backward. With reduction "none", each row has its
factor, which the sum over rows in dweight needs. In float16, the small gradients of a mean underflow without the loss
scale, which only backward knows. Then forward saves lse, a float32 per row, and backward recomputes the logits: a
fourth matrix product.

[Note: sum of dweight] Products of bfloat16 chunks are added up in float32. Error of dweight relative to float64, with
8192 rows, by the number of chunks (with a single chunk: 0.0018):

    chunks                              4        16       64
    added up in bfloat16              0.0027   0.0049   0.0104
    added up in float32               0.0018   0.0018   0.0018
    the same, of rounded products     0.0025   0.0025   0.0024

The last row is for devices whose matrix product cannot write float32 from bfloat16. The float32 sum takes 4 bytes per
element of weight during forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, Unpack

import torch
from torch import Tensor

from .cross_entropy import gradient_of_rows, losses_of_rows
from .dispatch import Backend, as_rows, form_of, has_autocast, product_dtype, uses_triton
from .loss_terms import LossOptions, LossTerms, check_label_range, check_labels_fit

_ROWS_MULTIPLE = 128  # height of a matrix product's tile
_COLUMNS_MULTIPLE = 16  # aligns the rows of the buffer for wide loads
_STRIP_BYTES = 16 * 2**20  # part of dweight that is added at a time if a product cannot add to float32


class LogitChunks:
    """The last linear layer and its input, (num_rows, n), in chunks of rows whose logits share memory."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, chunk_bytes: int
    ) -> None:
        """hidden: (..., n). dtype: of products and logits. chunk_bytes: maximum size of a chunk's logits."""
        self.hidden, self.dtype = as_rows(hidden), dtype
        self.weight, self.bias = weight.to(dtype), bias.to(dtype) if bias is not None else None
        self.num_rows, self.num_classes = self.hidden.shape[0], weight.shape[0]
        # Columns from num_classes on are padding.
        self._columns = -(-self.num_classes // _COLUMNS_MULTIPLE) * _COLUMNS_MULTIPLE
        # Chunks are of about equal size, of at most chunk_bytes unless a single row is larger: a small last product
        # would use the processors badly.
        most = max(1, chunk_bytes // (self._columns * dtype.itemsize))
        even = -(-self.num_rows // max(1, -(-self.num_rows // most)))
        rounded = -(-even // _ROWS_MULTIPLE) * _ROWS_MULTIPLE
        self.rows_per_chunk = max(1, min(rounded if rounded <= most else even, self.num_rows))

    @property
    def wide_dtype(self) -> torch.dtype:
        """The dtype of losses, of computations on a row, and of sums over chunks."""
        return torch.promote_types(self.dtype, torch.float32)

    def __iter__(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Iterate over rows, hidden, and logits, (rows, columns), in memory that the next chunk overwrites."""
        buffer = self.hidden.new_empty((self.rows_per_chunk, self._columns), dtype=self.dtype)
        for first in range(0, self.num_rows, self.rows_per_chunk):
            part = slice(first, min(first + self.rows_per_chunk, self.num_rows))
            hidden, logits = self.hidden[part].to(self.dtype), buffer[: part.stop - first]
            if self.bias is None:
                torch.mm(hidden, self.weight.t(), out=logits[:, : self.num_classes])
            else:
                torch.addmm(self.bias, hidden, self.weight.t(), out=logits[:, : self.num_classes])
            logits[:, self.num_classes :].fill_(float("-inf"))  # the previous chunk's gradient may be in the padding
            yield part, hidden, logits


class DlogitsSums:
    """Sums the gradients of hidden, weight and bias over chunks. A gradient that is not needed is None."""

    def __init__(self, chunks: LogitChunks, weight_dtype: torch.dtype, needed: tuple[bool, bool, bool]) -> None:
        of_hidden, of_weight, of_bias = needed
        self._chunks = chunks
        # A single chunk is rounded once, so it needs no wider dtype.
        self._is_whole = 0 < chunks.num_rows <= chunks.rows_per_chunk and weight_dtype == chunks.dtype
        self.hidden = torch.empty_like(chunks.hidden, memory_format=torch.contiguous_format) if of_hidden else None
        self.weight, self.bias = None, None
        if of_weight:
            make = torch.empty if self._is_whole else torch.zeros
            dtype = weight_dtype if self._is_whole else chunks.wide_dtype
            self.weight = make(chunks.weight.shape, dtype=dtype, device=chunks.weight.device)
        if of_bias:
            self.bias = chunks.weight.new_zeros(chunks.num_classes, dtype=chunks.wide_dtype)

    def add(self, part: slice, hidden: Tensor, logits: Tensor) -> None:
        """Add a chunk. hidden: (rows, n) of rows `part`; logits: (rows, columns), overwritten by their gradient."""
        dlogits = logits[:, : self._chunks.num_classes]
        # `out` of a product must have its dtype; under autocast hidden may be wider.
        if self.hidden is not None and self.hidden.dtype == dlogits.dtype:
            torch.mm(dlogits, self._chunks.weight, out=self.hidden[part])
        elif self.hidden is not None:
            self.hidden[part] = torch.mm(dlogits, self._chunks.weight)
        if self.weight is not None and self._is_whole:
            torch.mm(dlogits.t(), hidden, out=self.weight)
        elif self.weight is not None:
            add_product_(self.weight, dlogits, hidden)
        if self.bias is not None and (dlogits.device.type != "cpu" or self.bias.dtype == dlogits.dtype):
            self.bias += dlogits.sum(0, dtype=self.bias.dtype)
        elif self.bias is not None:  # on a CPU, sum(dtype=float32) would copy the chunk to float32
            add_product_(self.bias[:, None], dlogits, dlogits.new_ones(len(dlogits), 1))

    def finished(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients in the shapes and dtypes of the inputs. No chunk can be added afterwards."""
        of_hidden = self.hidden.view(hidden.shape) if self.hidden is not None else None
        of_weight = self.weight.to(weight.dtype) if self.weight is not None else None
        of_bias = self.bias.to(bias.dtype) if self.bias is not None and bias is not None else None
        return of_hidden, of_weight, of_bias


def add_product_(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Compute total += left^T right. total: (m, n); left: (rows, m) and right: (rows, n), not wider than total."""
    if total.dtype == left.dtype:
        total.addmm_(left.t(), right)
    # torch.addmm has out_dtype on CUDA only. There the product is not rounded to bfloat16.
    elif total.is_cuda and torch.version.hip is None and total.dtype == torch.float32:
        torch.addmm(total, left.t(), right, out_dtype=torch.float32, out=total)
    else:
        strip = max(1, _STRIP_BYTES // (right.shape[1] * right.dtype.itemsize))
        for first in range(0, total.shape[0], strip):
            total[first : first + strip] += torch.mm(left[:, first : first + strip].t(), right)


DEFAULT_CHUNK_BYTES = 512 * 2**20


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    backend: Backend = "auto",
    **options: Unpack[LossOptions],
) -> Tensor:
    """Compute `cross_entropy` of the logits hidden weight^T + bias, in float32 (float64 for float64 inputs).

    hidden: (..., n); weight: (vocabulary, n); bias: (vocabulary,); labels: (...), int64 or int32. weight and bias have
    the dtype of hidden, except under autocast, which multiplies in its dtype as in torch's linear layer.
    options: as in `cross_entropy`. chunk_bytes: maximum of held logits; at least a row is held.
    Computes gradients only for inputs that require them. Raises ValueError if shapes, dtypes or options do not fit, and
    RuntimeError for a second backward. Labels out of range are as in `cross_entropy`.
    """
    terms = LossTerms.of("linear_cross_entropy", options)
    dtype = product_dtype(hidden)
    _check(hidden, weight, bias, labels, dtype)
    if chunk_bytes <= 0:
        raise ValueError(f"linear_cross_entropy: expected chunk_bytes above 0, found {chunk_bytes}")
    on_triton = uses_triton(backend, "linear_cross_entropy", hidden, weight, bias, labels)
    if not on_triton:
        check_label_range("linear_cross_entropy", labels, weight.shape[0], terms.ignore_index)
    needs_gradient = torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in (hidden, weight, bias)
    )
    given = hidden, weight, bias, labels, terms, on_triton, dtype, chunk_bytes, needs_gradient
    return _LinearCrossEntropy.apply(*given)  # type: ignore[no-untyped-call, no-any-return]


def _check(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, dtype: torch.dtype) -> None:
    check_labels_fit("linear_cross_entropy", "hidden", form_of(hidden), form_of(labels))
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1] or not weight.shape[0]:
        raise ValueError(
            f"linear_cross_entropy: expected weight of shape (vocabulary, {hidden.shape[-1]}), as the last dimension "
            f"of hidden, {tuple(hidden.shape)}; found {tuple(weight.shape)}"
        )
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        raise ValueError(
            f"linear_cross_entropy: expected bias of shape ({weight.shape[0]},), the vocabulary of weight, "
            f"{tuple(weight.shape)}; found {tuple(bias.shape)}"
        )
    is_cast = has_autocast(hidden)
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is None or tensor.dtype == hidden.dtype:
            continue
        if not is_cast or not tensor.is_floating_point() or torch.float64 in (tensor.dtype, hidden.dtype):
            raise ValueError(
                f"linear_cross_entropy: expected {name} in {hidden.dtype}, the dtype of hidden, found {tensor.dtype}; "
                "convert a tensor, or use torch.autocast"
            )


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        terms: LossTerms,
        on_triton: bool,
        dtype: torch.dtype,
        chunk_bytes: int,
        needs_gradient: bool,
    ) -> Tensor:
        """dtype: of products and logits."""
        flat_labels = labels.reshape(-1).contiguous()
        divisor = terms.divisor(flat_labels)
        # [Note: gradient in backward]
        is_late = needs_gradient and (terms.reduction == "none" or dtype == torch.float16)
        sums, scale = None, None
        chunks = LogitChunks(hidden, weight, bias, dtype, chunk_bytes)
        if needs_gradient and not is_late:
            sums = DlogitsSums(chunks, weight.dtype, ctx.needs_input_grad[:3])
            # As if the incoming gradient were 1. Backward multiplies by that gradient.
            scale = terms.scale_of_rows(torch.ones((), dtype=chunks.wide_dtype, device=hidden.device), divisor)
        losses, lse = _losses_of(chunks, flat_labels, terms, on_triton, scale, sums)
        ctx.how, ctx.is_late, ctx.spent = (terms, on_triton, dtype, chunk_bytes), is_late, False
        if is_late:
            ctx.save_for_backward(hidden, weight, bias, flat_labels, lse, divisor)
        elif sums is not None:
            ctx.save_for_backward(*sums.finished(hidden, weight, bias))
        return terms.reduced(losses, divisor, labels.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.is_late:
            return *_late_gradients(ctx, dloss), *(None,) * 6
        if ctx.spent:
            raise RuntimeError(
                "linear_cross_entropy: expected a single backward, found a second; the first has returned the "
                "gradients that forward computed: call linear_cross_entropy again"
            )
        ctx.spent = True
        # The saved gradients are returned themselves, so a second backward would scale them twice.
        gradients, on_triton = ctx.saved_tensors, ctx.how[1]
        for gradient in gradients:
            if gradient is not None:
                _scale_(gradient, dloss, on_triton)
        return *gradients, *(None,) * 6


def _late_gradients(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
    hidden, weight, bias, labels, lse, divisor = ctx.saved_tensors
    terms, on_triton, dtype, chunk_bytes = ctx.how
    # Products have the same dtype as in forward.
    with torch.autocast(hidden.device.type, enabled=False) if has_autocast(hidden) else nullcontext():
        chunks = LogitChunks(hidden, weight, bias, dtype, chunk_bytes)
        sums = DlogitsSums(chunks, weight.dtype, ctx.needs_input_grad[:3])
        _add_gradients(sums, chunks, labels, lse, terms.scale_of_rows(dloss, divisor), terms, on_triton)
    return sums.finished(hidden, weight, bias)


# The loops are functions, so that the last chunk is freed when they return.


def _losses_of(
    chunks: LogitChunks,
    labels: Tensor,
    terms: LossTerms,
    on_triton: bool,
    scale: Tensor | None,
    sums: DlogitsSums | None,
) -> tuple[Tensor, Tensor]:
    """Compute losses and lse of all rows, (num_rows,). Adds scale, (), times the gradients to sums if given."""
    losses, lse = (chunks.hidden.new_empty(chunks.num_rows, dtype=chunks.wide_dtype) for _ in range(2))
    for part, rows, logits in chunks:
        losses[part], lse[part] = losses_of_rows(logits, chunks.num_classes, labels[part], terms, on_triton, scale)
        if sums is not None:
            sums.add(part, rows, logits)
    return losses, lse


def _add_gradients(
    sums: DlogitsSums,
    chunks: LogitChunks,
    labels: Tensor,
    lse: Tensor,
    scale: Tensor,
    terms: LossTerms,
    on_triton: bool,
) -> None:
    """Add scale, () or (num_rows,), times the gradient of each row's loss to sums."""
    scale = scale.expand(chunks.num_rows)
    for part, rows, logits in chunks:
        given = labels[part], lse[part], scale[part], terms, on_triton
        gradient_of_rows(logits, chunks.num_classes, *given, logits)
        sums.add(part, rows, logits)


def _scale_(gradient: Tensor, dloss: Tensor, on_triton: bool) -> None:
    if on_triton:
        from .triton import cross_entropy as triton_form

        triton_form.scale_(gradient, dloss)
    else:
        gradient.mul_(dloss)
