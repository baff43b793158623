"""Translate DeepSpeed's keys in a config file to lowtide's `Config`: the switches below, and `RULES`.

A training imports this module only for a file that may be DeepSpeed's: `is_foreign` of translate.py.

[Note: two defaults] A missing key has the default of docs/config.md, in every file. If DeepSpeed's default differs
and changes the numbers of a training, a file written for DeepSpeed trains differently here without saying so. So each
such key gets a note if the file was written for DeepSpeed: if it has a key that only DeepSpeed has, or if it has no
key of lowtide's alone and DeepSpeed could run it (it has a batch size).
Source: DeepSpeed 0.19.8, runtime/constants.py, runtime/engine.py (_configure_basic_optimizer), ops/adam, ops/lion,
runtime/lr_schedules.py.

Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from ..engine.config.errors import Fault, quoted, unknown_key, value_at
from ..engine.config.optimizer import optimizer_name
from ..engine.config.read import items_of, join
from ..engine.config.scheduler import WarmupDecayLRParams
from ..engine.config.translate import Translation, says_no_own_word
from ..optimizers import OPTIMIZERS
from .rules import RULES, judge, rule_schema

CPU_SWITCHES = {  # true means device "cpu" in this section
    "zero_optimization.cpu_offload": "zero_optimization.offload_optimizer",
    "zero_optimization.cpu_offload_param": "zero_optimization.offload_param",
    "zero_optimization.cpu_offload_params": "zero_optimization.offload_param",
    "activation_checkpointing.cpu_checkpointing": "activation_checkpointing.offload",
}
_OLD_SWITCHES = tuple(path.rpartition(".")[2] for path in CPU_SWITCHES)
MICS = "zero_optimization.mics_shard_size"  # shard_size, if above 0
PIN_SWITCH = (
    "zero_optimization.cpu_offload_use_pin_memory"  # pin_memory of what cpu_offload and cpu_offload_params offload
)
BF16_MASTERS = "bf16.bf16_master_weights_and_grads"  # masters false, and gradients that accumulate in bf16
QUANTIZED: dict[str, dict[str, int]] = {  # ZeRO++ (stage 3) -> keys of the section `communication`
    "zero_optimization.zero_quantized_weights": {"weight_bits": 8},
    "zero_optimization.zero_quantized_nontrainable_weights": {"frozen_weight_bits": 8},
    "zero_optimization.zero_quantized_gradients": {"gradient_bits": 4, "gradient_bits_in_host": 4},
}
BF16_STATES = "bf16.bf16_optimizer_states"  # state_dtype "bf16"
_SWITCHES = (*CPU_SWITCHES, PIN_SWITCH, BF16_MASTERS, BF16_STATES, *QUANTIZED)
_KEYS = frozenset([*RULES, *_SWITCHES, MICS])
FLOPS_WORDS = {"profile_step": "step", "module_depth": "module_depth", "top_modules": "top_modules"}
IDLE_WORDS = {  # sections that are `profile` here; it always includes what these keys select
    "flops_profiler": ("recompute_fwd_factor", "detailed"),
    "comms_logger": ("verbose", "prof_all", "debug", "prof_ops"),
}
_MUON_LR = "optimizer.params.muon_lr"
PEAK = "warmup_max_lr"
_THEIR_PEAK = 1e-3  # for WarmupDecayLR only: WarmupLR uses the optimizer's lr in DeepSpeed too
_MONITORS = {
    "tensorboard": {"job_name": "DeepSpeedJobName"},
    "csv_monitor": {"job_name": "DeepSpeedJobName"},
    "wandb": {"project": "deepspeed"},
}
_DTYPES = ("fp16", "bf16")  # sections whose inputs DeepSpeed does not cast, unless fp16.auto_cast is true

_UNREAD = {
    "max_grad_norm": "gradient_clipping is the key",
    "lr_scheduler": "scheduler is the key",
    "distributed_backend": "deepspeed.init_distributed takes it",
    "pipeline_parallel_size": "parallel.pipeline is the key",
    **{f"optimizer.{key}": "it belongs into optimizer.params" for key in ("lr", "betas", "eps", "weight_decay")},
}
"""Keys that DeepSpeed never reads but users write, and a hint to the intended key."""


REASONS: Mapping[str, str] = {path: rule.reason for path, rule in RULES.items()}
"""Key with a rule -> what to use instead, or why it has no effect."""


@cache
def keys() -> Mapping[str, set[type]]:
    """Return path -> types of the values, for each key."""
    of_rules: dict[str, set[type]] = {"true or false": {bool}, "an integer": {int}, "a number": {float}}
    known: dict[str, set[type]] = {path: of_rules.get(rule.expected, {str}) for path, rule in RULES.items()}
    known |= {path: {bool} for path in (*_SWITCHES, "zero_optimization")}
    known |= {path: {int} for path in (MICS, *(f"flops_profiler.{word}" for word in FLOPS_WORDS))}
    return known | {_MUON_LR: {float}}


def keys_of(section: str) -> list[str]:
    """Return the names of the keys below a section; "" is the top level."""
    prefix = f"{section}." if section else ""
    names = {path.removeprefix(prefix).split(".")[0] for path in _KEYS if path.startswith(prefix)}
    return sorted(name for name in names if f"{prefix}{name}" in _KEYS)


def without_unread(raw: dict[str, object]) -> tuple[dict[str, object], list[str]]:
    """Remove keys that DeepSpeed never reads, with notes. In a file that is not for DeepSpeed they are errors."""
    paths = {path for path, _ in items_of(raw)}
    unread = [path for path in _UNREAD if path in paths] if _is_for_deepspeed(raw, paths) else []
    kept = dict(raw)
    for path in unread:
        section, _, key = path.rpartition(".")
        if section:
            inner = kept[section]
            assert isinstance(inner, dict)
            kept[section] = {name: value for name, value in inner.items() if name != key}
        else:
            del kept[key]
    return kept, [f"{path}: has no effect here, and DeepSpeed never reads it: {_UNREAD[path]}" for path in unread]


def take(path: str, value: object, section: dict[str, object], kept: dict[str, object], out: Translation) -> bool:
    """Translate a key of `section` into `kept` (our values of the section) or `out`. False: the key is unknown."""
    if path == "zero_optimization" and isinstance(value, bool):
        kept[path] = {"stage": int(value)}
    elif path == MICS:
        _mics(value, section, kept, out)
    elif path in RULES:
        out.add(judge(path, RULES[path], value))
    elif path in CPU_SWITCHES or path == PIN_SWITCH:
        _switch(path, value, section, kept, out)
    else:
        return False
    return True


def finish(out: Translation) -> None:
    """Translate settings that span several sections."""
    _take_profilers(out)
    _take_bf16_switches(out)
    _take_quantized(out)
    _take_muon_lr(out)


def other_defaults(raw: Mapping[str, object], config: Any) -> list[str]:
    """Return a note for each missing key with a different default in DeepSpeed. config: the checked `Config`."""
    if not _is_for_deepspeed(raw, {path for path, _ in items_of(raw)}):
        return []
    return [
        f"{path}: missing, so it is {quoted(here)} here; in DeepSpeed 0.19 it is {quoted(there)}. Write the value "
        "that you want"
        for path, there in _missing(raw, config).items()
        if (here := value_at(config, path)) != there
    ]


def with_their_defaults(raw: Mapping[str, object], config: Any) -> dict[str, object]:
    """Return the values of a DeepSpeed file with DeepSpeed's defaults: see [Note: two defaults]. config: as above."""
    filled = dict(raw)
    for name, defaults in _MONITORS.items():
        section = raw.get(name)
        if isinstance(section, dict):
            filled[name] = {**defaults, **section}
    for path, value in _missing(raw, config).items():
        *names, key = path.split(".")
        inner: dict[str, Any] = filled
        for name in names:
            # Copied: the caller's values stay as they are.
            inner[name] = inner = dict(inner.get(name) or {})
        inner[key] = value
    return filled


