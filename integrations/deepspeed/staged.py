"""A `PipelineModule` of which each rank has built the layers of its own stage, on its way into an engine."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn

from ..engine.model.deferred import Found, LaterModel, move, plain_tensors
from ..engine.model.given_model import values_of
from .init import join_world
from .layers import PipelineModule


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
