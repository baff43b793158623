"""Describes how a layer is split over the ranks of an axis, as integers: each rank's part of each parameter.

`Heads` finds the heads of an attention, so that a rank gets whole heads, and the module attributes that count them.

[Note: LoRA of split layers]
PEFT puts two matrices beside a layer: y = x W^T + s (x A^T) B^T, with A (r, in) and B (out, r).

| W      | A                                     | B                                                   |
|--------|---------------------------------------|-----------------------------------------------------|
| column | whole, computed by all ranks alike    | the same columns; the gradient of x A^T is summed   |
| row    | the same inputs; its output is summed | whole, computed by all ranks alike                  |

So a whole matrix has its whole gradient on each rank, and a split matrix follows the split of W.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any

from torch import nn

from ..kernels.linear_layers import is_conv1d
from ..offload import TensorShard


class Style(Enum):
    """The split of a layer; the value is its name in a plan.

    y = x w^T, with w (out, in): columns of w^T are rows of w, as torch stores it.
    """

    COLUMN = "column"  # splits outputs: each rank computes some of them from all inputs
    GATHERED = "column_gathered"  # a column split, then all ranks gather all outputs
    ROW = "row"  # splits inputs, as a column split before it leaves them; outputs are summed
    VOCABULARY = "vocabulary"  # splits an embedding's rows, or a head's outputs and the loss over them
    EXPERTS = "experts"  # all experts of a layer: columns, then rows of each; outputs are summed
    PARTIAL = "partial"  # not split, but between a column and a row split: each rank has a part of the gradient
    WHOLE = "whole"  # not split, used by all ranks alike


@dataclass(frozen=True)
class ParameterSplit:
    """Each rank's part of a parameter."""

    tensor_shards: tuple[TensorShard, ...]  # by rank of the axis
    is_partial: bool = False  # gradients are summed over the ranks with the same part

    @classmethod
    def partial(cls, param: nn.Parameter, degree: int) -> ParameterSplit:
        """Keep a parameter whole on each rank and sum its gradients."""
        return cls((TensorShard.all_of(tuple(param.shape)),) * degree, is_partial=True)

    def copies(self, place: int) -> tuple[int, ...]:
        """Return the ranks of the axis with the same part as rank `place`."""
        return self._copies[place]

    @cached_property
    def _copies(self) -> tuple[tuple[int, ...], ...]:
        """By rank."""
        alike: dict[TensorShard, list[int]] = {}
        for place, tensor_shard in enumerate(self.tensor_shards):
            alike.setdefault(tensor_shard, []).append(place)
        return tuple(tuple(alike[tensor_shard]) for tensor_shard in self.tensor_shards)


@dataclass(frozen=True)
class LayerSplit:
    """A layer with its style and the splits of its direct parameters, by parameter name."""

    name: str
    module: nn.Module
    style: Style
    parameters: dict[str, ParameterSplit]
    inputs: tuple[tuple[int, int], ...] = ()  # [low, high) of a row split's inputs or experts' width, by rank

    @cached_property
    def is_transposed(self) -> bool:
        """Whether the weight is (in, out)."""
        return is_conv1d(self.module)


def is_linear(module: nn.Module) -> bool:
    return type(module) is nn.Linear or is_conv1d(module)


def can_give_vocabulary(module: nn.Module) -> bool:
    """Return whether a module is a linear head, or an embedding whose output is its rows, perhaps scaled."""
    is_scaled = type(module).__name__.endswith("ScaledWordEmbedding")  # Gemma and Bart in transformers
    is_scaled &= isinstance(module, nn.Embedding) and type(module).__module__.startswith("transformers.")
    # max_norm and scale_grad_by_freq depend on the ids, and a rank looks up row 0 for the ids of other ranks.
    if is_scaled or type(module) is nn.Embedding:
        return module.max_norm is None and not module.scale_grad_by_freq and not module.sparse
    return is_linear(module)


def width_out(module: nn.Module) -> int:
    """Return the outputs of a linear layer, or the columns of an embedding."""
    return module.get_parameter("weight").shape[0 if type(module) is nn.Linear else 1]


def width_in(module: nn.Module) -> int:
    """Return the inputs of a linear layer."""
    return module.get_parameter("weight").shape[0 if is_conv1d(module) else 1]


