"""Softmax cross-entropy with a single read of the logits in forward, and a read and a write in backward.

A row of logits x with label y, over a vocabulary of n:

    u = soft_cap tanh(x / soft_cap)                                (u = x without a cap; Gemma 2, arXiv 2408.00118)
    lse = log(sum over i of exp(u_i))                              (online, a block at a time: arXiv 1805.02867)
    loss = (1 - s) (lse - u_y) + s (lse - mean(u)) + z lse^2       (s: label_smoothing, torch's form, arXiv 1512.00567;
                                                                    z: z_loss, PaLM, arXiv 2204.02311, section 5)
    dx_i = (exp(u_i - lse) (1 + 2 z lse) - s / n - (1 - s) [i = y]) (1 - (u_i / soft_cap)^2) dloss

Computed in float32 (float64 for float64 logits), the dtype of the loss, as torch does under autocast, but without a
float32 copy of the logits. A row whose label is ignore_index is not read; its loss and gradient are 0. Saved for
backward: the logits and a float32 per row (two in Triton's form of a reduced loss).

[Note: labels out of range] On a CPU they raise ValueError. On a GPU an error would need a wait of the host in every
step. Instead the row reads nothing out of bounds, and its loss and gradient are NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.overrides import handle_torch_function, has_torch_function_unary

from .dispatch import (
    MOST_PREPARED,
    Backend,
    Form,
    as_rows,
    direct_apply,
    form_of,
    form_uses_triton,
    once_differentiable,
    triton_form,
)
from .loss_terms import LossOptions, LossTerms, check_label_range, check_labels_fit

_BLOCK_BYTES = 4 * 2**20  # logits that the eager reference casts to float32 at a time: bounds memory, fits a cache


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    overwrite_logits: bool = False,
    backend: Backend = "auto",
    **options: Unpack[LossOptions],
) -> Tensor:
    """Compute the cross-entropy in float32 (float64 for float64 logits): a scalar, or (...) for reduction "none".

    logits: (..., vocabulary); labels: (...), int64 or int32. options: fields of `LossTerms`.
    overwrite_logits: write the gradient over the logits in backward, to save their size. Nothing may read the logits
    after backward begins. Leaf logits that require a gradient raise ValueError, a second backward RuntimeError.
    Raises ValueError if shapes or options do not fit. For labels out of range see [Note: labels out of range].
    """
    if has_torch_function_unary(logits):  # a subclass, such as vocab-parallel logits, may compute the loss itself
        given: dict[str, Any] = {"overwrite_logits": overwrite_logits, "backend": backend, **options}
        loss: Tensor = handle_torch_function(cross_entropy, (logits,), logits, labels, **given)
        return loss
    if overwrite_logits and logits.requires_grad and logits.is_leaf:
        raise ValueError(
            "cross_entropy: overwrite_logits=True expected logits that an operation computed, found a leaf tensor "
            "that requires a gradient and would be overwritten; use overwrite_logits=False"
        )
    if is_compiling():
        return _compiled(logits, labels, overwrite_logits, backend, options)
    terms, launches = _prepared(form_of(logits), form_of(labels), backend, tuple(options.items()))
    if launches is None:
        check_label_range("cross_entropy", labels, logits.shape[-1], terms.ignore_index)
    return _apply(logits, labels, terms, launches, overwrite_logits)  # type: ignore[no-any-return]


@lru_cache(maxsize=MOST_PREPARED)
def _prepared(
    logits: Form, labels: Form, backend: Backend, options: tuple[tuple[str, Any], ...]
) -> tuple[LossTerms, Any]:
    """Check tensors and options, and prepare the launches of `triton/cross_entropy.py`; None for the reference."""
    terms = LossTerms.of("cross_entropy", dict(options))  # type: ignore[arg-type]  # it raises for other names
    check_labels_fit("cross_entropy", "logits", logits, labels)
    if not form_uses_triton(backend, "cross_entropy", logits, labels) or not labels[0].numel():
        return terms, None
    return terms, triton_form("cross_entropy").CrossEntropy(logits, labels, terms)


def _compiled(logits: Tensor, labels: Tensor, overwrite_logits: bool, backend: Backend, options: LossOptions) -> Tensor:
    """Compute `cross_entropy` in code that a compiler traces: it traces the reference, but no launch."""
    terms = LossTerms.of("cross_entropy", options)
    check_labels_fit("cross_entropy", "logits", form_of(logits), form_of(labels))
    if form_uses_triton(backend, "cross_entropy", form_of(logits), form_of(labels)):
        from .operators import untraced

        given: dict[str, Any] = {"overwrite_logits": overwrite_logits, "backend": backend, **options}
        return untraced(cross_entropy, logits, labels, **given)  # type: ignore[no-any-return]
    check_label_range("cross_entropy", labels, logits.shape[-1], terms.ignore_index)
    apply: Callable[..., Any] = _CrossEntropy.apply  # the compiler traces torch's form
    return apply(logits, labels, terms, None, overwrite_logits)  # type: ignore[no-any-return]


def losses_of_rows(
    logits: Tensor, n_cols: int, labels: Tensor, terms: LossTerms, on_triton: bool, scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute the loss and lse of each row, (n_rows,) in float32 or float64; both are 0 if the label is ignored.

    logits: (n_rows, n_cols or more) with adjacent columns, -inf from column n_cols on; labels: (n_rows,), contiguous.
    scale: a scalar, or None. With it, scale * gradient overwrites the logits; columns from n_cols on are undefined.
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
    """Write scale * gradient of each row's loss into `out`, a tensor like logits, or the logits.

    logits, labels: as in `losses_of_rows`. lse: its result. scale: () or (n_rows,).
    """
    if on_triton:
        from .triton import cross_entropy as triton_form

        triton_form.gradient(logits, n_cols, labels, lse, scale, terms, out)
        torch.autograd.graph.increment_version(out)  # a graph that saved these logits must raise an error
        return
    gradient_reference(logits[:, :n_cols], labels, lse, scale, terms, out[:, :n_cols])


def losses_reference(logits: Tensor, labels: Tensor, terms: LossTerms) -> tuple[Tensor, Tensor]:
    """Compute loss and lse of each row of logits, (n_rows, n), in eager torch, a few rows at a time."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    losses, lse = (torch.empty(len(logits), dtype=wide, device=logits.device) for _ in range(2))
    for part in _blocks(logits):
        u = logits[part].to(wide)
        if terms.soft_cap is not None:
            u = u.div(terms.soft_cap).tanh_().mul_(terms.soft_cap)
        # An ignored label, such as -100, is no index: its row takes class 0, and becomes 0 at the end.
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
    """Compute the gradient in eager torch, a few rows at a time, into `out`, (n_rows, n), which may be the logits."""
    of_rows = scale.expand(len(logits))
    for part in _blocks(logits):
        u, slope = logits[part].to(lse.dtype), None
        if terms.soft_cap is not None:
            slope = u.div(terms.soft_cap).tanh_()
            u = slope * terms.soft_cap
            slope = slope.square_().neg_().add_(1.0)
        kept = labels[part] != terms.ignore_index
        of_row = of_rows[part].to(lse.dtype)[:, None]
        # May write over u, if `out` is the logits: all further steps need dx alone.
        dx = torch.sub(u, lse[part, None], out=out[part] if out.dtype == lse.dtype else None).exp_()
        dx.mul_(of_row * (1.0 + 2.0 * terms.z_loss * lse[part, None]))
        if terms.label_smoothing:
            dx.sub_(of_row * (terms.label_smoothing / logits.shape[1]))
        # Subtracts 1 - s at the label.
        dx.scatter_add_(1, labels[part].where(kept, 0).long()[:, None], of_row * (terms.label_smoothing - 1.0))
        if slope is not None:
            dx.mul_(slope)
        if kept.device.type != "cpu" or not kept.all():  # `all` on a device would make the host wait
            dx.masked_fill_(~kept[:, None], 0.0)
        # Rounded once, at the end: until here dx has the dtype of lse.
        if out.dtype != lse.dtype:
            out[part] = dx


