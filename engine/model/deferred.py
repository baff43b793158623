"""Building a model without its memory: construction is recorded on the meta device and replayed bit by bit.

[Note: recording]
Under a dispatch mode every operation of the constructor runs on meta tensors and is written down with the storages that
it reads and writes. `values` runs the same operations on the real device in the same order, so that random numbers come
out as if the model had been built at once; a storage lives from its first operation to its last. A parameter is handed
over after its last operation and then forgotten: what is alive at a time is about one parameter.

[Note: weights drawn twice]
Many models draw their weights in a second pass over all modules (`apply(init_weights)`). The replay has to draw what
the first pass drew, since the random numbers that follow depend on it, but need not keep it until the second pass: a
storage is also forgotten after the last operation that uses it before another one fills it.

    operation          empty a   uniform a   empty b   uniform b   normal a   normal b
    a is alive         xxxxxxxxxxxxxxxxxxx                          xxxxxxxx
    b is alive                               xxxxxxxxxxxxxxxxxxx              xxxxxxxx

Idea: deferred initialization, as in torchdistx.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from ...watch.log import logger
from .later_model import LaterModel
from .plain_tensors import plain_tensors
from .recorded_generators import identity_of, restore
from .recorded_operations import View
from .recording import Recording

_NUM_NAMED = 3  # in an error; there may be hundreds


@dataclass(frozen=True)
class _Place:
    """Where a value of the model goes: to a parameter, or by each of `puts` to a buffer, an attribute, a list."""

    name: str
    param: nn.Parameter | None
    view: View
    is_hidden: bool = False  # a parameter that the model does not know
    requires_grad: bool = False
    puts: list[Callable[[Tensor], None]] = field(default_factory=list)

    def put(self, value: Tensor) -> None:
        """The same tensor everywhere. value: of its own memory."""
        one = nn.Parameter(value, self.requires_grad) if self.is_hidden else value.requires_grad_(self.requires_grad)
        for put in self.puts:
            put(one)


class DeferredModel(LaterModel):
    """A model on the meta device, whose real values `values` yields one parameter at a time."""

    def __init__(self, build: Callable[[], nn.Module], earlier: Recording | None = None) -> None:
        """build: constructs the model. earlier: of parts of it. What has its values at the end is `given`.

        Raises ValueError where it reads values of tensors while it constructs.
        """
        recording = Recording() if earlier is None else earlier
        with recording.running():
            module = build()
        if not isinstance(module, nn.Module):
            raise ValueError(f"model: expected a callable that returns an nn.Module, found {type(module).__name__}")
        self.module = module
        self.given = [param for param in module.parameters() if not param.is_meta]
        """Parameters that have their values already, which `values` does not yield."""
        if self.given and earlier is None:
            nbytes = sum(param.nbytes for param in self.given)
            logger.info("model: the builder made %d parameters with memory (%d bytes)", len(self.given), nbytes)
        # As when construction began.
        self.random_state = torch.get_rng_state() if recording.random_state is None else recording.random_state
        self.peak_bytes = 0  # of real values alive at a time, after `values` has run
        self._operations, self._constants, self._alive = recording.operations, recording.constants, recording.alive
        self._generators = list(recording.generators.values())
        self._places = self._replace_by_shells()

    def values(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """(parameter, its values on the CPU), each parameter once; buffers and other tensors are filled on the way.

        Random numbers are those of construction. What has been drawn since is not drawn again: then torch's generator
        is afterwards where it was before; else it goes on behind those of construction.
        """
        now, first = torch.get_rng_state(), self.random_state
        assert first is not None
        torch.set_rng_state(first)
        yield from self._replayed()
        if not torch.equal(now, first):
            torch.set_rng_state(now)

    def _replayed(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        last_use: dict[int, int] = {}
        for index, operation in enumerate(self._operations):
            for view in operation.views:
                last_use[view.storage] = index
        waiting: dict[int, list[_Place]] = {}
        for place in self._places:
            waiting.setdefault(place.view.storage, []).append(place)
        ending: dict[int, list[int]] = {}
        for storage, index in last_use.items():
            ending.setdefault(index, []).append(storage)
        overwritten = self._overwritten()
        real = dict(self._constants)
        for storage in [key for key in real if key not in last_use]:
            yield from self._hand_over(real, storage, waiting)
        kept: dict[int, list[torch.Generator]] = {}  # before which operation -> whose state is needed again
        for operation in self._operations:
            if operation.function is restore:
                generator, place = operation.args
                kept.setdefault(place, []).append(generator)
        states: dict[tuple[int, int], Tensor] = {}
        for one in self._generators:
            one.generator.set_state(one.first)
        for index, operation in enumerate(self._operations):
            for generator in kept.get(index, ()):
                states[identity_of(generator), index] = generator.get_state()
            if operation.function is restore:
                generator, place = operation.args
                generator.set_state(states[identity_of(generator), place])
            filled = operation.filled
            source = None if filled is None or last_use[filled] != index else operation.copied
            if filled is not None and source is not None:
                real[filled] = source  # perhaps a mapped file, of which only the pages of this rank's shards are read
            else:
                operation.run(real)
                nbytes = sum(tensor.untyped_storage().nbytes() for tensor in real.values())
                self.peak_bytes = max(self.peak_bytes, nbytes)
            for done in overwritten.get(index, ()):
                del real[done]
            for done in ending.get(index, ()):
                yield from self._hand_over(real, done, waiting)
        if waiting:
            names = [place.name for places in waiting.values() for place in places]
            more = f" and {len(names) - _NUM_NAMED} more" if len(names) > _NUM_NAMED else ""
            raise ValueError(
                "the model builder made parameters or buffers in a way that cannot be replayed, for example before it "
                f"was called: {', '.join(names[:_NUM_NAMED])}{more}; make them within the call, or pass the "
                "constructed module to initialize in its place"
            )

    def _overwritten(self) -> dict[int, list[int]]:
        """By operation: the storages whose next use is to be filled as a whole. See [Note: weights drawn twice]."""
        found: dict[int, list[int]] = {}
        latest_use: dict[int, int] = {}
        for index, operation in enumerate(self._operations):
            storage = operation.filled
            if storage is not None and storage in latest_use:
                found.setdefault(latest_use[storage], []).append(storage)
            for view in operation.views:
                latest_use[view.storage] = index
        return found

    def _hand_over(
        self,
        real: dict[int, Tensor],
        storage: int,
        waiting: dict[int, list[_Place]],
    ) -> Iterator[tuple[nn.Parameter, Tensor]]:
        base = real.pop(storage)
        for place in waiting.pop(storage, ()):
            tensor = place.view.of_values(base).resolve_conj().resolve_neg()
            if place.param is None:
                place.put(tensor.clone())
            else:
                yield place.param, tensor

    def _replace_by_shells(self) -> list[_Place]:
        """Parameters become real ones with a shape and no memory. Returns where each value goes."""
        shells: dict[int, nn.Parameter] = {}
        recorded: list[nn.Parameter] = []  # so that none gets the identity of one that is replaced
        given = set(map(id, self.given))
        places: dict[int, _Place] = {}  # by identity of the tensor
        for owner, module in self.module.named_modules():
            prefix = f"{owner}." if owner else ""
            for name, param in module._parameters.items():
                if param is None or id(param) in given or isinstance(param, nn.UninitializedParameter):
                    continue
                if id(param) not in shells:
                    nothing = torch.zeros((), dtype=param.dtype, device="cpu").expand(param.shape)
                    shell = shells[id(param)] = nn.Parameter(nothing, requires_grad=param.requires_grad)
                    _take_over(shell, param)
                    recorded.append(param)
                    places[id(param)] = _Place(prefix + name, shell, View.of(param))
                    self._alive.append(param.untyped_storage())
                module._parameters[name] = shells[id(param)]
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_meta:
                    self._await(places, prefix + name, buffer, partial(module._buffers.__setitem__, name))
        made = self._constants.keys() | {view.storage for one in self._operations for view in one.outputs}
        for name, tensor, put in plain_tensors(self.module):
            if id(tensor) in shells:
                put(shells[id(tensor)])
            elif tensor.is_meta and View.of(tensor).storage in made:  # else its maker wants it there
                self._await(places, name, tensor, put)
        return list(places.values())

    def _await(self, places: dict[int, _Place], name: str, tensor: Tensor, put: Callable[[Tensor], None]) -> None:
        """Its value goes there. A tensor that is in several places is one afterwards too."""
        if id(tensor) not in places:
            needs_grad = tensor.is_leaf and tensor.requires_grad
            places[id(tensor)] = _Place(name, None, View.of(tensor), isinstance(tensor, nn.Parameter), needs_grad)
            self._alive.append(tensor.untyped_storage())
        places[id(tensor)].puts.append(put)


def _take_over(shell: nn.Parameter, param: nn.Parameter) -> None:
    """What a constructor has put on a parameter: that it is not to decay, say, or hooks for its gradient."""
    vars(shell).update(vars(param))
    shell._backward_hooks = param._backward_hooks
    shell._post_accumulate_grad_hooks = param._post_accumulate_grad_hooks
