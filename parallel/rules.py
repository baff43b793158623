"""Which layers of a model are split how, where nobody says: the model's own plan, and the names of common families."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from .adapters import base_of
from .splits import Style, can_give_vocabulary, is_linear, width_in, width_out

OF_HUGGING_FACE = {
    "colwise": "column",
    "rowwise": "row",
    "rowwise_split_input": "row",
    "packed_colwise": "column/2",
    "colwise_gather_output": "column_gathered",
    "colwise_rep": "column_gathered",
    "embedding_rowwise": "vocabulary",
    "replicated_with_grad_allreduce": "partial",
}
"""A style of `_tp_plan` in transformers: ours. Those of experts are not needed: see `ExpertLayout`."""

_COLUMNS = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "q_attn", "query", "key", "value", "q", "k", "v"), "column"),
    **dict.fromkeys(("gate_proj", "up_proj", "fc1", "c_fc", "wi", "wi_0", "wi_1", "w1", "w3", "up", "gate"), "column"),
    **dict.fromkeys(("q_lin", "k_lin", "v_lin", "lin1", "linear1", "fc_in", "dense_h_to_4h"), "column"),
    "gate_up_proj": "column/2",
    "relative_attention_bias": "column",  # T5: a column for each head
}
_ROWS = {"o_proj", "out_proj", "c_proj", "o", "down_proj", "fc2", "wo", "w2", "down", "dense_4h_to_h"}
_ROWS |= {"out_lin", "lin2", "linear2", "fc_out"}
_OF_KEYS = {"k_proj", "v_proj", "key", "value", "k", "v"}  # perhaps of fewer heads than queries
_FUSED = {"c_attn": "column/3"}  # GPT-2, whose halves for cross-attention are queries and keys
_PARTS = {"self": {"query", "key", "value"}, "attention": {"query", "key", "value"}, "intermediate": {"dense"}}
_BETWEEN = {"q_norm", "k_norm", "q_layernorm", "k_layernorm"}


def plan_of_model(model: nn.Module) -> dict[str, str]:
    """Pattern -> style, of a Hugging Face model that has a plan of its own; empty elsewhere."""
    plan: Any = getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None)
    if not isinstance(plan, Mapping):
        return {}
    return {pattern: OF_HUGGING_FACE[style] for pattern, style in plan.items() if style in OF_HUGGING_FACE}


def plan_by_names(model: nn.Module) -> dict[str, str]:
    """Name of a layer -> style: modules of which some layers have names of columns and others of rows."""
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        children = {key: base_of(child) for key, child in module.named_children()}
        columns = {
            key: _COLUMNS.get(key) or _FUSED[key]
            for key, child in children.items()
            if (key in _COLUMNS or key in _FUSED) and (is_linear(child) or isinstance(child, nn.Embedding))
        }
        rows = {key: "row" for key, child in children.items() if key in _ROWS and is_linear(child)}
        if "c_attn" in columns and "q_attn" in columns:
            columns["c_attn"] = "column/2"
        if not rows:
            columns, rows = _in_parts(children)
        if not rows or not _fit(module, columns, rows):
            continue
        between = {key: "partial" for key in children if key in _BETWEEN}
        prefix = f"{name}." if name else ""
        found |= {prefix + key: style for key, style in {**columns, **rows, **between}.items()}
    return found


def _in_parts(children: Mapping[str, nn.Module]) -> tuple[dict[str, str], dict[str, str]]:
    """Columns and rows of a block of BERT's kind, where they are in modules beside each other."""
    behind = getattr(children.get("output"), "dense", None)
    behind = base_of(behind) if isinstance(behind, nn.Module) else None
    for part, names in _PARTS.items():
        layers = {key: base_of(one) for key, one in children[part].named_children()} if part in children else {}
        if behind is not None and is_linear(behind) and names == {k for k in layers if is_linear(layers[k])}:
            return dict.fromkeys((f"{part}.{key}" for key in layers if key in names), "column"), {"output.dense": "row"}
    return {}, {}


def _fit(parent: nn.Module, columns: Mapping[str, str], rows: Mapping[str, str]) -> bool:
    """Whether columns are as wide as the rows behind them: else one is several layers, in an order nobody says."""
    layers = {key: base_of(parent.get_submodule(key)) for key in (*columns, *rows)}
    inputs = {width_in(layers[key]) for key in rows}
    outputs = {
        key: width_out(layers[key]) // int(style.partition("/")[2] or 1)
        for key, style in columns.items()
        if is_linear(layers[key])
    }
    return inputs <= set(outputs.values()) and all(
        width in inputs for key, width in outputs.items() if key not in _OF_KEYS
    )


def vocabulary_of(model: nn.Module) -> dict[str, str]:
    """The embedding of tokens, and the head that gives logits over them, of a Hugging Face model."""
    embedding, head = _ask(model, "get_input_embeddings"), _ask(model, "get_output_embeddings")
    if not isinstance(embedding, nn.Embedding):
        return {}
    found = {}
    for name, module in model.named_modules():
        is_head = module is head and is_linear(module) and _rows(module) == _rows(embedding)
        if is_head or getattr(module, "weight", None) is embedding.weight:
            if not can_give_vocabulary(module):
                return {}  # what shares the weight cannot be split
            found[name] = Style.VOCABULARY.value
    return found


def _rows(module: nn.Module) -> int:
    weight = getattr(module, "weight", None)
    return 0 if weight is None else int(weight.shape[0])


def _ask(model: nn.Module, method: str) -> Any:
    ask = getattr(model, method, None)
    try:
        return ask() if callable(ask) else None
    except NotImplementedError:  # as transformers says that there is none
        return None
