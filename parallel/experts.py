"""Finds the expert layers of a model and computes each rank's part of their parameters, as integers.

`ExpertPlan` gives whole experts to the ranks of an expert axis. `ExpertLayout` gives columns of all experts to the
ranks of a tensor axis.
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
from .splits import LayerSplit, ParameterSplit, Style, adapter_around, ranges_of

_INDICES = {"top_k_index", "router_indices", "selected_experts"}
_WEIGHTS = {"top_k_weights", "routing_weights"}
_SIGNATURE = "forward(hidden_states, top_k_index, top_k_weights)"


@dataclass(frozen=True)
class ExpertLayer:
    """A module with all experts of a layer: parameters with a row for each expert, and a forward that takes the
    routing.

    hidden_states: (tokens, width); top_k_index: (tokens, k), expert numbers, or `num_experts` for no expert;
    top_k_weights: (tokens, k) -> (tokens, width), the sum over k of weight times expert(token).
    """

    name: str
    module: nn.Module
    num_experts: int
    parameters: tuple[str, ...]  # names of the parameters with a row for each expert

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """The input names of the module's forward."""
        return inputs_of(self.module)

    @cached_property
    def counts(self) -> tuple[str, ...]:
        """Attributes that hold the number of experts."""
        return tuple(
            key
            for key, value in vars(self.module).items()
            # num_experts_per_tok may equal the number of experts, and stays.
            if "expert" in key and "per_tok" not in key and type(value) is int and value == self.num_experts
        )


@dataclass(frozen=True)
class ExpertList:
    """An `nn.ModuleList` of equal experts; the module that has the list calls each expert with its tokens."""

    name: str
    block: nn.Module  # the module that has the list
    key: str  # the name of the list in the block
    experts: tuple[nn.Module, ...]

    @property
    def num_experts(self) -> int:
        return len(self.experts)


@dataclass(frozen=True)
class ExpertPlan:
    """The expert layers that are split over `degree` ranks, with an equal number of experts on each."""

    degree: int
    layers: tuple[ExpertLayer, ...]
    left_whole: tuple[str, ...]  # modules named "experts" of neither kind, with a star for numbers
    lists: tuple[ExpertList, ...] = ()

    @property
    def blocks(self) -> tuple[nn.Module, ...]:
        """The modules whose forward exchanges tokens."""
        return *(layer.module for layer in self.layers), *(layer.block for layer in self.lists)

    @classmethod
    def of(cls, model: nn.Module, degree: int) -> ExpertPlan:
        """Plan the split of a model. Raises ValueError if its experts cannot be split."""
        layers = [layer for name, module in model.named_modules() if (layer := layer_of(name, module)) is not None]
        lists = list(_lists_of(model))
        others = tuple(dict.fromkeys(_others(model, layers, lists)))
        if not layers and not lists:
            found = f"only {', '.join(others)}, of an unknown form" if others else "none"
            raise ValueError(
                f"parallel.expert: expected a model with experts to split over {degree} ranks, found {found}. The "
                "experts of a layer must be a single module with parameters of shape (experts, ..., ...) and "
                f"{_SIGNATURE}, as in transformers, or equal modules in an nn.ModuleList named experts. Change the "
                "model, or set parallel.expert to 1"
            )
        sizes = [(one.name, one.num_experts) for one in layers] + [(one.name, one.num_experts) for one in lists]
        for name, num_experts in sizes:
            if num_experts % degree:
                raise ValueError(
                    f"parallel.expert: '{name}': experts({num_experts}) % expert({degree}) = {num_experts % degree}; "
                    f"set parallel.expert to a divisor of {num_experts}"
                )
        _check_adapters(model, layers)
        _check_shared(model, layers)
        _check_rows(layers)
        _check_lists(model, lists)
        return cls(degree, tuple(layers), others, tuple(lists))

    def rows(self, param: nn.Parameter, place: int) -> tuple[int, int] | None:
        """Return the rows [low, high) of a parameter that rank `place` has, or None if it belongs to no expert.

        A parameter of an expert in a list is on a single rank: all rows or none.
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
        """By identity of a parameter: the number of its expert, and the number of experts."""
        return {
            id(param): (number, layer.num_experts)
            for layer in self.lists
            for number, expert in enumerate(layer.experts)
            for param in expert.parameters()
        }


def layer_of(name: str, module: nn.Module) -> ExpertLayer | None:
    """Return the module as an ExpertLayer, or None if it does not hold all experts of a layer."""
    own = {key: param for key, param in module._parameters.items() if param is not None}
    # Weights have three dimensions. Their biases have two, and so have many parameters that are no experts.
    nums = {param.shape[0] for param in own.values() if param.dim() == 3}
    names = inputs_of(module)
    takes_choices = len(names) == 3 and names[1] in _INDICES and names[2] in _WEIGHTS
    if len(nums) != 1 or not takes_choices:
        return None
    (num_experts,) = nums
    split = tuple(key for key, param in own.items() if param.dim() and param.shape[0] == num_experts)
    return ExpertLayer(name, module, num_experts, split)


def inputs_of(module: nn.Module) -> tuple[str, ...]:
    """Return the input names of a module's forward."""
    return tuple(inspect.signature(type(module).forward).parameters)[1:]


