"""The last linear layer and its cross-entropy, without ever holding the logits.

    logits = hidden weight^T + bias,  loss as in `cross_entropy.py`,  d = the gradient of the loss by the logits
    dhidden = d weight         dweight = d^T hidden         dbias = sum over rows of d

Rows are taken in chunks. A chunk's logits are computed by torch's matrix product into one buffer that all chunks share,
replaced there by their gradient, and used up by the products above before the next chunk: instead of rows x vocabulary,
at most chunk_bytes are held. All of it is done in forward, so that nothing is computed twice; backward multiplies by
the gradient that comes from above. Sources: arXiv 2410.10989, section 3.2; github.com/mgmalek/efficient_cross_entropy.

[Note: gradient in backward] Two losses cannot have their gradient before backward: with reduction "none" each row has a
factor of its own, which the sum over rows in dweight would need, and float16 loses the gradients of a mean, which are
small, unless the loss scale that backward brings is in them. There, forward saves lse, one float32 a row, and backward
computes the logits again: a fourth matrix product beside three.
"""

from __future__ import annotations

from typing import Any, Literal, Unpack, overload

import torch
from torch import Tensor

from .dispatch import Backend, uses_triton
from .logit_chunks import DlogitsSums, Head, LogitChunks
from .loss_terms import LossOptions, LossTerms, check_label_range, check_labels_fit
from .rows import as_rows

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
    """`cross_entropy` of the logits hidden weight^T + bias, in float32 (float64 for float64 inputs).

    hidden: (..., n); weight: (vocabulary, n) and bias: (vocabulary,), of the dtype of hidden, except under autocast,
    which multiplies in its own dtype as torch's linear layer does; labels: (...), int64 or int32. The options and
    return_z_loss are those of `cross_entropy`. chunk_bytes: bound of the logits that are held at once; at least one
    row is. accumulate_dtype: in which chunks of dweight are added up, None for float32 (float64 for float64 inputs);
    the dtype of weight saves memory and loses precision, see [Note: sum of dweight] in logit_chunks.py.

    Computes gradients only of what requires them. Raises ValueError where shapes, dtypes or options do not fit, and
    RuntimeError for a second backward through one forward; labels out of range are as in `cross_entropy`.
    """
    terms = LossTerms.of("linear_cross_entropy", options)
    dtype = _product_dtype(hidden)
    _check(hidden, weight, bias, labels, dtype)
    if chunk_bytes <= 0:
        raise ValueError(f"linear_cross_entropy: expected chunk_bytes above 0, found {chunk_bytes}")
    sum_dtype = accumulate_dtype or torch.promote_types(dtype, torch.float32)
    if sum_dtype not in (weight.dtype, torch.promote_types(dtype, torch.float32)):
        raise ValueError(
            f"linear_cross_entropy: expected accumulate_dtype to be None, torch.float32 or the dtype of weight, "
            f"{weight.dtype}; found {accumulate_dtype}"
        )
    on_triton = uses_triton(backend, "linear_cross_entropy", hidden, weight, bias, labels)
    if not on_triton:
        check_label_range("linear_cross_entropy", labels, weight.shape[0], terms.ignore_index)
    needs_gradient = torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in (hidden, weight, bias)
    )
    chunks = LogitChunks(terms, on_triton, dtype, sum_dtype, chunk_bytes)
    loss, reduced_z = _LinearCrossEntropy.apply(hidden, weight, bias, labels, chunks, needs_gradient)  # type: ignore[no-untyped-call]
    return (loss, reduced_z) if return_z_loss else loss


def _product_dtype(hidden: Tensor) -> torch.dtype:
    """That of torch's linear layer: of its inputs, or under autocast, which leaves float64 alone, of autocast."""
    if _is_cast(hidden) and hidden.dtype != torch.float64:
        return torch.get_autocast_dtype(hidden.device.type)
    return hidden.dtype


def _is_cast(hidden: Tensor) -> bool:
    """Of the meta device, on which a planner runs a model, torch knows no autocast."""
    return not hidden.is_meta and torch.is_autocast_enabled(hidden.device.type)


def _check(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, dtype: torch.dtype) -> None:
    check_labels_fit("linear_cross_entropy", "hidden", hidden, labels)
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
    is_cast = _is_cast(hidden)
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is None or tensor.dtype == hidden.dtype:
            continue
        if not is_cast or not tensor.is_floating_point() or torch.float64 in (tensor.dtype, hidden.dtype):
            raise ValueError(
                f"linear_cross_entropy: expected {name} of the dtype of hidden, {hidden.dtype}, found {tensor.dtype}; "
                "convert one of them, or use torch.autocast"
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
    ) -> tuple[Tensor, Tensor]:
        terms, flat_labels = chunks.terms, labels.reshape(-1).contiguous()
        divisor = terms.divisor(flat_labels)
        is_late = needs_gradient and (terms.reduction == "none" or chunks.dtype == torch.float16)
        sums, scale = None, None
        head = Head.cast(as_rows(hidden), weight, bias, chunks.dtype)
        if needs_gradient and not is_late:
            sums = DlogitsSums(head, weight.dtype, ctx.needs_input_grad[:3], chunks)
            scale = terms.scale_of_rows(torch.ones((), dtype=chunks.wide_dtype, device=hidden.device), divisor)
        losses, lse = chunks.forward(head, flat_labels, scale, sums)
        ctx.chunks, ctx.is_late, ctx.spent = chunks, is_late, False
        if is_late:
            ctx.save_for_backward(hidden, weight, bias, flat_labels, lse, divisor)
        elif sums is not None:
            ctx.save_for_backward(*sums.finished(hidden, weight, bias))
        reduced_z = terms.reduced(terms.z_loss * lse.square(), divisor, labels.shape)
        ctx.mark_non_differentiable(reduced_z)
        ctx.set_materialize_grads(False)
        return terms.reduced(losses, divisor, labels.shape), reduced_z

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dloss: Tensor | None, _dz: None) -> tuple[Tensor | None, ...]:
        if dloss is None:
            return None, None, None, None, None, None
        if ctx.is_late:
            return *_late_gradients(ctx, dloss), None, None, None
        if ctx.spent:
            raise RuntimeError(
                "linear_cross_entropy: expected one backward pass, found a second one; the gradients, which forward "
                "computed, were handed out by the first: call linear_cross_entropy again"
            )
        ctx.spent = True
        gradients = ctx.saved_tensors
        for gradient in gradients:
            if gradient is not None:
                _scale_(gradient, dloss, ctx.chunks.on_triton)
        return *gradients, None, None, None


def _late_gradients(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
    hidden, weight, bias, labels, lse, divisor = ctx.saved_tensors
    chunks: LogitChunks = ctx.chunks
    with torch.autocast(hidden.device.type, enabled=False):  # products are as those of forward were
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
