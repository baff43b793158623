"""Checks before the first step that split layers compute the same as whole layers.

A plan splits layers by their names. A name does not say that a layer fuses two layers, or that code between a column
and a row split mixes columns. So the smallest modules around both kinds of split run once with the inputs of the first
batch, split and with whole parameters that the ranks gather. These runs record no gradients and are in eval mode. Plans
that Hugging Face ships with its models are trusted.

`watch_copies` also compares the first gradients of replicated parameters.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ..comm import CollectiveError, Collectives
from ..model.patches import ModelPatches
from ..model.random_states import random_states
from ..model.recomputing import BufferValues
from ..pipe.split.trees import leaves
from .plan import TensorPlan
from .splits import LayerSplit, Style, is_linear

_MOST = 1e-4  # largest relative difference of outputs
MOST_NARROW = 3e-2  # in dtypes of less than 32 bits
_BLOCKS = "holds repeated blocks; put layers that follow each other into one module"
_LISTED = "has a list of experts; put layers that follow each other into a module beside it"
_CACHE = re.compile("cache", re.IGNORECASE)


class SplitSelfCheck:
    """Compares split modules with whole copies; of modules that repeat, the first. Make it before layers are split."""

    def __init__(
        self,
        plan: TensorPlan,
        model: nn.Module,
        units: Sequence[nn.Module],
        exchange: Collectives,
        with_all_tokens: Callable[[], AbstractContextManager[object]],
        experts: Sequence[nn.Module] = (),
    ) -> None:
        """Choose the modules.

        units: modules whose parameters exist only while they run. with_all_tokens: entered around the forward that is
        compared. experts: modules that send tokens to ranks of an expert axis, in the whole copies too.
        """
        modules = dict(model.named_modules())
        of_units = {name for name, module in modules.items() if any(module is unit for unit in units)}
        first: dict[str, str] = {}
        for layer in plan.layers:
            if layer.name in plan.guessed and (parent := _parent_of(layer, plan)) is not None:
                first.setdefault(re.sub(r"\b\d+\b", "*", parent), parent)
        self._experts = {name for name, module in modules.items() if any(module is one for one in experts)}
        self.left_out = {name: _BLOCKS for name in first.values() if any(_is_inside(unit, name) for unit in of_units)}
        """Modules that are not compared: name -> reason."""
        self.left_out |= {name: _LISTED for name in first.values() if name in self._experts}
        self.distances: dict[str, float] = {}
        """Relative distance of each module from the whole one; 0 if it is within the limit."""
        self._plan = plan
        self._exchange = exchange
        self._with_all_tokens = with_all_tokens
        self._parents = {name: modules[name] for name in first.values() if name not in self.left_out}
        self._wholes = {name: _without_values(module, experts) for name, module in self._parents.items()}
        self._hints = {name: _hint(name, plan) for name in self._parents}
        self._states: dict[str, list[Tensor]] = {}  # random generators when the module was called

    @contextmanager
    def compared(self, around_copy: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
        """Compare during a forward and fill `distances`. around_copy: entered around the forward of each whole copy."""
        self.distances = dict.fromkeys(self._parents, 0.0)
        handles: list[Any] = []
        for name, module in self._parents.items():
            behind = partial(self._compare, name, around_copy)
            # Before the other hooks behind the forward: ZeRO's releases the parameters.
            handles.append(module.register_forward_pre_hook(partial(self._note, name)))
            handles.append(module.register_forward_hook(behind, with_kwargs=True, prepend=True))
        try:
            with self._failures_named(), self._with_all_tokens():
                yield
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def _failures_named(self) -> Iterator[None]:
        self._states.clear()
        try:
            yield
        except (RuntimeError, IndexError) as error:  # sizes that do not fit; they are the same on all ranks
            if isinstance(error, torch.OutOfMemoryError | CollectiveError) or not self._states:
                raise
            name = list(self._states)[-1]  # the last module that was called and did not return
            raise ValueError(
                f"parallel.tensor: expected '{name}' to run with its layers split, found {type(error).__name__}: "
                f"{error}. {self._hints[name]}"
            ) from error

    @contextmanager
    def compared_in_passing(self, trying: Callable[[nn.Module], AbstractContextManager[object]]) -> Iterator[None]:
        """Compare during a forward that counts: each module is called once more before its first call.

        trying: a context without gradients, in eval mode.
        """
        self.distances = dict.fromkeys(self._parents, 0.0)
        handles: list[Any] = []

        def look(name: str, handle_at: int, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
            # The module may run several times in a forward: its first call is compared.
            handles[handle_at].remove()
            kwargs = _without_caches(kwargs)
            with trying(module):
                self._note(name, module, args)
                self._compare(name, nullcontext, module, args, kwargs, module.forward(*args, **kwargs))

        for at, (name, module) in enumerate(self._parents.items()):
            handles.append(module.register_forward_pre_hook(partial(look, name, at), with_kwargs=True))
        try:
            with self._failures_named():
                yield
        finally:
            for handle in handles:
                handle.remove()

    def check(self, wrong: Sequence[int]) -> None:
        """Raise ValueError if a module differed. wrong: on how many ranks each module differed."""
        self._exchange.release_slots()  # a whole parameter can be larger than any message of a step
        for (name, distance), count in zip(self.distances.items(), wrong, strict=True):
            if count:
                found = f"off by {distance:.2%} of their norm" if distance else "off on a different rank"
                raise ValueError(
                    f"parallel.tensor: expected the same outputs of '{name}' as without a split, found outputs "
                    f"{'of different shapes' if math.isinf(distance) else found}. The split of its layers does not "
                    f"match their use. {self._hints[name]}"
                )

    def _note(self, name: str, module: nn.Module, args: Any) -> None:
        self._states[name] = random_states(_device_of(module))

    def _compare(
        self,
        name: str,
        around_copy: Callable[[], AbstractContextManager[object]],
        module: nn.Module,
        args: Any,
        kwargs: Mapping[str, Any],
        output: Any,
    ) -> None:
        # A module that draws random numbers differs between two calls. All ranks find the same, as they run the same
        # module, so no rank waits in the sums of `_whole`.
        if not all(map(torch.equal, self._states.pop(name), random_states(_device_of(module)))):
            return
        kwargs = _without_caches(kwargs)
        prefix = f"{name}." if name else ""
        kept = [one for one in self._experts if _is_inside(one, name)]
        own = {
            key: param
            for key, param in module.named_parameters()
            if not any(_is_inside(prefix + key, one) for one in kept)
        }
        params = {key: self._whole(param, key) for key, param in own.items()}
        with around_copy(), BufferValues(self._wholes[name]):
            whole = functional_call(self._wholes[name], params, args, kwargs)
        pairs = zip(_tensors(output), _tensors(whole), strict=True)
        # Outputs of other shapes belong to this rank's heads (attention weights, position biases): nothing to compare.
        distances = [distance_of(own, right) for own, right in pairs if own.shape == right.shape]
        is_narrow = any(param.itemsize < 4 for param in module.parameters())
        is_narrow = is_narrow or torch.is_autocast_enabled(_device_of(module).type)
        most = MOST_NARROW if is_narrow else _MOST
        # No output of equal shape is infinitely far, and `check` then speaks of shapes.
        if (distance := max(distances, default=math.inf)) > most:
            self.distances[name] = distance

    def _whole(self, param: nn.Parameter, key: str) -> Tensor:
        exchange = self._exchange
        split = self._plan.parameters.get(id(param))
        own = param.detach()
        if split is None or split.tensor_shards[exchange.place].is_all:
            return own
        tensor_shard = split.tensor_shards[exchange.place]
        is_first = exchange.place == split.copies(exchange.place)[0]  # copies count once in the sum
        whole = tensor_shard.put(own) if is_first else own.new_zeros(tensor_shard.whole)
        return exchange.sum(whole, f"'{key}' as a whole")


def _without_caches(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Drop key caches, so that a call can be repeated."""
    return {key: None if _CACHE.search(type(value).__name__) else value for key, value in kwargs.items()}


