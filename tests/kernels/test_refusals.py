"""What fused modules and losses refuse, whatever the backend: shapes, dtypes and options that do not fit."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from lowtide.kernels.cross_entropy import cross_entropy
from lowtide.kernels.gated_mlp import geglu, geglu_packed, swiglu, swiglu_packed
from lowtide.kernels.linear_cross_entropy import linear_cross_entropy
from lowtide.kernels.rotary import rotary_embedding
from lowtide.kernels.row_norm import add_rms_norm, rms_norm
from tests.kit.training import refusal

X, W, LABELS = torch.ones(2, 8), torch.ones(5, 8), torch.zeros(2, dtype=torch.long)
Q, TABLE = torch.ones(2, 4, 3, 8), torch.ones(1, 3, 8)
TABLES = r"expected cos and sin of the same shape, \(2 or 1, 3, rotary_dim\), found"
EVEN = r"rotary_dim, the last dimension of cos, to be even and at most head_dim \(8\), found"
NO_GRADIENT = r"expected sin without requires_grad, because it gets no gradient; pass sin.detach\(\)"
FAST = r'expected approximate to be "tanh" or "none", found "fast"$'

OF_LOSSES: list[tuple[Callable[..., Any], tuple[Any, ...], str]] = [
    (cross_entropy, (X, LABELS[[0, 0, 0]]), r"labels of shape \(2,\), for logits of shape \(2, 8\); found \(3,\)"),
    (cross_entropy, (X, X[:, 0]), "expected labels of dtype torch.int64 or torch.int32, found torch.float32"),
    (cross_entropy, (X.long(), LABELS), r"expected floating-point logits .*, found \(2, 8\) torch.int64"),
    (cross_entropy, (X[:, :0], LABELS), r"with n of at least 1, found \(2, 0\)"),
    (partial(cross_entropy, label_smoothing=1.5), (X, LABELS), r"expected label_smoothing in \[0, 1\], found 1.5"),
    (partial(cross_entropy, z_loss=-1.0), (X, LABELS), "expected z_loss of at least 0 and finite, found -1.0"),
    (partial(cross_entropy, soft_cap=0.0), (X, LABELS), "soft_cap above 0 and finite, or None for no cap; found 0.0"),
    (
        partial(cross_entropy, reduction="max"),  # type: ignore[arg-type]  # it is refused
        (X, LABELS),
        'a reduction of "mean", "sum", "none", found "max"',
    ),
    (linear_cross_entropy, (X, W[:, 1:], LABELS), r"weight of shape \(vocabulary, 8\), .*; found \(5, 7\)"),
    (linear_cross_entropy, (X, W, LABELS, torch.ones(4)), r"expected bias of shape \(5,\), .*; found \(4,\)"),
    (linear_cross_entropy, (X, W.bfloat16(), LABELS), "torch.float32, the dtype of hidden, found torch.bfloat16"),
    (
        linear_cross_entropy,
        (X, W, LABELS[[0, 0, 0]]),
        r"expected labels of shape \(2,\), for hidden of shape \(2, 8\); found \(3,\)",
    ),
    (partial(linear_cross_entropy, chunk_bytes=0), (X, W, LABELS), "expected chunk_bytes above 0, found 0"),
    (
        partial(cross_entropy, backend="fast"),  # type: ignore[arg-type]
        (X, LABELS),
        'cross_entropy: expected backend "auto" or "triton" or "reference", found "fast"',
    ),
]
OF_MODULES: list[tuple[Callable[..., Any], tuple[Any, ...], str]] = [
    (rms_norm, (X, torch.ones(7)), r"^rms_norm: expected weight of shape \(8,\), .*; found \(7,\)"),
    (rms_norm, (X, torch.ones(8, 1)), r"expected weight of shape \(8,\), .*; found \(8, 1\)"),
    (rms_norm, (X.long(), None), r"expected a floating-point x .*, found \(2, 8\) torch.int64"),
    (add_rms_norm, (X, X.half(), None), r"^add_rms_norm: expected residual like x, \(2, 8\) torch.float32, found"),
    (swiglu, (X, X[:, :7]), r"^swiglu: expected up like gate, \(2, 8\) torch.float32, found \(2, 7\) "),
    (geglu, (X, X.half()), r"^geglu: expected up like gate, .*, found \(2, 8\) torch.float16"),
    (swiglu, (X[0, 0], X[0, 0]), r"expected a floating-point gate .*, found \(\) torch.float32"),
    (swiglu_packed, (X[:, :7],), r"^swiglu_packed: expected an even last dimension of x, .*; found \(2, 7\)"),
    (geglu_packed, (X.long(),), r"^geglu_packed: expected a floating-point x .*, found \(2, 8\) torch.int64"),
    (partial(geglu, approximate="fast"), (X, X), f"^geglu: {FAST}"),  # type: ignore[arg-type]
    (partial(geglu_packed, approximate="fast"), (X,), f"^geglu_packed: {FAST}"),  # type: ignore[arg-type]
    (rotary_embedding, (Q[0], Q, TABLE, TABLE), r"floating-point q, \(batch, heads, .*\), found \(4, 3, 8\) torch.f"),
    (rotary_embedding, (Q.long(), Q, TABLE, TABLE), r"floating-point q, .*, found \(2, 4, 3, 8\) torch.int64"),
    (rotary_embedding, (Q, Q[:, :, :2], TABLE, TABLE), r"k of shape \(2, heads, 3, 8\) .*; found \(2, 4, 2, 8\)"),
    (rotary_embedding, (Q, Q.bfloat16(), TABLE, TABLE), "and torch.float32, as q is; found .* torch.bfloat16"),
    (rotary_embedding, (Q, Q, TABLE[0], TABLE[0]), TABLES + r" \(3, 8\) and \(3, 8\)"),
    (rotary_embedding, (Q, Q, TABLE, TABLE[..., :4]), TABLES + r" \(1, 3, 8\) and \(1, 3, 4\)"),
    (rotary_embedding, (Q, Q, TABLE[..., :7], TABLE[..., :7]), f"{EVEN} 7"),
    (rotary_embedding, (Q, Q, torch.ones(1, 3, 10), torch.ones(1, 3, 10)), f"{EVEN} 10"),
    (rotary_embedding, (Q, Q, TABLE, TABLE.half()), "sin in torch.float32 or torch.float32, .*, found torch.float16"),
    (rotary_embedding, (Q, Q, TABLE, TABLE.clone().requires_grad_()), NO_GRADIENT),
]


def test_what_does_not_fit_is_refused() -> None:
    for call, given, text in (*OF_LOSSES, *OF_MODULES):
        found = refusal(call, *given)
        assert re.search(text, found), (text, found)