def _blocks(logits: Tensor) -> Iterator[slice]:
    """Iterate over slices of rows, of about _BLOCK_BYTES in float32."""
    rows_per_block = max(1, _BLOCK_BYTES // (4 * logits.shape[1]))
    for first in range(0, len(logits), rows_per_block):
        yield slice(first, first + rows_per_block)


class _CrossEntropy(torch.autograd.Function):
    """launches: of `triton/cross_entropy.py`, or None for the reference."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        terms: LossTerms,
        launches: Any,
        overwrite_logits: bool,
    ) -> Tensor:
        # Kernels find the label of a row by the row's number.
        labels = labels.contiguous()
        if launches is not None:
            loss, lse = launches.forward(logits, labels)
        else:
            losses, lse = losses_reference(as_rows(logits), labels.view(-1), terms)
            loss = terms.reduced(losses, terms.divisor(labels), labels.shape)
        ctx.save_for_backward(logits, labels, lse)
        ctx.terms, ctx.launches, ctx.overwrites, ctx.spent = terms, launches, overwrite_logits, False
        return loss  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.spent:
            raise RuntimeError(
                "cross_entropy: overwrite_logits=True allows a single backward, found a second; the first has written "
                "the gradient over the logits: use overwrite_logits=False"
            )
        logits, labels, lse = ctx.saved_tensors
        ctx.spent = ctx.overwrites
        if ctx.launches is not None:
            return ctx.launches.backward(dloss, logits, labels, lse, ctx.overwrites), None, None, None, None
        rows, terms = as_rows(logits), ctx.terms
        # Rows of an expanded tensor share memory and cannot hold a gradient each.
        in_place = ctx.overwrites and (len(rows) <= 1 or rows.stride(0) >= rows.shape[1])
        dx = rows if in_place else torch.empty_like(rows, memory_format=torch.contiguous_format)
        gradient_reference(rows, labels.view(-1), lse, terms.scale_of_rows(dloss, terms.divisor(labels)), terms, dx)
        return dx.view(logits.shape), None, None, None, None


_apply = direct_apply(_CrossEntropy)
