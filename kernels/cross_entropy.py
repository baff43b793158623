"""Softmax cross-entropy in one read forward, and one read and one write backward.

A row of logits x with label y, over a vocabulary of n:

    u = soft_cap tanh(x / soft_cap)                                (u = x without a cap; Gemma 2, arXiv 2408.00118)
    lse = log(sum over i of exp(u_i))                              (online, a block at a time: arXiv 1805.02867)
    loss = (1 - s) (lse - u_y) + s (lse - mean(u)) + z lse^2       (s: label_smoothing, torch's form, arXiv 1512.00567;
                                                                    z: z_loss, PaLM, arXiv 2204.02311, section 5)
    dx_i = (exp(u_i - lse) (1 + 2 z lse) - s / n - (1 - s) [i = y]) (1 - (u_i / soft_cap)^2) dloss

Computed in float32, float64 for float64 logits, and so is the loss: what torch computes from 16-bit logits under
autocast, without the float32 copy of them. A row whose label is ignore_index has loss 0 and gradient 0, and is not
read. Saved for backward: the logits themselves and one float32 a row.

[Note: labels out of range] Torch stops on them. The eager reference raises ValueError. A GPU cannot, without waiting
for it in every step: there such a row reads nothing out of bounds, and its loss and its gradient are NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, Unpack, overload

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from .dispatch import Backend, as_rows, uses_triton
from .loss_terms import LossOptions, LossTerms, check_label_range, check_labels_fit

_BLOCK_BYTES = 4 * 2**20  # of logits that the eager reference widens at once: bounds its memory, fits a cache


@overload
def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    return_z_loss: Literal[False] = ...,
    overwrite_logits: bool = ...,
    backend: Backend = ...,
    **options: Unpack[LossOptions],
) -> Tensor: ...


@overload
def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    return_z_loss: Literal[True],
    overwrite_logits: bool = ...,
    backend: Backend = ...,
    **options: Unpack[LossOptions],
) -> tuple[Tensor, Tensor]: ...


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    return_z_loss: bool = False,
    overwrite_logits: bool = False,
    backend: Backend = "auto",
    **options: Unpack[LossOptions],
) -> Tensor | tuple[Tensor, Tensor]:
    """The loss, in float32 (float64 for float64 logits): a scalar, or of the labels' shape for reduction "none".

    logits: (..., vocabulary); labels: (...), int64 or int32. options: fields of `LossTerms`. return_z_loss: gives
    also the part of the loss that is z_loss * lse^2, reduced alike, for logs: it has no gradient. overwrite_logits:
    backward writes the gradient over the logits, which saves as much memory as they take. They must be a result that
    nobody reads after backward begins, logits that are a parameter raise ValueError, and a second backward
    RuntimeError.

    Raises ValueError where shapes or options do not fit; for labels out of range see [Note: labels out of range].
    """
    if has_torch_function_unary(logits):  # a subclass may know how to do without its values
        given = {"return_z_loss": return_z_loss, "overwrite_logits": overwrite_logits, "backend": backend, **options}
        itself: Any = cross_entropy  # its overloads are not those that torch's types ask for
        loss: Tensor = handle_torch_function(itself, (logits,), logits, labels, **given)
        return loss
    terms = LossTerms.of("cross_entropy", options)
    check_labels_fit("cross_entropy", "logits", logits, labels)
    if overwrite_logits and logits.requires_grad and logits.is_leaf:
        raise ValueError(
            "cross_entropy: expected logits that an operation computed, found a leaf that requires a gradient; "
            "overwrite_logits=True would overwrite it with its gradient: use overwrite_logits=False"
        )
    on_triton = uses_triton(backend, "cross_entropy", logits, labels)
    if not on_triton:
        check_label_range("cross_entropy", labels, logits.shape[-1], terms.ignore_index)
    loss, reduced_z = _CrossEntropy.apply(logits, labels, terms, overwrite_logits, on_triton)  # type: ignore[no-untyped-call]
    return (loss, reduced_z) if return_z_loss else loss


def losses_of_rows(
    logits: Tensor, n_cols: int, labels: Tensor, terms: LossTerms, on_triton: bool, scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Each row's loss and lse, (n_rows,) in float32 or float64; both 0 where the label is ignored.

    logits: (n_rows, n_cols or more) with adjacent columns, -inf in those past n_cols; labels: (n_rows,), contiguous.
    Where scale is given, a scalar, scale * the gradient is written over the logits, and anything past n_cols.
    """
    if on_triton:
        from .triton import cross_entropy as triton_form

        return triton_form.losses(logits, n_cols, labels, terms, scale)
    losses, lse = losses_reference(logits[:, :n_cols], labels, terms)
    if scale is not None:
        gradient_reference(logits[:, :n_cols], labels, lse, scale, terms, logits[:, :n_cols])
    return losses, lse


