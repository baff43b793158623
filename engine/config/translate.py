"""From the words of a file to the fields of Config: aliases, "auto", DeepSpeed's other keys, one name for each type."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ...configs.section import Section
from ...optimizers import OPTIMIZERS
from .deepspeed import RULES, judge
from .errors import MAX_FAULTS, Fault, shown, unknown_key
from .optimizer import canonical_optimizer
from .planned import PLANNED
from .read import join
from .scheduler import SCHEDULER_PARAMS, canonical_scheduler

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
MICS = "zero_optimization.mics_shard_size"  # shard_size, where it is above 0
PIN_SWITCH = "zero_optimization.cpu_offload_use_pin_memory"  # pin_memory of what the two before it offload
BF16_MASTERS = "bf16.bf16_master_weights_and_grads"  # masters false, and gradients that accumulate in bf16
QUANTIZED: dict[str, dict[str, int]] = {  # ZeRO++, whose stage is 3 -> keys of the section `communication`
    "zero_optimization.zero_quantized_weights": {"weight_bits": 8},
    "zero_optimization.zero_quantized_nontrainable_weights": {"frozen_weight_bits": 8},
    "zero_optimization.zero_quantized_gradients": {"gradient_bits": 4, "gradient_bits_in_host": 4},
}
BF16_STATES = "bf16.bf16_optimizer_states"  # state_dtype "bf16"
_OFFLOAD = tuple(dict.fromkeys(CPU_SWITCHES.values()))
NULL_IS_DEFAULT = ("aio", "elasticity", *_OFFLOAD, *(f"{section}.device" for section in _OFFLOAD))
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


REMOVED = {  # section that earlier versions had: (its switch, which null turns off; what to use instead)
    "outer": (
        "every",
        "for ranks that train apart and meet every so many steps (DiLoCo) use torchft "
        "(https://github.com/meta-pytorch/torchft), and remove the section",
    ),
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
    paths = [*RULES, *ALIASES, *CPU_SWITCHES, PIN_SWITCH, MICS, BF16_MASTERS, BF16_STATES, *QUANTIZED]
    names = {path.removeprefix(prefix).split(".")[0] for path in paths if path.startswith(prefix)}
    return sorted(name for name in names if f"{prefix}{name}" in paths)


def translate(raw: dict[str, object]) -> Translation:
    """The values of Config's fields in `raw` (plain values without comments), the rest as notes and faults."""
    out = Translation({})
    out.values = _walk(raw, "", out)
    _take_profilers(out)
    _take_bf16_switches(out)
    _take_quantized(out)
    optimizer = out.values.pop("optimizer", None)
    if isinstance(optimizer, dict):
        given = optimizer
        section, notes, faults = canonical_optimizer(given)
        out.notes += notes
        out.faults += faults
        optimizer = section
        if faults:  # of an optimizer that is not here, the parameters cannot be judged
            out.faults = [f for f in out.faults if not f.path.startswith("optimizer.params.") or f in faults]
            out.faults += _slips(given, "optimizer")
        elif section is not None:
            _give_back(section, "optimizer", OPTIMIZERS[str(section["type"])].params, out.auto_paths)
    if optimizer is not None:
        out.values["optimizer"] = optimizer
    scheduler = out.values.pop("scheduler", None)
    if isinstance(scheduler, dict):
        given = scheduler
        scheduler, faults = canonical_scheduler(given)
        out.faults += faults + (_slips(given, "scheduler") if faults else [])
        if scheduler is not None:
            _give_back(scheduler, "scheduler", SCHEDULER_PARAMS[str(scheduler["type"])], out.auto_paths)
    if scheduler is not None:
        out.values["scheduler"] = scheduler
    return out


def _slips(section: dict[str, object], path: str) -> list[Fault]:
    """Unknown keys of an optimizer or scheduler of no known type, which Config does not see: "type" may be meant."""
    known = ["type", "params", *known_rule_keys(path)]
    slips = [key for key in section if key not in known][:MAX_FAULTS]
    return [unknown_key(join(path, key), key, known) for key in slips]


def _give_back(section: dict[str, object], name: str, params: type[Section], auto_paths: list[str]) -> None:
    """Keys that are "auto", and that this optimizer or scheduler does not have: to be refused as with any value."""
    given = section.get("params") or {}
    start, known = f"{name}.params.", params.json_keys()
    unknown = [path for path in auto_paths if path.startswith(start) and path.removeprefix(start) not in known]
    if unknown and isinstance(given, dict):
        section["params"] = {**given, **{path.removeprefix(start): "auto" for path in unknown}}
        auto_paths[:] = [path for path in auto_paths if path not in unknown]


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
        if here == "zero_optimization" and isinstance(value, bool):
            kept[key] = {"stage": int(value)}
        elif here == MICS:
            _mics(value, section, kept, out)
        elif here in RULES:
            out.add(judge(here, RULES[here], value))
        elif here in REMOVED:
            out.add([_removed(here, value)])
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


def _removed(here: str, value: object) -> str | Fault:
    """What a section says that is not here any more: it may be off, as files that a plan has written have it."""
    switch, instead = REMOVED[here]
    if value is None or (isinstance(value, dict) and value.get(switch) is None):
        return f"{here}: {shown(value)} has no effect here: it was removed; {instead}"
    return Fault(here, "unsupported", f"was removed; {instead}")


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


