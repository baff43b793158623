"""Translates the keys of a file to the fields of Config: aliases, "auto", text as values, names of types.

[Note: dialect] A file with a key that is not ours, or without a key that only we have, may be written for DeepSpeed.
`lowtide.deepspeed.dialect` takes the keys that it knows out of the file, with a note or a fault for each. It knows none
of our keys, so explaining a file may always ask it. A training imports it for such files alone.

[Note: text for a value] YAML 1.1 reads 1e-3 as text, and templates write every value as text. For a key that takes a
number, text that is a finite number as a whole becomes this number. For a key that takes true or false, so do "true"
and "false". The value must then fit its key as if written without quotes: "5e8" is an integer, "3.5" is not. Any other
text stays text, and the key accepts or refuses it: "yes" and "1" are no booleans, "true" is no number.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, get_args

from pydantic import Field, FiniteFloat, TypeAdapter, ValidationError

from ...configs.section import MAX_INTEGER, Section
from ...optimizers import OPTIMIZERS
from .batch import BATCH_KEYS
from .errors import MAX_FAULTS, ConfigError, Fault, did_you_mean, quoted, unknown_key
from .optimizer import canonical_optimizer
from .read import items_of, join, leaves
from .scheduler import SCHEDULER_PARAMS, SCHEDULERS, canonical_scheduler

ALIASES = {  # second name of a key -> its name
    "bfloat16": "bf16",
    "zero_optimization.prefetch_bucket_size": "zero_optimization.stage3_prefetch_bucket_size",
    "zero_optimization.max_live_parameters": "zero_optimization.stage3_max_live_parameters",
    "aio.intra_op_parallelism": "aio.thread_count",
    "communication.route": "communication.transport",
}
_OLD_NAMES = ("communication.route",)  # aliases that only older files have: a note names the new key
_OFFLOAD = (
    "zero_optimization.offload_optimizer",
    "zero_optimization.offload_param",
    "activation_checkpointing.offload",
)
NULL_IS_DEFAULT = ("aio", "elasticity", *_OFFLOAD, *(f"{section}.device" for section in _OFFLOAD))
_DEFAULT = "the default"
AUTO = {  # path -> why "auto" has this value, always the default
    "steps_per_print": _DEFAULT,
    "gradient_clipping": "gradients are clipped only if a number is given",
    "communication_data_type": "gradients are reduced in fp32 unless a dtype is given",
    "data_types.grad_accum_dtype": "gradients accumulate in fp32 unless a dtype is given",
    "bf16.enabled": "off unless true is given",
    "fp16.enabled": "off unless true is given",
    "fp16.loss_scale": "dynamic loss scaling",
    "fp16.initial_scale_power": _DEFAULT,
    "zero_optimization.stage3_prefetch_bucket_size": "two units are gathered ahead",
    "zero_optimization.stage3_max_live_parameters": _DEFAULT,
    **{f"{section}.device": "nothing is offloaded unless a device is given" for section in _OFFLOAD},
    **{f"{section}.nvme_path": "there is no default folder" for section in _OFFLOAD},
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
PLANNED = (
    "parallel.pipeline",
    "parallel.tensor",
    "parallel.sequence",
    "parallel.expert",
    "pipeline.schedule",
    "pipeline.chunks",
    "zero_optimization.stage",
    "zero_optimization.shard_size",
    "zero_optimization.zero_hpz_partition_size",
    "activation_checkpointing.every",
)
PLANNED_BESIDE = (  # planned with a key of PLANNED; alone, their "auto" means the same as for DeepSpeed
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "zero_optimization.offload_optimizer.device",
    "zero_optimization.offload_param.device",
    "activation_checkpointing.offload.device",
)


REMOVED = {  # removed section or key -> (a section's switch, off if null; what to use instead)
    "kernels.layer_norm": ("", "torch's own layer norm is a single kernel; remove the key"),
    "outer": (
        "every",
        "for DiLoCo use torchft (https://github.com/meta-pytorch/torchft), and remove the section",
    ),
}

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
OWN_KEYS = frozenset(_OWN.split())
"""Keys that no other engine has: a file with one of them was written for this engine."""
_SIZES = {"train_batch_size", "train_micro_batch_size_per_gpu"}  # DeepSpeed refuses a file with neither


@dataclass
class Translation:
    """The translated file: values for Config, notes, faults, and the paths that say "auto"."""

    values: dict[str, object]
    notes: list[str] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    auto_paths: list[str] = field(default_factory=list)

    def add(self, answers: Sequence[str | Fault]) -> None:
        """Sort the answers of a rule into notes and faults."""
        self.faults += [answer for answer in answers if isinstance(answer, Fault)]
        self.notes += [answer for answer in answers if isinstance(answer, str)]


def deepspeed() -> Any:
    """Return the module of DeepSpeed's keys: see [Note: dialect]. The engine's only import of that package."""
    from ...deepspeed import dialect  # it imports this module

    return dialect


def is_foreign(raw: Mapping[str, Any], fields: type[Section], also: Iterable[str] = ()) -> bool:
    """Return whether a file may be written for DeepSpeed. also: further paths that must be ours."""
    ours = own_keys(fields).keys() | REMOVED.keys()
    sections = {path.rpartition(".")[0] for path in ours}
    written = leaves(raw)
    empty = {path for path, value in written.items() if value == {}} & sections
    paths = {canonical(path) for path in {*written, *also} - empty}
    # An object can be a value too: `tensor_parallel.plan` has keys that no list knows.
    objects = tuple(f"{path}." for path in ours - sections)
    is_own = all(path in ours or path.startswith(objects) for path in paths)
    return not is_own or says_no_own_word(raw, {path for path, _ in items_of(raw)})


def other_keys(section: str) -> list[str]:
    """Return the key names that are allowed below a section beside its fields; "" is the top level."""
    prefix = f"{section}." if section else ""
    aliases = (path.removeprefix(prefix) for path in ALIASES if path.startswith(prefix))
    return [*(name for name in aliases if "." not in name), *deepspeed().keys_of(section)]


def says_no_own_word(raw: Mapping[str, Any], paths: set[str]) -> bool:
    """Return whether a file with these paths could be written for another engine."""
    optimizer, scheduler = (_type(raw.get(name)) for name in ("optimizer", "scheduler"))
    # Files for DeepSpeed say "AdamW" and "WarmupLR". Names in lower case are our spelling.
    is_own_type = optimizer in OPTIMIZERS or scheduler in [name for name in SCHEDULERS if name.islower()]
    return bool(paths & _SIZES) and not paths & OWN_KEYS and not is_own_type


def _type(section: object) -> str | None:
    """Return the type of an optimizer or scheduler section, or None."""
    found = section.get("type") if isinstance(section, dict) else None
    return found if isinstance(found, str) else None


def planned(auto_paths: list[str]) -> tuple[str, ...]:
    """Return the keys among those with "auto" that a plan chooses."""
    if not any(path in PLANNED for path in auto_paths):
        return ()
    return tuple(path for path in auto_paths if path in PLANNED or path in PLANNED_BESIDE)


def translate(raw: dict[str, object], dialect: Any) -> Translation:
    """Translate plain values without comments to values of Config's fields, notes and faults.

    dialect: `deepspeed()`, or None for a file that is not foreign.
    """
    out = Translation({})
    # Each "auto" with a meaning is gone after this: optimizer and scheduler see a missing key in its place.
    out.values = _walk(raw, "", out, dialect)
    # Before the optimizer is read: `finish` may change its params, for example for DeepSpeed's `bf16_optimizer_states`.
    if dialect is not None:
        dialect.finish(out)
    for name, canonical_form in (("optimizer", canonical_optimizer), ("scheduler", canonical_scheduler)):
        given = out.values.pop(name, None)
        if not isinstance(given, dict):
            out.values |= {} if given is None else {name: given}  # the field reports it
            continue
        section, notes, faults = canonical_form(given)
        out.notes += notes
        out.faults += faults
        if faults:  # the parameters of an unknown type cannot be checked
            out.faults = [f for f in out.faults if not f.path.startswith(f"{name}.params.") or f in faults]
            out.faults += _slips(given, name)
        if section is not None:
            out.values[name] = section
            # `_walk` took out "auto" before the type was known. Some types lack the key.
            kind = str(section["type"])
            params = OPTIMIZERS[kind].params if name == "optimizer" else SCHEDULER_PARAMS[kind]
            _give_back(section, name, params, out.auto_paths)
    return out


def _slips(section: dict[str, object], path: str) -> list[Fault]:
    """Return faults for unknown keys in an optimizer or scheduler without a known type: "type" may be misspelt."""
    known = ["type", "params", *other_keys(path)]
    slips = [key for key in section if key not in known][:MAX_FAULTS]
    return [unknown_key(join(path, key), key, known) for key in slips]


def _give_back(section: dict[str, object], name: str, params: type[Section], auto_paths: list[str]) -> None:
    """Restore "auto" for keys that the optimizer or scheduler lacks, so that they are refused like any value."""
    given = section.get("params") or {}
    start, known = f"{name}.params.", params.json_keys()
    unknown = [path for path in auto_paths if path.startswith(start) and path.removeprefix(start) not in known]
    if unknown and isinstance(given, dict):
        section["params"] = {**given, **{path.removeprefix(start): "auto" for path in unknown}}
        # In place: the list is the translation's, and each path in it gets a note.
        auto_paths[:] = [path for path in auto_paths if path not in unknown]


def _walk(section: dict[str, object], path: str, out: Translation, dialect: Any) -> dict[str, object]:
    """Return a section's keys for Config, without aliases, "auto" and keys of the dialect."""
    kept: dict[str, object] = {}
    for key, value in section.items():
        here = join(path, key)
        if here in ALIASES:
            name = ALIASES[here].rpartition(".")[2]
            if name in section:
                message = f'means the same as "{name}", which is given too; keep one of them'
                out.faults.append(Fault(here, "conflict", message))
                continue
            if here in _OLD_NAMES:
                out.notes.append(f'{here}: read as "{name}", the present name of this key')
            # From here on the key has our name: the rules of the dialect know a key by a single name.
            key, here = name, ALIASES[here]
        if here in REMOVED:
            out.add([_removed(here, value)])
        # The dialect first: null and "auto" may have a meaning for its keys.
        elif (dialect and dialect.take(here, value, section, kept, out)) or (value is None and here in NULL_IS_DEFAULT):
            continue
        elif value == "auto" and (here in AUTO or here in BATCH_KEYS or here in PLANNED):
            out.auto_paths.append(here)
        elif isinstance(value, dict):
            kept[key] = _walk(value, here, out, dialect)
        else:
            kept[key] = value
    return kept


