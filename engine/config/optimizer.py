"""The section `optimizer`: a type, and the parameters of its record in `optimizers/`."""

from typing import Any

from pydantic import Field, SerializeAsAny, ValidationInfo, field_validator

from ...configs.section import Section
from ...optimizers import OPTIMIZERS
from ...optimizers.optimizer import State, StateDtype
from .errors import ConfigSection, Fault, Wanted, did_you_mean, needs, no_effect, quoted, type_in


class OptimizerConfig(ConfigSection):
    """The optimizer and its parameters."""

    # Before `params`: pydantic validates fields in order, and the validator of `params` reads the type.
    type: str
    """Name of the optimizer, in upper or lower case."""
    # SerializeAsAny: else a dump has only the base class's fields. validate_default: for the defaults of the type.
    params: SerializeAsAny[Section] = Field(default_factory=Section, validate_default=True)

    @field_validator("type")
    @classmethod
    def _is_known(cls, value: str) -> str:
        if value not in OPTIMIZERS:
            raise ValueError(f"expected one of {', '.join(OPTIMIZERS)}, found {quoted(value)}")
        return value

    @field_validator("params", mode="before")
    @classmethod
    def _of_its_type(cls, value: object, info: ValidationInfo) -> object:
        if "type" not in info.data:  # reported as a separate error
            return value
        # The field's default is of the base class. It stands for the defaults of the type.
        given = value.model_dump() if type(value) is Section else value
        return OPTIMIZERS[info.data["type"]].params.model_validate(given)

    @property
    def options(self) -> dict[str, Any]:
        """The options of a parameter group."""
        return self.params.model_dump(exclude={"state_dtype"})

    @property
    def state_dtype(self) -> StateDtype:
        # Each optimizer has this key, but the base class has no fields.
        dtype: StateDtype = self.params.model_dump()["state_dtype"]
        return dtype

    @property
    def states(self) -> tuple[State, ...]:
        """The states that these parameters keep."""
        return OPTIMIZERS[self.type].states_for(self.options)

    def faults(self, config: Any) -> list[Fault]:
        said = OPTIMIZERS[self.type].conflicts(self.params)
        found = [Fault(f"optimizer.params.{key}", "conflict", message) for key, message in said]
        return found + _conflicts(self.type, config)

    def notes(self, config: Any) -> list[str]:
        if self.state_dtype == "fp32" or self.states:
            return []
        return [no_effect("optimizer.params.state_dtype", self.state_dtype, OPTIMIZERS[self.type].why_no_state)]


NOT_DONE = {  # name -> reason
    **dict.fromkeys(("muadam", "muadamw", "musgd"), "its learning rates depend on base shapes of the model"),
    "lbfgs": "it calls the model several times in a step",
    "sparseadam": "gradients are dense here",
    "asgd": "it averages the weights; engine.ema() does that with any optimizer",
    "rprop": "it needs the whole data set as a batch",
}
REMOVED = {  # name -> replacement
    "zerooneadam": (
        'use "onebitadam", rename var_freeze_step to freeze_step, and remove var_update_scaler, local_step_scaler and '
        "local_step_clipper"
    ),
    "onebitlamb": (
        'use "onebitadam" with the same freeze_step, and remove max_coeff, min_coeff, coeff_beta, factor_max, '
        'factor_min and factor_threshold; "lamb" scales steps by parameters, and sends whole gradients'
    ),
}
ADAM_IS_ADAMW = (
    'type "{}" without adam_w_mode false means AdamW (decoupled weight decay), as in DeepSpeed; weight_decay is {}'
)


def optimizer_name(written: object) -> str:
    """Return our name of a type in any case or spelling; an unknown name in lower case."""
    word = str(written).lower()
    return next((one.name for one in OPTIMIZERS.values() if word in (one.name, *one.deepspeed_names)), word)


def option_names(written: object) -> set[str]:
    """Return the parameters that a type in any case or spelling takes; none for an unknown type."""
    record = OPTIMIZERS.get(optimizer_name(written))
    return set() if record is None else set(record.params.model_fields)


