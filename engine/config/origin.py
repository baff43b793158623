"""For which engine a config was written, and what DeepSpeed makes of the keys that it leaves out.

[Note: two defaults] A key that is left out has the default of docs/config.md, for every file. Where DeepSpeed has
another one that changes the numbers of a training, a file that was written for it trains differently here, and nothing
in it says so. Such a file gets a note for each of these keys: one with a key that only DeepSpeed has, and one that
says no word of ours where DeepSpeed could run it (it needs a batch size). Any other was written with docs/config.md at
hand.
Source: DeepSpeed 0.19.8, runtime/constants.py, runtime/engine.py (_configure_basic_optimizer), ops/adam, ops/lion,
runtime/lr_schedules.py.
"""

from collections.abc import Iterator, Mapping

from ...optimizers import OPTIMIZERS
from .deepspeed import RULES
from .errors import shown
from .optimizer import OptimizerConfig
from .read import join
from .scheduler import SCHEDULERS, SchedulerConfig, WarmupDecayLRConfig
from .translate import BF16_MASTERS, BF16_STATES, CPU_SWITCHES, MICS, PIN_SWITCH, QUANTIZED

_OWN = """
    device seed parallel tensor_parallel sequence_parallel kernels communication
    compile.blocks compile.mode compile.dynamic compile.fullgraph
    pipeline.schedule pipeline.chunks pipeline.microbatches pipeline.balance
    zero_optimization.shard_size zero_optimization.units zero_optimization.update_in_backward
    zero_optimization.layered_gradient_accumulation
    zero_optimization.offload_optimizer.overlap zero_optimization.offload_optimizer.delay_after_steps bf16.auto_cast
    bf16.masters
    activation_checkpointing.every activation_checkpointing.offload aio.verify optimizer.params.state_dtype
    memory_report profile
    checkpoint.folder checkpoint.every_steps checkpoint.keep_last checkpoint.async checkpoint.on_sigterm
    checkpoint.exclude_frozen_parameters
"""
PEAK = "warmup_max_lr"
_THEIR_PEAK = 1e-3  # of WarmupDecayLR alone: of WarmupLR it is the optimizer's lr there too
OWN_KEYS = frozenset(_OWN.split())
_THEIR_KEYS = frozenset([*RULES, *CPU_SWITCHES, PIN_SWITCH, MICS, BF16_MASTERS, BF16_STATES, *QUANTIZED])
_SIZES = {"train_batch_size", "train_micro_batch_size_per_gpu"}  # DeepSpeed refuses a file with neither


def other_defaults(
    raw: dict[str, object],
    gradient_clipping: float,
    optimizer: OptimizerConfig | None,
    scheduler: SchedulerConfig | None,
) -> list[str]:
    """One sentence for each key that a file of DeepSpeed's leaves out and that would have another value there.

    raw: the values as they were written, without comments. The rest: what they are here.
    """
    paths = set(_paths(raw, ""))
    if not _is_for_deepspeed(raw, paths):
        return []
    theirs: dict[str, tuple[object, object]] = {"gradient_clipping": (gradient_clipping, 1.0)}
    if optimizer is not None:
        for key, value in _their_params(raw, optimizer.type).items():
            theirs[f"optimizer.params.{key}"] = (getattr(optimizer.params, key), value)
    if isinstance(scheduler, WarmupDecayLRConfig):
        theirs[f"scheduler.params.{PEAK}"] = (scheduler.params.warmup_max_lr, _THEIR_PEAK)
    return [
        f"{path}: left out, so it is {shown(here)} here; DeepSpeed 0.19 has {shown(there)} then. Write the one you mean"
        for path, (here, there) in theirs.items()
        if path not in paths and here != there
    ]


def with_their_defaults(raw: Mapping[str, object]) -> dict[str, object]:
    """The values of a file for DeepSpeed, with what they leave out as DeepSpeed has it: see [Note: two defaults].

    What is no valid file stays as it is, for `Config.load` to refuse.
    """
    filled: dict[str, object] = {"gradient_clipping": 1.0, **raw}
    for name, defaults in _MONITORS.items():
        section = raw.get(name)
        if isinstance(section, dict):
            filled[name] = {**defaults, **section}
    section = raw.get("optimizer")
    if isinstance(section, dict) and isinstance(section.get("type"), str):
        written = section["type"].lower()
        params = section.get("params") or {}
        is_decoupled = written in _ADAM_NAMES and isinstance(params, dict) and params.get("adam_w_mode", True) is True
        kind = "adamw" if is_decoupled else written
        found = next((one.name for one in OPTIMIZERS.values() if kind in (one.name, *one.deepspeed_names)), None)
        if found is not None and isinstance(params, dict):
            filled["optimizer"] = {**section, "params": {**_their_params({"optimizer": section}, found), **params}}
    section = raw.get("scheduler")
    if isinstance(section, dict) and str(section.get("type")).lower() == "warmupdecaylr":
        params = section.get("params") or {}
        if isinstance(params, dict):
            filled["scheduler"] = {**section, "params": {PEAK: _THEIR_PEAK, **params}}
    return filled


_MONITORS = {
    "tensorboard": {"job_name": "DeepSpeedJobName"},
    "csv_monitor": {"job_name": "DeepSpeedJobName"},
    "wandb": {"project": "deepspeed"},
}

_UNREAD = {
    "max_grad_norm": "gradient_clipping is the key",
    "lr_scheduler": "scheduler is the key",
    "distributed_backend": "deepspeed.init_distributed takes it",
    "pipeline_parallel_size": "parallel.pipeline is the key",
    **{f"optimizer.{key}": "it belongs into optimizer.params" for key in ("lr", "betas", "eps", "weight_decay")},
}
"""Keys in files of users that DeepSpeed never reads: what the writer of such a file may have meant."""


def without_unread(raw: dict[str, object]) -> tuple[dict[str, object], list[str]]:
    """A file for DeepSpeed without the keys of `_UNREAD`, and a sentence for each. In other files they are errors."""
    paths = set(_paths(raw, ""))
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


_ADAM_NAMES = ("adam", *OPTIMIZERS["adam"].deepspeed_names)


def _is_for_deepspeed(raw: dict[str, object], paths: set[str]) -> bool:
    if paths & _THEIR_KEYS:
        return True
    optimizer, scheduler = (_type(raw.get(name)) for name in ("optimizer", "scheduler"))
    is_own_type = optimizer in OPTIMIZERS or scheduler in [name for name in SCHEDULERS if name.islower()]
    return bool(paths & _SIZES) and not paths & OWN_KEYS and not is_own_type


def _their_params(raw: dict[str, object], kind: str) -> Mapping[str, object]:
    section = raw["optimizer"]
    params = section.get("params") if isinstance(section, dict) else None
    if kind == "adamw" and isinstance(params, dict) and params.get("torch_adam") is True:
        return {"weight_decay": 0.01}  # torch.optim.AdamW in place of DeepSpeed's own
    return OPTIMIZERS[kind].deepspeed_defaults


def _type(section: object) -> str | None:
    """None: it has none that can be one."""
    found = section.get("type") if isinstance(section, dict) else None
    return found if isinstance(found, str) else None


def _paths(section: dict[str, object], path: str) -> Iterator[str]:
    for key, value in section.items():
        here = join(path, key)
        yield here
        if isinstance(value, dict):
            yield from _paths(value, here)
