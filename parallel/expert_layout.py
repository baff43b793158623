"""How the experts of one layer are split over the ranks of a tensor axis. Integers only."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import nn

from ..offload import Portion
from .splits import LayerSplit, ParameterSplit, Style, ranges_of

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
                portions = [Portion.along(shape, dims[key], self._columns(*own)) for own in ranges]
            elif key == "down_proj":
                portions = [Portion.along(shape, 1 if self.is_transposed else 2, [own]) for own in ranges]
            else:
                portions = [Portion.all_of(shape)] * degree
            found[key] = ParameterSplit(tuple(portions))
        return LayerSplit(name, module, Style.EXPERTS, found, tuple(ranges))

    def _columns(self, low: int, high: int) -> list[tuple[int, int]]:
        """Of `up`, for [low, high) of the width."""
        if not self.is_gated:
            return [(low, high)]
        if self.is_concatenated:
            return [(low, high), (self.width + low, self.width + high)]
        return [(2 * low, 2 * high)]