def _lists_of(model: nn.Module) -> Iterator[ExpertList]:
    for name, block in model.named_modules():
        # A container does not call the experts of a list in it.
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
    """Raise ValueError if experts of a list share parameters or have buffers: they could not be on separate ranks."""
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
            what = f"the same parameter at '{elsewhere[0]}'" if elsewhere else "a parameter that several experts share"
            raise ValueError(
                f"parallel.expert: expected experts of '{layer.name}' that share no parameter, found {what}; use "
                "separate parameters, or set parallel.expert to 1"
            )
        for key, tensor in (*layer.experts[0].named_parameters(), *layer.experts[0].named_buffers()):
            # `ExpertPlan.rows` gives a rank all rows of a parameter or none, and a scalar has no rows.
            if not isinstance(tensor, nn.Parameter) or not tensor.dim():
                raise ValueError(
                    f"parallel.expert: expected experts of '{layer.name}' without buffers and scalar parameters, "
                    f"found '{key}' of shape {tuple(tensor.shape)}; set parallel.expert to 1"
                )


def _others(model: nn.Module, layers: list[ExpertLayer], lists: list[ExpertList]) -> Iterator[str]:
    """Yield modules that are named "experts" and are none of the layers."""
    known = {id(layer.module) for layer in layers} | {id(layer.block._modules[layer.key]) for layer in lists}
    for name, module in model.named_modules():
        if name.rpartition(".")[2] == "experts" and id(module) not in known:
            yield "'" + re.sub(r"\b\d+\b", "*", name) + "'"


def _check_adapters(model: nn.Module, layers: list[ExpertLayer]) -> None:
    """Raise ValueError if a split layer is inside of an adapter, whose matrices have rows for all experts."""
    modules = dict(model.named_modules())
    for layer in layers:
        if (adapter := adapter_around(layer.name, modules)) is not None:
            raise ValueError(
                f"parallel.expert: expected split experts without adapters, found a {type(modules[adapter]).__name__} "
                f"on '{adapter}'; put LoRA on linear layers alone (target_modules), or set parallel.expert to 1"
            )


def _check_shared(model: nn.Module, layers: list[ExpertLayer]) -> None:
    """Raise ValueError if a module that is not split shares a parameter with a split layer."""
    owner = {id(layer.module.get_parameter(key)): layer for layer in layers for key in layer.parameters}
    for name, module in model.named_modules():
        for key, param in module._parameters.items():
            layer = owner.get(id(param)) if param is not None else None
            if layer is not None and not any(module is other.module for other in layers):
                raise ValueError(
                    f"parallel.expert: expected that '{layer.name}' shares no parameter, found the same parameter at "
                    f"'{name}.{key}'; use separate parameters"
                )


