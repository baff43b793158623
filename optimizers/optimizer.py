"""The record of an optimizer: everything that differs between one optimizer and another.

`__init__.py` lists the records. The config takes its keys and names from there, the update of a shard its formula, a
checkpoint the names of its states. Nothing here imports torch, without which a config is read.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from ..configs.section import Float, Section

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Options = Mapping[str, Any]
"""The options of a parameter group: the keys of an optimizer's params, all but state_dtype."""
Apply = Callable[["Tensor", "Tensor", "Sequence[Tensor]", "Tensor", Options], None]
Coefficients = Callable[[Options, int], tuple[float, ...]]

Beta = Annotated[Float, Field(ge=0, lt=1)]
StateDtype = Literal["fp32", "bf16", "int8"]
MAX_COEFFICIENTS = 8


class OptimizerParams(Section):
    """The keys of `optimizer.params`. Each has a default, and `lr` and `state_dtype` are among them."""

    def conflicts(self) -> list[tuple[str, str]]:
        """(key, what it needs and what was found) of each key that contradicts others."""
        return []


@dataclass(frozen=True)
class State:
    """A value that is kept for each element of the parameters, under the name that torch gives it."""

    name: str
    is_mean_of_squares: bool = False  # never negative, and divided by: its 8-bit form has no sign and a wider range
    start_option: str | None = None  # the option that gives its start value, else 0
    needed_option: str | None = None  # the option without which it is not kept


@dataclass(frozen=True)
class WholeTensorRule:
    """What of an update is no matter of one element: it comes between two passes over elements.

    finish(weight, direction, (), step, options): updates the weight in place; `options["ratio"]` is of its parameter.
    ratio(options, step, numel, norm of the weight, norm of the direction): of a parameter.
    matrix(direction, step, options, factors): what becomes of the direction of a parameter that is a matrix, (...,
    rows, columns). Such parameters are in a group of options with `is_matrix`; in the other group is what `beside`
    updates, where there is one.
    factors(shape): the states of such a matrix that are not elementwise, by name, with their shapes: float32 or wider,
    zero before the first step. They are kept by who owns the matrix, and change in place.
    takes_all: whether every parameter of two dimensions or more is a matrix, embeddings and heads too.
    """

    finish: Apply
    ratio: Callable[[Options, int, int, float, float], float] | None = None
    matrix: Callable[[Tensor, int, Options, Mapping[str, Tensor]], Tensor] | None = None
    beside: Optimizer | None = None
    factors: Callable[[Sequence[int]], Mapping[str, tuple[int, ...]]] = lambda shape: {}
    takes_all: bool = False


@dataclass(frozen=True)
class Optimizer:
    """An elementwise optimizer, or one whose directions are elementwise, and then scaled by what is `whole`.

    apply(weight, gradient, states, step, options): updates weight and states in place, (n,) each; step: one element,
    counted from 1. It is the specification of the kernels. With `whole`, weight becomes the direction of the update.
    coefficients(options, step): what the C++ and the Triton kernel compute with, where they know the optimizer by its
    name: at most MAX_COEFFICIENTS numbers, in the order in which they name them. None: it has no kernel.
    idle: the coefficients with which a gradient of zero changes nothing.
    """

    title: str  # "AdamW"; in configs and checkpoints it has the name "adamw"
    params: type[OptimizerParams]
    states: tuple[State, ...]
    apply: Apply
    coefficients: Coefficients | None = None
    idle: tuple[float, ...] = ()
    whole: WholeTensorRule | None = None
    sends_signs: bool = False  # after `freeze_step` steps ranks send signs of momenta, and no gradients
    keeps_step: bool = True  # whether torch's state dict of such an optimizer has a step
    torch_class: str | None = None  # in torch.optim: the class that does the same
    torch_options: Options = field(default_factory=dict)  # what that class must have for it, beside our own options
    deepspeed_names: tuple[str, ...] = ()  # its other types in a file of DeepSpeed's, in lower case
    deepspeed_defaults: Options = field(default_factory=dict)  # where they are not ours

    @property
    def name(self) -> str:
        return self.title.lower()

    @property
    def why_no_state(self) -> str:
        """What is said where it keeps none."""
        needed = [state.needed_option for state in self.states if state.needed_option is not None]
        return f"{self.title}{' without ' if needed else ''}{' and '.join(needed)} has no state"

    @property
    def torch_twin(self) -> type[torch.optim.Optimizer] | None:
        import torch

        twin: type[torch.optim.Optimizer] | None = getattr(torch.optim, self.torch_class) if self.torch_class else None
        return twin

    def coefficients_at(self, options: Options, step: int) -> tuple[float, ...]:
        """The coefficients of a step, counted from 1; step 0: those that leave everything as it is."""
        assert self.coefficients is not None, self.name
        return self.coefficients(options, step) if step else self.idle

    def states_for(self, options: Options) -> tuple[State, ...]:
        """The states that are kept with these options, in the order in which `apply` takes them."""
        return tuple(s for s in self.states if s.needed_option is None or options.get(s.needed_option, True))


def lerp_coefficients(weight: float) -> tuple[float, float]:
    """What makes a + weight * (b - a), and whether b and not a is added to: as torch.lerp, from the nearer end."""
    narrow = ctypes.c_float(weight).value
    return (narrow, 0.0) if narrow < 0.5 else (narrow - 1, 1.0)
