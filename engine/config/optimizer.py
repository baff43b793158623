"""The optimizer section: one closed set of parameters for each type, with torch's own defaults."""

from typing import Annotated, Literal

from pydantic import Field

from .errors import Fault, did_you_mean, shown
from .types import Bool, Float, Section

Beta = Annotated[Float, Field(ge=0, lt=1)]
StateDtype = Literal["fp32", "bf16", "int8"]


class AdamWParams(Section):
    """Keyword arguments of AdamW (decay apart from the gradient). Source: torch.optim.AdamW."""

    lr: Float = Field(default=1e-3, ge=0)
    """Learning rate."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """Decay of the running mean of the gradient and of its square."""
    eps: Float = Field(default=1e-8, ge=0)
    """Added to the denominator."""
    weight_decay: Float = Field(default=1e-2, ge=0)
    """Decay of the parameters per step, times the learning rate."""
    state_dtype: StateDtype = "fp32"
    """The type in which both moments are kept."""


class AdamParams(AdamWParams):
    """Keyword arguments of Adam (decay added to the gradient). Source: torch.optim.Adam."""

    weight_decay: Float = Field(default=0.0, ge=0)
    """L2 penalty, added to the gradient."""


class SGDParams(Section):
    """Keyword arguments of SGD. Source: torch.optim.SGD."""

    lr: Float = Field(default=1e-3, ge=0)
    """Learning rate."""
    momentum: Float = Field(default=0.0, ge=0)
    """Momentum factor."""
    dampening: Float = 0.0
    """Dampening of the momentum."""
    weight_decay: Float = Field(default=0.0, ge=0)
    """L2 penalty, added to the gradient."""
    nesterov: Bool = False
    """Nesterov momentum. Needs momentum above 0 and dampening 0."""
    state_dtype: StateDtype = "fp32"
    """The type in which the momentum is kept."""


class LionParams(Section):
    """Keyword arguments of Lion, with the defaults of the paper (torch has none). Source: arXiv 2302.06675."""

    lr: Float = Field(default=1e-4, ge=0)
    """Learning rate."""
    betas: tuple[Beta, Beta] = (0.9, 0.99)
    """Mixing factor of the update, and decay of the momentum."""
    weight_decay: Float = Field(default=0.0, ge=0)
    """Decay of the parameters per step, times the learning rate."""
    state_dtype: StateDtype = "fp32"
    """The type in which the momentum is kept."""


class AdagradParams(Section):
    """Keyword arguments of Adagrad. Source: torch.optim.Adagrad."""

    lr: Float = Field(default=1e-2, ge=0)
    """Learning rate."""
    lr_decay: Float = Field(default=0.0, ge=0)
    """Decay of the learning rate with the step."""
    weight_decay: Float = Field(default=0.0, ge=0)
    """L2 penalty, added to the gradient."""
    initial_accumulator_value: Float = Field(default=0.0, ge=0)
    """Start value of the sum of squares."""
    eps: Float = Field(default=1e-10, ge=0)
    """Added to the denominator."""
    state_dtype: StateDtype = "fp32"
    """The type in which the sum of squares is kept."""


class AdamWOptimizer(Section):
    """AdamW."""

    type: Literal["adamw"] = "adamw"
    params: AdamWParams = AdamWParams()


class AdamOptimizer(Section):
    """Adam with its L2 penalty inside the gradient. In a file: type "Adam" with `adam_w_mode` false."""

    type: Literal["adam"] = "adam"
    params: AdamParams = AdamParams()


class SGDOptimizer(Section):
    """SGD."""

    type: Literal["sgd"] = "sgd"
    params: SGDParams = SGDParams()


class LionOptimizer(Section):
    """Lion."""

    type: Literal["lion"] = "lion"
    params: LionParams = LionParams()


class AdagradOptimizer(Section):
    """Adagrad."""

    type: Literal["adagrad"] = "adagrad"
    params: AdagradParams = AdagradParams()


OptimizerConfig = AdamWOptimizer | AdamOptimizer | SGDOptimizer | LionOptimizer | AdagradOptimizer
OPTIMIZERS = ("adamw", "adam", "sgd", "lion", "adagrad")
OPTIMIZER_PARAMS: dict[str, type[Section]] = {
    "adamw": AdamWParams,
    "adam": AdamParams,
    "sgd": SGDParams,
    "lion": LionParams,
    "adagrad": AdagradParams,
}
SPELLINGS = {
    "fusedadam": "adam",
    "cpuadam": "adam",
    "deepspeedcpuadam": "adam",
    "fusedadamw": "adamw",
    "cpuadamw": "adamw",
    "fusedlion": "lion",
    "cpulion": "lion",
    "deepspeedcpulion": "lion",
    "cpuadagrad": "adagrad",
    "deepspeedcpuadagrad": "adagrad",
}
NOT_DONE = ("lamb", "fusedlamb", "muon", "muadam", "muadamw", "musgd", "onebitadam", "onebitlamb", "zerooneadam")
ADAM_IS_ADAMW = (
    'type "{}" without adam_w_mode false means AdamW (decay apart from the gradient), as in DeepSpeed; '
    "weight_decay is {}"
)


def canonical_optimizer(section: dict[str, object]) -> tuple[dict[str, object] | None, list[str], list[Fault]]:
    """The section with the type's one name, the notes that this needs, and its faults (then there is no section).

    `section` is without comments and without "auto". `adam_w_mode` is taken out of params: it chooses the type.
    """
    written = section.get("type")
    if not isinstance(written, str):
        kind: Literal["type", "missing"] = "type" if "type" in section else "missing"
        found = f", found {shown(written)}" if "type" in section else ""
        return None, [], [Fault("optimizer.type", kind, f"expected one of {', '.join(OPTIMIZERS)}{found}")]
    name = SPELLINGS.get(written.lower(), written.lower())
    if name not in OPTIMIZERS:
        what = (
            f"{shown(written)} is not supported yet"
            if name in NOT_DONE
            else f"unknown optimizer {shown(written)}{did_you_mean(written, OPTIMIZERS)}"
        )
        fix = f"there is {', '.join(OPTIMIZERS)}; or pass your own elementwise torch optimizer class to initialize"
        return None, [], [Fault("optimizer.type", "unsupported" if name in NOT_DONE else "value", f"{what}; {fix}")]
    params = section.get("params", {})
    if not isinstance(params, dict) or name not in ("adam", "adamw"):
        return {**section, "type": name}, [], []
    params = dict(params)
    adam_w_mode = params.pop("adam_w_mode", True)
    if not isinstance(adam_w_mode, bool):
        message = f"expected true or false, found {shown(adam_w_mode)}"
        return None, [], [Fault("optimizer.params.adam_w_mode", "type", message)]
    notes = []
    if name == "adamw" and not adam_w_mode:
        notes.append('optimizer.params.adam_w_mode: false has no effect: type "AdamW" is always AdamW')
    if name == "adam" and adam_w_mode:
        params.setdefault("weight_decay", 0.0)
        notes.append("optimizer.type: " + ADAM_IS_ADAMW.format(written, shown(params["weight_decay"])))
        name = "adamw"
    return {**section, "type": name, "params": params}, notes, []
