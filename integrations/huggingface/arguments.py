"""TrainingArguments with lowtide's config, the values they give to it, and arguments that lowtide refuses."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import transformers

from ..engine.config.config import Config
from ..engine.config.optimizer import option_names
from .data_ranks import DataRank, only_cpu
from .engine_config import EngineConfig, Source

_TORCH_ADAMW = ("adamw_torch", "adamw_torch_fused")
_STEPS_IN_BACKWARD = ("lomo", "layerwise")
_WITH_WARMUP = ("warmuplr", "warmupdecaylr", "warmupcosinelr", "constant", "linear", "cosine")
_BETAS, _EPS = ("adam_beta1", "adam_beta2"), ("adam_epsilon",)
_ONE_SCHEDULE = (
    "a training with smaller batches would go on with the schedule of the config. Remove the section `scheduler`, and "
    "set lr_scheduler_type"
)
HELP = "lowtide's config: the name of a preset such as zero3, the path of a JSON file, or a dictionary."

HELP_OF_MEAN = (
    "Whether eval_loss is the mean over all tokens with a label, the same on any number of ranks. The default is "
    "transformers': the mean over batches of each batch's mean."
)


@dataclass
class TrainingArguments(transformers.TrainingArguments):
    """transformers' arguments and two more.

    lowtide: a preset's name, a path or a dictionary; None: the Trainer gets it. eval_token_mean: `eval_loss` is the
    mean over all tokens with a label, not over batches of each batch's mean.
    """

    _VALID_DICT_FIELDS = [*transformers.TrainingArguments._VALID_DICT_FIELDS, "lowtide"]  # noqa: RUF012 (as the base)

    lowtide: dict[str, Any] | str | None = field(default=None, metadata={"help": HELP})
    eval_token_mean: bool = field(default=False, metadata={"help": HELP_OF_MEAN})

    def __post_init__(self) -> None:
        self.use_cpu = self.use_cpu or only_cpu()
        super().__post_init__()  # type: ignore[no-untyped-call]  # transformers has no types for it


@dataclass
class Seq2SeqTrainingArguments(TrainingArguments, transformers.Seq2SeqTrainingArguments):
    """transformers' Seq2SeqTrainingArguments with `lowtide` and `eval_token_mean`: see `TrainingArguments`."""


def config_of(source: Source, args: Any) -> EngineConfig:
    """Make the config with the values of transformers.TrainingArguments. `fill_steps` adds the schedule's steps later.

    Raises ConfigError if config and arguments contradict each other, ValueError for arguments that lowtide refuses.
    """
    config = EngineConfig(source)
    refuse(args, config)
    _set_values(config, args)
    config.compute_in(args.mixed_precision, "mixed_precision of TrainingArguments")
    config.on_device(args.device.type)
    config.refuse_pipeline()
    data = DataRank.of(config.parallel, args.process_index, args.world_size)
    whole = args.per_device_train_batch_size * args.gradient_accumulation_steps * data.size
    product = "per_device_train_batch_size x gradient_accumulation_steps x data-parallel ranks"
    config.set_value("train_batch_size", whole, product, must_match=not args.auto_find_batch_size)
    _refuse_with(args, config.check())
    return config


def fill_steps(config: EngineConfig, args: Any, num_steps: int) -> None:
    """Fill in the schedule. num_steps: optimizer steps of the training, known once its data are."""
    config.set_value("scheduler.params.total_num_steps", num_steps, "the number of steps")
    warmup = args.get_warmup_steps(num_steps)
    section = config.values.get("scheduler")
    if warmup and isinstance(section, dict):
        # "auto", not the number: a second training may have another.
        section.setdefault("params", {}).setdefault("warmup_num_steps", "auto")
    # A schedule needs at least a step of warmup.
    argument = "warmup_steps" if warmup else "the least, for warmup_steps=0"
    config.set_value("scheduler.params.warmup_num_steps", max(1, warmup), argument)
    config.check()


def _set_values(config: EngineConfig, args: Any) -> None:
    """Put the values of the arguments into the config."""
    micro, steps = args.per_device_train_batch_size, args.gradient_accumulation_steps
    sizes = not args.auto_find_batch_size
    config.set_value("train_micro_batch_size_per_gpu", micro, "per_device_train_batch_size", must_match=sizes)
    config.set_value("gradient_accumulation_steps", steps, "gradient_accumulation_steps")
    config.set_value("pipeline.microbatches", steps, "gradient_accumulation_steps")
    config.set_value("gradient_clipping", args.max_grad_norm, "max_grad_norm")
    config.set_value("seed", args.seed, "seed")
    params, section = "optimizer.params", config.values.get("optimizer")
    if isinstance(section, dict):
        section.setdefault("params", {})  # else its learning rate would be lowtide's
    config.set_value(f"{params}.lr", args.learning_rate, "learning_rate", fills_missing=True)
    config.set_value(f"{params}.weight_decay", args.weight_decay, "weight_decay", fills_missing=True)
    betas = [args.adam_beta1, args.adam_beta2]
    config.set_value(
        f"{params}.betas", betas, "adam_beta1 and adam_beta2", fills_missing=_is_given(config, args, "betas", _BETAS)
    )
    config.set_value(
        f"{params}.eps", args.adam_epsilon, "adam_epsilon", fills_missing=_is_given(config, args, "eps", _EPS)
    )
    config.set_value("scheduler.params.warmup_min_lr", 0, "the Trainer", must_match=False)
    config.set_value("scheduler.params.warmup_max_lr", args.learning_rate, "learning_rate")