def _missing(raw: Mapping[str, Any], config: Any) -> dict[str, object]:
    """Return path -> DeepSpeed's value of each missing key that may have a different default there."""
    theirs: dict[str, object] = {"gradient_clipping": 1.0}
    theirs |= {f"{name}.auto_cast": False for name in _DTYPES if getattr(config, name).enabled}
    if config.optimizer is not None:
        defaults = OPTIMIZERS[config.optimizer.type].deepspeed_defaults
        params = raw["optimizer"].get("params") or {}
        if config.optimizer.type == "adamw" and params.get("torch_adam") is True:
            defaults = {"weight_decay": 0.01}  # torch.optim.AdamW instead of DeepSpeed's
        theirs |= {f"optimizer.params.{key}": value for key, value in defaults.items()}
    if config.scheduler is not None and isinstance(config.scheduler.params, WarmupDecayLRParams):
        theirs[f"scheduler.params.{PEAK}"] = _THEIR_PEAK
    paths = {path for path, _ in items_of(raw)}
    return {path: value for path, value in theirs.items() if path not in paths}


def add_to_schema(schema: dict[str, Any]) -> None:
    """Add the keys to the JSON schema."""
    from ..engine.config.schema import add, allow  # for a single command

    _add_profilers(schema)
    for path, rule in RULES.items():
        add(schema, path, rule_schema(rule))
    for path, section in CPU_SWITCHES.items():
        add(schema, path, {"type": ["boolean", "null"], "description": f'true: {section} with device "cpu".'})
    pinned = "pin_memory of both sections."
    add(schema, PIN_SWITCH, {"type": ["boolean", "null"], "description": pinned})
    mics = {"type": ["integer", "null"], "description": "The same as shard_size. -1: all ranks."}
    add(schema, MICS, mics)
    for path, meaning in (
        (BF16_MASTERS, 'masters false, and data_types.grad_accum_dtype "bf16".'),
        (BF16_STATES, 'optimizer.params.state_dtype "bf16".'),
        *((path, _bits_of(bits)) for path, bits in QUANTIZED.items()),
    ):
        add(schema, path, {"type": ["boolean", "null"], "description": f"true: {meaning}"})
    allow(schema, "zero_optimization", {"type": "boolean"})


