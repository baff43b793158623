"""How a layer is split over the ranks of an axis: what each of them has of its parameters. Integers only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from torch import nn

from ..offload import Portion


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

    portions: tuple[Portion, ...]  # by place
    is_partial: bool = False  # the gradients of places with the same portion are to be added up

    def copies(self, place: int) -> tuple[int, ...]:
        """The places that have the same portion as this one."""
        return self._copies[place]

    @cached_property
    def _copies(self) -> tuple[tuple[int, ...], ...]:
        """By place."""
        alike: dict[Portion, list[int]] = {}
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
        key: ParameterSplit((Portion.all_of(tuple(param.shape)),) * degree, is_partial=True)
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
            portions = tuple(Portion.along(tuple(param.shape), dim, own) for own in ranges)
            found[key] = ParameterSplit(portions, is_partial)
    return found