def _parent_of(layer: LayerSplit, plan: TensorPlan) -> str | None:
    """Return the name of the smallest module around the layer with a column and a row split; None if none is needed."""
    if layer.style not in (Style.COLUMN, Style.ROW) or not is_linear(layer.module):
        return None
    other = Style.ROW if layer.style is Style.COLUMN else Style.COLUMN
    name = layer.name
    while name:
        name = name.rpartition(".")[0]
        if any(one.style is other and _is_inside(one.name, name) for one in plan.layers):
            return name
    return name


def _is_inside(inner: str, outer: str) -> bool:
    return inner != outer and (not outer or inner.startswith(f"{outer}."))


def _hint(parent: str, plan: TensorPlan) -> str:
    """Suggest a correction from the sizes of the layers."""
    inside = [
        layer
        for layer in plan.layers
        if _is_inside(layer.name, parent) and is_linear(layer.module) and layer.style is not Style.PARTIAL
    ]
    names = ", ".join(f"'{layer.name}' ({layer.style.value})" for layer in inside)
    for row in (layer for layer in inside if layer.style is Style.ROW):
        for layer in inside:
            inputs, (outputs, num_parts) = row.inputs[-1][1], _outputs_of(layer)
            if layer.style is Style.COLUMN and num_parts == 1 and outputs > inputs and outputs % inputs == 0:
                return (
                    f"'{layer.name}' has {outputs} outputs, '{row.name}' behind it {inputs} inputs: if it fuses "
                    f'{outputs // inputs} layers, give it the style "column/{outputs // inputs}" in '
                    f'tensor_parallel.plan, else give "whole" to both. Its layers: {names}'
                )
    return f'Change their styles in tensor_parallel.plan, or set "whole". Its layers: {names}'


