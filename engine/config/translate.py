"""From the words of a file to the fields of Config: aliases, "auto", DeepSpeed's other keys, one name for each type."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from .deepspeed import RULES, judge
from .errors import Fault, shown
from .optimizer import canonical_optimizer
from .planned import PLANNED
from .read import join
from .scheduler import canonical_scheduler

BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
ALIASES = {  # alias: field
    "bfloat16": "bf16",
    "zero_optimization.prefetch_bucket_size": "zero_optimization.stage3_prefetch_bucket_size",
    "zero_optimization.max_live_parameters": "zero_optimization.stage3_max_live_parameters",
    "aio.intra_op_parallelism": "aio.thread_count",
}
CPU_SWITCHES = {  # true is device "cpu" in this section
    "zero_optimization.cpu_offload": "zero_optimization.offload_optimizer",
    "zero_optimization.cpu_offload_param": "zero_optimization.offload_param",
    "zero_optimization.cpu_offload_params": "zero_optimization.offload_param",
    "activation_checkpointing.cpu_checkpointing": "activation_checkpointing.offload",
}
_OLD_SWITCHES = tuple(path.rpartition(".")[2] for path in CPU_SWITCHES)
PIN_SWITCH = "zero_optimization.cpu_offload_use_pin_memory"  # pin_memory of what the two before it offload
_OFFLOAD = tuple(dict.fromkeys(CPU_SWITCHES.values()))
NULL_IS_DEFAULT = ("aio", *_OFFLOAD, *(f"{section}.device" for section in _OFFLOAD))
_DEFAULT = "the default"
AUTO = {  # path: why "auto" has this value; the value is what the key has when it is left out
    "steps_per_print": _DEFAULT,
    "gradient_clipping": "gradients are not clipped unless a number is given",
    "communication_data_type": "gradients are reduced in fp32 unless a type is given",
    "data_types.grad_accum_dtype": "gradients accumulate in fp32 unless a type is given",
    "bf16.enabled": "off unless it says true",
    "fp16.enabled": "off unless it says true",
    "fp16.loss_scale": "dynamic loss scaling",
    "fp16.initial_scale_power": _DEFAULT,
    "zero_optimization.stage3_prefetch_bucket_size": "two units are gathered ahead",
    "zero_optimization.stage3_max_live_parameters": _DEFAULT,
    **{f"{section}.device": "nothing is offloaded unless a device is named" for section in _OFFLOAD},
    **{f"{section}.nvme_path": "there is no folder unless one is given" for section in _OFFLOAD},
    "zero_optimization.offload_optimizer.pin_memory": _DEFAULT,
    "zero_optimization.offload_param.pin_memory": _DEFAULT,
    "aio.block_size": _DEFAULT,
    "aio.thread_count": _DEFAULT,
    "optimizer.params.lr": "the default of this optimizer",
    "optimizer.params.betas": "the default of this optimizer",
    "optimizer.params.eps": "the default of this optimizer",
    "optimizer.params.weight_decay": "the default of this optimizer",
    "optimizer.params.momentum": "the default of this optimizer",
    "scheduler.params.warmup_min_lr": _DEFAULT,
    "scheduler.params.warmup_max_lr": "null is the optimizer's learning rate",
    "scheduler.params.warmup_num_steps": _DEFAULT,
    "scheduler.params.warmup_min_ratio": _DEFAULT,
    "scheduler.params.cos_min_ratio": _DEFAULT,
    "scheduler.params.warmup_type": _DEFAULT,
}


@dataclass
class Translation:
    """What came of a file: the values for Config, the notes, the faults, and the paths that said "auto"."""

    values: dict[str, object]
    notes: list[str] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    auto_paths: list[str] = field(default_factory=list)

    def add(self, answers: Sequence[str | Fault]) -> None:
        """Files the answers of a rule under notes and faults."""
        self.faults += [answer for answer in answers if isinstance(answer, Fault)]
        self.notes += [answer for answer in answers if isinstance(answer, str)]


def known_rule_keys(section: str) -> list[str]:
    """The keys below a section ("" for the top level) that are DeepSpeed's and no fields of Config."""
    prefix = f"{section}." if section else ""
    paths = [*RULES, *ALIASES, *CPU_SWITCHES, PIN_SWITCH]
    names = {path.removeprefix(prefix).split(".")[0] for path in paths if path.startswith(prefix)}
    return sorted(name for name in names if f"{prefix}{name}" in paths)


