"""`deepspeed.pipe`: a model as a list of layers, each applied to the output of the layer before.

[Note: layers of all stages]
A rank builds only the LayerSpecs of its stage. But all ranks' engines need the same blueprint, with the names and
shapes of the whole model. So a rank also has the layers of all stages, on the meta device, without memory or random
draws. A write to them before `initialize` does nothing here and acts on the ranks that built them; `StagedModel` takes
the values from these ranks.

Without `seed_layers`, the random numbers of a layer depend on the layers before it. So the stages are built in turn,
and each passes its random state to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from ..comm import World
from ..engine.archive.agreement import no_rank_alone
from ..engine.archive.run_state import random_state, read_random_state, set_random_state
from ..engine.model.deferred import Found, LaterModel, move, plain_tensors
from ..engine.model.given_model import values_of
from ..engine.model.recording import Recording
from ..model.blocks import Layers
from ..pipe.split.split import plan_split
from . import comm
from .checkpointing import checkpoint
from .divided import is_dividing, join_world, table_of
from .messages import set_random_seed, warning_once
from .small import call_to_str, recursive_getattr, recursive_setattr
from .topology import PipeDataParallelTopology, PipelineParallelGrid, ProcessTopology


class PipelineError(Exception):
    """Scripts catch errors of a pipeline by this name. lowtide raises ValueError."""


class LayerSpec:
    """A layer to build later. Raises RuntimeError for a class that is no module."""

    def __init__(self, typename: type[nn.Module], *module_args: Any, **module_kwargs: Any) -> None:
        if not (isinstance(typename, type) and issubclass(typename, nn.Module)):
            raise RuntimeError(f"LayerSpec: expected a class of nn.Module, found {typename!r}")
        self.typename = typename
        self.module_args = module_args
        self.module_kwargs = module_kwargs

    def __repr__(self) -> str:
        return call_to_str(self.typename.__name__, *self.module_args, **self.module_kwargs)

    def build(self, log: bool = False) -> nn.Module:
        """Build the module."""
        return self.typename(*self.module_args, **self.module_kwargs)


class TiedLayerSpec(LayerSpec):
    """A layer that shares the weights `tied_weight_attr` with all layers of the same `key`.

    It computes `forward_fn(module, inputs)`, or `module(inputs)`.
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
    """The module of a TiedLayerSpec. Its tied weights are those of the first module with the key."""

    def __init__(self, spec: TiedLayerSpec) -> None:
        super().__init__()
        self.module = spec.build()
        self.key = spec.key
        self._names = spec.tied_weight_attr
        self._forward_fn = spec.forward_fn

    def tie_to(self, first: _TiedLayer) -> None:
        for name in self._names:
            # A name may be a property, as in Megatron, so the weight is found by identity.
            own = recursive_getattr(self.module, name)
            paths = [path for path, param in self.module.named_parameters(remove_duplicate=False) if param is own]
            if not paths:
                raise ValueError(f"TiedLayerSpec: expected a parameter as tied_weight_attr '{name}', found {own!r}")
            for path in paths:
                recursive_setattr(self.module, path, recursive_getattr(first.module, name))

    def forward(self, inputs: Any) -> Any:
        return self.module(inputs) if self._forward_fn is None else self._forward_fn(self.module, inputs)


def _on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    """Build the module on the meta device."""
    try:
        with Recording().running():
            return build()
    except Exception:  # it reads values, e.g. random numbers; a real error is raised again below
        module = build()
    for param in module.parameters():
        move(param, torch.empty_like(param, device="meta"))
    return module