def ranges_of(size: int, degree: int) -> list[tuple[int, int]]:
    """Return [low, high) for each rank, as even as possible."""
    return [(size * place // degree, size * (place + 1) // degree) for place in range(degree)]


Ranges = Sequence[Sequence[tuple[int, int]]]
"""For each rank: [low, high) of each of its parts of a dimension."""


def outputs_split(name: str, module: nn.Module, style: Style, ranges: Ranges, is_partial: bool = False) -> LayerSplit:
    """Split by columns: the outputs of a linear layer, or the columns of an embedding, by `ranges`."""
    dims = {"weight": 0 if type(module) is nn.Linear else 1, "bias": 0}
    return LayerSplit(name, module, style, _split(module, dims, ranges, is_partial))


def inputs_split(name: str, module: nn.Module, ranges: Sequence[tuple[int, int]]) -> LayerSplit:
    """Split a linear layer by rows. The bias stays whole and is added once."""
    dims = {"weight": 0 if is_conv1d(module) else 1}
    return LayerSplit(name, module, Style.ROW, _split(module, dims, [[one] for one in ranges]), tuple(ranges))


def vocabulary_split(name: str, module: nn.Module, degree: int) -> LayerSplit:
    """Split the rows of an embedding, or the outputs of a head."""
    dims = {"weight": 1 if is_conv1d(module) else 0, "bias": 0}
    size = module.get_parameter("weight").shape[dims["weight"]]
    ranges = [[one] for one in ranges_of(size, degree)]
    return LayerSplit(name, module, Style.VOCABULARY, _split(module, dims, ranges))


def partial_split(name: str, module: nn.Module, degree: int) -> LayerSplit:
    """Keep all parameters whole and sum their gradients over the ranks."""
    splits = {key: ParameterSplit.partial(param, degree) for key, param in module.named_parameters()}
    return LayerSplit(name, module, Style.PARTIAL, splits)


def _split(
    module: nn.Module, dims: dict[str, int], ranges: Ranges, is_partial: bool = False
) -> dict[str, ParameterSplit]:
    found = {}
    for key, dim in dims.items():
        param = getattr(module, key, None)
        if isinstance(param, nn.Parameter):
            tensor_shards = tuple(TensorShard.along(tuple(param.shape), dim, own) for own in ranges)
            found[key] = ParameterSplit(tensor_shards, is_partial)
    return found


# Attributes that hold the heads of an attention in transformers and in common repositories.
_SIZES = ("head_dim", "key_value_proj_dim", "attention_head_size", "head_size", "d_kv")
_COUNTS = ("num_heads", "n_heads", "n_head", "num_attention_heads", "num_query_heads", "nhead")
_KEY_COUNTS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "num_kv")
# GPT-2 divides the output of c_attn by split_size, T5 reshapes to inner_dim.
_WIDTHS = ("split_size", "inner_dim", "all_head_size", "embed_dim", "hidden_size")
_GROUPS = ("num_key_value_groups", "n_rep")
_PROJECTIONS = {"q_proj", "k_proj", "v_proj", "q_lin", "k_lin", "v_lin", "query", "key", "value", "q", "k", "v"}
_PROJECTIONS |= {"q_attn", "c_attn", "qkv", "qkv_proj", "query_key_value"}


@dataclass(frozen=True)
class Heads:
    """The heads of an attention module. Each rank computes some of them.

    If there are fewer key heads than ranks, several ranks have the same key head.
    """

    module: nn.Module
    size: int  # elements of a head
    queries: int  # number of query heads
    keys: int  # number of key heads
    layers: frozenset[str]  # names of the projections

    @classmethod
    def of(cls, parent: nn.Module, columns: dict[str, tuple[nn.Module, int]]) -> Heads | None:
        """Find the heads of a module, or return None if it is no attention.

        columns: name of a column-split layer -> (layer, width of its smallest fused part). If names mark some of them
        as projections of an attention, the rest belong to an MLP in the same module.
        """
        named = {name for name in columns if name.rpartition(".")[2] in _PROJECTIONS}
        widths = [width for name, (layer, width) in columns.items() if is_linear(layer) and name in (named or columns)]
        size = _number(parent, _SIZES)
        count = _number(parent, _COUNTS)
        if size is None and count is not None and widths and max(widths) % count == 0:
            size = max(widths) // count
        if size is None or not widths or any(width % size for width in widths):
            return None
        # With grouped queries, the projection of queries is the widest and the projection of keys the narrowest.
        return cls(parent, size, max(widths) // size, min(widths) // size, frozenset(named or columns))

    def ranges(self, name: str, width: int, degree: int, has_parts: bool) -> list[tuple[int, int]]:
        """Return [low, high) of a layer's outputs for each rank. Raises ValueError if the degree does not divide the
        heads.
        """
        heads = width // self.size
        if heads % degree == 0:
            step = heads // degree * self.size
            return [(place * step, (place + 1) * step) for place in range(degree)]
        # Not for fused layers: shards with a common key head would differ in their queries, and `copies` finds equal
        # shards only.
        if degree % heads == 0 and heads < self.queries and self.queries % degree == 0 and not has_parts:
            # Ranks with neighbouring query heads share the key head that these query heads use.
            kept = [place * heads // degree for place in range(degree)]
            return [(head * self.size, (head + 1) * self.size) for head in kept]
        kind = "heads" if heads == self.queries else "key heads"
        raise ValueError(
            f"parallel.tensor: expected a degree that divides the heads of '{name}', found {kind}({heads}) % "
            f"tensor({degree}) = {heads % degree}; set a divisor of {heads}, or "
            f'"tensor_parallel": {{"plan": {{"{name}": "whole"}}}} and the same for the layers beside it'
        )

    def parameters(self, degree: int) -> dict[str, ParameterSplit]:
        """Split direct parameters of the module that have a row for each query head, such as the sinks of GPT-OSS."""
        step = self.queries // degree
        rows = [(place * step, (place + 1) * step) for place in range(degree)]
        return {
            key: ParameterSplit(tuple(TensorShard.along(tuple(param.shape), 0, [own]) for own in rows))
            for key, param in self.module.named_parameters(recurse=False)
            if param.ndim and param.shape[0] == self.queries
        }

    def local_counts(self, degree: int) -> Iterator[tuple[str, int]]:
        """Yield (attribute of the module, its value for one rank's heads)."""
        queries, keys = self.queries // degree, max(1, self.keys // degree)
        for names, whole, own in (
            (_COUNTS, self.queries, queries),
            (_KEY_COUNTS, self.keys, keys),
            (_WIDTHS, self.queries * self.size, queries * self.size),
            (_GROUPS, self.queries // self.keys, queries // keys),
        ):
            for name in names:
                # The name alone does not decide: hidden_size may be the width of the model or of all heads.
                if self.module.__dict__.get(name) == whole != own:
                    yield name, own


def _number(module: nn.Module, names: tuple[str, ...]) -> int | None:
    values = (module.__dict__.get(name) for name in names)
    return next((value for value in values if type(value) is int and value > 0), None)


def smallest_part(module: nn.Module, parts: tuple[int, ...]) -> int:
    """Return the width of the smallest of several fused parts in the proportion `parts`."""
    return width_out(module) * min(parts) // sum(parts)


_BASE = "base_layer"


def is_lora(module: nn.Module) -> bool:
    """Return whether a module is PEFT's LoRA on a linear layer, without variants that need all columns (DoRA)."""
    kind = type(module)
    if kind.__module__ != "peft.tuners.lora.layer" or kind.__name__ != "Linear":
        return False
    magnitudes: Any = getattr(module, "lora_magnitude_vector", ())
    variants: Any = getattr(module, "lora_variant", ())
    return not len(magnitudes) and not len(variants)


def is_other_adapter(module: nn.Module) -> bool:
    """Return whether a module is a PEFT adapter around a layer that `is_lora` does not accept."""
    is_peft = type(module).__module__.startswith("peft.tuners.") and _BASE in module._modules
    return is_peft and not is_lora(module)


def adapter_around(name: str, modules: Mapping[str, nn.Module]) -> str | None:
    """Return the name of the outermost PEFT adapter around the module of this name, unless `is_lora` accepts it."""
    found = None
    while name.endswith(f".{_BASE}"):
        name = name.removesuffix(f".{_BASE}")
        found = name if is_other_adapter(modules[name]) else found
    return found


def base_of(module: nn.Module) -> nn.Module:
    """Return the layer inside an adapter, or the module itself."""
    found: Any = getattr(module, _BASE) if is_lora(module) else module
    assert isinstance(found, nn.Module)
    return found


def expanded(styles: dict[str, str], modules: dict[str, nn.Module]) -> dict[str, str]:
    """Replace each adapter in {layer name: style} by its base layer and its split LoRA matrices."""
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
    """Return the name of a layer, or of the adapter around it."""
    parts = name.split(".")
    # A base layer is one level below its adapter (`base_layer`), a LoRA matrix two levels (`lora_A.default`).
    for up in (1, 2):
        outer = ".".join(parts[:-up])
        if outer in modules and is_lora(modules[outer]):
            return outer
    return name