def translate(raw: dict[str, object]) -> Translation:
    """The values of Config's fields in `raw` (plain values without comments), the rest as notes and faults."""
    out = Translation({})
    out.values = _walk(raw, "", out)
    optimizer = out.values.pop("optimizer", None)
    if isinstance(optimizer, dict):
        section, notes, faults = canonical_optimizer(optimizer)
        out.notes += notes
        out.faults += faults
        optimizer = section
        if faults:  # of an optimizer that is not here, the parameters cannot be judged
            out.faults = [f for f in out.faults if not f.path.startswith("optimizer.params.") or f in faults]
    if optimizer is not None:
        out.values["optimizer"] = optimizer
    scheduler = out.values.pop("scheduler", None)
    if isinstance(scheduler, dict):
        scheduler, faults = canonical_scheduler(scheduler)
        out.faults += faults
        if scheduler is not None:
            _auto_peak(scheduler, out.auto_paths)
    if scheduler is not None:
        out.values["scheduler"] = scheduler
    return out


def _walk(section: dict[str, object], path: str, out: Translation) -> dict[str, object]:
    """The keys of a section that are left for Config once rules, aliases and "auto" are taken out."""
    kept: dict[str, object] = {}
    for key, value in section.items():
        here = join(path, key)
        if here in ALIASES:
            name = ALIASES[here].rpartition(".")[2]
            if name in section:
                message = f'means the same as "{name}", which is given too; keep one of them'
                out.faults.append(Fault(here, "conflict", message))
                continue
            key, here = name, ALIASES[here]
        if here in RULES:
            out.add(judge(here, RULES[here], value))
        elif here in CPU_SWITCHES or here == PIN_SWITCH:
            _switch(here, value, section, kept, out)
        elif value is None and here in NULL_IS_DEFAULT:
            continue
        elif value == "auto" and (here in AUTO or here in BATCH_KEYS or here in PLANNED):
            out.auto_paths.append(here)
        elif isinstance(value, dict):
            kept[key] = _walk(value, here, out)
        else:
            kept[key] = value
    return kept


def _switch(here: str, value: object, section: dict[str, object], kept: dict[str, object], out: Translation) -> None:
    """DeepSpeed's old switches of offload: each true one is a section in `kept`."""
    if value is not None and not isinstance(value, bool):
        out.faults.append(Fault(here, "type", f"expected true or false, found {shown(value)}"))
    elif here == PIN_SWITCH:
        if value is not None and not any(section.get(key) is True for key in _OLD_SWITCHES):
            reason = "it goes with cpu_offload and cpu_offload_params; the sections of today have pin_memory"
            out.notes.append(f"{here}: {shown(value)} has no effect here: {reason}")
    elif value:
        name = CPU_SWITCHES[here].rpartition(".")[2]
        if section.get(name) is not None:
            message = f'means the same as "device": "cpu" in "{name}", which is given too; keep one of them'
            out.faults.append(Fault(here, "conflict", message))
            return
        pinned = section.get(PIN_SWITCH.rpartition(".")[2])
        kept[name] = {"device": "cpu"} | ({"pin_memory": pinned} if isinstance(pinned, bool) else {})


def _auto_peak(scheduler: dict[str, object], auto_paths: list[str]) -> None:
    """ "auto" for the peak of a warm-up means the optimizer's learning rate, also where the default is a number."""
    params = scheduler.get("params")
    if "scheduler.params.warmup_max_lr" in auto_paths and isinstance(params, dict):
        scheduler["params"] = {**params, "warmup_max_lr": None}