def _outputs_of(layer: LayerSplit) -> tuple[int, int]:
    """Return the number of outputs, and of fused parts."""
    tensor_shard = layer.parameters["weight"].tensor_shards[0]
    return tensor_shard.whole[1 if layer.is_transposed else 0], len(tensor_shard.chunks)


def _device_of(module: nn.Module) -> torch.device:
    return next(module.parameters()).device


def _without_values(module: nn.Module, experts: Sequence[nn.Module]) -> nn.Module:
    """Copy a module without memory for its parameters. Experts are shared with the original."""
    # deepcopy takes this as its memo: it uses these objects and copies the rest.
    kept: dict[int, Any] = {id(param): nn.Parameter(torch.empty(0)) for param in module.parameters()}
    kept |= {id(one): one for one in experts}
    kept |= {id(buffer): buffer for buffer in module.buffers()}
    kept |= {id(part.config): part.config for part in module.modules() if hasattr(part, "config")}
    found, of_experts = copy.deepcopy(module, kept), {id(part) for one in experts for part in one.modules()}
    for part in found.modules():
        part.training = part.training and id(part) in of_experts  # shared modules keep the mode of the forward
    return found


def _tensors(value: Any) -> list[Tensor]:
    return [one for one in leaves(value) if isinstance(one, Tensor) and one.is_floating_point()]


def distance_of(found: Tensor, right: Tensor) -> float:
    """Return the relative distance of a tensor from the right one, by norms."""
    # A NaN in both, as behind a masked row, is no difference.
    found, right = (one.detach().double().nan_to_num() for one in (found, right))
    # Two tensors of zeros are equal.
    return float((found - right).norm() / right.norm().clamp(min=1e-30))


_MOST_APART = 1e-3  # largest relative difference of sums of a gradient: replicas differ by rounding at most


def watch_copies(plan: TensorPlan, model: nn.Module, exchange: Collectives, patches: ModelPatches) -> None:
    """Compare the first finite gradient, other than zeros, of each replicated parameter over the ranks, once.

    A parameter between a column and a row split that no plan names gets a part of its gradient on each rank. Without
    this check its replicas would drift apart silently.
    """
    for name, param in model.named_parameters():
        if id(param) not in plan.parameters and param.requires_grad:
            handles: list[Any] = []
            handle = param.register_hook(partial(_compare, name, exchange, handles))  # type: ignore[no-untyped-call]
            handles.append(handle)
            patches.hook(handle)


def _compare(name: str, exchange: Collectives, handles: list[Any], gradient: Tensor) -> None:
    own = gradient.detach().double() if gradient.device.type != "mps" else gradient.detach().float()
    # Relative to the sum of absolute values, since the plain sum may cancel to almost 0.
    sums = torch.stack([own.sum(), own.abs().sum()]).view(1, 2)
    found = exchange.gather(sums, 0, f"the first gradient of '{name}'")
    difference, size = (found[:, 0].max() - found[:, 0].min()).abs(), found[:, 1].max()
    if bool(difference > _MOST_APART * size):
        raise ValueError(
            f"parallel.tensor: expected equal gradients of the replicated '{name}' on {exchange.size} ranks, found "
            'different gradients: it is used between a column and a row split. Give its layer the style "partial" in '
            'tensor_parallel.plan, or "whole" to the layers around it'
        )
    # The hook removes itself: the collective is for the first backward alone, or the next one after an error. Zeros (in
    # front of a weight that starts at zero) and overflows show no difference, so the next gradient is compared too.
    if 0 < float(size) < math.inf:
        handles.pop().remove()
