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
element of weight during forward; `accumulate_dtype` avoids it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal, Unpack, overload

import torch
from torch import Tensor

from .cross_entropy import gradient_of_rows, losses_of_rows
from .dispatch import Backend, as_rows, form_of, has_autocast, product_dtype, uses_triton
from .loss_terms import LossOptions, LossTerms, check_label_range, check_labels_fit

_ROWS_MULTIPLE = 128  # height of a matrix product's tile
_COLUMNS_MULTIPLE = 16  # aligns the rows of the buffer for wide loads
_STRIP_BYTES = 16 * 2**20  # part of dweight that is added at a time if a product cannot add to float32


@dataclass(frozen=True)
class Head:
    """The last linear layer and its input, with weight and bias in the dtype of products."""

    hidden: Tensor  # (num_rows, n), in the input's dtype
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
    """Computes the loss chunk by chunk: sizes, dtypes and form of a chunk."""

    terms: LossTerms
    on_triton: bool
    dtype: torch.dtype  # of products and logits
    sum_dtype: torch.dtype  # of sums over chunks
    chunk_bytes: int  # maximum size of a chunk's logits

    @property
    def wide_dtype(self) -> torch.dtype:
        """The dtype of losses and of computations on a row."""
        return torch.promote_types(self.dtype, torch.float32)

    def columns(self, num_classes: int) -> int:
        """Return the number of columns of the buffer. Columns from num_classes on are padding."""
        return -(-num_classes // _COLUMNS_MULTIPLE) * _COLUMNS_MULTIPLE

    def rows_per_chunk(self, num_rows: int, num_classes: int) -> int:
        """Choose chunks of about equal size, of at most chunk_bytes unless a single row is larger."""
        most = max(1, self.chunk_bytes // (self.columns(num_classes) * self.dtype.itemsize))
        # Equal chunks: a small last product would use the processors badly.
        even = -(-num_rows // max(1, -(-num_rows // most)))
        rounded = -(-even // _ROWS_MULTIPLE) * _ROWS_MULTIPLE
        return max(1, min(rounded if rounded <= most else even, num_rows))

    def num_chunks(self, head: Head) -> int:
        return -(-head.num_rows // self.rows_per_chunk(head.num_rows, head.num_classes))

    def forward(
        self, head: Head, labels: Tensor, scale: Tensor | None, sums: DlogitsSums | None
    ) -> tuple[Tensor, Tensor]:
        """Compute losses and lse of all rows, (num_rows,). Adds scale, (), times the gradients to sums if given."""
        losses, lse = (head.hidden.new_empty(head.num_rows, dtype=self.wide_dtype) for _ in range(2))
        for part, hidden, logits in self._logits(head):
            losses[part], lse[part] = losses_of_rows(
                logits, head.num_classes, labels[part], self.terms, self.on_triton, scale
            )
            if sums is not None:
                sums.add(part, hidden, logits[:, : head.num_classes])
        return losses, lse

    def backward(self, head: Head, labels: Tensor, lse: Tensor, scale: Tensor, sums: DlogitsSums) -> None:
        """Add scale, () or (num_rows,), times the gradient of each row's loss to sums. lse: from forward."""
        scale = scale.expand(head.num_rows)
        for part, hidden, logits in self._logits(head):
            gradient_of_rows(
                logits, head.num_classes, labels[part], lse[part], scale[part], self.terms, self.on_triton, logits
            )
            sums.add(part, hidden, logits[:, : head.num_classes])

    def _logits(self, head: Head) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Iterate over chunks: rows, hidden, and logits, (rows, columns), in memory that the next chunk overwrites."""
        rows_per_chunk = self.rows_per_chunk(head.num_rows, head.num_classes)
        buffer = head.hidden.new_empty((rows_per_chunk, self.columns(head.num_classes)), dtype=self.dtype)
        for first in range(0, head.num_rows, rows_per_chunk):
            part = slice(first, min(first + rows_per_chunk, head.num_rows))
            hidden, logits = head.hidden[part].to(self.dtype), buffer[: part.stop - first]
            if head.bias is None:
                torch.mm(hidden, head.weight.t(), out=logits[:, : head.num_classes])
            else:
                torch.addmm(head.bias, hidden, head.weight.t(), out=logits[:, : head.num_classes])
            logits[:, head.num_classes :].fill_(float("-inf"))  # the previous chunk's gradient may be in the padding
            yield part, hidden, logits


class DlogitsSums:
    """Sums the gradients of hidden, weight and bias over chunks. A gradient that is not needed is None."""

    def __init__(
        self, head: Head, weight_dtype: torch.dtype, needed: tuple[bool, bool, bool], chunks: LogitChunks
    ) -> None:
        of_hidden, of_weight, of_bias = needed
        self._head = head
        # A single chunk is rounded once, so it needs no wider dtype.
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
        """Add a chunk. hidden: (rows, n) and dlogits: (rows, num_classes) of rows `part`, in the dtype of products."""
        # `out` of a product must have its dtype; under autocast hidden may be wider.
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


@overload
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = ...,
    *,
    return_z_loss: Literal[False] = ...,
    chunk_bytes: int = ...,
    accumulate_dtype: torch.dtype | None = ...,
    backend: Backend = ...,
    **options: Unpack[LossOptions],
) -> Tensor: ...


@overload
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = ...,
    *,
    return_z_loss: Literal[True],
    chunk_bytes: int = ...,
    accumulate_dtype: torch.dtype | None = ...,
    backend: Backend = ...,
    **options: Unpack[LossOptions],
) -> tuple[Tensor, Tensor]: ...


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    return_z_loss: bool = False,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    accumulate_dtype: torch.dtype | None = None,
    backend: Backend = "auto",
    **options: Unpack[LossOptions],
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute `cross_entropy` of the logits hidden weight^T + bias, in float32 (float64 for float64 inputs).

    hidden: (..., n); weight: (vocabulary, n); bias: (vocabulary,); labels: (...), int64 or int32. weight and bias have
    the dtype of hidden, except under autocast, which multiplies in its dtype as in torch's linear layer.
    options, return_z_loss: as in `cross_entropy`. chunk_bytes: maximum of held logits; at least a row is held.
    accumulate_dtype: of the sum of dweight over chunks. None: float32 (float64 for float64 inputs). The dtype of weight
    saves memory and loses precision, see [Note: sum of dweight].
    Computes gradients only for inputs that require them. Raises ValueError if shapes, dtypes or options do not fit, and
    RuntimeError for a second backward. Labels out of range are as in `cross_entropy`.
    """
    terms = LossTerms.of("linear_cross_entropy", options)
    dtype = product_dtype(hidden)
    _check(hidden, weight, bias, labels, dtype)
    if chunk_bytes <= 0:
        raise ValueError(f"linear_cross_entropy: expected chunk_bytes above 0, found {chunk_bytes}")
    sum_dtype = accumulate_dtype or torch.promote_types(dtype, torch.float32)
    if sum_dtype not in (weight.dtype, torch.promote_types(dtype, torch.float32)):
        raise ValueError(
            f"linear_cross_entropy: expected accumulate_dtype None, torch.float32 or {weight.dtype}, the dtype of "
            f"weight, found {accumulate_dtype}"
        )
    on_triton = uses_triton(backend, "linear_cross_entropy", hidden, weight, bias, labels)
    if not on_triton:
        check_label_range("linear_cross_entropy", labels, weight.shape[0], terms.ignore_index)
    needs_gradient = torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in (hidden, weight, bias)
    )
    chunks = LogitChunks(terms, on_triton, dtype, sum_dtype, chunk_bytes)
    given = hidden, weight, bias, labels, chunks, needs_gradient, return_z_loss
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
        chunks: LogitChunks,
        needs_gradient: bool,
        returns_z: bool,
    ) -> Tensor | tuple[Tensor, Tensor]:
        terms, flat_labels = chunks.terms, labels.reshape(-1).contiguous()
        divisor = terms.divisor(flat_labels)
        # [Note: gradient in backward]
        is_late = needs_gradient and (terms.reduction == "none" or chunks.dtype == torch.float16)
        sums, scale = None, None
        head = Head.cast(as_rows(hidden), weight, bias, chunks.dtype)
        if needs_gradient and not is_late:
            sums = DlogitsSums(head, weight.dtype, ctx.needs_input_grad[:3], chunks)
            # As if the incoming gradient were 1. Backward multiplies by that gradient.
            scale = terms.scale_of_rows(torch.ones((), dtype=chunks.wide_dtype, device=hidden.device), divisor)
        losses, lse = chunks.forward(head, flat_labels, scale, sums)
        ctx.chunks, ctx.is_late, ctx.spent = chunks, is_late, False
        if is_late:
            ctx.save_for_backward(hidden, weight, bias, flat_labels, lse, divisor)
        elif sums is not None:
            ctx.save_for_backward(*sums.finished(hidden, weight, bias))
        loss = terms.reduced(losses, divisor, labels.shape)
        if not returns_z:
            return loss
        reduced_z = terms.reduced(terms.z_loss * lse.square(), divisor, labels.shape)
        ctx.mark_non_differentiable(reduced_z)
        ctx.set_materialize_grads(False)
        return loss, reduced_z

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dloss: Tensor | None, _dz: None = None) -> tuple[Tensor | None, ...]:
        if dloss is None:
            return (None,) * 7
        if ctx.is_late:
            return *_late_gradients(ctx, dloss), None, None, None, None
        if ctx.spent:
            raise RuntimeError(
                "linear_cross_entropy: expected a single backward, found a second; the first has returned the "
                "gradients that forward computed: call linear_cross_entropy again"
            )
        ctx.spent = True
        # The saved gradients are returned themselves, so a second backward would scale them twice.
        gradients = ctx.saved_tensors
        for gradient in gradients:
            if gradient is not None:
                _scale_(gradient, dloss, ctx.chunks.on_triton)
        return *gradients, None, None, None, None


def _late_gradients(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
    hidden, weight, bias, labels, lse, divisor = ctx.saved_tensors
    chunks: LogitChunks = ctx.chunks
    # Products have the same dtype as in forward.
    with torch.autocast(hidden.device.type, enabled=False) if has_autocast(hidden) else nullcontext():
        head = Head.cast(as_rows(hidden), weight, bias, chunks.dtype)
        sums = DlogitsSums(head, weight.dtype, ctx.needs_input_grad[:3], chunks)
        chunks.backward(head, labels, lse, chunks.terms.scale_of_rows(dloss, divisor), sums)
    return sums.finished(hidden, weight, bias)


def _scale_(gradient: Tensor, dloss: Tensor, on_triton: bool) -> None:
    if on_triton:
        from .triton import cross_entropy as triton_form

        triton_form.scale_(gradient, dloss)
    else:
        gradient.mul_(dloss)
