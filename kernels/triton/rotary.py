"""Triton form of `kernels/rotary.py`: a program rotates all heads of q and k of a token by a row of cos and sin."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import PreparedLaunch, next_power_of_2

MAX_TILE_NUMEL = 4096  # elements that a program holds at a time: heads x head_dim
THREAD_NUMEL = 32


@triton.jit
def _load_row(T_row_ptr, ROTARY_DIM: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Load a row of a table: values for the first and the second elements of pairs, (PAIRS,) float32 each."""
    if INTERLEAVED:
        cols = tl.arange(0, 2 * PAIRS)
        t = tl.load(T_row_ptr + cols, mask=cols < ROTARY_DIM, other=0.0).to(tl.float32)
        t1, t2 = tl.split(tl.reshape(t, (PAIRS, 2)))
    else:
        cols = tl.arange(0, PAIRS)
        t1 = tl.load(T_row_ptr + cols, mask=cols < ROTARY_DIM // 2, other=0.0).to(tl.float32)
        t2 = tl.load(T_row_ptr + ROTARY_DIM // 2 + cols, mask=cols < ROTARY_DIM // 2, other=0.0).to(tl.float32)
    return t1, t2


@triton.jit
def _rotate_pairs(x1, x2, c1, c2, s1, s2, TRANSPOSED: tl.constexpr):
    """Rotate the first and second elements of pairs, (heads, pairs), by a row of the tables, (pairs,)."""
    if TRANSPOSED:
        y1 = x1 * c1[None, :] + x2 * s2[None, :]
        y2 = x2 * c2[None, :] - x1 * s1[None, :]
    else:
        y1 = x1 * c1[None, :] - x2 * s1[None, :]
        y2 = x2 * c2[None, :] + x1 * s2[None, :]
    return y1, y2


@triton.jit
def _rotate_heads(
    X_ptr, Y_ptr, X_head_stride, Y_head_stride, c1, c2, s1, s2,
    NUM_HEADS: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr,
    PAIRS: tl.constexpr, REST: tl.constexpr, INTERLEAVED: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Rotate all heads of a token, HEADS at a time. PAIRS, REST: powers of 2 >= the pairs and remaining elements."""
    for block in range((NUM_HEADS + HEADS - 1) // HEADS):
        heads = block * HEADS + tl.arange(0, HEADS)
        there = (heads < NUM_HEADS)[:, None]
        X_heads = X_ptr + (heads.to(tl.int64) * X_head_stride)[:, None]
        Y_heads = Y_ptr + (heads.to(tl.int64) * Y_head_stride)[:, None]
        if INTERLEAVED:
            cols = tl.arange(0, 2 * PAIRS)[None, :]
            ok = there & (cols < ROTARY_DIM)
            x = tl.load(X_heads + cols, mask=ok, other=0.0).to(tl.float32)
            x1, x2 = tl.split(tl.reshape(x, (HEADS, PAIRS, 2)))
            y1, y2 = _rotate_pairs(x1, x2, c1, c2, s1, s2, TRANSPOSED)
            y = tl.reshape(tl.join(y1, y2), (HEADS, 2 * PAIRS))
            tl.store(Y_heads + cols, y.to(Y_ptr.dtype.element_ty), mask=ok)
        else:
            cols = tl.arange(0, PAIRS)[None, :]
            ok = there & (cols < ROTARY_DIM // 2)
            x1 = tl.load(X_heads + cols, mask=ok, other=0.0).to(tl.float32)
            x2 = tl.load(X_heads + ROTARY_DIM // 2 + cols, mask=ok, other=0.0).to(tl.float32)
            y1, y2 = _rotate_pairs(x1, x2, c1, c2, s1, s2, TRANSPOSED)
            tl.store(Y_heads + cols, y1.to(Y_ptr.dtype.element_ty), mask=ok)
            tl.store(Y_heads + ROTARY_DIM // 2 + cols, y2.to(Y_ptr.dtype.element_ty), mask=ok)
        if HEAD_DIM > ROTARY_DIM:
            behind = ROTARY_DIM + tl.arange(0, REST)[None, :]
            ok = there & (behind < HEAD_DIM)
            # Copied without a change of dtype, so the elements keep their bits.
            tl.store(Y_heads + behind, tl.load(X_heads + behind, mask=ok, other=0.0), mask=ok)


@triton.jit
def _rotate_kernel(
    Q_ptr, K_ptr, COS_ptr, SIN_ptr, YQ_ptr, YK_ptr,
    Q_batch_stride, Q_head_stride, Q_seq_stride, K_batch_stride, K_head_stride, K_seq_stride,
    YQ_batch_stride, YQ_head_stride, YQ_seq_stride, YK_batch_stride, YK_head_stride, YK_seq_stride,
    COS_batch_stride, COS_seq_stride, SIN_batch_stride, SIN_seq_stride, seq,
    NUM_Q_HEADS: tl.constexpr, NUM_K_HEADS: tl.constexpr, Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr,
    INTERLEAVED: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """A token: y = x * cos + rotate(x) * sin;  TRANSPOSED: y = x * cos - rotate(x * sin)."""
    program = tl.program_id(0)
    b = (program // seq).to(tl.int64)
    s = (program % seq).to(tl.int64)
    c1, c2 = _load_row(COS_ptr + b * COS_batch_stride + s * COS_seq_stride, ROTARY_DIM, PAIRS, INTERLEAVED)
    s1, s2 = _load_row(SIN_ptr + b * SIN_batch_stride + s * SIN_seq_stride, ROTARY_DIM, PAIRS, INTERLEAVED)
    _rotate_heads(
        Q_ptr + b * Q_batch_stride + s * Q_seq_stride, YQ_ptr + b * YQ_batch_stride + s * YQ_seq_stride,
        Q_head_stride, YQ_head_stride, c1, c2, s1, s2,
        NUM_Q_HEADS, Q_HEADS, HEAD_DIM, ROTARY_DIM, PAIRS, REST, INTERLEAVED, TRANSPOSED,
    )  # fmt: skip
    _rotate_heads(
        K_ptr + b * K_batch_stride + s * K_seq_stride, YK_ptr + b * YK_batch_stride + s * YK_seq_stride,
        K_head_stride, YK_head_stride, c1, c2, s1, s2,
        NUM_K_HEADS, K_HEADS, HEAD_DIM, ROTARY_DIM, PAIRS, REST, INTERLEAVED, TRANSPOSED,
    )  # fmt: skip


class Rotation:
    """The launches for tensors of certain forms, and for whatever gradients they get."""

    def __init__(self, interleaved: bool) -> None:
        self._interleaved = interleaved
        self._launches: dict[Any, tuple[bool, PreparedLaunch]] = {}

    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, transposed: bool) -> tuple[Tensor, Tensor]:
        """Rotate q and k into new tensors with the same strides. transposed: the rotation of gradients.

        q, k: (batch, heads, seq, head_dim) with any strides; cos, sin: (batch or 1, seq, rotary_dim).
        """
        given = q.stride(), k.stride(), cos.stride(), sin.stride(), transposed
        prepared = self._launches.get(given)
        if prepared is None:
            prepared = self._launches[given] = self._prepare(q, k, cos, sin, transposed)
        is_apart, start = prepared
        if is_apart:
            q, k, cos, sin = (_with_adjacent_columns(x) for x in (q, k, cos, sin))
        rotated_q, rotated_k = torch.empty_like(q), torch.empty_like(k)
        start(q, k, cos, sin, rotated_q, rotated_k)
        return rotated_q, rotated_k

    def _prepare(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, transposed: bool) -> tuple[bool, PreparedLaunch]:
        """Return whether a tensor is copied, as its columns are apart, and the launch."""
        is_apart = any(x.stride(-1) != 1 for x in (q, k, cos, sin))
        q, k, cos, sin = (_with_adjacent_columns(x) for x in (q, k, cos, sin))
        batch, num_q_heads, seq, head_dim = q.shape
        table_batch, _, rotary_dim = cos.shape
        pairs = next_power_of_2(rotary_dim // 2)
        head_numel = next_power_of_2(head_dim)
        # A long head may exceed the tile: then a program takes a single head at a time.
        most_heads = max(MAX_TILE_NUMEL // head_numel, 1)
        num_k_heads = k.shape[1]
        q_heads, k_heads = (min(next_power_of_2(count), most_heads) for count in (num_q_heads, num_k_heads))
        strides = _strides("Q", q) | _strides("K", k)
        strides |= _strides("YQ", torch.empty_like(q)) | _strides("YK", torch.empty_like(k))
        return is_apart, PreparedLaunch(
            _rotate_kernel, (batch * seq,), num_warps=min(max(q_heads * head_numel // (32 * THREAD_NUMEL), 1), 4),
            **strides,
            # 0: all samples read the same table.
            COS_batch_stride=cos.stride(0) if table_batch > 1 else 0, COS_seq_stride=cos.stride(1),
            SIN_batch_stride=sin.stride(0) if table_batch > 1 else 0, SIN_seq_stride=sin.stride(1), seq=seq,
            NUM_Q_HEADS=num_q_heads, NUM_K_HEADS=num_k_heads, Q_HEADS=q_heads, K_HEADS=k_heads,
            HEAD_DIM=head_dim, ROTARY_DIM=rotary_dim, PAIRS=pairs, REST=next_power_of_2(head_dim - rotary_dim),
            INTERLEAVED=self._interleaved, TRANSPOSED=transposed,
        )  # fmt: skip


def _with_adjacent_columns(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _strides(name: str, x: Tensor) -> dict[str, int]:
    batch, head, seq, _ = x.stride()
    return {f"{name}_batch_stride": batch, f"{name}_head_stride": head, f"{name}_seq_stride": seq}
