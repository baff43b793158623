"""The Accelerator of Hugging Face whose models are engines."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import accelerate
import torch
from accelerate.utils import DistributedType, DynamoBackend
from accelerate.utils.deepspeed import DummyOptim, DummyScheduler
from torch import Tensor, nn

from ..engine.build import initialize
from ..engine.engine import Engine
from ..engine.model.deferred import DeferredModel
from ..model.blocks import find_blocks
from .data_ranks import DataCalls, DataRank, only_cpu, refuse_alone
from .engine_config import EngineConfig, Said, Source
from .saved_states import EngineOptimizer, EngineSchedule, SavedStates

_OTHERS = (DistributedType.DEEPSPEED, DistributedType.FSDP, DistributedType.MEGATRON_LM, DistributedType.XLA)
_BATCH_AUTO = ("train_batch_size", "train_micro_batch_size_per_gpu")


class Accelerator(DataCalls, SavedStates, accelerate.Accelerator):  # type: ignore[misc]  # accelerate has no types
    """Its `prepare` gives an engine for a model: with the optimizer beside it, one that trains, else one that computes.

    Everything else is as with DistributedDataParallel: gradients are means over the ranks, `backward` weighs the loss
    by the accumulation, `accumulate` and `no_sync` say which backwards are the last of their step.
    """

    _models: list[Any]
    _optimizers: list[Any]

    def __init__(self, *, lowtide: Source | EngineConfig, mixed_precision: str | None = None, **kwargs: Any) -> None:
        """lowtide: a preset's name, a path or a dictionary. mixed_precision: "no", "bf16", "fp16"; None: the config's.

        kwargs: as accelerate.Accelerator has them. Raises ConfigError where they and the config contradict each other,
        ValueError beside DeepSpeed, FSDP, Megatron-LM or a ParallelismConfig.
        """
        config = lowtide if isinstance(lowtide, EngineConfig) else EngineConfig(lowtide)
        precision = mixed_precision or os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
        if precision not in ("no", "bf16", "fp16"):
            raise ValueError(f'mixed_precision: expected "no", "bf16" or "fp16" beside lowtide, found "{precision}"')
        kwargs.setdefault("cpu", only_cpu())
        super().__init__(mixed_precision="no", **kwargs)  # the engine has masters and a loss scale of its own
        refuse_alone(self.num_processes)
        if self.distributed_type in _OTHERS or self.parallelism_config is not None:
            found = "a parallelism_config" if self.parallelism_config is not None else self.distributed_type.value
            raise ValueError(f"Accelerator: expected lowtide alone to divide the model, found {found} beside it")
        config.on_device(self.device.type)
        config.refuse_pipeline()
        if not isinstance(lowtide, EngineConfig):  # a Trainer has its own arguments for these
            config.compute_in(precision, "mixed_precision")
            steps = self.gradient_accumulation_steps
            config.say(Said("gradient_accumulation_steps", steps, "Accelerator(gradient_accumulation_steps)"))
            config.say(Said("pipeline.microbatches", steps, "Accelerator(gradient_accumulation_steps)"))
            config.check()
        self.lowtide = config
        self.data_rank = DataRank.of(config.parallel, self.process_index, self.num_processes)
        self.engines: list[Engine] = []
        """Those that are open, in the order in which they were made."""
        self.deferred: DeferredModel | None = None
        """The model of a Trainer that has no values before its engine is made."""

    @property
    def mixed_precision(self) -> str:
        """What the engines compute in: "no", "bf16" or "fp16"."""
        config = self.__dict__.get("lowtide")  # none, while the Accelerator is made
        return next((name for name in ("bf16", "fp16") if config is not None and config.is_on(name)), "no")

    # -- engines --------------------------------------------------------------------------------------------------

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """As accelerate's. A model and its optimizer must be in the same call; a model without one computes alone.

        If the config has an optimizer, give `accelerate.utils.deepspeed.DummyOptim(model.parameters())` in its place.
        If the config has a schedule, give `accelerate.utils.deepspeed.DummyScheduler(optimizer)`.
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
        """An engine that computes, without an optimizer: of a teacher, or for an evaluation."""
        if isinstance(model, Engine):
            return model
        return self.engine_of(model) or self._open(model, None, self.lowtide.of_evaluation())

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> torch.optim.Optimizer:
        if not isinstance(optimizer, EngineOptimizer):
            params = _ids(_params_of(optimizer))
            if any(params & _ids(engine.parameters()) for engine in self.engines):
                raise ValueError(
                    "Accelerator.prepare: expected the optimizer in the same call as its model, found one of a model "
                    "that was prepared before; write model, optimizer = accelerator.prepare(model, optimizer)"
                )
        prepared: torch.optim.Optimizer = super().prepare_optimizer(optimizer, device_placement)
        return prepared

    def engine_of(self, model: nn.Module) -> Engine | None:
        """The engine that a model was prepared to, while it is open."""
        return next((engine for engine in self.engines if engine.module is model), None)

    def release(self, engines: Iterable[Engine] | None = None) -> None:
        """Closes engines, all by default: their models are as `lowtide.Engine.close` leaves them."""
        for engine in list(self.engines if engines is None else engines):
            self.engines.remove(engine)
            _generate_in_step(engine.module, False)
            engine.close()

    def free_memory(self, *objects: Any) -> Any:
        """As accelerate's; also closes the engines."""
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
        """The backward of `loss / gradient_accumulation_steps`, of all engines that it reaches."""
        trained = [engine for engine in self.engines if engine.optimizer.param_groups]
        with ExitStack() as stack:
            if not self.sync_gradients:  # also where nobody has entered `accumulate`, as in the Trainer's loop
                for engine in trained:
                    stack.enter_context(engine.no_sync())
            if len(trained) == 1:  # float16's loss scale is on the loss itself then
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
        """The next backward inside is the last of its step, though its forward was under `no_sync`."""
        with model.accumulate(last=True) if isinstance(model, Engine) else nullcontext():
            yield

    @contextmanager
    def join_uneven_inputs(self, joinables: Sequence[Any], even_batches: bool | None = None) -> Iterator[None]:
        """Ranks whose batches end earlier take part in the steps of the others: see `lowtide.Engine.join`."""
        before = [(loader, loader.batch_sampler.even_batches) for loader in self._map_loaders()]
        with ExitStack() as stack:
            for one in joinables:
                if isinstance(one, Engine):
                    stack.enter_context(one.join())
            try:
                if even_batches is not None:
                    for loader, _ in before:
                        loader.batch_sampler.even_batches = even_batches
                yield
            finally:
                for loader, was in before:
                    loader.batch_sampler.even_batches = was

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
        """The norm over all parameters of an engine and all ranks, to which its gradients are clipped.

        parameters: all that one engine trains; ValueError for some of them, whose norm an engine does not know.
        """
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if (engine := self._engine_of_all(parameters, "clip_grad_norm_")) is not None:
            return engine.clip_grad_norm_(max_norm, norm_type)
        norm: Tensor = super().clip_grad_norm_(parameters, max_norm, norm_type)
        return norm

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clips each element of an engine's gradients into [-clip_value, clip_value]; parameters as `clip_grad_norm_`.

        As accelerate's, it acts behind the last microbatch of a step, on what was added up.
        """
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        engine = self._engine_of_all(parameters, "clip_grad_value_")
        if engine is None:
            super().clip_grad_value_(parameters, clip_value)
        else:
            engine.clip_grad_value_(clip_value)

    def _engine_of_all(self, parameters: Sequence[Tensor], what: str) -> Engine | None:
        """The engine that trains these. Raises ValueError where it trains others too."""
        given = _ids(parameters)
        for engine in self.engines:
            trained = _ids(param for param in engine.parameters() if param.requires_grad)
            if trained & given:
                if trained - given:
                    raise ValueError(
                        f"Accelerator.{what}: expected all {len(trained)} trained parameters of a model, "
                        f"found {len(trained & given)} of them; pass model.parameters()"
                    )
                return engine
        return None

    # -- state ----------------------------------------------------------------------------------------------------

    def get_state_dict(self, model: Any, unwrap: bool = True) -> dict[str, Any]:
        """Full parameters and buffers on rank 0, empty on other ranks. All ranks must call it."""
        if isinstance(model, Engine):
            return model.state_dict()
        state: dict[str, Any] = super().get_state_dict(model, unwrap)
        return state

    # -- pieces of it ---------------------------------------------------------------------------------------------

    def _engines_of(self, found: Mapping[int, Any]) -> dict[int, Any]:
        """Place -> engine, its optimizer, its schedule: what of the arguments of `prepare` becomes one."""
        taken: dict[int, Any] = {place: one for place, one in found.items() if isinstance(one, Engine)}
        models = {place: one for place, one in found.items() if isinstance(one, nn.Module)}
        loaders = [one for one in found.values() if isinstance(one, torch.utils.data.DataLoader)]
        for place, model in models.items():
            beside = [at for at, one in found.items() if at not in taken and self._is_of(one, model, len(models))]
            if len(beside) > 1:
                raise ValueError(f"Accelerator.prepare: expected one optimizer for a model, found {len(beside)}")
            if not beside:
                taken[place] = self.prepare_model(model)
                continue
            taken[place], taken[beside[0]] = self._open_for_training(model, found[beside[0]], found, loaders)
        for place, one in found.items():
            if isinstance(one, DummyScheduler):
                taken[place] = self._schedule(one)
        return taken

    @staticmethod
    def _is_of(one: Any, model: nn.Module, num_models: int) -> bool:
        """Whether an argument of `prepare` is the optimizer of a model."""
        if isinstance(one, DummyOptim):
            return num_models == 1
        if not isinstance(one, torch.optim.Optimizer) or isinstance(one, EngineOptimizer):
            return False
        return bool(_ids(_params_of(one)) & _ids(model.parameters()))

    def _open_for_training(
        self, model: nn.Module, optimizer: Any, found: Mapping[int, Any], loaders: Sequence[Any]
    ) -> tuple[Engine, EngineOptimizer]:
        config = self.lowtide
        own = None if isinstance(optimizer, DummyOptim) else optimizer
        if callable(getattr(own, "train", None)):
            raise ValueError(
                f"Accelerator.prepare: expected an optimizer without modes, found {type(own).__name__}, whose train() "
                "and eval() change the weights, which are divided here; use AdamW with a schedule"
            )
        if own is None:
            self._fill_optimizer(optimizer)
        for schedule in (one for one in found.values() if isinstance(one, DummyScheduler)):
            config.say(Said("scheduler.params.total_num_steps", schedule.total_num_steps, "DummyScheduler"))
            config.say(Said("scheduler.params.warmup_num_steps", schedule.warmup_num_steps, "DummyScheduler"))
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
            deferred.module = wanted
            wanted = deferred
        engine = initialize(wanted, config, optimizer=optimizer, fill=self.lowtide.fill)
        if engine.config.zero_optimization.stage == 3 or engine.config.parallel.expert > 1:
            _generate_in_step(engine.module, True)
        self.engines.append(engine)
        self._models.append(engine)
        return engine

    def _compiled(self, model: nn.Module, config: dict[str, Any]) -> Any:
        """The model, of which `config` says from then on that its blocks are compiled; what has none as a whole."""
        plugin = self.state.dynamo_plugin
        if plugin.backend == DynamoBackend.NO or plugin.disable:
            return model
        if "compile" in config:
            raise ValueError(
                "compile: found it in the config, and torch_compile (or a dynamo_backend) in the arguments; leave one "
                "of them out"
            )
        options = plugin.to_kwargs()
        if "options" in options or not find_blocks(model):  # the section has no options of a backend
            return torch.compile(model, **options)
        config["compile"] = {"blocks": True, **options}
        return model

    def _fill_optimizer(self, dummy: Any) -> None:
        config = self.lowtide
        if not config.has("optimizer"):
            raise ValueError(
                "Accelerator.prepare: expected an optimizer in the config where a DummyOptim stands for it, found "
                "none; give a torch optimizer, or write one into the config"
            )
        if isinstance(dummy.params, (list, tuple)) and any(isinstance(one, dict) for one in dummy.params):
            raise ValueError(
                "Accelerator.prepare: expected a DummyOptim over parameters, found one over groups, which the "
                "optimizer of the config does not have; leave it out of the config, and give a torch optimizer of them"
            )
        for key in ("lr", "weight_decay"):
            config.say(Said(f"optimizer.params.{key}", getattr(dummy, key), "DummyOptim", must_match=False))
        for key, value in dummy.kwargs.items():
            config.say(Said(f"optimizer.params.{key}", value, "DummyOptim", must_match=False))
        config.say(Said("scheduler.params.warmup_min_lr", 0, "DummyOptim", must_match=False))
        config.say(Said("scheduler.params.warmup_max_lr", dummy.lr, "DummyOptim", must_match=False))

    def _check_batch_sizes(self, loaders: Sequence[Any]) -> None:
        sizes = [loader.batch_size for loader in loaders if getattr(loader, "batch_size", None) is not None]
        if not sizes:
            return
        micro = min(sizes) // (self.data_rank.size if self.split_batches else 1)
        whole = micro * self.data_rank.size * self.gradient_accumulation_steps
        for key, size in zip(_BATCH_AUTO, (whole, micro), strict=True):
            self.lowtide.say(Said(key, size, "the data loader"))

    def _schedule(self, dummy: Any) -> Any:
        engine_optimizer = next((one for one in self._optimizers if isinstance(one, EngineOptimizer)), None)
        if engine_optimizer is None:
            raise ValueError("Accelerator.prepare: expected the optimizer of a DummyScheduler beside it, found none")
        if self.lowtide.has("scheduler"):
            return EngineSchedule(engine_optimizer)
        if dummy.lr_scheduler_callable is None:
            raise ValueError(
                "Accelerator.prepare: expected a scheduler in the config where a DummyScheduler stands for it, found "
                "none; give a torch scheduler, or DummyScheduler(lr_scheduler_callable=...)"
            )
        return self.prepare_scheduler(dummy.lr_scheduler_callable(engine_optimizer))

    def _map_loaders(self) -> list[Any]:
        return [one for one in self._dataloaders if hasattr(getattr(one, "batch_sampler", None), "even_batches")]


def _generate_in_step(model: nn.Module, in_step: bool) -> None:
    """in_step: `generate` runs forwards until all ranks have ended, since each forward is a collective call.

    transformers asks a model that has a `generate` for torch's mark of FSDP2, torch.compile for the second name.
    """
    for module in model.modules():
        if hasattr(module, "generate"):
            module._is_fsdp_managed_module = module._fsdp_use_orig_params = in_step  # type: ignore[assignment]


def _ids(params: Iterable[Any]) -> set[int]:
    return {id(param) for param in params}


def _params_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]
