"""The config: a JSON file that is checked as a whole before anything is built.

file -> read.py (plain values) -> translate.py ("auto", DeepSpeed's keys) -> Config -> resolve(world_size)

Nothing here imports torch: dtypes are the strings "fp32", "bf16" and "fp16".
"""

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PrivateAttr, ValidationError
from pydantic_core import PydanticCustomError

from ...configs.section import Bool, Dtype, Float, Int, Natural, Positive, Section
from ...optimizers import OPTIMIZERS
from .batch import (
    BATCH_KEYS,
    Batch,
    ElasticityConfig,
    KeptBatch,
    elastic_batch,
    elastic_note,
    fill_batch,
    nothing_kept,
)
from .errors import (
    MAX_FAULTS,
    ConfigError,
    ConfigSection,
    Fault,
    FaultKind,
    no_effect,
    quoted,
    unknown_key,
    value_at,
)
from .kernels import KernelsConfig, TilesConfig
from .optimizer import OptimizerConfig
from .parallel import (
    ParallelConfig,
    PipelineConfig,
    SequenceParallelConfig,
    TensorParallelConfig,
    schedule_faults,
    world_faults,
)
from .read import items_of, join, read
from .scheduler import SCHEDULER_PARAMS, SchedulerConfig
from .sections import (
    BF16Config,
    CheckpointConfig,
    CommunicationConfig,
    CompileConfig,
    CsvMonitorConfig,
    DataTypesConfig,
    FP8Config,
    FP16Config,
    MemoryReportConfig,
    ProfileConfig,
    TensorboardConfig,
    TorchAutocastConfig,
    WandbConfig,
)
from .translate import (
    AUTO,
    READ,
    Fill,
    deepspeed,
    filled,
    is_foreign,
    other_keys,
    planned,
    sections_of,
    translate,
)
from .zero import ActivationCheckpointingConfig, AioConfig, ZeroConfig, shard_size_faults, update_in_backward_faults

_DEVICE_NAME = "^[a-z][a-z0-9_]{0,30}$"

__all__ = ["Config", "ConfigError", "Fault", "OptimizerConfig", "SchedulerConfig"]


def _or_never(value: object) -> object:
    """Return 0 (never) for null and Infinity too."""
    return 0 if value is None or value == math.inf else value


