"""How a layer is split over the ranks of an axis: what each of them has of its parameters. Integers only.

`Heads` finds the heads of an attention, so that ranks have whole ones, and the counts that its module goes by.

[Note: LoRA of split layers]
PEFT puts two matrices around a layer: y = x W^T + s (x A^T) B^T, with A (r, in) and B (out, r).

| W      | A                                        | B                                                       |
|--------|------------------------------------------|---------------------------------------------------------|
| column | whole, computed by all ranks alike       | the same columns; its gradient of x A^T is summed       |
| row    | the same inputs; what it gives is summed | whole, computed by all ranks alike                      |

So a matrix that is whole has the whole gradient on each rank, and one that is split goes with what it is beside.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any

from torch import nn

from ..offload import TensorShard


class Style(Enum):
    """What becomes of a layer; the value is how a plan says it.

    y = x w^T, with w (out, in): columns of w^T are rows of w, as torch keeps it.
    """

    COLUMN = "column"  # outputs are divided: each rank has some, of all inputs
    GATHERED = "column_gathered"  # as a column split, and all ranks get the outputs of all
    ROW = "row"  # inputs are divided, as a column split before it leaves them: outputs are summed
    VOCABULARY = "vocabulary"  # an embedding's rows, or a head's outputs, with the loss over them
    EXPERTS = "experts"  # all experts of a layer: columns and, behind them, rows of each; outputs are summed
    PARTIAL = "partial"  # whole, between a column and a row split: each rank has a part of the gradient
    WHOLE = "whole"  # whole, and used by all ranks alike


@dataclass(frozen=True)
class ParameterSplit:
    """What each place has of a parameter."""

    portions: tuple[TensorShard, ...]  # by place
    is_partial: bool = False  # the gradients of places with the same portion are to be added up

    def copies(self, place: int) -> tuple[int, ...]:
        """The places that have the same portion as this one."""
        return self._copies[place]

    @cached_property
    def _copies(self) -> tuple[tuple[int, ...], ...]:
        """By place."""
        alike: dict[TensorShard, list[int]] = {}
        for place, portion in enumerate(self.portions):
            alike.setdefault(portion, []).append(place)
        return tuple(tuple(alike[portion]) for portion in self.portions)


@dataclass(frozen=True)
class LayerSplit:
    """One layer, with its style and the splits of its own parameters by their name in it."""

    name: str
    module: nn.Module
    style: Style
    parameters: dict[str, ParameterSplit]
    inputs: tuple[tuple[int, int], ...] = ()  # [low, high) of a row split's inputs or experts' width, by place

    @cached_property
    def is_transposed(self) -> bool:
        """Whether the weight is (in, out)."""
        return is_conv1d(self.module)


def is_conv1d(module: nn.Module) -> bool:
    """Whether it is GPT-2's linear layer, whose weight is (in, out)."""
    return type(module).__name__ == "Conv1D" and type(module).__module__.startswith("transformers.")


def is_linear(module: nn.Module) -> bool:
    return type(module) is nn.Linear or is_conv1d(module)


def can_give_vocabulary(module: nn.Module) -> bool:
    """Whether it is a head, or an embedding whose output is its rows, perhaps in a scale, and nothing more."""
    is_scaled = type(module).__name__.endswith("ScaledWordEmbedding")  # of transformers: Gemma's, Bart's
    is_scaled &= isinstance(module, nn.Embedding) and type(module).__module__.startswith("transformers.")
    if is_scaled or type(module) is nn.Embedding:
        return module.max_norm is None and not module.scale_grad_by_freq and not module.sparse
    return is_linear(module)


def width_out(module: nn.Module) -> int:
    """Outputs of a linear layer, columns of an embedding."""
    return module.get_parameter("weight").shape[0 if type(module) is nn.Linear else 1]


def width_in(module: nn.Module) -> int:
    """Inputs of a linear layer."""
    return module.get_parameter("weight").shape[0 if is_conv1d(module) else 1]