def _is_for_deepspeed(raw: Mapping[str, Any], paths: set[str]) -> bool:
    return bool(paths & _KEYS) or says_no_own_word(raw, paths)


def _is_on(path: str, value: object, out: Translation) -> bool:
    """Return whether a switch is true. Adds a fault unless it is true, false or null."""
    if value is not None and not isinstance(value, bool):
        out.faults.append(Fault(path, "type", f"expected true or false, found {quoted(value)}"))
    return value is True


def _switch(here: str, value: object, section: dict[str, object], kept: dict[str, object], out: Translation) -> None:
    """Translate DeepSpeed's old offload switches: each true one becomes a section in `kept`."""
    is_on = _is_on(here, value, out)
    if here == PIN_SWITCH:
        if isinstance(value, bool) and not any(section.get(key) is True for key in _OLD_SWITCHES):
            reason = "it needs cpu_offload or cpu_offload_params; offload_optimizer and offload_param have pin_memory"
            out.notes.append(f"{here}: {quoted(value)} has no effect here: {reason}")
    elif is_on:
        name = CPU_SWITCHES[here].rpartition(".")[2]
        if section.get(name) is not None:
            message = f'means the same as "device": "cpu" in "{name}", which is given too; keep one of them'
            out.faults.append(Fault(here, "conflict", message))
            return
        pinned = section.get(PIN_SWITCH.rpartition(".")[2])
        kept[name] = {"device": "cpu"} | ({"pin_memory": pinned} if isinstance(pinned, bool) else {})


def _mics(value: object, section: dict[str, object], kept: dict[str, object], out: Translation) -> None:
    """Translate MiCS to hybrid sharding: stage 3 within groups of ranks, replicated between groups."""
    if value is None or value == -1:
        return
    if section.get("shard_size") is not None:
        out.faults.append(
            Fault(MICS, "conflict", 'means the same as "shard_size", which is given too; keep one of them')
        )
    elif isinstance(value, bool) or not isinstance(value, int) or value < 1:
        out.faults.append(Fault(MICS, "value", f"expected -1 or the ranks of a shard group, found {quoted(value)}"))
    else:
        kept["shard_size"] = value


def _take_bf16_switches(out: Translation) -> None:
    """Translate DeepSpeed's bf16 switches. Until here they are in the section `bf16`."""
    section = out.values.get("bf16")
    if not isinstance(section, dict):
        return
    # Removed here, because the section's model refuses unknown keys.
    no_masters, bf16_states = (
        _is_on(path, section.pop(path.rpartition(".")[2], None), out) for path in (BF16_MASTERS, BF16_STATES)
    )
    if no_masters:
        if section.get("masters", False) is not False:
            out.faults.append(Fault(BF16_MASTERS, "conflict", 'means "masters": false; keep one of them'))
        section["masters"] = False
        data_types = out.values.setdefault("data_types", {})
        if isinstance(data_types, dict) and data_types.get("grad_accum_dtype") is None:
            data_types["grad_accum_dtype"] = "bf16"
        out.notes.append(f"{BF16_MASTERS}: true is bf16.masters false here, with stochastic rounding of updates")
    if bf16_states:
        optimizer = out.values.get("optimizer")
        params = optimizer.setdefault("params", {}) if isinstance(optimizer, dict) else None
        if not no_masters:
            message = "needs bf16_master_weights_and_grads true, as in DeepSpeed; or set optimizer.params.state_dtype"
            out.faults.append(Fault(BF16_STATES, "conflict", message))
        elif not isinstance(params, dict):
            message = (
                "sets state_dtype of the optimizer in the file, which has none; an optimizer passed in keeps its own"
            )
            out.faults.append(Fault(BF16_STATES, "conflict", message))
        else:
            params.setdefault("state_dtype", "bf16")