def _lower(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


def _device(value: object) -> object:
    """Return the value if it has the form of a device name. Only torch knows the available devices."""
    if not isinstance(value, str) or not re.fullmatch(_DEVICE_NAME, value):
        kind = "value_error" if isinstance(value, str) else "string_type"
        raise PydanticCustomError(kind, 'expected "auto", "cpu" or the name of an accelerator, such as "cuda" or "xpu"')
    return value


class Config(Section):
    """All settings of a run, with defaults for keys that the JSON file leaves out. Frozen; made by `Config.load`."""

    # The schema and `lowtide config explain` list the sections and keys in the order of these fields.
    device: Annotated[str, BeforeValidator(_device), Field(json_schema_extra={"pattern": _DEVICE_NAME})] = "auto"
    """The model's device: "cpu", or an accelerator by torch's name, such as "cuda" or "xpu". "auto": this machine's
    accelerator, else cpu; chosen when the engine is built."""

    train_batch_size: Positive | None = None
    """Samples per optimizer step over all ranks: microbatch x accumulation x data-parallel ranks."""

    train_micro_batch_size_per_gpu: Positive | None = None
    """Samples per forward on each rank."""

    gradient_accumulation_steps: Positive | None = None
    """Microbatches per optimizer step on each rank."""

    elasticity: ElasticityConfig = ElasticityConfig()

    gradient_clipping: Float = Field(default=0.0, ge=0)
    """Gradients with a larger global norm are clipped to it. 0: off."""

    # Pydantic runs the last "before" validator first: `_or_never` sees null before `Int` refuses it.
    steps_per_print: Annotated[Int, BeforeValidator(_or_never)] = Field(default=10, ge=0)
    """Steps between log lines. 0, null or Infinity: never."""

    seed: Natural | None = None
    """Seed of the random generators. null: not seeded."""

    prescale_gradients: Bool = False
    """Divide gradients by the number of ranks before the sum, not after."""

    gradient_predivide_factor: Float = Field(default=1.0, gt=0)
    """Divide gradients by this before the sum, and by ranks / factor after."""

    gradient_allreduce_op: Annotated[Literal["mean", "sum"], BeforeValidator(_lower)] = "mean"
    """Average or sum gradients over data-parallel ranks. Over microbatches they are averaged."""

    communication_data_type: Dtype | None = None
    """Dtype of gradients between ranks. null: fp32."""

    data_types: DataTypesConfig = DataTypesConfig()
    parallel: ParallelConfig = ParallelConfig()
    pipeline: PipelineConfig = PipelineConfig()
    tensor_parallel: TensorParallelConfig = TensorParallelConfig()
    sequence_parallel: SequenceParallelConfig = SequenceParallelConfig()
    zero_optimization: ZeroConfig = ZeroConfig()
    bf16: BF16Config = BF16Config()
    fp16: FP16Config = FP16Config()
    fp8: FP8Config = FP8Config()
    torch_autocast: TorchAutocastConfig = TorchAutocastConfig()
    optimizer: OptimizerConfig | None = None
    """null: the optimizer is passed to initialize."""
    scheduler: SchedulerConfig | None = None
    """null: a constant learning rate, or a scheduler that is passed to initialize."""
    activation_checkpointing: ActivationCheckpointingConfig = ActivationCheckpointingConfig()
    tiles: TilesConfig = TilesConfig()
    compile: CompileConfig = CompileConfig()
    aio: AioConfig = AioConfig()
    kernels: KernelsConfig = KernelsConfig()
    communication: CommunicationConfig = CommunicationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    memory_report: MemoryReportConfig = MemoryReportConfig()
    tensorboard: TensorboardConfig = TensorboardConfig()
    wandb: WandbConfig = WandbConfig()
    csv_monitor: CsvMonitorConfig = CsvMonitorConfig()
    profile: ProfileConfig = ProfileConfig()

    _notes: tuple[str, ...] = PrivateAttr(default=())
    _source: str | None = PrivateAttr(default=None)
    _auto_batch_keys: tuple[str, ...] = PrivateAttr(default=())
    _planned_keys: tuple[str, ...] = PrivateAttr(default=())
    _is_foreign: bool = PrivateAttr(default=False)

    @classmethod
    def load(
        cls, source: "str | os.PathLike[str] | Mapping[str, object] | Config", *, fill: Fill | None = None
    ) -> "Config":
        """Return the checked config of a JSON file, a preset ("zero3") or a dictionary. A Config is returned unchanged.

        fill: path of a key -> value for a key that says "auto": {"scheduler.params.total_num_steps": 1000}. Keys with a
        different value, and keys that the file leaves out, stay as they are.

        Raises ConfigError with all faults at once, and ValueError for `fill` with a Config, since a Config has no
        "auto".
        """
        if isinstance(source, Config):
            if fill:
                raise ValueError('fill: expected a file or a dictionary, since a Config has no "auto", found a Config')
            return source
        raw, name = read(source)
        # First, since a switch of DeepSpeed may be text, and the dialect takes only booleans.
        raw, fill_notes = filled(raw, fill or {}, cls)
        dialect = deepspeed() if is_foreign(raw, cls) else None
        raw, unread_notes = dialect.without_unread(raw) if dialect is not None else (raw, [])
        translation = translate(raw, dialect)
        config, faults = _validate(translation.values)
        # Both kinds of faults together: a user with ten faults should not need ten runs.
        faults = translation.faults + faults
        if faults or config is None:
            raise ConfigError(_in_file_order(faults, raw), name)
        chosen = planned(translation.auto_paths)
        notes = fill_notes + unread_notes + translation.notes
        notes += [
            f'{path}: "auto" is {quoted(value_at(config, path))}: {AUTO[path]}'
            for path in translation.auto_paths
            if path not in BATCH_KEYS and path not in chosen
        ]
        # Only fields are frozen. These attributes belong to the reading of the config.
        notes += _idle_settings(config)
        config._notes = tuple(notes if dialect is None else notes + dialect.other_defaults(raw, config))
        config._is_foreign = dialect is not None
        config._source = name
        config._auto_batch_keys = tuple(
            path for path in translation.auto_paths if path in BATCH_KEYS and path not in chosen
        )
        config._planned_keys = chosen
        return config

    @property
    def has_monitors(self) -> bool:
        """Whether a monitor writes numbers of each step."""
        return any(section.enabled for section in (self.tensorboard, self.wandb, self.csv_monitor))

    @property
    def has_stages(self) -> bool:
        """Whether a schedule takes the model's blocks through a step: a pipeline, or layered accumulation."""
        return self.parallel.pipeline > 1 or self.zero_optimization.layered_gradient_accumulation

    @property
    def planned_keys(self) -> tuple[str, ...]:
        """Keys whose "auto" is chosen from the model and the machine, by `as_planned`."""
        return self._planned_keys

    def as_planned(self, values: Mapping[str, object], reasons: Mapping[str, str]) -> "Config":
        """Return the config that a plan has chosen, with a note for each value. values: of a file without "auto"."""
        made = Config.load(values)
        chosen = [
            f'{key}: "auto" is {quoted(value_at(made, key))}: {reasons[key]}'
            for key in self._planned_keys
            if key in reasons
        ]
        made._notes, made._source, made._is_foreign = (*self._notes, *chosen), self._source, self._is_foreign
        return made

    @property
    def notes(self) -> tuple[str, ...]:
        """A sentence for each key without effect, each "auto" and each text that was read as a value."""
        return self._notes

    @property
    def short_notes(self) -> tuple[str, ...]:
        """`notes` with all text that was read as values in a single line, and DeepSpeed's keys without effect in
        another.
        """
        text = [note for note in self._notes if READ in note]
        rest = [note for note in self._notes if note not in text]
        said = ["; ".join(text)] if text else []
        rules = deepspeed().REASONS if self._is_foreign else {}
        idle = [note for note in rest if note.partition(": ")[0] in rules and " has no effect here: " in note]
        # The line for several keys names no reasons. A single key has room for its reason.
        if len(idle) < 2:
            return (*said, *rest)
        keys = ", ".join(note.partition(": ")[0] for note in idle)
        command = f"`lowtide config explain {self._source or 'FILE'} --given` says why"
        line = f"{len(idle)} keys of DeepSpeed have no effect here: {keys}; {command}"
        return (*said, line, *(note for note in rest if note not in idle))

    def resolve(self, world_size: int, first_world_size: int | None = None) -> "Config":
        """Return a copy for `world_size` ranks, with all batch sizes filled in and a note for each "auto" among them.

        first_world_size: number of ranks that the job began with, if it continues on a different number. Its global
        batch stays: see [Note: what stays].

        Raises ConfigError, with the equation, if an axis, the batch or the shard size does not fit the world size, or
        the pipeline schedule does not fit the number of microbatches.
        """
        if world_size < 1:
            # A mistake of the caller, and not a fault of the file.
            raise ValueError(f"world_size: expected at least 1, found {world_size}")
        if self._planned_keys:
            message = (
                '"auto" is chosen from the model and the machine by initialize, or by `lowtide plan`, which writes a '
                'config without "auto"'
            )
            raise ConfigError([Fault(self._planned_keys[0], "missing", message)], self._source)
        before = None if first_world_size in (None, world_size) else first_world_size
        # Elasticity decides on the batch of each number of ranks by itself.
        kept = None if before is None or self.elasticity.enabled else _kept_batch(self, before)
        faults = world_faults(self.parallel, world_size)
        if faults:
            # Without whole data-parallel ranks no batch can be computed, so no further fault is known.
            raise ConfigError(faults + ([kept.fault(world_size)] if kept else []), self._source)
        data_size = world_size // self.parallel.ranks_of_sample
        # None: these ranks do not divide the batch that stays. `kept.fault` names the numbers of ranks that do.
        batch = kept.on(data_size) if kept else _batch(self, data_size)
        update: dict[str, object] = {}
        if isinstance(batch, Fault):
            faults.append(batch)
        elif batch is not None:
            update = dict(zip(BATCH_KEYS, (batch.train, batch.micro, batch.accumulation), strict=True))
            if self.elasticity.enabled:
                update["elasticity"] = ElasticityConfig()  # it has chosen; its keys would be without effect
            # The two keys are the same number: a config with two values would not load again from `as_dict`.
            if self.pipeline.microbatches is not None:
                update["pipeline"] = self.pipeline.model_copy(update={"microbatches": batch.accumulation})
            faults += schedule_faults(self.parallel, self.pipeline, batch.accumulation)
        faults += shard_size_faults(self.zero_optimization, data_size, self.parallel.expert)
        # No validation: every value comes from checked values. The copy includes notes and source.
        resolved = self.model_copy(update=update)
        # `load` has checked a given accumulation. Only a number that was chosen here is new.
        if self.gradient_accumulation_steps is None or kept or self.elasticity.enabled:
            faults += update_in_backward_faults(resolved)
        if kept and (faults or batch is None):
            faults.append(kept.fault(world_size))
        if faults:
            raise ConfigError(faults, self._source)
        # A batch exists here: without it a fault was raised above.
        equation = " x ".join(str(update[key]) for key in BATCH_KEYS[1:]) + f" x {data_size} ranks"
        reason = f"train_batch_size = microbatch x accumulation x ranks = {equation}"
        notes = [f'{key}: "auto" is {update[key]}: {reason}' for key in self._auto_batch_keys]
        if self.elasticity.enabled and isinstance(batch, Batch):
            first = None if before is None else _batch(self, before // self.parallel.ranks_of_sample)
            notes.append(elastic_note(self.elasticity, batch, data_size, first))
        elif before is not None:
            notes.append(kept.note(world_size) if kept else nothing_kept(before, world_size))
        resolved._notes = (*self._notes, *notes)
        # They have values now: to resolve the result again adds no note.
        resolved._auto_batch_keys = ()
        return resolved

    def __eq__(self, other: object) -> bool:
        """Whether both ask for the same, wherever they were read and however they were written."""
        # Pydantic would compare private attributes too: notes and source differ between two spellings of a config.
        return isinstance(other, Config) and self.__dict__ == other.__dict__

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values that `Config.load` reads back to an equal config."""
        values = self.model_dump(mode="json")
        if self.optimizer is not None and self.optimizer.type == "adam":
            # The type "adam" without this key would be read as AdamW.
            values["optimizer"]["params"]["adam_w_mode"] = False
        return values


for _path, _section in sections_of(Config).items():
    if issubclass(_section, ConfigSection):
        _section.path = _path


def _batch(config: Config, data_size: int) -> Batch | Fault:
    """Return the batch sizes that the config asks for on `data_size` data-parallel ranks."""
    if config.elasticity.enabled:
        return elastic_batch(config.elasticity, data_size)
    accumulation = config.gradient_accumulation_steps
    accumulation = accumulation if accumulation is not None else config.pipeline.microbatches
    return fill_batch(config.train_batch_size, config.train_micro_batch_size_per_gpu, accumulation, data_size)


def _kept_batch(config: Config, first_world_size: int) -> KeptBatch | None:
    """Return the global batch that stays, or None if the config has none. Raises ConfigError if it was not legal."""
    micro = config.train_micro_batch_size_per_gpu
    if config.train_batch_size is None and micro is None:
        return None
    # Only a batch that was legal can stay: this raises the faults of the first attempt.
    config.resolve(first_world_size)
    first = _batch(config, first_world_size // config.parallel.ranks_of_sample)
    assert isinstance(first, Batch)

    @cache
    def can_accumulate(count: int) -> bool:
        zero = config.zero_optimization
        # The same condition as in `update_in_backward_faults`, asked for a number that no config has yet.
        is_whole = count == 1 or not zero.update_in_backward or zero.layered_gradient_accumulation
        return is_whole and not schedule_faults(config.parallel, config.pipeline, count)

    zero = config.zero_optimization
    # The shard group must divide the ranks. A shard size of null means all ranks, so hpZ must divide them.
    shard_size = zero.shard_size or zero.partition_size if zero.stage else 1
    divisor = math.lcm(shard_size, config.parallel.expert)
    same = config.parallel.ranks_of_sample
    return KeptBatch(first, first_world_size, same, micro is not None, can_accumulate, divisor)


def _in_file_order(faults: Sequence[Fault], raw: dict[str, object]) -> list[Fault]:
    """Sort faults by their position in the file."""
    order = {path: number for number, (path, _) in enumerate(items_of(raw))}

    def position(fault: Fault) -> int:
        path = fault.path
        while path and path not in order:
            path = path.rpartition("[")[0] if path.endswith("]") else path.rpartition(".")[0]
        # A fault of a missing key has the place of its section. A fault of the whole config comes first.
        return order.get(path, -1)

    return sorted(faults, key=position)


def _validate(values: dict[str, object]) -> tuple[Config | None, list[Fault]]:
    """Return the config, or None, and all faults. Faulty sections are left out, to find the remaining conflicts."""
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        details = error.errors(include_url=False)
        faults = [_fault(dict(detail), values) for detail in details[:MAX_FAULTS]]
        if len(details) > MAX_FAULTS:
            faults.append(Fault("", "value", f"{MAX_FAULTS} of {len(details):,} faults are listed here"))
        # Whole sections: a section without its faulty key would have the default, and could contradict falsely.
        faulty = {detail["loc"][0] for detail in details}
        rest = {key: value for key, value in values.items() if key not in faulty}
        return None, faults + _conflicts(Config.model_validate(rest))
    return config, _conflicts(config)


def _fault(detail: dict[str, Any], values: Mapping[str, Any]) -> Fault:
    """Translate a validation error of pydantic to a fault: key, expected value, found value."""
    loc: tuple[int | str, ...] = detail["loc"]
    tag = ""
    if len(loc) > 1 and loc[0] in ("optimizer", "scheduler"):
        # `canonical_optimizer` and `canonical_scheduler` let no section without a known type pass.
        tag = values[str(loc[0])]["type"]
    path = ""
    for part in loc:
        path = f"{path}[{part}]" if isinstance(part, int) else join(path, part)
    name, found, context = detail["type"], detail.get("input"), detail.get("ctx", {})
    if name == "extra_forbidden":
        return _unknown(path, loc, tag)
    if name == "missing":
        return Fault(path, "missing", "must be given: it has no default")
    # Only "auto" without a meaning is left: `translate` has taken out each "auto" that it knows.
    if found == "auto":
        what = "the number of optimizer steps of the training" if loc[-1] == "total_num_steps" else "the value"
        fix = f'write {what}, or pass it to initialize: fill={{"{path}": ...}}'
        return Fault(path, "missing", f'"auto" has no meaning for this key here; {fix}')
    expected = {
        "bool_type": "expected true or false",
        "model_type": "expected an object",
        "model_attributes_type": "expected an object",
        "tuple_type": "expected a list",
        # Pydantic puts the values in single quotes. A file has double quotes.
        "literal_error": f"expected {context.get('expected')}".replace("'", '"'),
        "greater_than_equal": f"expected at least {context.get('ge', 0):g}",
        "greater_than": f"expected more than {context.get('gt', 0):g}",
        "less_than_equal": f"expected at most {context.get('le', 0):g}",
        "less_than": f"expected less than {context.get('lt', 0):g}",
        "multiple_of": f"expected a multiple of {context.get('multiple_of', 0):g}",
        "too_long": f"expected at most {context.get('max_length')} values",
        # Validators of our types write the text themselves.
    }.get(name, detail["msg"])
    kind: FaultKind = "type" if name.endswith("_type") else "value"
    section = sections_of(Config).get(path)
    is_switch = found is True and section is not None and "enabled" in section.json_keys()
    fix = '; write {"enabled": true}' if is_switch else ""
    return Fault(path, kind, f"{expected}, found {quoted(found)}{fix}")


def _unknown(path: str, loc: tuple[int | str, ...], tag: str) -> Fault:
    """Return the fault of the unknown key at `loc`. tag: type of the optimizer or scheduler."""
    *above, key = map(str, loc)
    below = [
        join(name, key)
        for name, section in _sections_with(tag).items()
        if name.startswith(".".join(above)) and key in section.json_keys()
    ]
    if len(below) == 1:
        return Fault(path, "unknown", f'unknown key {quoted(key)}; did you mean "{below[0]}"?')
    return unknown_key(path, key, _known_keys(loc, tag))


def _known_keys(loc: tuple[int | str, ...], tag: str) -> list[str]:
    """Return the keys that may stand next to the unknown key at `loc`. tag: type of the optimizer or scheduler."""
    sections, path = _sections_with(tag), ".".join(str(part) for part in loc[:-1])
    # Only the sections of optimizer and scheduler are not in the list, since their classes depend on the type.
    fields = sections[path].json_keys() if path in sections else ["type", "params"]
    return fields + other_keys(path)


def _sections_with(tag: str) -> dict[str, type[Section]]:
    """Return path -> class of all sections. tag: type of the optimizer or scheduler."""
    return {
        **sections_of(Config),
        "optimizer.params": OPTIMIZERS[tag].params if tag in OPTIMIZERS else Section,
        "scheduler.params": SCHEDULER_PARAMS.get(tag, Section),
    }


def _sections(section: Section) -> Iterator[ConfigSection]:
    """Yield the sections within a section, at any depth."""
    for value in vars(section).values():
        if isinstance(value, ConfigSection):
            yield value
            yield from _sections(value)


def _conflicts(config: Config) -> list[Fault]:
    """Return contradicting settings that do not depend on the world size."""
    return [fault for section in _sections(config) for fault in section.faults(config)]


def _idle_settings(config: Config) -> list[str]:
    """Return notes on given keys that have no effect with the rest of this config."""
    notes = [note for section in _sections(config) for note in section.notes(config)]
    if config.prescale_gradients and config.gradient_predivide_factor != 1:
        reason = "prescale_gradients divides by the ranks before the sum"
        notes.append(no_effect("gradient_predivide_factor", config.gradient_predivide_factor, reason))
    return notes