def ranges_of(size: int, degree: int) -> list[tuple[int, int]]:
    """[low, high) of each place: as even as can be."""
    return [(size * place // degree, size * (place + 1) // degree) for place in range(degree)]


Ranges = Sequence[Sequence[tuple[int, int]]]
"""By place: what it has of a dimension, [low, high) of each part."""


def outputs_split(name: str, module: nn.Module, style: Style, ranges: Ranges, is_partial: bool = False) -> LayerSplit:
    """A column split: of a linear layer's outputs, or of an embedding's columns. ranges: of these."""
    dims = {"weight": 0 if type(module) is nn.Linear else 1, "bias": 0}
    return LayerSplit(name, module, style, _split(module, dims, ranges, is_partial))


def inputs_split(name: str, module: nn.Module, ranges: Sequence[tuple[int, int]]) -> LayerSplit:
    """A row split of a linear layer. The bias stays whole, and is added once."""
    dims = {"weight": 0 if is_conv1d(module) else 1}
    return LayerSplit(name, module, Style.ROW, _split(module, dims, [[one] for one in ranges]), tuple(ranges))


def vocabulary_split(name: str, module: nn.Module, degree: int) -> LayerSplit:
    """Of an embedding, or of a head."""
    dims = {"weight": 1 if is_conv1d(module) else 0, "bias": 0}
    size = module.get_parameter("weight").shape[dims["weight"]]
    ranges = [[one] for one in ranges_of(size, degree)]
    return LayerSplit(name, module, Style.VOCABULARY, _split(module, dims, ranges))


def partial_split(name: str, module: nn.Module, degree: int) -> LayerSplit:
    """Whole parameters whose gradients are added up."""
    splits = {
        key: ParameterSplit((TensorShard.all_of(tuple(param.shape)),) * degree, is_partial=True)
        for key, param in module.named_parameters()
    }
    return LayerSplit(name, module, Style.PARTIAL, splits)


def _split(
    module: nn.Module, dims: dict[str, int], ranges: Ranges, is_partial: bool = False
) -> dict[str, ParameterSplit]:
    found = {}
    for key, dim in dims.items():
        param = getattr(module, key, None)
        if isinstance(param, nn.Parameter):
            portions = tuple(TensorShard.along(tuple(param.shape), dim, own) for own in ranges)
            found[key] = ParameterSplit(portions, is_partial)
    return found


_SIZES = ("head_dim", "key_value_proj_dim", "attention_head_size", "head_size", "d_kv")
_COUNTS = ("num_heads", "n_heads", "n_head", "num_attention_heads", "num_query_heads", "nhead")
_KEY_COUNTS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "num_kv")
_WIDTHS = ("split_size", "inner_dim", "all_head_size", "embed_dim", "hidden_size")
_GROUPS = ("num_key_value_groups", "n_rep")
_PROJECTIONS = {"q_proj", "k_proj", "v_proj", "q_lin", "k_lin", "v_lin", "query", "key", "value", "q", "k", "v"}
_PROJECTIONS |= {"q_attn", "c_attn", "qkv", "qkv_proj", "query_key_value"}


@dataclass(frozen=True)
class Heads:
    """The heads of one attention module, of which each rank computes some.

    Where there are fewer keys and values than ranks, several ranks have the same of them.
    """

    module: nn.Module
    size: int  # elements of one
    queries: int
    keys: int
    layers: frozenset[str]  # names of those that give them

    @classmethod
    def of(cls, parent: nn.Module, columns: dict[str, tuple[nn.Module, int]]) -> Heads | None:
        """columns: layers that are split by columns -> with the width of their smallest part. None: no attention.

        Where names say which of them are an attention's, the others are an MLP's beside it.
        """
        named = {name for name in columns if name.rpartition(".")[2] in _PROJECTIONS}
        widths = [width for name, (layer, width) in columns.items() if is_linear(layer) and name in (named or columns)]
        size = _number(parent, _SIZES)
        count = _number(parent, _COUNTS)
        if size is None and count is not None and widths and max(widths) % count == 0:
            size = max(widths) // count
        if size is None or not widths or any(width % size for width in widths):
            return None
        return cls(parent, size, max(widths) // size, min(widths) // size, frozenset(named or columns))

    def ranges(self, name: str, width: int, degree: int, has_parts: bool) -> list[tuple[int, int]]:
        """[low, high) of a layer's outputs, by place. Raises ValueError where the degree does not divide the heads."""
        heads = width // self.size
        if heads % degree == 0:
            step = heads // degree * self.size
            return [(place * step, (place + 1) * step) for place in range(degree)]
        if degree % heads == 0 and heads < self.queries and self.queries % degree == 0 and not has_parts:
            kept = [place * heads // degree for place in range(degree)]
            return [(head * self.size, (head + 1) * self.size) for head in kept]
        kind = "heads" if heads == self.queries else "key heads"
        raise ValueError(
            f"parallel.tensor: expected a degree that divides the heads of '{name}', found {kind}({heads}) / "
            f"tensor({degree}), which leaves {heads % degree}; set a divisor of {heads}, or "
            f'"tensor_parallel": {{"plan": {{"{name}": "whole"}}}} and the same for the layers beside it'
        )

    def parameters(self, degree: int) -> dict[str, ParameterSplit]:
        """Of the module itself, with a row for each head of queries, as the sinks of GPT-OSS."""
        step = self.queries // degree
        rows = [(place * step, (place + 1) * step) for place in range(degree)]
        return {
            key: ParameterSplit(tuple(TensorShard.along(tuple(param.shape), 0, [own]) for own in rows))
            for key, param in self.module.named_parameters(recurse=False)
            if param.ndim and param.shape[0] == self.queries
        }

    def local_counts(self, degree: int) -> Iterator[tuple[str, int]]:
        """(attribute of the module, its value for one rank's heads)."""
        queries, keys = self.queries // degree, max(1, self.keys // degree)
        for names, whole, own in (
            (_COUNTS, self.queries, queries),
            (_KEY_COUNTS, self.keys, keys),
            (_WIDTHS, self.queries * self.size, queries * self.size),
            (_GROUPS, self.queries // self.keys, queries // keys),
        ):
            for name in names:
                if self.module.__dict__.get(name) == whole != own:
                    yield name, own


def _number(module: nn.Module, names: tuple[str, ...]) -> int | None:
    values = (module.__dict__.get(name) for name in names)
    return next((value for value in values if type(value) is int and value > 0), None)


def smallest_part(module: nn.Module, parts: tuple[int, ...]) -> int:
    """The width of the smallest of several fused parts, in proportion `parts`."""
    return width_out(module) * min(parts) // sum(parts)


_BASE = "base_layer"


def is_lora(module: nn.Module) -> bool:
    """Whether it is PEFT's layer around a linear one, of which nothing needs all columns but the product."""
    kind = type(module)
    if kind.__module__ != "peft.tuners.lora.layer" or kind.__name__ != "Linear":
        return False
    magnitudes: Any = getattr(module, "lora_magnitude_vector", ())
    variants: Any = getattr(module, "lora_variant", ())
    return not len(magnitudes) and not len(variants)


def is_other_adapter(module: nn.Module) -> bool:
    """Whether it is PEFT's layer around a linear one, and no such LoRA."""
    is_peft = type(module).__module__.startswith("peft.tuners.") and _BASE in module._modules
    return is_peft and not is_lora(module)


def base_of(module: nn.Module) -> nn.Module:
    """The layer inside of an adapter; else the module."""
    found: Any = getattr(module, _BASE) if is_lora(module) else module
    assert isinstance(found, nn.Module)
    return found


def expanded(styles: dict[str, str], modules: dict[str, nn.Module]) -> dict[str, str]:
    """Names of layers -> styles, with those of the layers in adapters in place of these."""
    found: dict[str, str] = {}
    for name, style in styles.items():
        wrapper = modules[name]
        if not is_lora(wrapper):
            found[name] = style
            continue
        kind = style.partition("/")[0]
        found[f"{name}.{_BASE}"] = style
        inner: Any = {"column": "lora_B", "column_gathered": "lora_B", "row": "lora_A"}.get(kind)
        if inner is not None:
            found |= {f"{name}.{inner}.{key}": style for key in getattr(wrapper, inner)}
    return found


def name_of(name: str, modules: dict[str, nn.Module]) -> str:
    """Of a layer, or of the adapter that it is in."""
    parts = name.split(".")
    for up in (1, 2):
        outer = ".".join(parts[:-up])
        if outer in modules and is_lora(modules[outer]):
            return outer
    return name
