"""What scripts import as `deepspeed.pipe`: a model as a list of layers, each of which takes what the last has given."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from ..model.blocks import Layers
from . import comm
from .checkpointing import checkpoint
from .messages import set_random_seed, warning_once
from .small import call_to_str, recursive_getattr, recursive_setattr
from .topology import PipeDataParallelTopology, PipelineParallelGrid, ProcessTopology


class PipelineError(Exception):
    """The name by which scripts catch errors of a pipeline; lowtide raises ValueError."""


class LayerSpec:
    """A layer that is not built yet. Raises RuntimeError for what is no class of modules."""

    def __init__(self, typename: type[nn.Module], *module_args: Any, **module_kwargs: Any) -> None:
        if not (isinstance(typename, type) and issubclass(typename, nn.Module)):
            raise RuntimeError(f"LayerSpec: expected a class of nn.Module, found {typename!r}")
        self.typename = typename
        self.module_args = module_args
        self.module_kwargs = module_kwargs

    def __repr__(self) -> str:
        return call_to_str(self.typename.__name__, *self.module_args, **self.module_kwargs)

    def build(self, log: bool = False) -> nn.Module:
        return self.typename(*self.module_args, **self.module_kwargs)


class TiedLayerSpec(LayerSpec):
    """One of several layers with the same `key`, which share the weights of these names.

    The layer is `forward_fn(module, inputs)`, or the module itself.
    """

    def __init__(
        self,
        key: str,
        typename: type[nn.Module],
        *module_args: Any,
        forward_fn: Callable[[nn.Module, Any], Any] | None = None,
        tied_weight_attr: str | Sequence[str] = ("weight",),
        **module_kwargs: Any,
    ) -> None:
        super().__init__(typename, *module_args, **module_kwargs)
        self.key = key
        self.forward_fn = forward_fn
        self.tied_weight_attr = [tied_weight_attr] if isinstance(tied_weight_attr, str) else list(tied_weight_attr)


class _TiedLayer(nn.Module):
    """What a TiedLayerSpec has built: a module of its own, whose tied weights are those of the first one."""

    def __init__(self, spec: TiedLayerSpec, first: nn.Module | None) -> None:
        super().__init__()
        self.module = spec.build()
        self._forward_fn = spec.forward_fn
        for name in spec.tied_weight_attr if first is not None else ():
            recursive_setattr(self.module, name, recursive_getattr(first, name))

    def forward(self, inputs: Any) -> Any:
        return self.module(inputs) if self._forward_fn is None else self._forward_fn(self.module, inputs)


class PipelineModule(Layers):
    """Layers one after the other, over the stages of a pipeline. Without an engine it is the whole model.

    layers: modules, specs, and functions without parameters. num_stages, or a topology with an axis "pipe". loss_fn:
    (output, labels) -> loss. Which stage has which layers the engine finds out by parameters (pipeline.balance in the
    config); partition_method "uniform" and "type:REGEX" are not taken over, and each layer is a module of its own name,
    its number.
    """

    def __init__(
        self,
        layers: Iterable[Any],
        num_stages: int | None = None,
        topology: ProcessTopology | None = None,
        loss_fn: Callable[[Any, Any], Tensor] | None = None,
        seed_layers: bool = False,
        seed_fn: Callable[[int], Any] | None = None,
        base_seed: int = 1234,
        partition_method: str = "parameters",
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Callable[..., Any] = checkpoint,
        checkpointable_layers: Sequence[str] | None = None,
        dynamic_shape: bool = False,
    ) -> None:
        super().__init__()
        if topology is None and num_stages is None:
            raise RuntimeError("PipelineModule: expected num_stages or a topology, found neither")
        comm.init_distributed()
        world_size = comm.get_world_size()
        self.num_stages = num_stages if topology is None else topology.get_dim("pipe")
        if topology is not None and topology.get_dim("model") > 1:
            raise NotImplementedError(
                "PipelineModule: expected a topology without model parallelism, found "
                f'{topology.get_dim("model")} ranks of it; set "parallel": {{"tensor": N}} in the config'
            )
        if world_size % (self.num_stages or 1):
            raise RuntimeError(
                f"PipelineModule: num_stages({self.num_stages}) x data(?) = world size({world_size}) does not hold"
            )
        assert self.num_stages is not None
        self._topo = topology or PipeDataParallelTopology(self.num_stages, world_size // self.num_stages)
        self._grid = PipelineParallelGrid(self._topo)
        self.loss_fn = loss_fn
        self.partition_method = partition_method
        if partition_method.lower() not in ("parameters", "best"):
            warning_once(
                f'PipelineModule: partition_method "{partition_method}" has no effect, stages are balanced by their '
                "parameters; pipeline.balance of the config says how many blocks each has"
            )
        self.activation_checkpoint_interval = activation_checkpoint_interval
        self.activation_checkpoint_func = activation_checkpoint_func
        self.checkpointable_layers = checkpointable_layers
        self._tied: dict[str, nn.Module] = {}
        self.forward_funcs: list[Callable[[Any], Any]] = []
        for index, layer in enumerate(layers):
            if seed_layers:
                (seed_fn or set_random_seed)(base_seed + index)
            self.forward_funcs.append(self._build(index, layer))

    def _build(self, index: int, layer: Any) -> Callable[[Any], Any]:
        if isinstance(layer, TiedLayerSpec):
            tied = _TiedLayer(layer, self._tied.get(layer.key))
            self._tied.setdefault(layer.key, tied.module)
            self.add_module(str(index), tied)
            return tied
        if isinstance(layer, (LayerSpec, nn.Module)):
            module = layer.build() if isinstance(layer, LayerSpec) else layer
            self.add_module(str(index), module)
            return module
        if not callable(layer):
            raise TypeError(
                f"PipelineModule: expected modules, LayerSpecs and functions, found a {type(layer).__name__} as layer "
                f"{index}"
            )
        function: Callable[[Any], Any] = layer
        return function

    def forward(self, forward_input: Any, labels: Any = None) -> Any:
        """What the last layer gives. labels: not used; the engine has them beside the inputs for the loss."""
        x = forward_input
        every = self.activation_checkpoint_interval
        if not every:
            return self._run(x, 0, len(self.forward_funcs))
        for start in range(0, len(self.forward_funcs), every):
            stop = min(start + every, len(self.forward_funcs))
            if self._is_checkpointable(start, stop):
                x = self.activation_checkpoint_func(partial(self._run, start=start, stop=stop), x)
            else:
                x = self._run(x, start, stop)
        return x

    def _run(self, x: Any, start: int, stop: int) -> Any:
        for layer in self.forward_funcs[start:stop]:
            x = layer(x)
        return x

    def _is_checkpointable(self, start: int, stop: int) -> bool:
        modules = [layer for layer in self.forward_funcs[start:stop] if isinstance(layer, nn.Module)]
        if self.checkpointable_layers is not None:
            return all(type(layer).__name__ in self.checkpointable_layers for layer in self.forward_funcs[start:stop])
        return any(True for module in modules for _ in module.parameters())

    def loss_of(self, output: Any, batch: Any) -> Tensor:
        """Of a microbatch as `batch_of` makes it: the loss, which is the output where there is no loss_fn."""
        if self.loss_fn is None:
            found: Tensor = output
            return found
        return self.loss_fn(output, batch["labels"])

    @staticmethod
    def batch_of(drawn: Any) -> dict[str, Any]:
        """The arguments of `forward` of what a loader gives, (inputs, labels). Raises ValueError for other things."""
        if not isinstance(drawn, (tuple, list)) or len(drawn) != 2:
            raise ValueError(
                f"PipelineModule: expected microbatches of (inputs, labels), found a {type(drawn).__name__}"
                + (f" of {len(drawn)}" if isinstance(drawn, (tuple, list)) else "")
                + "; engine.set_batch_fn(fn) makes them of others"
            )
        return {"forward_input": drawn[0], "labels": drawn[1]}

    def topology(self) -> ProcessTopology:
        return self._topo

    def num_pipeline_stages(self) -> int:
        assert self.num_stages is not None
        return self.num_stages

    def mpu(self) -> PipelineParallelGrid:
        return self._grid

    def set_checkpoint_interval(self, interval: int) -> None:
        self.activation_checkpoint_interval = interval

    def get_additional_losses(self) -> None:
        return None