def canonical_optimizer(section: dict[str, object]) -> tuple[dict[str, object] | None, list[str], list[Fault]]:
    """Return the section with our name of the type, notes, and faults (then without a section).

    `section` has no comments and no "auto". `adam_w_mode` is taken out of params, since it chooses the type.
    """
    written = type_in(section, "optimizer", OPTIMIZERS)
    if isinstance(written, Fault):
        return None, [], [written]
    name = optimizer_name(written)
    if name in REMOVED:
        return None, [], [Fault("optimizer.type", "unsupported", f"{quoted(written)} was removed; {REMOVED[name]}")]
    if name not in OPTIMIZERS:
        expected = f"expected {', '.join(OPTIMIZERS)}, or an elementwise torch optimizer class passed to initialize"
        if name in NOT_DONE:
            text = f"{quoted(written)} is not supported yet: {NOT_DONE[name]}; {expected}"
            return None, [], [Fault("optimizer.type", "unsupported", text)]
        text = f"unknown optimizer {quoted(written)}; {expected}{did_you_mean(written, OPTIMIZERS)}"
        return None, [], [Fault("optimizer.type", "value", text)]
    params = section.get("params", {})
    if isinstance(params, dict) and OPTIMIZERS[name].sends_signs and "bias_correction" in params:
        why = "1-bit optimizers correct no moments, here and in DeepSpeed"
        note = f"optimizer.params.bias_correction: {quoted(params['bias_correction'])} has no effect here: {why}"
        params = {key: value for key, value in params.items() if key != "bias_correction"}
        return {**section, "type": name, "params": params}, [note], []
    # Params of a wrong type stay in the section: the fields report them.
    if not isinstance(params, dict) or name not in ("adam", "adamw"):
        return {"params": {}, **section, "type": name}, [], []
    params = dict(params)
    adam_w_mode = params.pop("adam_w_mode", True)
    if not isinstance(adam_w_mode, bool):
        message = f"expected true or false, found {quoted(adam_w_mode)}"
        return None, [], [Fault("optimizer.params.adam_w_mode", "type", message)]
    notes = []
    if name == "adamw" and not adam_w_mode:
        notes.append('optimizer.params.adam_w_mode: false has no effect: type "AdamW" is always AdamW')
    if name == "adam" and adam_w_mode:
        # The default of Adam, since the file says Adam. That of AdamW is 0.01.
        params.setdefault("weight_decay", 0.0)
        notes.append("optimizer.type: " + ADAM_IS_ADAMW.format(written, quoted(params["weight_decay"])))
        name = "adamw"
    return {**section, "type": name, "params": params}, notes, []


def _conflicts(name: str, config: Any) -> list[Fault]:
    """Return conflicts of an optimizer that works on whole parameters, or that sends signs of momenta."""
    zero, whole = config.zero_optimization, OPTIMIZERS[name].whole
    wanted: Wanted = {}
    if whole is not None:
        why = "its ranks exchange parts of whole parameters during an update"
        wanted["zero_optimization.update_in_backward"] = ((False,), why)
        if zero.offload_optimizer.is_used:
            wanted["zero_optimization.offload_optimizer.overlap"] = (("none",), why)
        if whole.matrix is not None and zero.stage == 3:
            wanted["zero_optimization.zero_hpz_partition_size"] = ((1,), why)
        axes = ("tensor", "expert") if whole.matrix is None else ("tensor", "sequence", "expert")
        wanted |= {f"parallel.{axis}": ((1,), why) for axis in axes}
    if OPTIMIZERS[name].sends_signs:
        alone = "it works with plain data parallelism only"
        wanted["zero_optimization.stage"] = ((0,), alone)
        wanted |= {f"parallel.{axis}": ((1,), alone) for axis in ("tensor", "sequence", "expert")}
        wanted["communication.gradient_bits"] = ((None,), "it sends no gradients after its warm-up")
        wanted["communication.power_sgd.rank"] = ((0,), "it sends no gradients after its warm-up")
        why = "an update sends momenta, in the same order on all ranks"
        wanted["zero_optimization.update_in_backward"] = ((False,), why)
        if zero.offload_optimizer.is_used:
            why = "an update sends momenta, so it runs on the model's device"
            wanted["zero_optimization.offload_optimizer.device"] = (("none",), why)
        if config.bf16.enabled:
            wanted["bf16.masters"] = ((True,), "randomly rounded parameters would differ between ranks")
    return needs(f'optimizer.type "{name}"', wanted, config)