def _removed(here: str, value: object) -> str | Fault:
    """Answer a removed section or key: a note if it is off, as in files that a plan wrote, else a fault."""
    switch, instead = REMOVED[here]
    # Files that a plan wrote list all keys, also those of sections that were off.
    if value is None or (isinstance(value, dict) and value.get(switch) is None):
        return f"{here}: {quoted(value)} has no effect here: it was removed; {instead}"
    return Fault(here, "unsupported", f"was removed; {instead}")


Fill = Mapping[str, object]
"""Path of a key, by our name or DeepSpeed's -> its value if the file says "auto"."""

READ = ': read "'
"""Occurs in each note on text that was read as a value."""
_Whole = Annotated[int, Field(ge=-MAX_INTEGER, le=MAX_INTEGER)]  # larger integers are floats, as in JSON
_NUMBER = TypeAdapter[int | float](_Whole | FiniteFloat)


def canonical(path: str) -> str:
    """Return the path by our names of the key and of each section above it."""
    parts: list[str] = []
    for part in path.split("."):
        here = ".".join([*parts, part])
        parts = ALIASES.get(here, here).split(".")
    return ".".join(parts)


def filled(raw: dict[str, object], fill: Fill, fields: type[Section]) -> tuple[dict[str, object], list[str]]:
    """Return the plain values with `fill` for "auto" and values for text, and a note for each.

    Keys with a different value, and missing keys, stay as they are. fields: the class of a whole config. Raises
    ConfigError for a path that no config has. See [Note: text for a value].
    """
    values = {canonical(path): value for path, value in fill.items()}
    # A path of `fill` by DeepSpeed's name asks for its keys, even if the file has none of them.
    known = {**own_keys(fields), **(deepspeed().keys() if is_foreign(raw, fields, values) else {})}
    faults = [
        Fault(path, "unknown", f"fill: no config has such a key{did_you_mean(path, known)}")
        for path in fill
        if canonical(path) not in known
    ]
    if faults:
        raise ConfigError(faults)
    notes: list[str] = []
    return _with(raw, "", values, known, notes), notes