def _take_quantized(out: Translation) -> None:
    """Translate ZeRO++'s switches to message bits in the section `communication`."""
    section = out.values.get("zero_optimization")
    if not isinstance(section, dict):
        return
    for path, bits in QUANTIZED.items():
        if not _is_on(path, section.pop(path.rpartition(".")[2], None), out):
            continue
        said = ", ".join(f"communication.{key} {count}" for key, count in bits.items())
        if section.get("stage") != 3:
            reason = f"it needs stage 3; {said} acts at every stage"
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


def _take_profilers(out: Translation) -> None:
    """Translate DeepSpeed's flops_profiler and comms_logger to the section `profile`."""
    found: dict[str, object] = {}
    for name, idle in IDLE_WORDS.items():
        section = out.values.pop(name, None)
        if section is None or section is False:
            continue
        if not isinstance(section, dict):
            out.faults.append(Fault(name, "type", f"expected an object, found {quoted(section)}"))
            continue
        known = ["enabled", *idle, *((*FLOPS_WORDS, "output_file") if name == "flops_profiler" else ())]
        out.faults += [unknown_key(join(name, key), key, known) for key in section if key not in known]
        if not isinstance(section.get("enabled", False), bool):
            message = f"expected true or false, found {quoted(section['enabled'])}"
            out.faults.append(Fault(f"{name}.enabled", "type", message))
        if section.get("enabled") is True:
            found["enabled"] = True
            found |= {FLOPS_WORDS[key]: value for key, value in section.items() if key in FLOPS_WORDS}
            if isinstance(section.get("output_file"), str):
                # DeepSpeed writes a text file by this name. A folder of the same name could not be made beside it.
                found["folder"] = f"{section['output_file']}.profile"
    if not found:
        return
    step, own = found.get("step"), out.values.get("profile")
    found["step"] = max(1, step) if isinstance(step, int) else 1  # DeepSpeed's -1 is every step
    # A section `profile` in the file goes before the translated keys.
    out.values["profile"] = {**found, **own} if isinstance(own, dict) else found
    out.notes.append("profile: flops_profiler and comms_logger turn on this section, which covers both")


def _take_muon_lr(out: Translation) -> None:
    """Translate the two rates of DeepSpeed's Muon: `muon_lr`, and `lr` for the parameters that Adam updates."""
    optimizer = out.values.get("optimizer")
    params = optimizer.get("params") if isinstance(optimizer, dict) else None
    if not isinstance(optimizer, dict) or not isinstance(params, dict) or "muon_lr" not in params:
        return
    if optimizer_name(optimizer.get("type")) == "muon":
        rates = {"adam_lr": params.get("lr"), **params, "lr": params["muon_lr"]}
        del rates["muon_lr"]
        out.values["optimizer"] = {**optimizer, "params": rates}


def _add_profilers(schema: dict[str, Any]) -> None:
    """Add flops_profiler and comms_logger to the schema."""
    profile = schema["$defs"]["ProfileConfig"]["properties"]
    flops: dict[str, Any] = {ours: profile[own] for ours, own in FLOPS_WORDS.items()}
    flops["profile_step"] = {"type": "integer", "description": "step of `profile`."}
    flops["output_file"] = {"type": ["string", "null"], "description": "With .profile behind it, folder of `profile`."}
    for key, title, others in (("flops_profiler", "FlopsProfiler", flops), ("comms_logger", "CommsLogger", {})):
        idle = {word: {"description": "No effect here: `profile` always includes it."} for word in IDLE_WORDS[key]}
        enabled = {"type": "boolean", "description": "Turns `profile` on."}
        section = {
            "type": "object",
            "additionalProperties": False,
            "properties": {"enabled": enabled, **others, **idle},
        }
        schema["$defs"][title] = section
        schema["properties"][key] = {"anyOf": [{"$ref": f"#/$defs/{title}"}, {"type": "null"}]}


def _bits_of(bits: Mapping[str, int]) -> str:
    """Describe a switch of ZeRO++."""
    return "at stage 3 " + " and ".join(f"communication.{key} {count}" for key, count in bits.items()) + "."
