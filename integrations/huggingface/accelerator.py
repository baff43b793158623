"""Hugging Face's Accelerator, with engines as prepared models."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import accelerate
import torch
from accelerate.data_loader import prepare_data_loader
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import MODEL_NAME, DistributedType, DynamoBackend, recursively_apply
from accelerate.utils.deepspeed import DummyOptim, DummyScheduler
from torch import Tensor, nn

from ..engine.build import initialize
from ..engine.engine import Engine
from ..engine.model.deferred import DeferredModel
from ..model.blocks import find_blocks
from .data_ranks import DataRank, DataScheduler, only_cpu, refuse_alone
from .engine_config import EngineConfig, Source
from .saved_states import EngineOptimizer, EngineSchedule, same_random_state

_OTHERS = (DistributedType.DEEPSPEED, DistributedType.FSDP, DistributedType.MEGATRON_LM, DistributedType.XLA)
_BATCH_AUTO = ("train_batch_size", "train_micro_batch_size_per_gpu")


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]  # accelerate has no types
    """An Accelerator with a `prepare` that makes an engine of a model: to train with its optimizer, else to evaluate.

    The rest is as with DistributedDataParallel: gradients are means over the ranks, `backward` divides the loss by the
    accumulation steps, and `accumulate` and `no_sync` choose the backwards that end a step. Data are divided over data
    ranks.
    """

    _models: list[Any]
    _optimizers: list[Any]

    def __init__(self, *, lowtide: Source | EngineConfig, mixed_precision: str | None = None, **kwargs: Any) -> None:
        """lowtide: a preset's name, a path or a dictionary. mixed_precision: "no", "bf16", "fp16"; None: the config's.

        kwargs: of accelerate.Accelerator. Raises ConfigError if they contradict the config, ValueError with DeepSpeed,
        FSDP, Megatron-LM or a ParallelismConfig.
        """
        config = lowtide if isinstance(lowtide, EngineConfig) else EngineConfig(lowtide)
        precision = mixed_precision or os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
        if precision not in ("no", "bf16", "fp16"):
            raise ValueError(f'mixed_precision: expected "no", "bf16" or "fp16" with lowtide, found "{precision}"')
        kwargs.setdefault("cpu", only_cpu())
        super().__init__(mixed_precision="no", **kwargs)  # the engine has master weights and a loss scale
        refuse_alone(self.num_processes)
        if self.distributed_type in _OTHERS or self.parallelism_config is not None:
            found = "a parallelism_config" if self.parallelism_config is not None else self.distributed_type.value
            raise ValueError(f"Accelerator: expected only lowtide to divide the model, found {found} too")
        config.on_device(self.device.type)
        config.refuse_pipeline()
        if not isinstance(lowtide, EngineConfig):  # a Trainer has filled these in from its arguments
            config.compute_in(precision, "mixed_precision")
            steps = self.gradient_accumulation_steps
            config.set_value("gradient_accumulation_steps", steps, "Accelerator(gradient_accumulation_steps)")
            config.set_value("pipeline.microbatches", steps, "Accelerator(gradient_accumulation_steps)")
            config.check()
        self.lowtide = config
        self.data_rank = DataRank.of(config.parallel, self.process_index, self.num_processes)
        self.engines: list[Engine] = []  # open, in the order of preparation
        self.deferred: DeferredModel | None = None  # a Trainer's model without values until its engine is made

    @property
    def mixed_precision(self) -> str:
        """The compute dtype of the engines: "no", "bf16" or "fp16"."""
        config = self.__dict__.get("lowtide")  # none, while the Accelerator is made
        return next((name for name in ("bf16", "fp16") if config is not None and config.is_on(name)), "no")

    # -- engines --------------------------------------------------------------------------------------------------

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare as accelerate does. Pass a model with its optimizer. Without an optimizer it only evaluates.

        If the config has an optimizer, pass `accelerate.utils.deepspeed.DummyOptim(model.parameters())` instead.
        If the config has a schedule, pass `accelerate.utils.deepspeed.DummyScheduler(optimizer)`.
        """
        found = dict(enumerate(args))
        taken = self._engines_of(found)
        rest = [place for place in found if place not in taken]
        if rest:
            placement = None if device_placement is None else [device_placement[place] for place in rest]
            others = super().prepare(*(found[place] for place in rest), device_placement=placement)
            taken.update(zip(rest, others if len(rest) > 1 else (others,), strict=True))
        result = tuple(taken[place] for place in found)
        return result if len(result) > 1 else result[0]

    def prepare_model(
        self, model: nn.Module | Engine, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Engine:
        """Make an engine without an optimizer: for a teacher, or an evaluation."""
        if isinstance(model, Engine):
            return model
        # `prepare` may be called again with the same model, for example before each evaluation.
        return self.engine_of(model) or self._open(model, None, self.lowtide.of_evaluation())

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> torch.optim.Optimizer:
        if not isinstance(optimizer, EngineOptimizer):
            params = _ids(_params_of(optimizer))
            # The engine has its optimizer from the start: an optimizer that comes later would never see a gradient.
            if any(params & _ids(engine.parameters()) for engine in self.engines):
                raise ValueError(
                    "Accelerator.prepare: expected the optimizer in the same call as its model, found an optimizer of "
                    "a model prepared before. Write model, optimizer = accelerator.prepare(model, optimizer)"
                )
        prepared: torch.optim.Optimizer = super().prepare_optimizer(optimizer, device_placement)
        return prepared

    def engine_of(self, model: nn.Module) -> Engine | None:
        """Return the open engine of a model."""
        return next((engine for engine in self.engines if engine.module is model), None)

    def release(self, engines: Iterable[Engine] | None = None) -> None:
        """Close engines, all by default. Their models are left as by `lowtide.Engine.close`."""
        for engine in list(self.engines if engines is None else engines):
            self.engines.remove(engine)
            _generate_in_step(engine.module, False)
            engine.close()

    def free_memory(self, *objects: Any) -> Any:
        """Free memory as accelerate does, and close the engines."""
        self.release()
        return super().free_memory(*objects)

    def end_training(self) -> None:
        self.release()
        super().end_training()

    def unwrap_model(self, model: Any, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> nn.Module:
        if isinstance(model, Engine):
            return model.module
        module: nn.Module = super().unwrap_model(model, keep_fp32_wrapper, keep_torch_compile)
        return module

    # -- steps ----------------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Run the backward of `loss / gradient_accumulation_steps` for all engines that it reaches."""
        trained = [engine for engine in self.engines if engine.optimizer.param_groups]
        with ExitStack() as stack:
            if not self.sync_gradients:  # even outside `accumulate`, as in the Trainer's loop
                for engine in trained:
                    stack.enter_context(engine.no_sync())
            if len(trained) == 1:  # then float16's loss scale can multiply the loss itself
                loss = trained[0].scale(loss)
            super().backward(loss, **kwargs)

    @contextmanager
    def no_sync(self, model: Any) -> Iterator[None]:
        with model.no_sync() if isinstance(model, Engine) else super().no_sync(model):
            yield

    @contextmanager
    def accumulate(self, *models: Any) -> Iterator[None]:
        with super().accumulate(), ExitStack() as stack:
            for model in models:
                stack.enter_context(nullcontext() if self.sync_gradients else self.no_sync(model))
            yield

    @staticmethod
    @contextmanager
    def trigger_sync_in_backward(model: Any) -> Iterator[None]:
        """Make the next backward inside the last of its step, though its forward ran under `no_sync`."""
        with model.accumulate(last=True) if isinstance(model, Engine) else nullcontext():
            yield

    @contextmanager
    def join_uneven_inputs(self, joinables: Sequence[Any], even_batches: bool | None = None) -> Iterator[None]:
        """Let ranks with fewer batches join the steps of the rest: see `lowtide.Engine.join`."""
        before = [(loader, loader.batch_sampler.even_batches) for loader in self._map_loaders()]
        with ExitStack() as stack:
            for joinable in joinables:
                if isinstance(joinable, Engine):
                    stack.enter_context(joinable.join())
            try:
                if even_batches is not None:
                    for loader, _ in before:
                        loader.batch_sampler.even_batches = even_batches
                yield
            finally:
                for loader, was in before:
                    loader.batch_sampler.even_batches = was

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
        """Clip an engine's gradients by their norm over all parameters and ranks, and return the norm.

        parameters: all parameters that an engine trains. Raises ValueError for a subset.
        """
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if (engine := self._engine_of_all(parameters, "clip_grad_norm_")) is not None:
            return engine.clip_grad_norm_(max_norm, norm_type)
        norm: Tensor = super().clip_grad_norm_(parameters, max_norm, norm_type)
        return norm

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clip each element of an engine's gradients to [-clip_value, clip_value]; parameters as `clip_grad_norm_`.

        As in accelerate, it acts after the last microbatch of a step, on the accumulated gradients.
        """
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        engine = self._engine_of_all(parameters, "clip_grad_value_")
        if engine is None:
            super().clip_grad_value_(parameters, clip_value)
        else:
            engine.clip_grad_value_(clip_value)

    def _engine_of_all(self, parameters: Sequence[Tensor], what: str) -> Engine | None:
        """Return the engine that trains these parameters. Raises ValueError if it trains more."""
        given = _ids(parameters)
        for engine in self.engines:
            trained = _ids(param for param in engine.parameters() if param.requires_grad)
            if trained & given:
                if trained - given:
                    raise ValueError(
                        f"Accelerator.{what}: expected all {len(trained)} trained parameters of a model, "
                        f"found {len(trained & given)} of them. Pass model.parameters()"
                    )
                return engine
        return None

    # -- state ----------------------------------------------------------------------------------------------------

    def get_state_dict(self, model: Any, unwrap: bool = True) -> dict[str, Any]:
        """Return full parameters and buffers on rank 0, {} on all ranks but 0. All ranks must call it."""
        if isinstance(model, Engine):
            return model.state_dict()
        state: dict[str, Any] = super().get_state_dict(model, unwrap)
        return state

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **kwargs: Any) -> str:
        """Save as accelerate does, with a checkpoint of each engine in the folder. It loads at any number of ranks."""
        for engine in self.engines:
            engine._archive.checkpoints.wait()  # with a total_limit accelerate removes earlier states first
        # accelerate would ask the engines for whole state dicts, and write them.
        with self._engines_aside(self._save_model_state_pre_hook, lambda models: (models, [])):
            folder: str = super().save_state(output_dir, safe_serialization, **kwargs)
        for tag, engine in self._tags():
            engine.save_checkpoint(folder, tag, within_step=True)  # scripts may count batches, not steps
        return folder

    def load_state(
        self, input_dir: str | None = None, load_kwargs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Load the states of `save_state`.

        Raises ValueError unless the script has prepared as many models for lowtide as the script that saved.
        """
        folder = self._newest_state() if input_dir is None else os.path.expanduser(input_dir)
        saved = [path.name for path in Path(folder).glob(f"{MODEL_NAME}*") if path.is_dir()]
        differ = bool(saved) and len(saved) != len(self.engines)
        if self.engines and self.engines[0].agree(differ):
            raise ValueError(
                f"{folder}: expected a state of {len(self.engines)} models, found {len(saved)} "
                f"({', '.join(sorted(saved))}). Prepare the same models in the same order as the script that saved it"
            )
        with same_random_state():  # accelerate restores each rank's below
            for tag, engine in self._tags():
                if engine.optimizer.param_groups:
                    engine.load_checkpoint(folder, tag)
                else:  # also from the checkpoint of a training
                    is_whole = not engine.config.checkpoint.exclude_frozen_parameters
                    engine.load_weights(Path(folder, tag), strict=is_whole)
        # After the engines: accelerate's part ends with the random states, and these must come last.
        with self._engines_aside(self._load_model_state_pre_hook, lambda models: (models,)):
            super().load_state(folder, load_kwargs, **kwargs)

    def _tags(self) -> list[tuple[str, Engine]]:
        """Return the engines with the tags of their checkpoints, in the order of preparation."""
        return [
            (MODEL_NAME if not index else f"{MODEL_NAME}_{index}", engine) for index, engine in enumerate(self.engines)
        ]

    def _newest_state(self) -> str:
        naming = self.project_configuration
        if not naming.automatic_checkpoint_naming:
            raise ValueError("load_state: expected input_dir, since automatic_checkpoint_naming is off; pass it")
        parent = Path(naming.project_dir, "checkpoints")
        folders = list(parent.glob("checkpoint_*"))
        if not folders:
            raise ValueError(f"load_state: expected a state that save_state has written to {parent}, found none")
        return str(max(folders, key=lambda folder: int(folder.name.rpartition("_")[2])))

    @contextmanager
    def _engines_aside(
        self, hooks: dict[Any, Callable[..., None]], shown: Callable[[list[Any]], Any]
    ) -> Iterator[None]:
        """Hide the engines from accelerate's saving and loading. The caller's hooks still get them."""
        models, optimizers, kept = self._models, self._optimizers, dict(hooks)
        self._models = [model for model in models if not isinstance(model, Engine)]
        self._optimizers = [optimizer for optimizer in optimizers if not isinstance(optimizer, EngineOptimizer)]
        for key, hook in kept.items():
            hooks[key] = partial(_call_hook, hook, shown(list(models)))
        try:
            yield
        finally:
            self._models, self._optimizers = models, optimizers
            hooks.update(kept)

    # -- data -----------------------------------------------------------------------------------------------------

    def prepare_data_loader(
        self, data_loader: Any, device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        """Divide a loader over data ranks. Raises ValueError for `dispatch_batches` if ranks share data."""
        data = self.data_rank
        if data.num_sharers == 1 or getattr(data_loader, "_is_accelerate_prepared", False):
            return super().prepare_data_loader(data_loader, device_placement, slice_fn_for_dispatch)
        if self.dispatch_batches:
            raise ValueError(
                f"Accelerator: expected no dispatch_batches if {data.num_sharers} ranks need the same batches: rank 0 "
                "would send each rank a different part. Leave it out"
            )
        # accelerate's method would take the process's number. Its function takes the data rank's.
        prepared = prepare_data_loader(
            data_loader,
            self.device,
            num_processes=data.size,
            process_index=data.rank,
            split_batches=self.split_batches,
            put_on_device=self.device_placement if device_placement is None else device_placement,
            rng_types=self.rng_types.copy(),
            dispatch_batches=False,
            even_batches=self.even_batches,
            use_seedable_sampler=self.use_seedable_sampler,
            data_seed=self.dataloader_config.data_seed,
            non_blocking=self.non_blocking,
            use_stateful_dataloader=self.use_stateful_dataloader,
        )
        self._dataloaders.append(prepared)
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Prepare a scheduler that steps once for each data rank."""
        prepared = super().prepare_scheduler(scheduler)
        if self.data_rank.num_sharers == 1 or type(prepared) is not AcceleratedScheduler or prepared.split_batches:
            return prepared
        # accelerate saves all schedulers of this list, and this scheduler is replaced.
        self._schedulers.remove(prepared)
        prepared = DataScheduler(prepared, self.data_rank.size)
        self._schedulers.append(prepared)
        return prepared

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """Open a context with this data rank's part of the inputs."""
        data = self.data_rank
        state: Any = accelerate.PartialState
        view = SimpleNamespace(num_processes=data.size, process_index=data.rank, device=self.device)
        with state.split_between_processes(view, inputs, apply_padding) as part:
            yield part

    def gather(self, tensor: Any) -> Any:
        """Gather over data ranks: from ranks with the same data, take the first rank's."""
        gathered = super().gather(tensor)
        return gathered if self.data_rank.num_sharers == 1 else recursively_apply(self._of_first, gathered)

    def _of_first(self, gathered: Tensor) -> Tensor:
        data = self.data_rank
        # The chunks are in the order of the ranks, and sharers are neighbours: the first of each group is kept.
        return torch.cat(gathered.chunk(data.size * data.num_sharers)[:: data.num_sharers])

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather as accelerate does, over data ranks."""
        if not use_gather_object:
            try:
                recursively_apply(lambda tensor: tensor, input_data, error_on_other_type=True)
            except TypeError:
                use_gather_object = True
        if use_gather_object and not self.data_rank.is_first:
            input_data = []  # accelerate concatenates the objects of all ranks
        return super().gather_for_metrics(input_data, use_gather_object)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Reduce as accelerate does, over data ranks."""
        if reduction == "sum" and not self.data_rank.is_first:
            # A sum over all ranks then counts each data rank once. A mean needs nothing: sharers have equal values.
            tensor = recursively_apply(torch.zeros_like, tensor)
        return super().reduce(tensor, reduction, scale)

    # -- making engines -------------------------------------------------------------------------------------------
    def _engines_of(self, found: Mapping[int, Any]) -> dict[int, Any]:
        """Make engines of the arguments of `prepare`: index -> engine, its optimizer or its schedule."""
        taken: dict[int, Any] = {place: given for place, given in found.items() if isinstance(given, Engine)}
        models = {place: given for place, given in found.items() if isinstance(given, nn.Module)}
        loaders = [given for given in found.values() if isinstance(given, torch.utils.data.DataLoader)]
        for place, model in models.items():
            own = [at for at, given in found.items() if at not in taken and self._is_of(given, model, len(models))]
            if len(own) > 1:
                raise ValueError(f"Accelerator.prepare: expected one optimizer for a model, found {len(own)}")
            if not own:
                taken[place] = self.prepare_model(model)
                continue
            taken[place], taken[own[0]] = self._open_for_training(model, found[own[0]], found, loaders)
        for place, given in found.items():
            if isinstance(given, DummyScheduler):
                taken[place] = self._schedule(given)
        return taken

    @staticmethod
    def _is_of(given: Any, model: nn.Module, num_models: int) -> bool:
        """Return whether an argument of `prepare` is the optimizer of a model."""
        if isinstance(given, DummyOptim):
            return num_models == 1
        if not isinstance(given, torch.optim.Optimizer) or isinstance(given, EngineOptimizer):
            return False
        return bool(_ids(_params_of(given)) & _ids(model.parameters()))

    def _open_for_training(
        self, model: nn.Module, optimizer: Any, found: Mapping[int, Any], loaders: Sequence[Any]
    ) -> tuple[Engine, EngineOptimizer]:
        config = self.lowtide
        own = None if isinstance(optimizer, DummyOptim) else optimizer
        if callable(getattr(own, "train", None)):
            raise ValueError(
                f"Accelerator.prepare: expected an optimizer without modes, found {type(own).__name__}. Its train() "
                "and eval() change the weights, but a rank has only shards. Use AdamW with a schedule"
            )
        if own is None:
            self._fill_optimizer(optimizer)
        for schedule in (given for given in found.values() if isinstance(given, DummyScheduler)):
            config.set_value("scheduler.params.total_num_steps", schedule.total_num_steps, "DummyScheduler")
            config.set_value("scheduler.params.warmup_num_steps", schedule.warmup_num_steps, "DummyScheduler")
        self._check_batch_sizes(loaders)
        config.check()
        engine = self._open(model, own, config.of_training())
        prepared = EngineOptimizer(engine, own)
        self._optimizers.append(prepared)
        return engine, prepared

    def _open(self, model: nn.Module, optimizer: torch.optim.Optimizer | None, config: dict[str, Any]) -> Engine:
        wanted: Any = self._compiled(model, config)
        deferred = self.deferred
        if deferred is not None and deferred.module is model:
            self.deferred = None
            # torch.compile may have replaced the model by a wrapper.
            deferred.module = wanted
            wanted = deferred
        engine = initialize(wanted, config, optimizer=optimizer, fill=self.lowtide.fill)
        # In both cases each forward is a collective, and `generate` ends at different lengths on different ranks.
        if engine.config.zero_optimization.stage == 3 or engine.config.parallel.expert > 1:
            _generate_in_step(engine.module, True)
        self.engines.append(engine)
        self._models.append(engine)
        return engine

    def _compiled(self, model: nn.Module, config: dict[str, Any]) -> Any:
        """Make `config` compile the model's blocks, and return the model; without blocks, compile all of it."""
        plugin = self.state.dynamo_plugin
        if plugin.backend == DynamoBackend.NO or plugin.disable:
            return model
        if "compile" in config:
            raise ValueError(
                "compile: found both the section in the config and torch_compile (or a dynamo_backend) in the "
                "arguments. Remove either"
            )
        options = plugin.to_kwargs()
        if "options" in options or not find_blocks(model):  # the section takes no options of a backend
            return torch.compile(model, **options)
        config["compile"] = {"blocks": True, **options}
        return model

    def _fill_optimizer(self, dummy: Any) -> None:
        config = self.lowtide
        if not config.has("optimizer"):
            raise ValueError(
                "Accelerator.prepare: a DummyOptim needs an optimizer in the config, found none. Pass a torch "
                "optimizer, or write one into the config"
            )
        if isinstance(dummy.params, (list, tuple)) and any(isinstance(param, dict) for param in dummy.params):
            raise ValueError(
                "Accelerator.prepare: expected a DummyOptim over parameters, found parameter groups, which the "
                "config's optimizer does not have. Remove it from the config, and pass a torch optimizer over them"
            )
        for key in ("lr", "weight_decay"):
            config.set_value(f"optimizer.params.{key}", getattr(dummy, key), "DummyOptim", must_match=False)
        for key, value in dummy.kwargs.items():
            config.set_value(f"optimizer.params.{key}", value, "DummyOptim", must_match=False)
        config.set_value("scheduler.params.warmup_min_lr", 0, "DummyOptim", must_match=False)
        config.set_value("scheduler.params.warmup_max_lr", dummy.lr, "DummyOptim", must_match=False)

    def _check_batch_sizes(self, loaders: Sequence[Any]) -> None:
        sizes = [loader.batch_size for loader in loaders if getattr(loader, "batch_size", None) is not None]
        if not sizes:
            return
        # With `split_batches`, a loader's batch is for all data ranks together.
        micro = min(sizes) // (self.data_rank.size if self.split_batches else 1)
        whole = micro * self.data_rank.size * self.gradient_accumulation_steps
        for key, size in zip(_BATCH_AUTO, (whole, micro), strict=True):
            self.lowtide.set_value(key, size, "the data loader")

    def _schedule(self, dummy: Any) -> Any:
        # The call's optimizer is the last: `prepare` may have been called before for another model.
        optimizers = (each for each in reversed(self._optimizers) if isinstance(each, EngineOptimizer))
        engine_optimizer = next(optimizers, None)
        if engine_optimizer is None:
            raise ValueError("Accelerator.prepare: expected the optimizer of a DummyScheduler in the call, found none")
        if self.lowtide.has("scheduler"):
            return EngineSchedule(engine_optimizer)
        if dummy.lr_scheduler_callable is None:
            raise ValueError(
                "Accelerator.prepare: a DummyScheduler needs a scheduler in the config, found none. Pass a torch "
                "scheduler, or DummyScheduler(lr_scheduler_callable=...)"
            )
        return self.prepare_scheduler(dummy.lr_scheduler_callable(engine_optimizer))

    def _map_loaders(self) -> list[Any]:
        return [
            loader for loader in self._dataloaders if hasattr(getattr(loader, "batch_sampler", None), "even_batches")
        ]


def _generate_in_step(model: nn.Module, in_step: bool) -> None:
    """Make `generate` run forwards until all ranks are done: each forward is a collective.

    transformers does so for a model with FSDP2's marks; torch.compile reads the second.
    """
    for module in model.modules():
        if hasattr(module, "generate"):
            module._is_fsdp_managed_module = module._fsdp_use_orig_params = in_step  # type: ignore[assignment]


def _ids(params: Iterable[Any]) -> set[int]:
    return {id(param) for param in params}


def _params_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _call_hook(hook: Callable[..., None], shown: Sequence[Any], *args: Any) -> None:
    """Call a hook of `save_state` (models, weights, folder) or `load_state` (models, folder)."""
    hook(*shown, args[-1])
