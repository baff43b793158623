"""The section `optimizer`: a type, and the parameters of its record in `optimizers/`."""

from typing import Any, Literal

from pydantic import Field, SerializeAsAny, ValidationInfo, field_validator

from ...optimizers import OPTIMIZERS
from ...optimizers.optimizer import OptimizerParams, State, StateDtype
from .errors import ConfigSection, Fault, did_you_mean, no_effect, shown


class OptimizerConfig(ConfigSection):
    """The optimizer and its parameters."""

    path = "optimizer"

    type: str
    """Name of the optimizer, in upper or lower case."""
    params: SerializeAsAny[OptimizerParams] = Field(default_factory=OptimizerParams, validate_default=True)

    @field_validator("type")
    @classmethod
    def _is_known(cls, value: str) -> str:
        if value not in OPTIMIZERS:
            raise ValueError(f"expected one of {', '.join(OPTIMIZERS)}, found {shown(value)}")
        return value

    @field_validator("params", mode="before")
    @classmethod
    def _of_its_type(cls, value: object, info: ValidationInfo) -> object:
        if "type" not in info.data:  # reported as a separate error
            return value
        given = value.model_dump() if type(value) is OptimizerParams else value
        return OPTIMIZERS[info.data["type"]].params.model_validate(given)

    @property
    def options(self) -> dict[str, Any]:
        """The options of a parameter group."""
        return self.params.model_dump(exclude={"state_dtype"})

    @property
    def state_dtype(self) -> StateDtype:
        dtype: StateDtype = self.params.model_dump()["state_dtype"]
        return dtype

    @property
    def states(self) -> tuple[State, ...]:
        """The states that these parameters keep."""
        return OPTIMIZERS[self.type].states_for(self.options)

    def faults(self, config: Any) -> list[Fault]:
        found = _whole_faults(self.type, config)
        found += [Fault(f"optimizer.params.{key}", "conflict", message) for key, message in self.params.conflicts()]
        return found + (_sign_faults(self.type, config) if OPTIMIZERS[self.type].sends_signs else [])

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


def canonical_optimizer(section: dict[str, object]) -> tuple[dict[str, object] | None, list[str], list[Fault]]:
    """Return the section with our name of the type, notes, and faults (then without a section).

    `section` has no comments and no "auto". `adam_w_mode` is taken out of params, since it chooses the type.
    """
    written = section.get("type")
    if not isinstance(written, str):
        kind: Literal["type", "missing"] = "type" if "type" in section else "missing"
        found = f", found {shown(written)}" if "type" in section else ""
        return None, [], [Fault("optimizer.type", kind, f"expected one of {', '.join(OPTIMIZERS)}{found}")]
    name = optimizer_name(written)
    if name in REMOVED:
        return None, [], [Fault("optimizer.type", "unsupported", f"{shown(written)} was removed; {REMOVED[name]}")]
    if name not in OPTIMIZERS:
        what = (
            f"{shown(written)} is not supported yet: {NOT_DONE[name]}"
            if name in NOT_DONE
            else f"unknown optimizer {shown(written)}{did_you_mean(written, OPTIMIZERS)}"
        )
        fix = f"there is {', '.join(OPTIMIZERS)}; or pass your own elementwise torch optimizer class to initialize"
        return None, [], [Fault("optimizer.type", "unsupported" if name in NOT_DONE else "value", f"{what}; {fix}")]
    params = section.get("params", {})
    if isinstance(params, dict) and OPTIMIZERS[name].sends_signs and "bias_correction" in params:
        why = "1-bit optimizers correct no moments, here and in DeepSpeed"
        note = f"optimizer.params.bias_correction: {shown(params['bias_correction'])} has no effect here: {why}"
        params = {key: value for key, value in params.items() if key != "bias_correction"}
        return {**section, "type": name, "params": params}, [note], []
    if not isinstance(params, dict) or name not in ("adam", "adamw"):
        return {"params": {}, **section, "type": name}, [], []
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


def _whole_faults(name: str, config: Any) -> list[Fault]:
    """Return conflicts of an optimizer that works on whole parameters."""
    zero, parallel = config.zero_optimization, config.parallel
    whole = OPTIMIZERS[name].whole
    if whole is None:
        return []
    overlap = zero.offload_optimizer.overlap if zero.offload_optimizer.is_used else "none"
    wrong = {
        "zero_optimization.update_in_backward": (zero.update_in_backward, "false", "true"),
        "zero_optimization.offload_optimizer.overlap": (overlap != "none", '"none"', f'"{overlap}"'),
        "parallel.tensor": (parallel.tensor > 1, "1", str(parallel.tensor)),
        "parallel.expert": (parallel.expert > 1, "1", str(parallel.expert)),
    }
    if whole.matrix is not None:
        hpz = zero.partition_size
        wrong["zero_optimization.zero_hpz_partition_size"] = (hpz > 1, "1", str(hpz))
        wrong["parallel.sequence"] = (parallel.sequence > 1, "1", str(parallel.sequence))
    why = "its ranks exchange parts of whole parameters during an update"
    return [
        Fault(path, "conflict", f'optimizer.type "{name}" needs {expected}, found {found}: {why}')
        for path, (is_wrong, expected, found) in wrong.items()
        if is_wrong
    ]


def _sign_faults(name: str, config: Any) -> list[Fault]:
    """Return conflicts of an optimizer that sends signs of momenta."""
    zero, parallel, bf16 = config.zero_optimization, config.parallel, config.bf16
    alone = "it works with plain data parallelism only"
    masters = "randomly rounded parameters would differ between ranks"
    wrong: dict[str, tuple[bool, str, object, str]] = {
        "zero_optimization.stage": (zero.stage > 0, "0", zero.stage, alone),
        "parallel.tensor": (parallel.tensor > 1, "1", parallel.tensor, alone),
        "parallel.sequence": (parallel.sequence > 1, "1", parallel.sequence, alone),
        "parallel.expert": (parallel.expert > 1, "1", parallel.expert, alone),
        "zero_optimization.offload_optimizer.device": (
            zero.offload_optimizer.is_used,
            '"none"',
            zero.offload_optimizer.device,
            "an update sends momenta, so it runs on the model's device",
        ),
        "zero_optimization.update_in_backward": (
            zero.update_in_backward,
            "false",
            True,
            "an update sends momenta, in the same order on all ranks",
        ),
        "bf16.masters": (
            bf16.enabled and bf16.masters is not True,
            "true",
            bf16.masters,
            masters,
        ),
    }
    return [
        Fault(path, "conflict", f'optimizer.type "{name}" needs {expected}, found {shown(value)}: {why}')
        for path, (is_wrong, expected, value, why) in wrong.items()
        if is_wrong
    ]
