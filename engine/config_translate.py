"""From the words of a file to the fields of Config: aliases, "auto", DeepSpeed's other keys, one name for each type."""

from dataclasses import dataclass, field

from .config_deepspeed import OFFLOAD_KEYS, RULES, judge, judge_offload
from .config_errors import Fault
from .config_optimizer import canonical_optimizer
from .config_read import join
from .config_scheduler import canonical_scheduler

BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
ALIASES = {  # alias: field
    "bfloat16": "bf16",
    "zero_optimization.prefetch_bucket_size": "zero_optimization.stage3_prefetch_bucket_size",
}
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
    "zero_optimization.stage3_prefetch_bucket_size": _DEFAULT,
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

    def add(self, answer: str | Fault | None) -> None:
        """Files an answer of a rule under notes or faults."""
        if isinstance(answer, Fault):
            self.faults.append(answer)
        elif answer is not None:
            self.notes.append(answer)


def known_rule_keys(section: str) -> list[str]:
    """The keys below a section ("" for the top level) that are DeepSpeed's and no fields of Config."""
    prefix = f"{section}." if section else ""
    paths = [*RULES, *ALIASES, *(f"zero_optimization.{key}" for key in OFFLOAD_KEYS)]
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
        elif path == "zero_optimization" and key in OFFLOAD_KEYS:
            for answer in judge_offload(here, value):
                out.add(answer)
        elif value == "auto" and (here in AUTO or here in BATCH_KEYS):
            out.auto_paths.append(here)
        elif isinstance(value, dict):
            kept[key] = _walk(value, here, out)
        else:
            kept[key] = value
    return kept


def _auto_peak(scheduler: dict[str, object], auto_paths: list[str]) -> None:
    """ "auto" for the peak of a warm-up means the optimizer's learning rate, also where the default is a number."""
    params = scheduler.get("params")
    if "scheduler.params.warmup_max_lr" in auto_paths and isinstance(params, dict):
        scheduler["params"] = {**params, "warmup_max_lr": None}
