"""Cases of the kernels inside a model: norms, gated MLPs, rotary embeddings.

Liger's forms are those that its patches put into a Llama. Each call begins with fresh inputs, since some of them write
over what they were given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from _kernel_case import Case, Draw, Form, Pass, Size, Tensors, nbytes
from torch import Tensor

from lowtide.kernels.gated_mlp import geglu, swiglu
from lowtide.kernels.layer_norm import add_layer_norm, layer_norm
from lowtide.kernels.rms_norm import add_rms_norm, rms_norm
from lowtide.kernels.rotary import rotary_embedding

EPS = 1e-5
ROWS = ((4096, 1024), (8192, 4096), (16384, 8192))  # rows, columns
GATED = ((4096, 4096), (8192, 14336))
HEADS = ((1, 32, 8, 2048, 128), (4, 32, 8, 4096, 128))  # batch, heads of q, of k, sequence, elements of a head
BOTH_PASSES: tuple[Pass, ...] = ("forward", "backward")


def draw_norm(size: Size, dtype: torch.dtype, draw: Draw) -> Tensors:
    n_cols = size[-1]
    drawn = {"x": draw.normal(*size, dtype=dtype), "weight": draw.normal(n_cols, dtype=dtype).add_(1.0)}
    return drawn | {"bias": draw.normal(n_cols, dtype=dtype)}


def draw_norm_of_sum(size: Size, dtype: torch.dtype, draw: Draw) -> Tensors:
    return draw_norm(size, dtype, draw) | {"residual": draw.normal(*size, dtype=dtype)}


def exact_rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight


def exact_layer(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    centered = x - x.mean(-1, keepdim=True)
    return centered * torch.rsqrt(centered.square().mean(-1, keepdim=True) + EPS) * weight + bias


def torch_rms(t: Tensors) -> Tensors:
    return {"y": F.rms_norm(t["x"], t["x"].shape[-1:], t["weight"], EPS)}


def torch_add_rms(t: Tensors) -> Tensors:
    h = t["x"] + t["residual"]
    return {"y": F.rms_norm(h, h.shape[-1:], t["weight"], EPS), "h": h}


def torch_layer(t: Tensors) -> Tensors:
    return {"y": F.layer_norm(t["x"], t["x"].shape[-1:], t["weight"], t["bias"], EPS)}


def torch_add_layer(t: Tensors) -> Tensors:
    h = t["x"] + t["residual"]
    return {"y": F.layer_norm(h, h.shape[-1:], t["weight"], t["bias"], EPS), "h": h}


def our_add_rms(t: Tensors) -> Tensors:
    y, h = add_rms_norm(t["x"], t["residual"], t["weight"], EPS, backend="triton")
    return {"y": y, "h": h}


def our_add_layer(t: Tensors) -> Tensors:
    y, h = add_layer_norm(t["x"], t["residual"], t["weight"], t["bias"], EPS, backend="triton")
    return {"y": y, "h": h}


def exact_add_rms(t: Tensors) -> Tensors:
    h = t["x"] + t["residual"]
    return {"y": exact_rms(h, t["weight"]), "h": h * 1.0}


def exact_add_layer(t: Tensors) -> Tensors:
    h = t["x"] + t["residual"]
    return {"y": exact_layer(h, t["weight"], t["bias"]), "h": h * 1.0}


def liger_rms(t: Tensors) -> Tensors:
    from liger_kernel.transformers.functional import liger_rms_norm

    return {"y": liger_rms_norm(t["x"], t["weight"], EPS)}


def liger_add_rms(t: Tensors) -> Tensors:
    from liger_kernel.transformers.functional import liger_fused_add_rms_norm

    y, h = liger_fused_add_rms_norm(t["x"], t["residual"], t["weight"], EPS)
    return {"y": y, "h": h}


def liger_layer(t: Tensors) -> Tensors:
    from liger_kernel.transformers.functional import liger_layer_norm

    return {"y": liger_layer_norm(t["x"], t["weight"], t["bias"], EPS)}


def moved_by_norm(t: Tensors, results: Tensors, parameters: int, numbers: int) -> Mapping[Pass, int]:
    """Read x, write y; read dy and x, write dx; both also the parameters and `numbers` float32 a row."""
    x, of_rows = t["x"].nbytes, 4 * numbers * (t["x"].numel() // t["x"].shape[-1])
    of_sum = 2 * x if "residual" in t else 0
    weights = parameters * t["weight"].nbytes
    return {
        "forward": 2 * x + of_sum + weights + of_rows,
        # dh is read beside dy; one gradient serves x and residual.
        "backward": 3 * x + of_sum // 2 + t["weight"].nbytes + weights + of_rows,
    }


def norm_case(
    name: str, file: str, forms: Mapping[str, Form], exact: Form, parameters: tuple[str, ...], numbers: int
) -> Case:
    of_sum = name.startswith("add_")
    unused = {"weight", "bias"} - set(parameters)

    def draw(size: Size, dtype: torch.dtype, source: Draw) -> Tensors:
        drawn = (draw_norm_of_sum if of_sum else draw_norm)(size, dtype, source)
        return {key: value for key, value in drawn.items() if key not in unused}

    return Case(
        name=name,
        file=file,
        draw=draw,
        forms=forms,
        exact=exact,
        moved=lambda t, results: moved_by_norm(t, results, len(parameters), numbers),
        sizes=ROWS,
        tiny=(5, 123),
        passes=BOTH_PASSES,
        inputs_with_gradient=("x", *(("residual",) if of_sum else ()), *parameters),
        results_with_gradient=("y", "h") if of_sum else ("y",),
        inner_roundings=4.0 if of_sum else 0.0,  # of h, on which the norm is computed
    )


def gated_case(name: str, ours: Form, plain: Callable[[Tensor], Tensor], liger: str) -> Case:
    def torch_form(t: Tensors) -> Tensors:
        return {"y": plain(t["gate"]) * t["up"]}

    def liger_form(t: Tensors) -> Tensors:
        from liger_kernel.transformers import functional

        return {"y": getattr(functional, liger)(t["gate"], t["up"])}

    def draw(size: Size, dtype: torch.dtype, source: Draw) -> Tensors:
        return {key: source.normal(*size, dtype=dtype) for key in ("gate", "up")}

    return Case(
        name=name,
        file="gated_mlp",
        draw=draw,
        forms={"lowtide": ours, "torch": torch_form, "compile": torch_form, "liger": liger_form},
        exact=torch_form,
        moved=lambda t, results: {"forward": 3 * t["gate"].nbytes, "backward": 5 * t["gate"].nbytes},
        sizes=GATED,
        tiny=(5, 123),
        passes=BOTH_PASSES,
        inputs_with_gradient=("gate", "up"),
        results_with_gradient=("y",),
    )


def draw_rotary(size: Size, dtype: torch.dtype, draw: Draw) -> Tensors:
    """q and k as projections give them: transposed views of (batch, sequence, heads, elements of a head)."""
    batch, q_heads, k_heads, seq, head_dim = size
    inverse = 10000.0 ** (-torch.arange(0, head_dim, 2, device=draw.device) / head_dim)
    angles = torch.arange(seq, device=draw.device)[:, None] * inverse
    angles = torch.cat((angles, angles), dim=-1)[None]
    q, k = (draw.normal(batch, seq, heads, head_dim, dtype=dtype).transpose(1, 2) for heads in (q_heads, k_heads))
    return {"q": q, "k": k, "cos": angles.cos(), "sin": angles.sin()}


def torch_rotary(t: Tensors) -> Tensors:
    """As Hugging Face's `apply_rotary_pos_emb`, with tables of the dtype of q."""
    cos, sin = (t[name].unsqueeze(1).to(t["q"].dtype) for name in ("cos", "sin"))

    def rotated(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-second, first), dim=-1) * sin

    return {"q": rotated(t["q"]), "k": rotated(t["k"])}


