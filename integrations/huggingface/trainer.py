"""Hugging Face's Trainer on an engine, and the mixin that does the same for any of its subclasses."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest import mock

import torch
import transformers
from accelerate.utils.deepspeed import DummyOptim
from peft import PeftModel
from torch import nn
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME
from transformers.utils import logging

from ..engine.archive.agreement import no_rank_alone
from ..engine.engine import Engine
from ..engine.model.deferred import DeferredModel
from .accelerator import Accelerator
from .arguments import config_of, fill_steps
from .engine_config import EngineConfig, Source
from .saved_states import EngineOptimizer, EngineSchedule, same_random_state
from .streaming import ReadAtOnceError

logger = logging.get_logger(__name__)


class _TrainersAccelerator(Accelerator):
    """Keeps engines open when the Trainer frees memory before its loops: it continues with its model and optimizer."""

    def free_memory(self, *objects: Any) -> Any:
        return super(Accelerator, self).free_memory(*objects)  # accelerate's, without closing engines

    def prepare_model(self, model: Any, device_placement: bool | None = None, evaluation_mode: bool = False) -> Any:
        engine = super().prepare_model(model, device_placement, evaluation_mode)
        # trl places reward models alone, and calls them as functions unless they are modules, whose hooks gather.
        return engine.module if device_placement else engine


_AnyTrainer: Any = object  # the mixin's base class at run time is a Trainer


class LowtideMixin(_AnyTrainer):  # type: ignore[misc]  # mypy knows nothing of that class
    """A mixin for a Trainer or any subclass: `class Mine(LowtideMixin, SFTTrainer)`.

    `self.model` is the model, `self.model_wrapped` its engine, and the loop is the Trainer's. This class overrides the
    methods in which the Trainer would call DistributedDataParallel, or save and load whole states.
    """

    # Attributes of the Trainer that this class sets, for mypy.
    accelerator: Any
    gather_function: Any
    lr_scheduler: Any
    model_wrapped: Any
    optimizer: Any
    optimizer_cls_and_kwargs: Any
    _created_lr_scheduler: bool

    def __init__(
        self, *args: Any, lowtide: Source | None = None, eval_token_mean: bool | None = None, **kwargs: Any
    ) -> None:
        """lowtide: a preset's name, a path of a JSON file, or a dictionary. eval_token_mean: see `TrainingArguments`.

        If None, the arguments have it. Raises ConfigError and ValueError if the config contradicts the arguments.
        """
        self._given_lowtide = lowtide
        self._eval_token_mean = eval_token_mean
        self._token_sums: torch.Tensor | None = None  # in an evaluation, (2,): sum of token losses, number of tokens
        self._lowtide: EngineConfig | None = None
        self._num_params = 0  # of the whole model, without embeddings
        super().__init__(*args, **kwargs)
        given = {"optimizer": self.optimizer or self.optimizer_cls_and_kwargs, "scheduler": self.lr_scheduler}
        for section, found in given.items():
            if found is not None and self._lowtide is not None and self._lowtide.has(section):
                raise ValueError(
                    f"{section}: found both the section in the config and the Trainer's argument optimizers or "
                    "optimizer_cls_and_kwargs. Leave one of them out"
                )

    # -- accelerator and engine -----------------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        before = getattr(self, "accelerator", None)
        if isinstance(before, _TrainersAccelerator):  # another trial of a hyperparameter search
            # Its model is replaced by that of the next trial, and its memory is needed.
            self._release_engine()
        super().create_accelerator_and_postprocess()  # calls `_build_accelerator_args`
        if self._lowtide is None:
            logger.warning_once("no config of lowtide was given (lowtide=...): this is transformers' plain Trainer")
            return
        self.accelerator = _TrainersAccelerator(**self._made_with)
        if isinstance(before, _TrainersAccelerator):
            self.accelerator.engines.extend(before.engines)  # of models besides the trained, still open
        # The Trainer took this method from its first Accelerator, and that is replaced here.
        gathered = self.accelerator.gather_for_metrics
        self.gather_function = partial(gathered, use_gather_object=self.args.eval_use_gather_object)

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        made_with: dict[str, Any] = super()._build_accelerator_args(**kwargs)
        source = self._given_lowtide if self._given_lowtide is not None else getattr(self.args, "lowtide", None)
        self._lowtide = None if source is None else config_of(source, self.args)
        if self._lowtide is None:
            return made_with
        made_with["mixed_precision"] = "no"
        self._made_with = {**made_with, "mixed_precision": "no", "lowtide": self._lowtide}
        return made_with

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """Build the model as the Trainer does. With lowtide's `from_pretrained`, values come with the engine."""
        build = super().call_model_init
        if self._lowtide is None:
            return cast(nn.Module, build(trial))
        if hasattr(self, "model"):
            self._release_engine()  # of an earlier call's model
        before = torch.get_rng_state()
        try:
            return cast(nn.Module, build(trial))
        except ReadAtOnceError:
            # The failed attempt may have drawn numbers. The model must have the same values as without it.
            torch.set_rng_state(before)
        self.accelerator.deferred = DeferredModel(partial(build, trial))
        return cast(nn.Module, self.accelerator.deferred.module)

    @property
    def engine(self) -> Engine | None:
        """The model's engine, once `train`, `evaluate` or `predict` has made it."""
        accelerator = self.accelerator
        return accelerator.engine_of(self.model) if isinstance(accelerator, Accelerator) else None

    def add_callback(self, callback: Any) -> None:
        """Add a callback. trl's callback that updates a reference model gets full parameters."""
        synchronize = getattr(callback, "sync_target_model", None)
        if self._lowtide is not None and synchronize is not None:
            callback.sync_target_model = partial(self._synchronize, synchronize)
        super().add_callback(callback)

    def _synchronize(self, synchronize: Callable[..., None], model: nn.Module, reference: Engine, alpha: float) -> None:
        trained = self.accelerator.engine_of(model)
        with trained.gathered(), reference.gathered(modify=True):
            synchronize(model, reference.module, alpha)

    def _release_engine(self) -> None:
        """Close the model's engine. Engines of further models, like a reference model, stay open."""
        if (engine := self.engine) is not None:
            self.accelerator.release([engine])

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        if self._lowtide is None:  # the engine moves this rank's part
            super()._move_model_to_device(model, device)

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        if self._lowtide is None or not self._lowtide.has("optimizer") or self.optimizer is not None:
            return super().create_optimizer(*(() if model is None else (model,)))
        said = {"lr": self.args.learning_rate, "weight_decay": self.args.weight_decay}
        self.optimizer = DummyOptim(params=None, **said)  # `prepare` replaces it by the config's optimizer
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        if self._lowtide is None or not self._lowtide.has("scheduler") or self.lr_scheduler is not None:
            return super().create_scheduler(num_training_steps, optimizer)
        self.lr_scheduler = EngineSchedule(self.optimizer)
        self._created_lr_scheduler = True
        return self.lr_scheduler

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None) -> Any:
        if self._lowtide is None:
            return super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        engine, is_new = self._trained_engine, resume_from_checkpoint is None
        if engine is not None and engine.global_step and is_new and self._lowtide.has("scheduler"):
            raise ValueError(
                "Trainer.train: expected a single training with the scheduler of the config, found a second training. "
                f"The schedule is at step {engine.global_step} and would not begin again. Remove the section "
                "`scheduler`, and set lr_scheduler_type: transformers' schedule begins again with each training"
            )
        fill_steps(self._lowtide, self.args, max_steps)
        if engine is None:
            self._release_engine()  # of an earlier evaluation
        # It belongs to an engine that was just closed, so the Trainer must make a new optimizer.
        if engine is None and isinstance(self.optimizer, EngineOptimizer):
            self.optimizer = None
        self._count_params()
        return super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)

    def _prepare_early(self, config: EngineConfig) -> None:
        """Make the training's engine early, for an evaluation before the training.

        An engine without optimizer would lose precision: closing it leaves 16-bit values or shards.
        """
        if config.has("scheduler"):
            fill_steps(config, self.args, self._num_steps())
        self._count_params()
        self.create_optimizer()
        self.model_wrapped, self.optimizer = self.accelerator.prepare(self.model, self.optimizer)

    def _num_steps(self) -> int:
        *_, num_steps = self.set_initial_training_values(self.args, self.get_train_dataloader())
        return int(num_steps)

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Any:
        if self._lowtide is None:
            return super()._wrap_model(model, training=training, dataloader=dataloader)
        engine = self._trained_engine if training else self.engine
        return self.model if engine is None else engine

    def _update_auto_batch_size(self, batch_size: int) -> None:
        if self._lowtide is None:
            super()._update_auto_batch_size(batch_size)
        self._train_batch_size = batch_size  # the engine takes any batch size

    @property
    def _trained_engine(self) -> Engine | None:
        engine = self.engine
        return engine if engine is not None and engine.optimizer.param_groups else None

    # -- ranks with the same data ---------------------------------------------------------------------------------

    @property
    def _num_sharers(self) -> int:
        return self.accelerator.data_rank.num_sharers if self._lowtide is not None else 1

    def get_total_train_batch_size(self, args: Any) -> int:
        total: int = super().get_total_train_batch_size(args)
        return total // self._num_sharers

    def _get_num_items_in_batch(self, *args: Any, **kwargs: Any) -> Any:
        found = super()._get_num_items_in_batch(*args, **kwargs)
        # `accelerator.gather` counts ranks with the same batches once, but `compute_loss` multiplies by all ranks.
        counts_all = isinstance(found, torch.Tensor) and self.args.average_tokens_across_devices
        return found * self._num_sharers if counts_all else found

    def _get_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        if self._num_sharers == 1:
            return super()._get_dataloader(*args, **kwargs)
        data, kind = self.accelerator.data_rank, type(self.args)
        with (  # samplers and worker seeds read these
            mock.patch.object(kind, "world_size", data.size),
            mock.patch.object(kind, "process_index", data.rank),
        ):
            return super()._get_dataloader(*args, **kwargs)

    def _whole(self, output: Any, inputs: Any) -> Any:
        """Return the output of a forward, assembled from all ranks that share it."""
        engine = self.engine
        if engine is None or self._num_sharers == 1:
            return output
        tokens = inputs.get(getattr(self.model, "main_input_name", "input_ids"))
        return engine.whole_output(output, tokens.shape[1] if tokens is not None and tokens.dim() > 1 else 0)

    def _count_params(self) -> None:
        """Count the model's parameters before an engine is made: it may leave this rank a part."""
        if self.engine is None and hasattr(self.model, "num_parameters"):
            self._num_params = self.model.num_parameters(exclude_embeddings=True)

    def floating_point_ops(self, inputs: Any) -> Any:
        found = super().floating_point_ops(inputs)
        if self._lowtide is None or not self._num_params:
            return found
        if not self.accelerator.data_rank.is_first:  # the Trainer sums over all ranks
            return 0
        # transformers counts the parameters of this rank's part. The count of the whole model replaces it.
        return found // self.model.num_parameters(exclude_embeddings=True) * self._num_params

    # -- steps ----------------------------------------------------------------------------------------------------

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss = super().training_step(model, inputs, *args, **kwargs)
        if self._num_sharers == 1:
            return loss
        return self._whole(loss, inputs)

    def _clip_grad_norm(self, model: Any) -> Any:
        return model.clip_grad_norm_(self.args.max_grad_norm) if self._lowtide else super()._clip_grad_norm(model)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        if self._lowtide is None:
            return super()._get_grad_norm(model, grad_norm=grad_norm)
        # An infinite limit clips nothing, and returns the norm for the log.
        return model.clip_grad_norm_(float("inf")) if grad_norm is None else grad_norm

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        given = (dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)
        values: dict[str, Any] = {}
        if self._lowtide is not None:
            if self.engine is None and self.train_dataset is not None:
                self._prepare_early(self._lowtide)
            elif self.engine is None:  # transformers skips it if a reference model was prepared before
                self.accelerator.prepare_model(self.model, evaluation_mode=True)
            # The engine computes in 16 bits already; `_refuse_with` has checked it.
            values = {"bf16_full_eval": False, "fp16_full_eval": False}
        wanted = self._eval_token_mean
        if not (getattr(self.args, "eval_token_mean", False) if wanted is None else wanted):
            with self._with_arguments(**values):
                return super().evaluation_loop(*given)
        self._token_sums = torch.zeros(2, dtype=torch.float64, device=self.args.device)
        try:
            with self._with_arguments(**values, average_tokens_across_devices=False):  # each loss: its batch's mean
                output = super().evaluation_loop(*given)
            loss, count = self.accelerator.reduce(self._token_sums).tolist()
        finally:
            self._token_sums = None
        output.metrics[f"{metric_key_prefix}_loss"] = loss / count if count else float("nan")
        return output

    @contextmanager
    def _with_arguments(self, **values: Any) -> Iterator[None]:
        before = {name: getattr(self.args, name) for name in values}
        try:
            for name, value in values.items():
                setattr(self.args, name, value)
            yield
        finally:
            for name, value in before.items():
                setattr(self.args, name, value)

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if self._token_sums is not None:
            inputs = self._without_repeated_rows(inputs)
        loss, *others = super().prediction_step(model, inputs, *args, **kwargs)
        loss, logits = self._whole((loss, others[0]), inputs)
        if self._token_sums is not None:
            labels = inputs["labels"][..., 1:] if self._loss_shifts_labels else inputs["labels"]
            # -100 is torch's ignore_index.
            count = inputs.get("shift_labels", labels).ne(-100).sum()
            total = torch.where(count > 0, loss.double() * count, 0.0)  # the mean over no token is NaN
            self._token_sums += torch.stack((total, count)).to(self._token_sums)
        return loss, logits, *others[1:]

    def _without_repeated_rows(self, inputs: Any) -> Any:
        """Set labels to -100 in rows that only fill up the last batches of an evaluation, so that they count once."""
        labels = inputs.get("labels")
        if not isinstance(labels, torch.Tensor) or labels.is_floating_point():
            found = "none" if labels is None else f"{type(labels).__name__} of numbers"
            raise ValueError(
                "eval_token_mean: expected batches with a tensor of token ids as `labels`, -100 for ignored tokens, "
                f"found {found}. Leave eval_token_mean out for this model"
            )
        accelerator, rows = self.accelerator, labels.shape[0]
        state, rank = accelerator.gradient_state, accelerator.process_index // self._num_sharers
        if not state.end_of_dataloader or state.remainder <= 0 or accelerator.num_processes == self._num_sharers:
            return inputs
        if rows == 1 < self.args.eval_batch_size:
            raise ValueError(
                f"eval_token_mean: expected a row of labels for each of {self.args.eval_batch_size} samples, found "
                f"shape {tuple(labels.shape)}, which hides repeated samples. Use a collator that pads, or "
                "per_device_eval_batch_size=1"
            )
        # In the last step, the rows of all ranks in order are `remainder` real rows, then repeated rows.
        repeated = torch.arange(rows, device=labels.device) + rank * rows >= state.remainder
        without = {key: inputs[key].clone() for key in ("labels", "shift_labels") if key in inputs}
        for values in without.values():
            values[repeated] = -100
        return {**inputs, **without}

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if self.engine is not None and not self.args.should_save:
            # Not in `_save`: some versions of transformers call that on the rank that writes, and nowhere else.
            self._read_shards(self.args.output_dir if output_dir is None else output_dir)
        super().save_model(output_dir, _internal_call)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if self.engine is None or state_dict is not None:
            super()._save(output_dir, state_dict=state_dict)
        elif self.args.should_save:
            folder = self.args.output_dir if output_dir is None else output_dir
            state_dict = self._read_shards(folder)
            if self._saves_adapters:
                card = self.model.create_or_update_model_card  # the only further file of peft
                with mock.patch.object(self.model, "save_pretrained", lambda folder, **kwargs: card(folder)):
                    super()._save(folder, state_dict=state_dict)
            else:
                super()._save(folder, state_dict=state_dict)

    @property
    def _saves_adapters(self) -> bool:
        return isinstance(self.model, PeftModel) and not self.model.active_peft_config.is_prompt_learning

    def _read_shards(self, folder: str) -> dict[str, Any]:
        """Write the adapters, and return nothing further; without adapters, return all weights. A collective."""
        engine = self.engine
        assert engine is not None
        if self._saves_adapters:
            engine.export(folder, adapters_only=True)  # from the shards: a state dict would have the whole base
            return {}
        return engine.state_dict()

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        engine = self._trained_engine
        if engine is None:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        # Callbacks may save before an update, as that of enable_jit_checkpoint does.
        engine.save_checkpoint(output_dir, _tag(self.state.global_step), within_step=True)
        if self.args.save_total_limit == 1:
            # transformers now removes the checkpoint before, also while this one is written in the background.
            engine._archive.checkpoints.wait()
        if self.args.should_save and not isinstance(self.lr_scheduler, EngineSchedule):
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER_NAME))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if self._lowtide is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        elif _engine_folder(resume_from_checkpoint) is None and os.path.isfile(
            os.path.join(resume_from_checkpoint, OPTIMIZER_NAME)
        ):
            raise ValueError(
                f"resume_from_checkpoint: expected a checkpoint of lowtide's Trainer, with a folder {_tag('N')}, found "
                f"{OPTIMIZER_NAME} of another Trainer in {resume_from_checkpoint}. To start from its weights, pass it "
                "to from_pretrained"
            )

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        engine = self._trained_engine
        if engine is None or checkpoint is None:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        engine._archive.checkpoints.wait()  # after an error the script may resume from a save in the background
        if _engine_folder(checkpoint) is None:
            if any(Path(checkpoint).glob("rng_state*")):
                raise ValueError(
                    f"resume_from_checkpoint: expected a complete checkpoint with a folder {_tag('N')}, found none in "
                    f"{checkpoint}: its job ended while it was written. Resume from an earlier checkpoint"
                )
            # Saved with save_only_model.
            logger.info("%s has no optimizer state: it begins anew", checkpoint)
            self._load_weights(engine, checkpoint)
            return
        with same_random_state():  # the Trainer restores random states at the start of the epoch
            engine.load_checkpoint(checkpoint)
        scheduler = os.path.join(checkpoint, SCHEDULER_NAME)
        if not isinstance(self.lr_scheduler, EngineSchedule) and os.path.isfile(scheduler):
            self.lr_scheduler.load_state_dict(torch.load(scheduler, weights_only=True))

    def _load_best_model(self) -> None:
        engine = self.engine
        if engine is None:
            super()._load_best_model()
            return
        logger.info("best model: %s (%s)", self.state.best_model_checkpoint, self.state.best_metric)
        engine._archive.checkpoints.wait()  # its files may be written in the background
        self._load_weights(engine, self.state.best_model_checkpoint)

    def _load_weights(self, engine: Engine, checkpoint: str) -> None:
        """Load the weights of a folder of `_save_checkpoint`."""
        saved = _engine_folder(checkpoint)
        if saved is not None:
            engine.load_weights(saved)
        elif isinstance(self.model, PeftModel):
            # peft reads the whole model's state dict for its names: shards are enough
            with engine.gathered(*_adapters_of(self.model), modify=True), torch._C.DisableTorchFunctionSubclass():
                super()._load_from_checkpoint(checkpoint)
        else:
            try:
                engine.load_weights(checkpoint)
            except ValueError:
                if not hasattr(self.model, "from_pretrained"):
                    raise
                # transformers' files: experts may have other names and shapes than the model, and buffers are left out.
                with no_rank_alone(engine._mesh.world, f"loading {checkpoint}"):
                    state = self.model.from_pretrained(checkpoint).state_dict() if engine.rank == 0 else {}
                engine.load_state_dict(state)


def _adapters_of(model: PeftModel) -> list[nn.Parameter]:
    """Return the parameters that an adapter file may have: by the adapter's name, and further trained parameters."""
    parts = set(model.peft_config)
    return [param for name, param in model.named_parameters() if param.requires_grad or parts & set(name.split("."))]


def _tag(step: object) -> str:
    return f"global_step{step}"


def _engine_folder(checkpoint: str) -> Path | None:
    """Return the engine's folder in a Trainer checkpoint, None if only the model was saved."""
    return next(iter(sorted(Path(checkpoint).glob(_tag("*")))), None)


class Trainer(LowtideMixin, transformers.Trainer):
    """transformers.Trainer on an engine: `Trainer(model, args, lowtide="zero3")`. See `LowtideMixin`."""


class Seq2SeqTrainer(LowtideMixin, transformers.Seq2SeqTrainer):
    """transformers.Seq2SeqTrainer on an engine. `predict_with_generate` generates on all ranks in step."""
