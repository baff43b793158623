"""Which layers of a model have experts that ranks share, and what each place has of their parameters.

`ExpertPlan` gives whole experts to the ranks of an expert axis. `ExpertLayout` gives columns of all experts to the
ranks of a tensor axis. Integers only.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import nn

from ..offload import TensorShard
from .splits import LayerSplit, ParameterSplit, Style, ranges_of

_INDICES = {"top_k_index", "router_indices", "selected_experts"}
_WEIGHTS = {"top_k_weights", "routing_weights"}
_SIGNATURE = "forward(hidden_states, top_k_index, top_k_weights)"


@dataclass(frozen=True)
class ExpertLayer:
    """One module with all experts of a layer: parameters with a row for each, and a forward that gets the choices.

    hidden_states: (tokens, width), top_k_index: (tokens, k), the number of an expert, or that of all for none,
    top_k_weights: (tokens, k) -> (tokens, width), the sum over k of weight times what the expert makes of the token.
    """

    name: str
    module: nn.Module
    num_experts: int
    parameters: tuple[str, ...]  # names in it of those that have a row for each expert

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """What the module calls its inputs."""
        return inputs_of(self.module)

    @cached_property
    def counts(self) -> tuple[str, ...]:
        """Attributes by which the module knows how many experts it has."""
        return tuple(
            key
            for key, value in vars(self.module).items()
            if "expert" in key and "per_tok" not in key and type(value) is int and value == self.num_experts
        )


@dataclass(frozen=True)
class ExpertList:
    """An `nn.ModuleList` of experts of one shape, of which the module that has it calls each with its tokens."""

    name: str
    block: nn.Module  # that has it
    key: str  # its name there
    experts: tuple[nn.Module, ...]

    @property
    def num_experts(self) -> int:
        return len(self.experts)


@dataclass(frozen=True)
class ExpertPlan:
    """The layers whose experts are split over so many places, each with as many; the others have all that they have."""

    degree: int
    layers: tuple[ExpertLayer, ...]
    left_whole: tuple[str, ...]  # names of experts that are neither one module nor a list, with a star for numbers
    lists: tuple[ExpertList, ...] = ()

    @property
    def blocks(self) -> tuple[nn.Module, ...]:
        """Whose forward exchanges tokens."""
        return *(layer.module for layer in self.layers), *(layer.block for layer in self.lists)

    @classmethod
    def of(cls, model: nn.Module, degree: int) -> ExpertPlan:
        """Raises ValueError, with names or the equation, where experts cannot be split so."""
        layers = [layer for name, module in model.named_modules() if (layer := layer_of(name, module)) is not None]
        lists = list(_lists_of(model))
        others = tuple(dict.fromkeys(_others(model, layers, lists)))
        if not layers and not lists:
            found = f"those of {', '.join(others)}, which are not one module" if others else "none"
            raise ValueError(
                f"parallel.expert: expected a model with experts to split over {degree} ranks, found {found}: experts "
                f"of a layer are one module with parameters of shape (experts, ..., ...) and {_SIGNATURE}, as those of "
                "transformers are, or modules of one shape in an nn.ModuleList named experts; write them so, or set "
                "parallel.expert to 1"
            )
        sizes = [(one.name, one.num_experts) for one in layers] + [(one.name, one.num_experts) for one in lists]
        for name, num_experts in sizes:
            if num_experts % degree:
                raise ValueError(
                    f"parallel.expert: experts({num_experts}) / expert({degree}) of '{name}' does not "
                    f"hold; set parallel.expert to a divisor of {num_experts}"
                )
        _check_shared(model, layers)
        _check_rows(layers)
        _check_lists(model, lists)
        return cls(degree, tuple(layers), others, tuple(lists))

    def rows(self, param: nn.Parameter, place: int) -> tuple[int, int] | None:
        """Which rows [low, high) of a parameter a place has; None where it is not an expert's.

        Of an expert in a list all or none.
        """
        if id(param) in self._listed:
            number, num_experts = self._listed[id(param)]
            return (0, param.shape[0]) if number // (num_experts // self.degree) == place else (0, 0)
        num_experts = self._num_experts.get(id(param), 0)
        own = num_experts // self.degree
        return (place * own, (place + 1) * own) if num_experts else None

    @cached_property
    def _num_experts(self) -> Mapping[int, int]:
        """By identity of a parameter."""
        return {
            id(layer.module.get_parameter(key)): layer.num_experts for layer in self.layers for key in layer.parameters
        }

    @cached_property
    def _listed(self) -> Mapping[int, tuple[int, int]]:
        """By identity of a parameter: the number of its expert, and how many there are."""
        return {
            id(param): (number, layer.num_experts)
            for layer in self.lists
            for number, expert in enumerate(layer.experts)
            for param in expert.parameters()
        }


def layer_of(name: str, module: nn.Module) -> ExpertLayer | None:
    """None where the module is not all experts of a layer."""
    own = {key: param for key, param in module._parameters.items() if param is not None}
    nums = {param.shape[0] for param in own.values() if param.dim() == 3}
    if len(nums) != 1 or not _takes_choices(module):
        return None
    (num_experts,) = nums
    split = tuple(key for key, param in own.items() if param.dim() and param.shape[0] == num_experts)
    return ExpertLayer(name, module, num_experts, split)


def _takes_choices(module: nn.Module) -> bool:
    names = inputs_of(module)
    return len(names) == 3 and names[1] in _INDICES and names[2] in _WEIGHTS


def inputs_of(module: nn.Module) -> tuple[str, ...]:
    """What a module calls its inputs."""
    return tuple(inspect.signature(type(module).forward).parameters)[1:]


def _lists_of(model: nn.Module) -> Iterator[ExpertList]:
    for name, block in model.named_modules():
        if isinstance(block, nn.ModuleList | nn.ModuleDict | nn.Sequential):
            continue
        for key, module in block._modules.items():
            if isinstance(module, nn.ModuleList) and key.endswith("experts") and len(module) > 1:
                experts = tuple(module)
                if len(set(map(_kind_of, experts))) == 1 and len(set(map(id, experts))) == len(experts):
                    yield ExpertList(f"{name}.{key}".removeprefix("."), block, key, experts)


def _kind_of(module: nn.Module) -> tuple[Any, ...]:
    shapes = tuple((key, tuple(param.shape)) for key, param in module.named_parameters())
    return type(module), shapes


def _check_lists(model: nn.Module, lists: list[ExpertList]) -> None:
    """Raises ValueError where an expert has what cannot be on one rank alone."""
    for layer in lists:
        inside = {id(module) for expert in layer.experts for module in expert.modules()}
        found = {id(param): "" for expert in layer.experts for param in expert.parameters()}
        number = sum(1 for expert in layer.experts for _ in expert.parameters())
        elsewhere = [
            f"{name}.{key}"
            for name, module in model.named_modules()
            for key, param in module._parameters.items()
            if id(param) in found and id(module) not in inside
        ]
        if elsewhere or number != len(found):
            what = f"'{elsewhere[0]}', which is one of them" if elsewhere else "one that several of them have"
            raise ValueError(
                f"parallel.expert: expected parameters of '{layer.name}' that each expert alone has, found {what}; "
                "give that a parameter of its own, or set parallel.expert to 1"
            )
        for key, tensor in (*layer.experts[0].named_parameters(), *layer.experts[0].named_buffers()):
            if not isinstance(tensor, nn.Parameter) or not tensor.dim():
                raise ValueError(
                    f"parallel.expert: expected experts of '{layer.name}' with parameters that have dimensions alone, "
                    f"found '{key}' of shape {tuple(tensor.shape)}"
                    f"{'' if isinstance(tensor, nn.Parameter) else ', a buffer'}; set parallel.expert to 1"
                )


def _others(model: nn.Module, layers: list[ExpertLayer], lists: list[ExpertList]) -> Iterator[str]:
    """Modules that are called as experts are, and are none of the layers."""
    known = {id(layer.module) for layer in layers} | {id(layer.block._modules[layer.key]) for layer in lists}
    for name, module in model.named_modules():
        if name.rpartition(".")[2] == "experts" and id(module) not in known:
            yield "'" + re.sub(r"\b\d+\b", "*", name) + "'"


def _check_shared(model: nn.Module, layers: list[ExpertLayer]) -> None:
    """Raises ValueError where a module that is not split has a parameter of one that is."""
    owner = {id(layer.module.get_parameter(key)): layer for layer in layers for key in layer.parameters}
    for name, module in model.named_modules():
        for key, param in module._parameters.items():
            layer = owner.get(id(param)) if param is not None else None
            if layer is not None and not any(module is other.module for other in layers):
                raise ValueError(
                    f"parallel.expert: expected parameters of '{layer.name}' that it alone has, found '{name}.{key}', "
                    "which is one of them; give that a parameter of its own"
                )


def _check_rows(layers: list[ExpertLayer]) -> None:
    """Raises ValueError where a buffer, or a module inside, has rows of experts too: they would stay whole.

    A size that the experts' own parameters have behind their rows is taken for a width.
    """
    for layer in layers:
        split = [layer.module.get_parameter(key) for key in layer.parameters]
        sizes = {size for param in split for size in param.shape[1:]}
        known = {id(param) for param in split}
        for key, tensor in (*layer.module.named_parameters(), *layer.module.named_buffers()):
            has_rows = tensor.dim() > 0 and tensor.shape[0] == layer.num_experts and layer.num_experts not in sizes
            if has_rows and id(tensor) not in known:
                raise ValueError(
                    f"parallel.expert: expected what has a row for each expert of '{layer.name}' to be a parameter of "
                    f"that module itself, found '{layer.name}.{key}' of shape {tuple(tensor.shape)}, which would stay "
                    "whole; make it one (with requires_grad=False in place of a buffer), or set parallel.expert to 1"
                )


_ALIGNED = 8  # columns: 16 bytes of two-byte elements, as grouped matrix products want them


@dataclass(frozen=True)
class ExpertLayout:
    """Parameters of a module with all experts of a layer: up to a width between, an activation, and down from it.

    | for E experts, H wide, I between      | up, and its bias                    | down, and its bias   |
    |---------------------------------------|-------------------------------------|----------------------|
    | as linear layers have them            | (E, n I, H), (E, n I)               | (E, H, I), (E, H)    |
    | transposed                            | (E, H, n I), (E, n I)               | (E, I, H), (E, H)    |

    n is 2 with a gate, whose columns come before those of the values, or alternate with them. A rank has some of I:
    what its experts give is a part of a sum. Source: what `use_experts_implementation` of transformers says of a class.
    """

    up: str
    width: int  # I
    is_gated: bool
    is_concatenated: bool
    is_transposed: bool

    @classmethod
    def of(cls, module: nn.Module) -> ExpertLayout | None:
        """None where the module does not say it, or has more than this."""
        said = [getattr(module, key, None) for key in ("has_gate", "has_bias", "is_concatenated", "is_transposed")]
        if any(type(value) is not bool for value in said) or getattr(module, "has_post_expert_norm", False):
            return None
        is_gated, has_bias, is_concatenated, is_transposed = said
        up = "gate_up_proj" if is_gated else "up_proj"
        shapes = {key: tuple(param.shape) for key, param in module.named_parameters()}
        if shapes.keys() != {f"{key}{end}" for key in (up, "down_proj") for end in ("", "_bias")[: 1 + bool(has_bias)]}:
            return None
        if len(shapes[up]) != 3 or len(shapes["down_proj"]) != 3:
            return None
        num_experts, *sizes = shapes["down_proj"]
        width, wide = sizes if is_transposed else reversed(sizes)
        columns = width * (2 if is_gated else 1)
        expected = {
            up: (num_experts, wide, columns) if is_transposed else (num_experts, columns, wide),
            "down_proj": shapes["down_proj"],
            f"{up}_bias": (num_experts, columns),
            "down_proj_bias": (num_experts, wide),
        }
        if any(shape != expected[key] for key, shape in shapes.items()):
            return None
        return cls(up, width, bool(is_gated), bool(is_concatenated), bool(is_transposed))

    def ranges(self, degree: int) -> list[tuple[int, int]]:
        """[low, high) of the width, by place: as even as can be, in steps that grouped products take."""
        step = math.gcd(self.width, _ALIGNED)
        step = step if self.width // step >= degree else 1
        return [(low * step, high * step) for low, high in ranges_of(self.width // step, degree)]

    def split(self, name: str, module: nn.Module, degree: int) -> LayerSplit:
        """The bias behind stays whole, and is added once."""
        ranges = self.ranges(degree)
        dims = {self.up: 2 if self.is_transposed else 1, f"{self.up}_bias": 1}
        found = {}
        for key, param in module.named_parameters():
            shape = tuple(param.shape)
            if key in dims:
                portions = [TensorShard.along(shape, dims[key], self._columns(*own)) for own in ranges]
            elif key == "down_proj":
                portions = [TensorShard.along(shape, 1 if self.is_transposed else 2, [own]) for own in ranges]
            else:
                portions = [TensorShard.all_of(shape)] * degree
            found[key] = ParameterSplit(tuple(portions))
        return LayerSplit(name, module, Style.EXPERTS, found, tuple(ranges))

    def _columns(self, low: int, high: int) -> list[tuple[int, int]]:
        """Of `up`, for [low, high) of the width."""
        if not self.is_gated:
            return [(low, high)]
        if self.is_concatenated:
            return [(low, high), (self.width + low, self.width + high)]
        return [(2 * low, 2 * high)]
