"""What scripts import as `deepspeed.pipe`: a model as a list of layers, each of which takes what the last has given.

[Note: layers of other stages]
A rank builds the LayerSpecs of its own stage. An engine has the same blueprint on all ranks, for which it asks the
modules of the whole model for names and shapes. So the layers of other stages are here too, on the meta device, where
they take no memory and no time to draw. What a script writes to them between here and `initialize` does nothing, and
has its effect on the ranks that have built them; `StagedModel` takes their values from these ranks.

Without `seed_layers` the random numbers of a layer hang on those of the layers before it. So the stages are built one
after the other, and each hands its random state on to the next.
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

    def __init__(self, spec: TiedLayerSpec) -> None:
        super().__init__()
        self.module = spec.build()
        self.key = spec.key
        self._names = spec.tied_weight_attr
        self._forward_fn = spec.forward_fn

    def tie_to(self, first: _TiedLayer) -> None:
        for name in self._names:
            recursive_setattr(self.module, name, recursive_getattr(first.module, name))

    def forward(self, inputs: Any) -> Any:
        return self.module(inputs) if self._forward_fn is None else self._forward_fn(self.module, inputs)


def _on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    """The module with parameters that have shapes alone."""
    try:
        with Recording().running():
            return build()
    except Exception:  # it reads values, of random numbers say; or it fails, and does so again
        module = build()
    for param in module.parameters():
        move(param, torch.empty_like(param, device="meta"))
    return module


class PipelineModule(Layers):
    """Layers one after the other, over the stages of a pipeline. With one stage it is a model without an engine too.

    layers: modules, specs, and functions without parameters. num_stages, or a topology with an axis "pipe". loss_fn:
    (output, labels) -> loss. Which stage has which layers the engine finds out by parameters (pipeline.balance in the
    config); partition_method "uniform" and "type:REGEX" are not taken over, and each layer is a module of its own name,
    its number.

    A rank builds the specs of its own stage, as parameters divide them; of others it has shapes alone, on the meta
    device. Values are those of a model of which all is built. All ranks make it together. In `zero.Init` each rank
    builds all, and has its part.
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
        self.forward_funcs: list[Callable[[Any], Any]] = []
        self.built_by: dict[int, int] = {}
        """Layer -> the first of the ranks that have built it: of specs, where others have not. See `StagedModel`."""
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
        """Whether there are specs that this rank need not build: not where values come later, or are divided anyway."""
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
        """See [Note: layers of other stages]. in_turn: one stage after the other. A collective."""
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
        ranks_of_stage = world.size // len(spans)  # they follow each other, as those of the engine's stages
        self.built_by = {
            index: stage * ranks_of_stage for stage, span in enumerate(spans) for index in span if index in specs
        }
        own = world.rank // ranks_of_stage
        for stages in [[stage] for stage in range(len(spans))] if in_turn else [range(len(spans))]:
            with no_rank_alone(world, "PipelineModule"):
                if own in stages:
                    restore(states)
                    for index in spans[own]:
                        self.forward_funcs[index] = build(index)
                    states = random_state(world.device)
            states = world.broadcast_object(states, stages[-1] * ranks_of_stage)
        for name, own_state in before.items():
            # A generator from which no layer has drawn, or from which the ranks draw different numbers.
            if states[name] == first[name] or (in_turn and own_state != first[name]):
                states[name] = own_state
        restore(states)
        self._share_tied(world, spans[own])

    def _share_tied(self, world: World, own: Collection[int]) -> None:
        """Gives this rank's layers the values of weights that are those of an earlier stage. A collective."""
        owners: dict[int, int] = {}
        for index, source in self.built_by.items():
            for param in self.get_submodule(str(index)).parameters():
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
        """The layers of each stage: as the engine divides them, from its first block to that of the next."""
        plan = plan_split(self, self.num_pipeline_stages())
        blocks = [plan.blocks[plan.blocks_of(stage).start] for stage in range(1, plan.num_stages)]
        return [range(*ends) for ends in pairwise([0, *(int(name.partition(".")[0]) for name in blocks), num_layers])]

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Layers of other stages have no values that could be moved: they take the dtype alone."""

        def change(tensor: Tensor) -> Any:
            if not tensor.is_meta:
                return fn(tensor)
            return torch.empty_like(tensor, dtype=fn(torch.empty(0, dtype=tensor.dtype)).dtype)

        return super()._apply(change, recurse)  # type: ignore[no-untyped-call]

    def forward(self, forward_input: Any, labels: Any = None) -> Any:
        """What the last layer gives. labels: not used; the engine has them beside the inputs for the loss."""
        if self.built_by:
            raise ValueError(
                "PipelineModule: expected engine.train_batch or eval_batch, found a call of the module, of which this "
                f"rank has built the layers of its own stage alone, of {self.num_stages} stages; give it to "
                "deepspeed.initialize, or set num_stages=1 for a whole model"
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


class StagedModel(LaterModel):
    """Takes the values of each layer from the first rank that has built it: see [Note: layers of other stages]."""

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
            move(param, torch.zeros((), dtype=param.dtype).expand(param.shape))

    def restore(self) -> None:
        """The module as before, where no engine has begun to take its values."""
        self.module.built_by = self._built_by
        for param in self._absent:
            move(param, torch.empty_like(param, device="meta"))

    def values(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        self._built_by, self._absent = {}, []
        done: set[int] = set()
        for source, layers in self._layers.items():
            params = [param for param in layers.parameters() if id(param) not in done]
            done.update(map(id, params))
            yield from values_of(params, self._world, source)
            self._fill_others(layers, source)

    def _fill_others(self, layers: nn.Module, source: int) -> None:
        """Buffers and other tensors: a rank may run layers that it has not built, where the config divides others."""
        is_source = self._world.rank == source
        own = {name: tensor.cpu() for name, tensor, _ in _others(layers)} if is_source else {}
        found = self._world.broadcast_object(own, source)
        for name, tensor, put in _others(layers) if not is_source else ():
            if name in found:
                put(found[name] if tensor.is_meta else found[name].to(tensor.device))


def _others(layers: nn.Module) -> Found:
    """As `plain_tensors`, with buffers."""
    for owner, module in layers.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                yield f"{owner}.{name}", buffer, partial(module._buffers.__setitem__, name)
    yield from (found for found in plain_tensors(layers) if not isinstance(found[1], nn.Parameter))