def _mics(value: object, section: dict[str, object], kept: dict[str, object], out: Translation) -> None:
    """MiCS is hybrid sharding: stage 3 within groups of ranks, and copies of these."""
    if value is None or value == -1:
        return
    if section.get("shard_size") is not None:
        out.faults.append(
            Fault(MICS, "conflict", 'means the same as "shard_size", which is given too; keep one of them')
        )
    elif isinstance(value, bool) or not isinstance(value, int) or value < 1:
        out.faults.append(Fault(MICS, "value", f"expected -1, or the ranks of a shard group, found {shown(value)}"))
    else:
        kept["shard_size"] = value


def _take_bf16_switches(out: Translation) -> None:
    """DeepSpeed's words for parameters, gradients and states of bf16: they stand in the section `bf16` until here."""
    section = out.values.get("bf16")
    if not isinstance(section, dict):
        return
    found = {path: section.pop(path.rpartition(".")[2], None) for path in (BF16_MASTERS, BF16_STATES)}
    for path, value in found.items():
        if value is not None and not isinstance(value, bool):
            out.faults.append(Fault(path, "type", f"expected true or false, found {shown(value)}"))
    if found[BF16_MASTERS] is True:
        if section.get("masters", False) is not False:
            out.faults.append(Fault(BF16_MASTERS, "conflict", 'means "masters": false; keep one of them'))
        section["masters"] = False
        data_types = out.values.setdefault("data_types", {})
        if isinstance(data_types, dict) and data_types.get("grad_accum_dtype") is None:
            data_types["grad_accum_dtype"] = "bf16"
        out.notes.append(f"{BF16_MASTERS}: true is bf16.masters false here, which rounds updates at random")
    if found[BF16_STATES] is True:
        optimizer = out.values.get("optimizer")
        params = optimizer.setdefault("params", {}) if isinstance(optimizer, dict) else None
        if found[BF16_MASTERS] is not True:
            message = "needs bf16_master_weights_and_grads true, as in DeepSpeed; or set optimizer.params.state_dtype"
            out.faults.append(Fault(BF16_STATES, "conflict", message))
        elif not isinstance(params, dict):
            message = "needs an optimizer in the file, whose state_dtype it is: one that is passed has its own states"
            out.faults.append(Fault(BF16_STATES, "conflict", message))
        else:
            params.setdefault("state_dtype", "bf16")


def _take_quantized(out: Translation) -> None:
    """The switches of ZeRO++ are bits of messages here, in the section `communication`."""
    section = out.values.get("zero_optimization")
    if not isinstance(section, dict):
        return
    for path, bits in QUANTIZED.items():
        value = section.pop(path.rpartition(".")[2], None)
        if value is not None and not isinstance(value, bool):
            out.faults.append(Fault(path, "type", f"expected true or false, found {shown(value)}"))
        if value is not True:
            continue
        said = ", ".join(f"communication.{key} {count}" for key, count in bits.items())
        if section.get("stage") != 3:
            reason = f"it is of stage 3; {said} acts at every stage"
            out.notes.append(f"{path}: true has no effect here: {reason}")
            continue
        communication = out.values.setdefault("communication", {})
        given = [key for key in bits if isinstance(communication, dict) and communication.get(key) is not None]
        if given:
            message = f"means {said}, and communication.{given[0]} is given too; keep one of them"
            out.faults.append(Fault(path, "conflict", message))
        elif isinstance(communication, dict):
            communication |= bits
            out.notes.append(f"{path}: true is {said} here")


FLOPS_WORDS = {"profile_step": "step", "module_depth": "module_depth", "top_modules": "top_modules"}
IDLE_WORDS = {  # of the sections that are `profile` here, which writes all that these would choose
    "flops_profiler": ("recompute_fwd_factor", "detailed"),
    "comms_logger": ("verbose", "prof_all", "debug", "prof_ops"),
}


def _take_profilers(out: Translation) -> None:
    """DeepSpeed's flops_profiler and comms_logger are the section `profile`."""
    found: dict[str, object] = {}
    for name, idle in IDLE_WORDS.items():
        section = out.values.pop(name, None)
        if section is None or section is False:
            continue
        if not isinstance(section, dict):
            out.faults.append(Fault(name, "type", f"expected an object, found {shown(section)}"))
            continue
        known = ["enabled", *idle, *((*FLOPS_WORDS, "output_file") if name == "flops_profiler" else ())]
        out.faults += [unknown_key(f"{name}.{key}", key, known) for key in section if key not in known]
        if not isinstance(section.get("enabled", False), bool):
            message = f"expected true or false, found {shown(section['enabled'])}"
            out.faults.append(Fault(f"{name}.enabled", "type", message))
        if section.get("enabled") is True:
            found["enabled"] = True
            found |= {FLOPS_WORDS[key]: value for key, value in section.items() if key in FLOPS_WORDS}
            if isinstance(section.get("output_file"), str):
                found["folder"] = f"{section['output_file']}.profile"
    if not found:
        return
    step, own = found.get("step"), out.values.get("profile")
    found["step"] = max(1, step) if isinstance(step, int) else 1  # DeepSpeed's -1 is every step
    out.values["profile"] = {**found, **own} if isinstance(own, dict) else found
    out.notes.append("profile: flops_profiler and comms_logger are this section here, which writes all of both")