def _check_rows(layers: list[ExpertLayer]) -> None:
    """Raise ValueError if a buffer or an inner parameter has a row for each expert, since it would stay whole.

    A size equal to the number of experts is taken for a width if the experts' parameters have it behind their rows.
    """
    for layer in layers:
        split = [layer.module.get_parameter(key) for key in layer.parameters]
        sizes = {size for param in split for size in param.shape[1:]}
        known = {id(param) for param in split}
        for key, tensor in (*layer.module.named_parameters(), *layer.module.named_buffers()):
            has_rows = tensor.dim() > 0 and tensor.shape[0] == layer.num_experts and layer.num_experts not in sizes
            if has_rows and id(tensor) not in known:
                raise ValueError(
                    f"parallel.expert: '{layer.name}.{key}' of shape {tuple(tensor.shape)} has a row for each expert, "
                    f"but is no direct parameter of '{layer.name}', so it would stay whole; make it a direct parameter "
                    "(with requires_grad=False in place of a buffer), or set parallel.expert to 1"
                )


_ALIGNED = 8  # columns, or 16 bytes of two-byte elements: the alignment of grouped matrix products


@dataclass(frozen=True)
class ExpertLayout:
    """Parameters of a module with all experts of a layer: up to an inner width I, an activation, and down again.

    | E experts, width H, inner width I | up, and its bias      | down, and its bias |
    |-----------------------------------|-----------------------|--------------------|
    | layout of nn.Linear               | (E, n I, H), (E, n I) | (E, H, I), (E, H)  |
    | transposed                        | (E, H, n I), (E, n I) | (E, I, H), (E, H)  |

    n is 2 with a gate; gate columns come before the value columns, or alternate with them. A rank has some of I, so the
    output of its experts is a term of a sum. Source: the attributes that `use_experts_implementation` of transformers
    sets on a class.
    """

    up: str
    width: int  # I
    is_gated: bool
    is_concatenated: bool
    is_transposed: bool

    @classmethod
    def of(cls, module: nn.Module) -> ExpertLayout | None:
        """Return the layout of a module, or None if the module does not declare it or has further parameters."""
        said = [getattr(module, key, None) for key in ("has_gate", "has_bias", "is_concatenated", "is_transposed")]
        # A norm of the output is not linear: the terms of the ranks would not add up to it.
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
        """Return [low, high) of I for each rank: as even as possible, in steps that grouped products accept."""
        step = math.gcd(self.width, _ALIGNED)
        # With fewer aligned steps than ranks, a rank would get no column.
        step = step if self.width // step >= degree else 1
        return [(low * step, high * step) for low, high in ranges_of(self.width // step, degree)]

    def split(self, name: str, module: nn.Module, degree: int) -> LayerSplit:
        """Split the parameters. The down bias stays whole and is added once."""
        ranges = self.ranges(degree)
        dims = {self.up: 2 if self.is_transposed else 1, f"{self.up}_bias": 1}
        found = {}
        for key, param in module.named_parameters():
            shape = tuple(param.shape)
            if key in dims:
                tensor_shards = [TensorShard.along(shape, dims[key], self._columns(*own)) for own in ranges]
            elif key == "down_proj":
                tensor_shards = [TensorShard.along(shape, 1 if self.is_transposed else 2, [own]) for own in ranges]
            else:
                tensor_shards = [TensorShard.all_of(shape)] * degree
            found[key] = ParameterSplit(tuple(tensor_shards))
        return LayerSplit(name, module, Style.EXPERTS, found, tuple(ranges))

    def _columns(self, low: int, high: int) -> list[tuple[int, int]]:
        """Return the columns of `up` for [low, high) of I."""
        if not self.is_gated:
            return [(low, high)]
        if self.is_concatenated:
            return [(low, high), (self.width + low, self.width + high)]
        return [(2 * low, 2 * high)]