def value_of(raw: Mapping[str, object], path: str) -> object:
    """Return the value of a key by any of its names, or None if it is missing."""
    wanted = canonical(path)
    return next((value for here, value in items_of(raw) if canonical(here) == wanted), None)


def _with(
    section: dict[str, object], path: str, values: Fill, known: Mapping[str, set[type]], notes: list[str]
) -> dict[str, object]:
    result: dict[str, object] = {}
    for key, value in section.items():
        here = join(path, key)
        here = ALIASES.get(here, here)
        if isinstance(value, dict):
            result[key] = _with(value, here, values, known, notes)
            continue
        if value == "auto" and here in values:
            value = values[here]
            notes.append(f'{here}: "auto" is {quoted(value)}: it was given as `fill`')
        # The dialect does not list the switch of each of its sections.
        kinds = known.get(here, {bool} if key == "enabled" else set())
        result[key] = _value(value, here, kinds, notes)
    return result


def _value(value: object, path: str, kinds: set[type], notes: list[str]) -> object:
    """Return the value that text stands for if a key takes these kinds of values, else the value unchanged."""
    if isinstance(value, list):
        return [_value(item, path, kinds, notes) for item in value]
    # A key that takes any text keeps it: the name "1" of a run is no number.
    if not isinstance(value, str) or str in kinds:
        return value
    found: object = value
    if bool in kinds and value in ("true", "false"):
        found = value == "true"
    elif kinds & {int, float}:
        try:
            found = _NUMBER.validate_python(value)
        except ValidationError:
            return value
    if found is not value:
        notes.append(f"{path}: read {quoted(value)} as {quoted(found)}")
    return found


