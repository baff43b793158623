"""The strategy of Lightning's Trainer, implemented by an engine."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from ..engine.build import initialize
from ..engine.config.errors import ConfigError
from ..engine.config.parallel import world_faults
from ..engine.engine import Engine
from ..engine.model.deferred import DeferredModel
from ..engine.model.recording import Recording
from . import checkpoints
from .settings import EnginePrecision, Source, for_evaluation, for_training, of_strategy

_OfPackage: Any = object  # the mixin's base class at run time is the `DDPStrategy` of a Lightning package
_FITTING = "fit"
_NAME = "_lowtide_holder"


class _Holder:
    """A module attribute that copies of the module get empty: a copy has no engine."""

    def __init__(self, engine: Engine | None = None) -> None:
        self.engine = engine

    def __deepcopy__(self, memo: dict[int, Any]) -> _Holder:
        return _Holder()

    def __reduce__(self) -> tuple[type[_Holder], tuple[()]]:
        return _Holder, ()


def engine_of(module: nn.Module) -> Engine | None:
    """Return the module's open engine, made in an earlier call of any Trainer."""
    holder = module.__dict__.get(_NAME)
    if holder is None or holder.engine is None or not holder.engine.is_open:
        return None
    engine: Engine = holder.engine
    return engine


class EngineStrategy(_OfPackage):  # type: ignore[misc]  # mypy knows nothing of that class
    """Train a LightningModule by lowtide's engine, on ranks launched as for DDP.

        setup           configure_optimizers, then lowtide.initialize over the LightningModule
        *_step          a forward of the engine: `engine.run`; with manual optimization only the model's hooks
        backward, clip_gradients, optimizer_step      by the precision plugin: `EnginePrecision`
        save, load      folders with the engine's checkpoint and the Trainer's state: `checkpoints`

    A mixin for the `DDPStrategy` of a Lightning package, for processes, samplers and the reduction of metrics.
    """

    strategy_name = "lowtide"
    precision_class: type[EnginePrecision]
    optimizers: Any
    _precision_plugin: Any

    def __init__(
        self,
        config: Source | None = None,
        *,
        stage: int | None = None,
        offload_optimizer: str | None = None,
        offload_parameters: str | None = None,
        nvme_path: str | None = None,
        deferred_init: bool | None = None,
        **options: Any,
    ) -> None:
        """config: as in `lowtide.initialize`, without batch sizes. stage and the next three replace a config.

        offload_optimizer, offload_parameters: "cpu" or "nvme". nvme_path: default /local_nvme.
        deferred_init: whether modules made by `configure_model` get memory only when they are sharded; None: at stage
        3. Modules made on the meta device always do. options: of Lightning's strategies: accelerator,
        cluster_environment, parallel_devices, precision_plugin, process_group_backend, timeout.
        Raises ValueError and ConfigError.
        """
        self.config = of_strategy(config, stage, offload_optimizer, offload_parameters, nvme_path)
        # Of the current or last fit. For an evaluation without a fit it has no optimizer.
        self.engine: Engine | None = None
        self._defers = self.config.zero_optimization.stage == 3 if deferred_init is None else deferred_init
        self._recording: Recording | None = None  # of `configure_model`
        self._replaced: list[Any] = []  # paths of checkpoints to remove
        unknown = options.keys() - _OPTIONS
        if unknown:
            raise TypeError(
                f"LowtideStrategy: unknown argument {sorted(unknown)[0]!r}; expected config, stage, offload_optimizer, "
                f"offload_parameters, nvme_path, deferred_init, or one of {', '.join(sorted(_OPTIONS))}. Write "
                "settings of the engine into the config"
            )
        super().__init__(**options)

    # -- the Trainer's setup --------------------------------------------------------------------------------------

    @property
    def precision_plugin(self) -> Any:
        if self._precision_plugin is None:
            self._precision_plugin = self.precision_class()
        return self._precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Any) -> None:
        self._precision_plugin = None if plugin is None else self.precision_class.like(plugin)

    @property
    def checkpoint_io(self) -> Any:
        return super().checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: Any) -> None:
        raise ValueError(
            f"plugins: expected no CheckpointIO, found a {type(io).__name__}. Each rank writes its shards; "
            '"checkpoint": {"async": true} in the config writes them in the background'
        )

    def connect(self, model: Any) -> None:
        if self.engine is not None and self.engine.module is not model:
            self._close()
        self.engine = self.precision_plugin.engine = engine_of(model)  # of an earlier evaluation or fit
        # Each fit begins with a new engine: the Trainer calls `configure_optimizers` again.
        if model.trainer.state.fn == _FITTING:
            _check_callbacks(model.trainer)
            if self.engine is not None:
                _make_whole(self.engine)  # before callbacks copy the model
                self._close()
        super().connect(model)

    # -- ranks that take the same data ----------------------------------------------------------------------------

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Arguments of samplers: ranks that share layers (parallel.tensor) get the same data."""
        given: dict[str, Any] = super().distributed_sampler_kwargs
        sharers = self.config.parallel.ranks_of_sample
        if faults := world_faults(self.config.parallel, given["num_replicas"]):
            raise ConfigError(faults)
        return {"num_replicas": given["num_replicas"] // sharers, "rank": given["rank"] // sharers}

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce as DDP. A sum counts ranks with the same data once."""
        is_sum = str(getattr(reduce_op, "name", reduce_op)).lower() == "sum"
        if isinstance(tensor, torch.Tensor) and is_sum and self.global_rank % self.config.parallel.ranks_of_sample:
            tensor.zero_()  # `reduce` works in place, so the sum replaces the 0
        return super().reduce(tensor, group, reduce_op)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether all ranks, or any, say true. Each rank counts: it may decide by what it alone has seen."""
        votes = super().reduce(torch.tensor(int(decision), device=self.root_device), reduce_op="sum")
        return bool(votes == self.world_size if all else votes)

    # -- the model becomes an engine ------------------------------------------------------------------------------

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Wrap `configure_model`: deferred modules get their values when they are sharded."""
        if self.engine is not None:  # of an earlier fit: the model exists
            yield
            return
        self._recording = Recording()
        try:
            with self._recording.running(all_on_meta=self._defers):
                yield
        except ValueError as error:
            if not self._defers:
                raise
            raise ValueError(
                f"{error}. In a LightningModule: pass deferred_init=False to LowtideStrategy, or load weights after "
                "the start of the fit, by `trainer.strategy.engine.load_weights(...)`"
            ) from error

    def setup(self, trainer: Any) -> None:
        self.accelerator.setup(trainer)
        is_fit = trainer.state.fn == _FITTING
        if self.engine is not None:
            self._use_engine(self.engine)  # an evaluation of the trained model
            return
        module = self.lightning_module
        if is_fit and self._layer_sync:
            module = self._layer_sync.apply(module)
        model: Any = module
        if self._recording is not None:
            recording, self._recording = self._recording, None
            model = DeferredModel(lambda: module, recording)
        self.precision_plugin.convert_module(module)
        _move_without_parameters(module, self.root_device)
        self.model = module
        self._use_engine(self._training(trainer, model) if is_fit else self._evaluation(model))
        self.setup_precision_plugin()

    def _use_engine(self, engine: Engine) -> None:
        self.engine = self.precision_plugin.engine = engine
        self.model = self.lightning_module
        self.model.__dict__[_NAME] = _Holder(engine)

    def _training(self, trainer: Any, model: Any) -> Engine:
        by_value = getattr(trainer.gradient_clip_algorithm, "value", trainer.gradient_clip_algorithm) == "value"
        config = for_training(self.config, self.precision_plugin, self._device, trainer.gradient_clip_val, by_value)
        self._check_uses_config(trainer)
        # Before the engine: `configure_optimizers` must see whole parameters.
        self.setup_optimizers(trainer)
        own = [optimizer for optimizer in self.optimizers if type(optimizer).__name__ != "_MockOptimizer"]
        if len(own) > 1:
            raise ValueError(
                f"configure_optimizers: expected a single optimizer, found {len(own)}. A step of the engine clips all "
                "gradients together and updates all shards: use parameter groups of a single optimizer, or make an "
                "engine for each model by lowtide.initialize, without a Trainer"
            )
        if not own and config.optimizer is None:
            raise ValueError(
                "configure_optimizers: expected an optimizer here or in the config of LowtideStrategy, found neither"
            )
        if own and config.optimizer is not None:
            raise ValueError(
                f'optimizer: found both "{config.optimizer.type}" in the config and the {type(own[0]).__name__} of '
                "configure_optimizers. Remove the key, or return None"
            )
        engine = initialize(model, config, optimizer=own[0] if own else None)
        if own:
            own[0].add_param_group = engine.optimizer.add_param_group  # unfreezing callbacks call the given optimizer's
        self.optimizers = own or [engine.optimizer]
        return engine

    def _check_uses_config(self, trainer: Any) -> None:
        if self.config.scheduler is not None and self.config.optimizer is None:
            raise ValueError(
                f'scheduler: "{self.config.scheduler.type}" in the config needs an optimizer in the config. Return '
                "the scheduler from configure_optimizers instead"
            )

    def _evaluation(self, model: Any) -> Engine:
        config = for_training(self.config, self.precision_plugin, self._device, None)
        return initialize(model, for_evaluation(config))

    @property
    def _device(self) -> str:
        return str(self.root_device)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        return {}  # in the checkpoint of the engine

    # -- steps ----------------------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        module = self.lightning_module
        with self.precision_plugin.train_step_context():
            if module.automatic_optimization:
                return self._engine.run(module.training_step, *args, **kwargs)
            parallel = self.config.parallel
            if parallel.tensor > 1 or parallel.expert > 1:
                raise ValueError(
                    "automatic_optimization: expected true with parallel.tensor or parallel.expert, whose ranks run "
                    "each forward together, found manual optimization. Return the loss, or use lowtide.initialize"
                )
            return module.training_step(*args, **kwargs)  # calls backward and step itself

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.val_step_context(), _no_grad():
            return self._engine.run(self.lightning_module.validation_step, *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.test_step_context(), _no_grad():
            return self._engine.run(self.lightning_module.test_step, *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.predict_step_context(), _no_grad():
            return self._engine.run(self.lightning_module.predict_step, *args, **kwargs)

    def block_backward_sync(self) -> AbstractContextManager[None]:
        """Wrap all backwards of a step but the last."""
        return self._engine.no_sync()

    @property
    def _engine(self) -> Engine:
        return self.precision_plugin.needed_engine()  # type: ignore[no-any-return]

    # -- checkpoints ----------------------------------------------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        return False  # `load_checkpoint` restores it

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return {}  # in the checkpoint of the engine

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save a folder, written by all ranks. Raises TypeError for storage_options."""
        if storage_options is not None:
            raise TypeError("save_checkpoint: expected no storage_options, since no CheckpointIO uses them")
        self._finish_save()
        # Names may contain times or losses that differ between ranks: all write into rank 0's folder.
        checkpoints.save(self._engine, self.broadcast(filepath), checkpoint, self.is_global_zero)
        if self.lightning_module.trainer.state.finished:
            self._finish_save()  # no step follows, and the script may read the files
        self.barrier()

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint. With `async` it stays until the checkpoint that replaces it is complete."""
        if self.config.checkpoint.asynchronous:
            self._replaced.append(filepath)
        else:
            super().remove_checkpoint(filepath)

    def _finish_save(self) -> None:
        """Wait for a pending save, and remove the checkpoints that it replaces. A collective."""
        if self.engine is None:  # after an error, of perhaps this rank alone: the save may fail, so all stay
            return
        self.engine._archive.checkpoints.wait()
        replaced, self._replaced = self._replaced, []
        for path in replaced:
            super().remove_checkpoint(path)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Return the Trainer's state from our folder or an ordinary file of Lightning."""
        is_fit = self.lightning_module.trainer.state.fn == _FITTING
        return checkpoints.load(self._engine, self.broadcast(checkpoint_path), weights_only, is_fit, self._strict)

    @property
    def _strict(self) -> bool:
        return bool(self.lightning_module.strict_loading)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Do nothing: `load_checkpoint` loads the weights."""

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Do nothing: `load_checkpoint` loads the states."""

    # -- the end --------------------------------------------------------------------------------------------------

    def on_exception(self, exception: BaseException) -> None:
        engine, self.engine = self.engine, None
        if engine is not None:
            engine.__exit__(type(exception), exception, exception.__traceback__)
        super().on_exception(exception)

    def teardown(self) -> None:
        """End the run. The engine stays open for `save_checkpoint` and evaluations, until another model comes."""
        self._finish_save()
        module = self.lightning_module
        if module is not None and module._trainer is not None and self._layer_sync and self.engine is None:
            self._layer_sync.revert(module)
        self.precision_plugin.teardown()
        self.cluster_environment.teardown()
        self.accelerator.teardown()

    def _close(self) -> None:
        engine, self.engine = self.engine, None
        self.precision_plugin.engine = None
        if engine is not None:
            engine.close()

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Do nothing: Lightning calls it for its strategies, and `import lowtide.lightning` registers ours."""


_OPTIONS = {
    "accelerator",
    "cluster_environment",
    "parallel_devices",
    "precision_plugin",
    "process_group_backend",
    "timeout",
}


def _check_callbacks(trainer: Any) -> None:
    """Raise ValueError for callbacks that average the module's weights: the engine has shards of them.

    Make unfreezing callbacks compare parameters by identity.
    """
    for callback in trainer.callbacks:
        kinds = {kind.__name__ for kind in type(callback).__mro__}
        if kinds & {"WeightAveraging", "StochasticWeightAveraging"}:
            raise ValueError(
                f"callbacks: expected none that averages the module's weights, found a {type(callback).__name__}. "
                "Call `trainer.strategy.engine.ema(decay)` in on_fit_start, and evaluate and export in "
                "`with trainer.strategy.engine.ema_weights():`"
            )
        for kind in type(callback).__mro__:
            if "filter_on_optimizer" in vars(kind):  # of BaseFinetuning, which compares values: stage 3 has none
                kind.filter_on_optimizer = staticmethod(_not_in_optimizer)  # type: ignore[attr-defined]


def _not_in_optimizer(optimizer: torch.optim.Optimizer, params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Return the parameters that are in no group of the optimizer."""
    present = {id(param) for group in optimizer.param_groups for param in group["params"]}
    params = list(params)
    added = [param for param in params if id(param) not in present]
    if len(added) < len(params):
        warnings.warn(
            f"{len(params) - len(added)} of the provided params already exist within another group of this optimizer, "
            "and are skipped. In configure_optimizers, pass the optimizer only parameters with requires_grad",
            stacklevel=2,
        )
    return added


@contextmanager
def _no_grad() -> Iterator[None]:
    """Disable gradients without inference mode: a later backward cannot use its tensors."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def _move_without_parameters(module: nn.Module, device: torch.device) -> None:
    """Move modules without parameters, like metrics, and set `LightningModule.device`. The engine moves the rest."""
    if device.type == "cpu":
        return
    for part in module.modules():
        if not any(True for _ in part.parameters()):
            part.to(device)
    module._device = device  # type: ignore[assignment]


def _make_whole(engine: Engine) -> None:
    """Replace the module's sharded parameters by full copies, and close the engine."""
    module = engine.module
    with engine.gathered(), torch.no_grad():
        made = {id(p): nn.Parameter(p.detach().clone(), requires_grad=False) for p in module.parameters()}
    places = [(part._parameters, name) for part in module.modules() for name in part._parameters]
    sharded = [parameters[name] for parameters, name in places]
    # `close` works on the sharded parameters and unfreezes those of an evaluation, so the copies come after it.
    engine.close()
    for (parameters, name), param in zip(places, sharded, strict=True):
        if param is not None:
            parameters[name] = made[id(param)]
            made[id(param)].requires_grad = param.requires_grad
