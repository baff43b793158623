"""The record of an optimizer: all differences between optimizers.

`__init__.py` lists the records. The config reads keys and names from them, the update its formula, a checkpoint the
names of states. Nothing here imports torch, which reading a config does not need.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from ..configs.section import Bool, Float, Key, NonNegative, Section, section_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Options = Mapping[str, Any]
"""The options of a parameter group: the keys of an optimizer's params, all but state_dtype."""
Apply = Callable[["Tensor", "Tensor", "Sequence[Tensor]", "Tensor", Options], None]
Coefficients = Callable[[Options, int], tuple[float, ...]]

Beta = Annotated[Float, Field(ge=0, lt=1)]
Betas = tuple[Beta, Beta]
StateDtype = Literal["fp32", "bf16", "int8"]
MAX_COEFFICIENTS = 8


CORRECTED: Key = (Bool, True, "Whether both moments are corrected for their start at zero, as in the paper.")
L2: Key = (NonNegative, 0.0, "L2 penalty, added to the gradient.")
DECAY: Key = (NonNegative, 0.0, "Decay of the parameters per step, times the learning rate.")
STATE_DTYPE: Key = (StateDtype, "fp32", "Dtype of the states.")


def rate(default: float) -> Key:
    return NonNegative, default, "Learning rate."


def epsilon(default: float, text: str = "Added to the denominator.") -> Key:
    return NonNegative, default, text


@dataclass(frozen=True)
class State:
    """A value kept for each element of the parameters, under torch's name."""

    name: str
    is_mean_of_squares: bool = False  # never negative, and a divisor: its 8-bit form has no sign and a wider range
    start_option: str | None = None  # the option with its start value, else 0
    needed_option: str | None = None  # the state is kept if this option is true


@dataclass(frozen=True)
class WholeTensorRule:
    """The part of an update that needs whole parameters. It runs between two elementwise passes.

    finish(weight, direction, (), step, options): updates the weight in place; `options["ratio"]` is the parameter's.
    ratio(options, step, numel, norm of the weight, norm of the direction): the ratio of a parameter. matrix(direction,
    step, options, factors): the new direction of a matrix, (..., rows, columns). Matrices are in a group of options
    with `is_matrix`; `beside` updates the parameters of the other group, if set. factors(shape): states of a matrix
    that are not elementwise: name -> shape; float32 or wider, zero before the first step. The owner of the matrix keeps
    them and changes them in place. workspace(shape): elements that `matrix` allocates, its result included. takes_all:
    whether every parameter of two or more dimensions is a matrix, embeddings and heads included.
    """

    finish: Apply
    ratio: Callable[[Options, int, int, float, float], float] | None = None
    matrix: Callable[[Tensor, int, Options, Mapping[str, Tensor]], Tensor] | None = None
    beside: Optimizer | None = None
    factors: Callable[[Sequence[int]], Mapping[str, tuple[int, ...]]] = lambda shape: {}
    workspace: Callable[[Sequence[int]], int] = lambda shape: 0
    takes_all: bool = False


@dataclass(frozen=True)
class Optimizer:
    """An elementwise optimizer, or an optimizer with elementwise directions that `whole` then scales.

    apply(weight, gradient, states, step, options): updates weight and states in place, (n,) each; step: one element,
    counted from 1. It specifies the kernels. With `whole`, weight becomes the direction of the update.
    coefficients(options, step): at most MAX_COEFFICIENTS numbers, in the order of the C++ and Triton kernels, which
    know the optimizer by its name. None: no kernel. idle: the coefficients with which a zero gradient changes nothing.
    keys: of `optimizer.params`, each with a default; every optimizer has `lr` and `state_dtype`. text: describes them.
    conflicts(params): returns (key, need and found value) of each key that contradicts another key.
    """

    title: str  # "AdamW"; configs and checkpoints use the name "adamw"
    text: str
    keys: Mapping[str, Key]
    states: tuple[State, ...]
    apply: Apply
    coefficients: Coefficients | None = None
    idle: tuple[float, ...] = ()
    whole: WholeTensorRule | None = None
    sends_signs: bool = False  # after `freeze_step` steps ranks send signs of momenta, no gradients
    keeps_step: bool = True  # whether torch's state dict of this optimizer has a step
    torch_class: str | None = None  # class of torch.optim that does the same
    torch_options: Options = field(default_factory=dict)  # values of that class's options beside ours
    deepspeed_names: tuple[str, ...] = ()  # more type names in DeepSpeed files, in lower case
    deepspeed_defaults: Options = field(default_factory=dict)  # DeepSpeed's defaults that differ from ours
    conflicts: Callable[[Any], list[tuple[str, str]]] = lambda params: []

    @cached_property
    def name(self) -> str:
        return self.title.lower()

    @cached_property
    def params(self) -> type[Section]:
        """The class of `optimizer.params`."""
        return section_of(f"{self.title}Params", self.text, self.keys)

    @property
    def why_no_state(self) -> str:
        """The text shown for an optimizer without states."""
        needed = [state.needed_option for state in self.states if state.needed_option is not None]
        return f"{self.title}{' without ' if needed else ''}{' and '.join(needed)} has no state"

    @property
    def torch_twin(self) -> type[torch.optim.Optimizer] | None:
        import torch

        twin: type[torch.optim.Optimizer] | None = getattr(torch.optim, self.torch_class) if self.torch_class else None
        return twin

    def coefficients_at(self, options: Options, step: int) -> tuple[float, ...]:
        """Return the coefficients of a step, counted from 1. Step 0: those that change nothing."""
        assert self.coefficients is not None, self.name
        return self.coefficients(options, step) if step else self.idle

    def states_for(self, options: Options) -> tuple[State, ...]:
        """Return the states kept with these options, in the order of `apply`."""
        # A missing option keeps the state: callers may pass options of torch, which lack ours.
        return tuple(s for s in self.states if s.needed_option is None or options.get(s.needed_option, True))


def lerp_coefficients(weight: float) -> tuple[float, float]:
    """Return (factor, whether b not a is added to) for a + weight * (b - a), from the nearer end as torch.lerp."""
    # torch.lerp rounds the weight to float32 first, and 0.5 must fall on the same side.
    narrow = ctypes.c_float(weight).value
    return (narrow, 0.0) if narrow < 0.5 else (narrow - 1, 1.0)