def our_rotary(t: Tensors) -> Tensors:
    q, k = rotary_embedding(t["q"], t["k"], t["cos"], t["sin"], backend="triton")
    return {"q": q, "k": k}


def liger_rotary(t: Tensors) -> Tensors:
    from liger_kernel.transformers.functional import liger_rope

    q, k = liger_rope(t["q"], t["k"], t["cos"], t["sin"])
    return {"q": q, "k": k}


def moved_by_rotary(t: Tensors, results: Tensors) -> Mapping[Pass, int]:
    one_pass = 2 * nbytes(t["q"], t["k"]) + nbytes(t["cos"], t["sin"])
    return {"forward": one_pass, "backward": one_pass}


ROTARY = Case(
    name="rotary_embedding",
    file="rotary",
    draw=draw_rotary,
    forms={"lowtide": our_rotary, "torch": torch_rotary, "compile": torch_rotary, "liger": liger_rotary},
    exact=torch_rotary,
    moved=moved_by_rotary,
    sizes=HEADS,
    tiny=(2, 3, 1, 5, 16),
    passes=BOTH_PASSES,
    inputs_with_gradient=("q", "k"),
    results_with_gradient=("q", "k"),
)

LAYER_CASES = (
    norm_case(
        "rms_norm",
        "rms_norm",
        {
            "lowtide": lambda t: {"y": rms_norm(t["x"], t["weight"], EPS, backend="triton")},
            "torch": torch_rms,
            "compile": torch_rms,
            "liger": liger_rms,
        },
        lambda t: {"y": exact_rms(t["x"], t["weight"])},
        ("weight",),
        1,
    ),
    norm_case(
        "add_rms_norm",
        "rms_norm",
        {"lowtide": our_add_rms, "torch": torch_add_rms, "compile": torch_add_rms, "liger": liger_add_rms},
        exact_add_rms,
        ("weight",),
        1,
    ),
    norm_case(
        "layer_norm",
        "layer_norm",
        {
            "lowtide": lambda t: {"y": layer_norm(t["x"], t["weight"], t["bias"], EPS, backend="triton")},
            "torch": torch_layer,
            "compile": torch_layer,
            "liger": liger_layer,
        },
        lambda t: {"y": exact_layer(t["x"], t["weight"], t["bias"])},
        ("weight", "bias"),
        2,
    ),
    norm_case(
        "add_layer_norm",
        "layer_norm",
        {"lowtide": our_add_layer, "torch": torch_add_layer, "compile": torch_add_layer},
        exact_add_layer,
        ("weight", "bias"),
        2,
    ),
    gated_case("swiglu", lambda t: {"y": swiglu(t["gate"], t["up"], backend="triton")}, F.silu, "liger_swiglu"),
    gated_case(
        "geglu",
        lambda t: {"y": geglu(t["gate"], t["up"], backend="triton")},
        lambda gate: F.gelu(gate, approximate="tanh"),
        "liger_geglu",
    ),
    ROTARY,
)
