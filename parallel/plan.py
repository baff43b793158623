"""Chooses the layers that are split over the ranks of a tensor axis, and computes each rank's part of their parameters.

A style comes from the config, else from the model's own plan, else from the layer names of common model families.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from ..offload import TensorShard
from .experts import ExpertLayout, layer_of
from .region_blocks import SequenceParallelRegion, find_regions, splits_of_parts
from .splits import (
    Heads,
    LayerSplit,
    ParameterSplit,
    Style,
    adapter_around,
    base_of,
    can_give_vocabulary,
    expanded,
    inputs_split,
    is_linear,
    is_other_adapter,
    name_of,
    outputs_split,
    partial_split,
    ranges_of,
    smallest_part,
    vocabulary_split,
    width_in,
    width_out,
)

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
"""Styles of `_tp_plan` in transformers -> our styles. `ExpertLayout` replaces their styles of experts."""

_COLUMNS = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "q_attn", "query", "key", "value", "q", "k", "v"), "column"),
    **dict.fromkeys(("gate_proj", "up_proj", "fc1", "c_fc", "wi", "wi_0", "wi_1", "w1", "w3", "up", "gate"), "column"),
    **dict.fromkeys(("q_lin", "k_lin", "v_lin", "lin1", "linear1", "fc_in", "dense_h_to_4h"), "column"),
    "gate_up_proj": "column/2",
    "relative_attention_bias": "column",  # T5: a column for each head
}
_ROWS = {"o_proj", "out_proj", "c_proj", "o", "down_proj", "fc2", "wo", "w2", "down", "dense_4h_to_h"}
_ROWS |= {"out_lin", "lin2", "linear2", "fc_out"}
_OF_KEYS = {"k_proj", "v_proj", "key", "value", "k", "v"}  # may have fewer heads than queries
_FUSED = {"c_attn": "column/3"}  # GPT-2; in its cross-attention c_attn has two parts, keys and values
_PARTS = {"self": {"query", "key", "value"}, "attention": {"query", "key", "value"}, "intermediate": {"dense"}}
# Norms of each head: every rank normalizes its heads with the whole weight, and so has a part of its gradient.
_BETWEEN = {"q_norm", "k_norm", "q_layernorm", "k_layernorm"}


def plan_of_model(model: nn.Module) -> dict[str, str]:
    """Return pattern -> style of the plan that a Hugging Face model ships with, or an empty dict."""
    plan: Any = getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None)
    if not isinstance(plan, Mapping):
        return {}
    return {pattern: OF_HUGGING_FACE[style] for pattern, style in plan.items() if style in OF_HUGGING_FACE}


def plan_by_names(model: nn.Module) -> dict[str, str]:
    """Return layer name -> style for modules with layer names of both columns and rows."""
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        children = {key: base_of(child) for key, child in module.named_children()}
        columns = {
            key: _COLUMNS.get(key) or _FUSED[key]
            for key, child in children.items()
            if (key in _COLUMNS or key in _FUSED) and (is_linear(child) or isinstance(child, nn.Embedding))
        }
        rows = {key: "row" for key, child in children.items() if key in _ROWS and is_linear(child)}
        # GPT-2's cross-attention has its queries in q_attn, so c_attn holds keys and values.
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
    """Return columns and rows of a BERT block, which has them in separate modules."""
    behind = getattr(children.get("output"), "dense", None)
    behind = base_of(behind) if isinstance(behind, nn.Module) else None
    for part, names in _PARTS.items():
        layers = {key: base_of(one) for key, one in children[part].named_children()} if part in children else {}
        if behind is not None and is_linear(behind) and names == {k for k in layers if is_linear(layers[k])}:
            return dict.fromkeys((f"{part}.{key}" for key in layers if key in names), "column"), {"output.dense": "row"}
    return {}, {}


def _fit(parent: nn.Module, columns: Mapping[str, str], rows: Mapping[str, str]) -> bool:
    """Return whether columns are as wide as the rows behind them. If not, a layer fuses several in an unknown order."""
    layers = {key: base_of(parent.get_submodule(key)) for key in (*columns, *rows)}
    inputs = {width_in(layers[key]) for key in rows}
    outputs = {
        key: width_out(layers[key]) // int(style.partition("/")[2] or 1)
        for key, style in columns.items()
        if is_linear(layers[key])
    }
    # Keys may be narrower than the rows behind them (grouped queries). Any other width means fused layers.
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
        # A head with other outputs than the embedding has rows gives no logits over these tokens.
        is_head = module is head and is_linear(module) and _rows(module) == _rows(embedding)
        if is_head or getattr(module, "weight", None) is embedding.weight:
            if not can_give_vocabulary(module):
                return {}  # a module that shares the weight cannot be split
            found[name] = Style.VOCABULARY.value
    return found


def _rows(module: nn.Module) -> int:
    weight = getattr(module, "weight", None)
    return 0 if weight is None else int(weight.shape[0])


def _ask(model: nn.Module, method: str) -> Any:
    ask = getattr(model, method, None)
    try:
        return ask() if callable(ask) else None
    except NotImplementedError:  # transformers: the model has none
        return None


_LARGE_SHARE, _LARGE_NUMEL = 0.01, 1 << 12  # from this part of all parameters on, a layer that stays whole is reported
_KEY = "tensor_parallel.plan"
_STYLES = ", ".join(f'"{style.value}"' for style in Style)


@dataclass(frozen=True)
class TensorPlan:
    """The layers that are split over `degree` ranks. Parameters are keyed by identity; the rest are whole."""

    degree: int
    layers: tuple[LayerSplit, ...]
    heads: tuple[Heads, ...]
    parameters: Mapping[int, ParameterSplit]
    left_whole: tuple[str, ...]  # names of large layers without a style
    regions: tuple[SequenceParallelRegion, ...] = ()  # blocks between which a rank has a part of the tokens
    guessed: frozenset[str] = frozenset()  # layers whose style does not come from a model of transformers

    @classmethod
    def of(
        cls, model: nn.Module, degree: int, wanted: Mapping[str, str] | None = None, has_parts: bool = False
    ) -> TensorPlan:
        """Plan the split of a model. Raises ValueError, with names or the equation, if a layer cannot be split.

        wanted: name pattern -> style, before all other sources. has_parts: ranks have parts of the tokens between
        blocks.
        """
        styles = _styles(model, wanted or {})
        layers, heads = [], []
        modules = dict(model.named_modules())
        names = {name: name_of(name, modules) for name in styles}
        _check_adapters(names, has_parts)
        by_parent: dict[str, dict[str, tuple[Style, tuple[int, ...]]]] = {}
        for name, style in styles.items():
            by_parent.setdefault(names[name].rpartition(".")[0], {})[name] = style
        # Together, because the heads of an attention show only in the widths of all its projections.
        for parent, own in by_parent.items():
            found, of_attention = _split_beside(modules[parent], model, own, names, degree)
            layers += found
            heads += [] if of_attention is None else [of_attention]
        if not any(layer.style is not Style.PARTIAL for layer in layers):
            raise ValueError(
                f"parallel.tensor: expected a model with layers to split over {degree} ranks, found no known layer "
                f'names; name layers: "tensor_parallel": {{"plan": {{"layers.*.mlp.up": "column"}}}}'
            )
        regions = find_regions(model, layers) if has_parts else ()
        layers += splits_of_parts(model, regions, layers, degree)
        parameters, left_whole = _parameters(model, layers), _left_whole(model, {*styles, *_named(model, wanted or {})})
        guessed = _guessed(model, styles, wanted or {})
        return cls(degree, tuple(layers), tuple(heads), parameters, left_whole, regions, guessed)

    def tensor_shard(self, param: nn.Parameter, place: int) -> tuple[TensorShard, tuple[int, ...]]:
        """Return the part of a parameter on rank `place`, and the ranks with the same part."""
        split = self.parameters.get(id(param))
        if split is None:
            return TensorShard.all_of(tuple(param.shape)), tuple(range(self.degree))
        return split.tensor_shards[place], split.copies(place)


def _styles(model: nn.Module, wanted: Mapping[str, str]) -> dict[str, tuple[Style, tuple[int, ...]]]:
    """Return layer name -> (style, proportions of fused parts). Later sources win."""
    modules = dict(model.named_modules())
    own = plan_of_model(model)
    found: dict[str, str] = {}
    for pattern, style in own.items():
        found |= dict.fromkeys(_matches(modules, pattern), style)
    found |= {name: "column/2" for name in found if _is_gate_up(name, found, modules)}
    _check_kinds(found, modules)
    # A plan of the model with columns or rows is complete: names would split layers that it leaves whole.
    has_own = any(style in ("column", "row") for style in found.values())
    experts = {name: Style.EXPERTS.value for name in modules if _can_be(modules[name], Style.EXPERTS.value)}
    # A plan of transformers may name modules of other kinds, which stay whole.
    found = {name: style for name, style in found.items() if _can_be(modules[name], style)}
    found = {**({} if has_own else plan_by_names(model)), **found, **vocabulary_of(model), **experts}
    for pattern, style in wanted.items():
        names = _matches(modules, pattern)
        if not names:
            tops = ", ".join(sorted({re.sub(r"\b\d+\b", "*", name) for name in modules if name})[:8])
            raise ValueError(
                f'{_KEY}: expected a pattern of layer names, found "{pattern}", which matches no layer; '
                f"the layers are {tops}"
            )
        for name in names:
            if not _can_be(modules[name], style):
                raise ValueError(
                    f'{_KEY}: expected {_expected(style)} for "{style}", found "{name}", a '
                    f"{type(modules[name]).__name__}; name the layers in it"
                )
        found |= dict.fromkeys(names, style)
    parsed = {name: parse_style(style) for name, style in expanded(found, modules).items()}
    split = {name: style for name, style in parsed.items() if style[0] is not Style.WHOLE}
    _check_kinds(split, modules)
    return split


def _is_gate_up(name: str, styles: Mapping[str, str], modules: Mapping[str, nn.Module]) -> bool:
    """Return whether a layer fuses gate and up. Plans of transformers gather it, but its columns need no gather."""
    down = name.removesuffix("gate_up_proj") + "down_proj"
    if not name.endswith("gate_up_proj") or (styles[name], styles.get(down)) != ("column_gathered", "row"):
        return False
    up, back = modules[name], modules[down]
    return is_linear(up) and is_linear(back) and width_out(up) == 2 * width_in(back)


def _guessed(model: nn.Module, styles: Mapping[str, object], wanted: Mapping[str, str]) -> frozenset[str]:
    """Return the split layers whose style the config names, or all of a model that is not from transformers."""
    if not type(model).__module__.startswith("transformers."):
        return frozenset(styles)
    return _named(model, wanted)


def _named(model: nn.Module, wanted: Mapping[str, str]) -> frozenset[str]:
    modules = dict(model.named_modules())
    return frozenset(name for pattern in wanted for name in _matches(modules, pattern))


def parse_style(text: str) -> tuple[Style, tuple[int, ...]]:
    """Parse "column", "column/3" for three equal fused parts, or "column/4:1:1" for a proportion. Raises ValueError."""
    name, _, parts = text.partition("/")
    known = {style.value: style for style in Style}
    if name not in known or (parts and not re.fullmatch(r"\d+(:\d+)*", parts)) or (parts and name != "column"):
        raise ValueError(
            f'expected {_STYLES}, "column/3" for a layer of three equal parts, or "column/4:1:1" for parts in '
            f'proportion, found "{text}"'
        )
    numbers = tuple(map(int, parts.split(":"))) if parts else (1,)
    return known[name], (1,) * numbers[0] if len(numbers) == 1 else numbers


def _matches(modules: Mapping[str, nn.Module], pattern: str) -> list[str]:
    """Return the names that the pattern matches, as a whole or from a dot on."""
    return [name for name in modules if name and (fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}"))]


def _can_be(module: nn.Module, style: str) -> bool:
    kind = style.partition("/")[0]
    if kind in (Style.COLUMN.value, Style.GATHERED.value, Style.ROW.value):
        module = base_of(module)
    if kind in (Style.PARTIAL.value, Style.WHOLE.value):
        return True
    if kind in (Style.ROW.value, Style.GATHERED.value):
        return is_linear(module)
    if kind == Style.VOCABULARY.value:
        return can_give_vocabulary(module)
    if kind == Style.EXPERTS.value:
        return layer_of("", module) is not None and ExpertLayout.of(module) is not None
    return is_linear(module) or type(module) is nn.Embedding


def _expected(style: str) -> str:
    if style == Style.EXPERTS.value:
        return "a module with all experts of a layer that declares its layout as in transformers"
    return "a linear layer or an embedding"


def _split_beside(
    parent: nn.Module,
    model: nn.Module,
    styles: Mapping[str, tuple[Style, tuple[int, ...]]],
    names: Mapping[str, str],
    degree: int,
) -> tuple[list[LayerSplit], Heads | None]:
    """Split the layers of one module, with whole heads if it is an attention. names: of layers or the adapters around
    them.
    """
    modules = {name: model.get_submodule(name) for name in styles}
    columns = {
        names[name]: (modules[name], smallest_part(modules[name], parts))
        for name, (style, parts) in styles.items()
        if style is Style.COLUMN
    }
    heads = Heads.of(parent, columns)
    found = []
    for name, (style, parts) in styles.items():
        of_name = heads if heads is not None and names[name] in heads.layers else None
        found.append(_split_one(name, modules[name], style, parts, of_name, degree))
    own = {} if heads is None else heads.parameters(degree)
    if own:
        # These parameters are split too. The style says only that the module needs no hooks.
        found.append(LayerSplit(next(iter(styles)).rpartition(".")[0], parent, Style.PARTIAL, own))
    return found, heads


def _split_one(
    name: str, module: nn.Module, style: Style, parts: tuple[int, ...], heads: Heads | None, degree: int
) -> LayerSplit:
    if style is Style.PARTIAL:
        return partial_split(name, module, degree)
    if style is Style.VOCABULARY:
        _check_room(name, module.get_parameter("weight").shape[0], degree, "rows")
        return vocabulary_split(name, module, degree)
    layout = ExpertLayout.of(module) if style is Style.EXPERTS else None
    if layout is not None:
        _check_room(name, layout.width, degree, "columns")
        return layout.split(name, module, degree)
    if style is Style.ROW:
        _check_room(name, width_in(module), degree, "inputs")
        return inputs_split(name, module, ranges_of(width_in(module), degree))
    width = width_out(module)
    if width % sum(parts):
        raise ValueError(
            f"{_KEY}: expected parts that divide the outputs of '{name}', found {width} % "
            f"({' + '.join(map(str, parts))}) = {width % sum(parts)}"
        )
    _check_room(name, width // sum(parts) * min(parts), degree, "outputs")
    by_place: list[list[tuple[int, int]]] = [[] for _ in range(degree)]
    start, is_partial = 0, False
    for part in parts:
        size = width // sum(parts) * part
        if heads is None or style is Style.GATHERED or not is_linear(module):
            ranges = ranges_of(size, degree)
        else:
            # Whole heads, since a softmax needs all elements of a head's scores.
            ranges = heads.ranges(name, size, degree, len(parts) > 1)
            # Fewer key heads than ranks: the ranks with the same key head have parts of its gradient.
            is_partial = len(set(ranges)) < degree
        for place, (low, high) in enumerate(ranges):
            by_place[place].append((start + low, start + high))
        start += size
    return outputs_split(name, module, style, by_place, is_partial)


def _check_kinds(styles: Iterable[str], modules: Mapping[str, nn.Module]) -> None:
    for name in styles:
        adapter = name if is_other_adapter(modules[name]) else adapter_around(name, modules)
        if adapter is not None:
            kind = type(modules[adapter])
            found = f"{kind.__module__.split('.')[2]}.{kind.__name__}"  # such as ia3.Linear
            if found == "lora.Linear":
                found += " with a variant such as DoRA"
            raise ValueError(
                "parallel.tensor: expected PEFT's LoRA without DoRA on split linear layers, found "
                f"{found} on '{adapter}'; put plain LoRA on linear layers alone (use_dora, target_modules), or set "
                "parallel.tensor to 1"
            )


def _check_adapters(names: Mapping[str, str], has_parts: bool) -> None:
    found = next((outer for name, outer in names.items() if name != outer), None)
    if found is not None and has_parts:
        raise ValueError(
            f"parallel.tensor_sequence: expected split layers without adapters, found an adapter at '{found}'; set it "
            "to false"
        )


def _check_room(name: str, size: int, degree: int, what: str) -> None:
    if size < degree:
        raise ValueError(
            f"parallel.tensor: '{name}': expected {what} for each rank, found {what}({size}) < tensor({degree}); set a "
            f'smaller degree, or "whole" for the layer in {_KEY}'
        )


def _parameters(model: nn.Module, layers: list[LayerSplit]) -> dict[int, ParameterSplit]:
    """Return the splits by identity of a parameter. Raises ValueError if a parameter would be split in two ways."""
    found: dict[int, tuple[ParameterSplit, str]] = {}
    for layer in layers:
        for key, split in layer.parameters.items():
            param = layer.module.get_parameter(key)
            before = found.get(id(param))
            if before is not None and before[0] != split:
                raise ValueError(
                    f"{_KEY}: '{before[1]}' and '{layer.name}' share a weight, but their splits differ; give both the "
                    "same style"
                )
            found[id(param)] = split, layer.name
    split_layers = {id(layer.module) for layer in layers}
    for name, module in _leaves(model):
        for param in module.parameters(recurse=False):
            if id(param) not in found or id(module) in split_layers or _is_inside_partial(layers, module):
                continue
            # The module has no style and uses a split parameter.
            if not found[id(param)][1].startswith(f"{name}."):  # BERT: a module also lists a parameter of its child
                raise ValueError(
                    f"{_KEY}: '{found[id(param)][1]}' and '{name}' share a weight, but '{name}' is not split; give "
                    'both the same style, or "whole" to both'
                )
    return {key: split for key, (split, _) in found.items()}


def _is_inside_partial(layers: list[LayerSplit], module: nn.Module) -> bool:
    return any(layer.style is Style.PARTIAL and module in set(layer.module.modules()) for layer in layers)


def _leaves(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    return ((name, module) for name, module in model.named_modules() if module._parameters)


def _left_whole(model: nn.Module, known: set[str]) -> tuple[str, ...]:
    """Return the names of large layers without a style, with a star for numbers."""
    total = sum(param.numel() for param in model.parameters())
    found = [
        re.sub(r"\b\d+\b", "*", name)
        for name, module in model.named_modules()
        if name not in known
        and (is_linear(module) or isinstance(module, nn.Embedding) or layer_of(name, module) is not None)
        and sum(param.numel() for param in module.parameters(recurse=False)) > max(_LARGE_SHARE * total, _LARGE_NUMEL)
    ]
    return tuple(dict.fromkeys(found))