def gradient_of_rows(
    logits: Tensor,
    n_cols: int,
    labels: Tensor,
    lse: Tensor,
    scale: Tensor,
    terms: LossTerms,
    on_triton: bool,
    out: Tensor,
) -> None:
    """Writes scale * the gradient of each row's loss into out, like logits, which it may be.

    logits, labels: as `losses_of_rows` took them, lse: as it gave it; scale: () or (n_rows,).
    """
    if on_triton:
        from .triton import cross_entropy as triton_form

        triton_form.gradient(logits, n_cols, labels, lse, scale, terms, out)
        torch.autograd.graph.increment_version(out)  # whoever saved these logits is told, not handed a gradient
        return
    gradient_reference(logits[:, :n_cols], labels, lse, scale, terms, out[:, :n_cols])


def losses_reference(logits: Tensor, labels: Tensor, terms: LossTerms) -> tuple[Tensor, Tensor]:
    """The formula in eager torch, a few rows at a time: loss and lse of each row of logits, (n_rows, n)."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    losses, lse = (torch.empty(len(logits), dtype=wide, device=logits.device) for _ in range(2))
    for part in _blocks(logits):
        u = logits[part].to(wide)
        if terms.soft_cap is not None:
            u = u.div(terms.soft_cap).tanh_().mul_(terms.soft_cap)
        kept = labels[part] != terms.ignore_index
        logsumexp = torch.logsumexp(u, 1)
        loss = logsumexp - u.gather(1, labels[part].where(kept, 0).long()[:, None])[:, 0]
        if terms.label_smoothing:
            loss = loss.lerp(logsumexp - u.mean(1), terms.label_smoothing)
        losses[part] = (loss + terms.z_loss * logsumexp.square()).where(kept, 0.0)
        lse[part] = logsumexp.where(kept, 0.0)
    return losses, lse


def gradient_reference(
    logits: Tensor, labels: Tensor, lse: Tensor, scale: Tensor, terms: LossTerms, out: Tensor
) -> None:
    """The formula in eager torch, a few rows at a time: into out, (n_rows, n), which may be the logits."""
    of_rows = scale.expand(len(logits))
    for part in _blocks(logits):
        u, slope = logits[part].to(lse.dtype), None
        if terms.soft_cap is not None:
            slope = u.div(terms.soft_cap).tanh_()
            u = slope * terms.soft_cap
            slope = slope.square_().neg_().add_(1.0)
        kept = labels[part] != terms.ignore_index
        of_row = of_rows[part].to(lse.dtype)[:, None]
        dx = torch.sub(u, lse[part, None], out=out[part] if out.dtype == lse.dtype else None).exp_()
        dx.mul_(of_row * (1.0 + 2.0 * terms.z_loss * lse[part, None]))
        if terms.label_smoothing:
            dx.sub_(of_row * (terms.label_smoothing / logits.shape[1]))
        dx.scatter_add_(1, labels[part].where(kept, 0).long()[:, None], of_row * (terms.label_smoothing - 1.0))
        if slope is not None:
            dx.mul_(slope)
        if kept.device.type != "cpu" or not kept.all():  # elsewhere the host would wait
            dx.masked_fill_(~kept[:, None], 0.0)
        if out.dtype != lse.dtype:
            out[part] = dx


def _blocks(logits: Tensor) -> Iterator[slice]:
    """Slices of rows, of about _BLOCK_BYTES in float32."""
    rows_per_block = max(1, _BLOCK_BYTES // (4 * logits.shape[1]))
    for first in range(0, len(logits), rows_per_block):
        yield slice(first, first + rows_per_block)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, terms: LossTerms, overwrite_logits: bool, on_triton: bool
    ) -> tuple[Tensor, Tensor]:
        rows, flat_labels = as_rows(logits), labels.reshape(-1).contiguous()
        divisor = terms.divisor(flat_labels)
        losses, lse = losses_of_rows(rows, rows.shape[1], flat_labels, terms, on_triton)
        ctx.save_for_backward(rows, flat_labels, lse, divisor)
        ctx.terms, ctx.overwrites, ctx.on_triton, ctx.spent = terms, overwrite_logits, on_triton, False
        ctx.shape = logits.shape
        reduced_z = terms.reduced(terms.z_loss * lse.square(), divisor, labels.shape)
        ctx.mark_non_differentiable(reduced_z)
        ctx.set_materialize_grads(False)
        return terms.reduced(losses, divisor, labels.shape), reduced_z

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dloss: Tensor | None, _dz: None) -> tuple[Tensor | None, ...]:
        if dloss is None:
            return None, None, None, None, None
        if ctx.spent:
            raise RuntimeError(
                "cross_entropy: expected one backward pass, as overwrite_logits=True allows; found a second one, and "
                "the first has written the gradient over the logits: use overwrite_logits=False"
            )
        rows, labels, lse, divisor = ctx.saved_tensors
        ctx.spent = ctx.overwrites
        # Rows of an expanded tensor share memory: there is nothing to write over.
        in_place = ctx.overwrites and (len(rows) <= 1 or rows.stride(0) >= rows.shape[1])
        dx = rows if in_place else torch.empty_like(rows, memory_format=torch.contiguous_format)
        scale = ctx.terms.scale_of_rows(dloss, divisor)
        gradient_of_rows(rows, rows.shape[1], labels, lse, scale, ctx.terms, ctx.on_triton, dx)
        return dx.view(ctx.shape), None, None, None, None