class PipelineModule(Layers):
    """Layers in sequence, over the stages of a pipeline. With a single stage it also works without an engine.

    layers: modules, specs, and functions without parameters. Each layer is a module named by its number.
    num_stages, or a topology with an axis "pipe". loss_fn: (output, labels) -> loss. The engine chooses the layers of
    each stage by parameters (pipeline.balance in the config); partition_method "uniform" or "type:REGEX" has no effect.

    All ranks must build it together. A rank builds only the specs of its stage, with the values of a whole model, and
    has the remaining layers on the meta device. In `zero.Init` each rank builds all layers and keeps its part.
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
                f'PipelineModule: partition_method "{partition_method}" has no effect. Stages are balanced by '
                "parameters; pipeline.balance in the config sets the blocks of each stage"
            )
        self.activation_checkpoint_interval = activation_checkpoint_interval
        self.activation_checkpoint_func = activation_checkpoint_func
        self.checkpointable_layers = checkpointable_layers
        self.forward_funcs: list[Callable[[Any], Any]] = []
        # Layer of a spec -> the first rank that built it, if not all did. See `StagedModel`.
        self.built_by: dict[int, int] = {}
        layers = list(layers)

        def build(index: int) -> Callable[[Any], Any]:
            if seed_layers:
                (seed_fn or set_random_seed)(base_seed + index)
            return self._build(index, layers[index])

        if self._has_other_stages(layers):
            self._build_own_stage(layers, build, in_turn=not seed_layers)
        else:
            self.forward_funcs += map(build, range(len(layers)))

    def _has_other_stages(self, layers: Sequence[Any]) -> bool:
        """Return whether this rank can leave specs to other stages: not on the meta device or inside `zero.Init`."""
        given = (param for layer in layers if isinstance(layer, nn.Module) for param in layer.parameters())
        return (
            self.num_pipeline_stages() > 1
            and any(isinstance(layer, LayerSpec) for layer in layers)
            and not torch.empty(0).is_meta
            and not is_dividing()
            and all(table_of(param) is None for param in given)
        )

    def _build_own_stage(
        self, layers: Sequence[Any], build: Callable[[int], Callable[[Any], Any]], *, in_turn: bool
    ) -> None:
        """Build this rank's stage: see [Note: layers of all stages]. in_turn: build stages in order. A collective."""
        world = join_world()

        def restore(states: Any) -> None:
            set_random_state(read_random_state(states, world.device), world.device)

        before = random_state(world.device)
        first = states = world.broadcast_object(before)
        restore(first)
        for index, layer in enumerate(layers):
            self.forward_funcs.append(self._build(index, layer, on_meta=True))
        spans = self._spans(len(layers))
        specs = {index for index, layer in enumerate(layers) if isinstance(layer, LayerSpec)}
        ranks_of_stage = world.size // len(spans)  # neighbours, as in the engine
        self.built_by = {
            index: stage * ranks_of_stage for stage, span in enumerate(spans) for index in span if index in specs
        }
        own = world.rank // ranks_of_stage
        for stages in [[stage] for stage in range(len(spans))] if in_turn else [range(len(spans))]:
            # A constructor may fail on a single rank. The broadcast below would then wait for ever.
            with no_rank_alone(world, "PipelineModule"):
                if own in stages:
                    restore(states)
                    for index in spans[own]:
                        self.forward_funcs[index] = build(index)
                    states = random_state(world.device)
            states = world.broadcast_object(states, stages[-1] * ranks_of_stage)
        for name, own_state in before.items():
            # No layer drew from this generator, or the ranks draw different numbers from it.
            if states[name] == first[name] or (in_turn and own_state != first[name]):
                states[name] = own_state
        restore(states)
        self._share_tied(world, spans[own])

    def _share_tied(self, world: World, own: Collection[int]) -> None:
        """Copy tied weights of an earlier stage to this rank's layers. A collective."""
        owners: dict[int, int] = {}
        for index, source in self.built_by.items():
            for param in self.get_submodule(str(index)).parameters():
                # The first stage with a tied weight has its values.
                owner = owners.setdefault(id(param), source)
                if owner != source:
                    given = torch.empty(param.shape, dtype=param.dtype) if param.is_meta else param.detach()
                    values = world.broadcast_tensor(given, owner)
                    if param.is_meta and index in own:
                        move(param, values.cpu())

    def _build(self, index: int, layer: Any, *, on_meta: bool = False) -> Callable[[Any], Any]:
        if isinstance(layer, LayerSpec):
            build = partial(_TiedLayer, layer) if isinstance(layer, TiedLayerSpec) else layer.build
            layer = _on_meta(build) if on_meta else build()
        if isinstance(layer, nn.Module):
            self.add_module(str(index), layer)
            if isinstance(layer, _TiedLayer):
                first, *others = (
                    one for one in self.children() if isinstance(one, _TiedLayer) and one.key == layer.key
                )
                for other in others:
                    other.tie_to(first)
            return layer
        if not callable(layer):
            raise TypeError(
                f"PipelineModule: expected modules, LayerSpecs and functions, found a {type(layer).__name__} as layer "
                f"{index}"
            )
        function: Callable[[Any], Any] = layer
        return function

    def _spans(self, num_layers: int) -> list[range]:
        """Return the layers of each stage, as the engine divides them: from its first block to that of the next."""
        plan = plan_split(self, self.num_pipeline_stages())
        blocks = [plan.blocks[plan.blocks_of(stage).start] for stage in range(1, plan.num_stages)]
        return [range(*ends) for ends in pairwise([0, *(int(name.partition(".")[0]) for name in blocks), num_layers])]

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Apply `fn`. Without values, on the meta device, take only the dtype of the result."""

        def change(tensor: Tensor) -> Any:
            if not tensor.is_meta:
                return fn(tensor)
            return torch.empty_like(tensor, dtype=fn(torch.empty(0, dtype=tensor.dtype)).dtype)

        return super()._apply(change, recurse)  # type: ignore[no-untyped-call]

    def forward(self, forward_input: Any, labels: Any = None) -> Any:
        """Return the output of the last layer. labels: unused; the engine passes them with the inputs to the loss."""
        if self.built_by:
            raise ValueError(
                f"PipelineModule: called a module of {self.num_stages} stages, but this rank has built only its stage. "
                "Give it to deepspeed.initialize and call engine.train_batch or eval_batch, or set num_stages=1"
            )
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
        """Return the loss of a microbatch of `batch_of`. Without loss_fn the output is the loss."""
        if self.loss_fn is None:
            found: Tensor = output
            return found
        return self.loss_fn(output, batch["labels"])

    @staticmethod
    def batch_of(drawn: Any) -> dict[str, Any]:
        """Return the arguments of `forward` for a loader's (inputs, labels). Raises ValueError for anything else."""
        if not isinstance(drawn, (tuple, list)) or len(drawn) != 2:
            raise ValueError(
                f"PipelineModule: expected microbatches of (inputs, labels), found a {type(drawn).__name__}"
                + (f" of {len(drawn)}" if isinstance(drawn, (tuple, list)) else "")
                + ". engine.set_batch_fn(fn) converts other forms"
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


class StagedModel(LaterModel):
    """Takes the values of each layer from the first rank that built it: see [Note: layers of all stages]."""

    module: PipelineModule

    def __init__(self, module: PipelineModule) -> None:
        self.module = module
        self.random_state = None
        self._world = join_world()
        self._built_by, module.built_by = module.built_by, {}
        self._layers = {source: nn.ModuleList() for source in self._built_by.values()}
        for index, source in self._built_by.items():
            self._layers[source].append(module.get_submodule(str(index)))
        params = {id(param): param for layers in self._layers.values() for param in layers.parameters()}
        self.given = [param for param in module.parameters() if id(param) not in params]
        self._absent = [param for param in params.values() if param.is_meta]
        for param in self._absent:
            # Building an engine needs a shape and a dtype on a real device. A single number takes no memory.
            move(param, torch.zeros((), dtype=param.dtype).expand(param.shape))

    def restore(self) -> None:
        """Restore the module, unless an engine has begun to take its values."""
        self.module.built_by = self._built_by
        for param in self._absent:
            move(param, torch.empty_like(param, device="meta"))

    def values(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        # From here the engine takes values, and `restore` must not touch the module.
        self._built_by, self._absent = {}, []
        done: set[int] = set()
        for source, layers in self._layers.items():
            params = [param for param in layers.parameters() if id(param) not in done]
            done.update(map(id, params))
            yield from values_of(params, self._world, source)
            self._fill_others(layers, source)

    def _fill_others(self, layers: nn.Module, source: int) -> None:
        """Copy buffers and remaining tensors: by the config, a rank may run layers that it has not built."""
        is_source = self._world.rank == source
        own = {name: tensor.cpu() for name, tensor, _ in _others(layers)} if is_source else {}
        found = self._world.broadcast_object(own, source)
        for name, tensor, put in _others(layers) if not is_source else ():
            if name in found:
                put(found[name] if tensor.is_meta else found[name].to(tensor.device))


def _others(layers: nn.Module) -> Found:
    """Yield buffers and all tensors that are no parameters, as `plain_tensors` does."""
    for owner, module in layers.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                yield f"{owner}.{name}", buffer, partial(module._buffers.__setitem__, name)
    yield from (found for found in plain_tensors(layers) if not isinstance(found[1], nn.Parameter))