@cache
def own_keys(fields: type[Section]) -> dict[str, set[type]]:
    """Return each of our keys -> the types it takes: bool, int, float or str. fields: the class of a whole config."""
    # `tiles` may be a number in place of a section. No field has adam_w_mode: `canonical_optimizer` takes it out.
    known = _kinds(fields, "") | {"tiles": {int}, "optimizer.params.adam_w_mode": {bool}}
    known["optimizer.type"] = known["scheduler.type"] = {str}
    for kind, sections in (
        ("optimizer", [one.params for one in OPTIMIZERS.values()]),
        ("scheduler", list(SCHEDULER_PARAMS.values())),
    ):
        for section in sections:
            # A key may take different types for two optimizers. The check against the file's optimizer comes later.
            for path, kinds in _kinds(section, f"{kind}.params").items():
                known[path] = known.get(path, set()) | kinds
    return known


@cache
def sections_of(fields: type[Section], path: str = "") -> dict[str, type[Section]]:
    """Return path -> class of a section and of the sections in it. Optimizer and scheduler depend on their type."""
    found = {path: fields}
    for name, info in fields.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, Section):
            found |= sections_of(info.annotation, join(path, info.alias or name))
    return found


def _kinds(fields: type[Section], path: str) -> dict[str, set[type]]:
    return {
        join(section, info.alias or name): _leaves(info.annotation)
        for section, kind in sections_of(fields, path).items()
        for name, info in kind.model_fields.items()
        if not (isinstance(info.annotation, type) and issubclass(info.annotation, Section))
    }


def _leaves(kind: object) -> set[type]:
    """Return the types in an annotation; for a Literal the types of its values without its words, since `str` is any
    text.
    """
    if parts := get_args(kind):
        return set[type]().union(*map(_leaves, parts))
    return {kind} if isinstance(kind, type) else {type(kind)} - {str}