def _is_given(config: EngineConfig, args: Any, key: str, names: Sequence[str]) -> bool:
    """Return whether the arguments are not their defaults, and are a parameter of the config's optimizer.

    A default does not count: optimizers such as Lion have other betas than Adam.
    """
    if not {key, "betas"} <= option_names(config.found("optimizer.type")):
        return False
    return any(getattr(args, name) != type(args).__dataclass_fields__[name].default for name in names)


def refuse(args: Any, config: EngineConfig) -> None:
    """Raise ValueError for arguments that lowtide cannot follow."""
    found = [
        ("deepspeed", args.deepspeed, "there is one engine; leave it out"),
        ("fsdp", args.fsdp, "there is one engine; leave it out"),
        ("parallelism_config", args.parallelism_config, "the config of lowtide divides the model"),
        ("ddp_broadcast_buffers", args.ddp_broadcast_buffers, "each rank keeps its buffers; leave it out"),
        ("n_gpu", args.n_gpu if args.n_gpu > 1 else None, "start a process for each GPU, by `lowtide launch SCRIPT`"),
        ("optim", args.optim if _is_in_backward(args.optim) else None, "it updates in the backward; use adamw_torch"),
    ]
    if config.has("scheduler"):
        kind, why = str(config.found("scheduler.type")), "the config has a scheduler; leave one of them out"
        other = None if (name := _name(args.lr_scheduler_type)) == "linear" else name
        found += [("lr_scheduler_type", other, why), ("lr_scheduler_kwargs", args.lr_scheduler_kwargs, why)]
        if kind.lower() not in _WITH_WARMUP:
            found.append(("warmup_steps", args.warmup_steps, f'the scheduler "{kind}" of the config has no warmup'))
        found.append(("auto_find_batch_size", args.auto_find_batch_size, _ONE_SCHEDULE))
    if config.has("optimizer"):
        why = "the config has an optimizer; leave one of them out"
        other = None if (name := _name(args.optim)) in _TORCH_ADAMW else name
        found += [("optim", other, why), ("optim_args", args.optim_args, why)]
    # With a single host the argument changes nothing.
    if args.save_on_each_node and args.world_size > int(os.environ.get("LOCAL_WORLD_SIZE", args.world_size)):
        found.append(("save_on_each_node", True, "all hosts write one checkpoint into a shared folder"))
    for name, value, why in found:
        if value:
            raise ValueError(f"TrainingArguments: expected no {name} with lowtide, found {name}={value}: {why}")


def _is_in_backward(optim: Any) -> bool:
    return any(word in _name(optim) for word in _STEPS_IN_BACKWARD)


def _name(choice: Any) -> str:
    """Return the text of an enumeration's value or of a string."""
    return str(getattr(choice, "value", choice))


def _refuse_with(args: Any, config: Config) -> None:
    """Raise ValueError for arguments that contradict the filled config."""
    for name, is_on in (("bf16", config.bf16.enabled), ("fp16", config.fp16.enabled)):
        if getattr(args, f"{name}_full_eval") and not is_on:
            raise ValueError(
                f"TrainingArguments: {name}_full_eval needs {name}=True: the model has one compute dtype. Set "
                f"{name}=True, or leave {name}_full_eval out"
            )
    if config.zero_optimization.update_in_backward and args.max_grad_norm:
        raise ValueError(
            f"TrainingArguments: expected max_grad_norm=0 with update_in_backward, found {args.max_grad_norm:g}. The "
            "norm is known only after all gradients: set max_grad_norm=0 or update_in_backward false"
        )
    if config.parallel.sequence > 1 and args.neftune_noise_alpha:
        raise ValueError(
            "TrainingArguments: expected no neftune_noise_alpha with parallel.sequence, found "
            f"{args.neftune_noise_alpha:g}. Each rank would scale the noise by the length of its part of the sequence, "
            "and draw the same noise: leave it out"
        )
    if config.parallel.sequence > 1 and args.label_smoothing_factor:
        raise ValueError(
            "TrainingArguments: expected label_smoothing_factor=0 with parallel.sequence, found "
            f"{args.label_smoothing_factor:g}. The Trainer smooths labels of whole sequences, but a rank has the "
            "logits of a part"
        )
