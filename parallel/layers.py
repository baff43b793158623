"""Installs the splits of layers on a model: a rank gets its part of the inputs, and outputs are summed or gathered.

`SplitLayers` handles linear layers, embeddings and heads. `ExpertSums` handles experts of which each rank has some
columns: their outputs are summed once per layer.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..comm import Collectives
from ..model.patches import ModelPatches
from .collectives import copied, gathered, joined_columns, parted_columns, scattered, summed
from .experts import inputs_of
from .plan import TensorPlan
from .randomness import Randomness
from .sequence_regions import SequenceParallelRegions
from .splits import LayerSplit, Style, base_of, is_lora
from .vocab_parallel import VocabParallelLogits

_BIAS = "down_proj_bias"


class ExpertSums:
    """Sums the outputs of a module's experts over the ranks: each rank has some columns of each expert.

    Tokens and routing weights are `copied` before the module, and its output is `summed`.

    If a rank has a part of the tokens, the tokens are gathered with their choices and the sum is scattered. Experts
    treat each token alone, so any order of tokens is correct. These hooks lie outside the token exchange of an expert
    axis, so that exchange sends each token's row once and only the local terms of the sum.
    """

    def __init__(
        self, layer: LayerSplit, exchange: Collectives, parts: SequenceParallelRegions | None, patches: ModelPatches
    ) -> None:
        """Must run before the token exchange is installed on the module."""
        self._layer, self._exchange, self._parts = layer, exchange, parts
        module = layer.module
        self._inputs = inputs_of(module)
        patches.hook(module.register_forward_pre_hook(self._before, with_kwargs=True))
        patches.hook(module.register_forward_hook(self._behind))
        # Each rank has the whole bias and the outputs are summed, so the first rank of the axis alone adds it.
        if _BIAS in layer.parameters and exchange.place:
            patches.override(module, "forward", partial(_without_bias, module, module.forward))
        low, high = layer.inputs[exchange.place]
        # A forward that divides by its inner width must see that of its part.
        for key, value in list(vars(module).items()):
            if "intermediate" in key and type(value) is int and value == layer.inputs[-1][1]:
                patches.override(module, key, high - low)

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: Any) -> Any:
        x, choices, weights = *args, *(kwargs[name] for name in self._inputs[len(args) :])
        if self._has_part():
            return tuple(gathered(one, self._exchange, 0, self._layer.name) for one in (x, choices, weights)), {}
        return (self._copied(x), choices, self._copied(weights)), {}

    def _behind(self, module: nn.Module, args: Any, y: Tensor) -> Tensor:
        if self._has_part():
            return scattered(y, self._exchange, 0, self._layer.name)
        return summed(y, self._exchange, self._layer.name)

    def _has_part(self) -> bool:
        return self._parts is not None and self._parts.has_part(self._layer.module)

    def _copied(self, x: Tensor) -> Tensor:
        return copied(x, self._exchange, self._layer.name) if torch.is_grad_enabled() and x.requires_grad else x


def _without_bias(module: nn.Module, forward: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Run a module with its output bias as zeros, since the first rank adds it. The bias still gets its gradient."""
    bias: Any = module._parameters[_BIAS]
    # Not by setattr: torch refuses a plain tensor in the place of a parameter.
    module._parameters[_BIAS] = bias - bias.detach()
    try:
        return forward(*args, **kwargs)
    finally:
        module._parameters[_BIAS] = bias


class SplitLayers:
    """Installs the split layers of a model on a rank.

    | style      | before the layer                  | behind the layer                                       |
    |------------|-----------------------------------|--------------------------------------------------------|
    | column     | `copied`, once for all layers     | nothing: the next layer takes columns                  |
    |            | with the same input tensor        |                                                        |
    | gathered   | as column                         | `joined`                                               |
    | row        | nothing                           | `summed`, then the bias                                |
    | vocabulary | an embedding looks up local rows  | `summed`; the logits of a head stay in parts           |
    | experts    | `copied`: see `ExpertSums`        | `summed`, for all experts of a layer at once           |
    | partial    | nothing                           | a hook on each parameter sums the gradients of ranks   |

    If a rank has a part of the tokens between splits (`SequenceParallelRegions`), a gather replaces `copied` and a
    scatter replaces `summed`.

    Most layers get hooks only, so that other replacements of their forward (gradients in place, delayed weight
    gradients) keep working. Row splits with a bias and split embeddings get a new forward.
    """

    def __init__(
        self,
        plan: TensorPlan,
        model: nn.Module,
        exchange: Collectives,
        randomness: Randomness | None,
        patches: ModelPatches,
        parts: SequenceParallelRegions | None = None,
    ) -> None:
        """Parameters have their local shapes, or get them before the first forward."""
        self._exchange = exchange
        self._randomness = randomness
        self._parts = parts
        self._last: tuple[weakref.ref[Tensor], Tensor] | None = None  # (input, its copy), until the next row split
        parents = {id(child): module for module in model.modules() for child in module.children()}
        self._put_on_adapters(plan, model, parents, patches)
        for layer in plan.layers:
            self._put(layer, parents[id(layer.module)], patches)
        for heads in plan.heads:
            # Attention code views its projections as (..., heads, size), so it must read the counts of this rank.
            for name, value in heads.local_counts(plan.degree):
                patches.override(heads.module, name, value)
        self._override_sizes(plan, patches)
        patches.hook(model.register_forward_hook(self._forget, always_call=True))
        if randomness is not None:
            patches.hook(model.register_forward_pre_hook(lambda *_: randomness.begin()))
            # also after an error: a self-check compares the next random numbers
            patches.hook(model.register_forward_hook(partial(_return, randomness), always_call=True))

    def _forget(self, *_: object) -> None:
        """Drop the copy between columns and rows, since it would keep the graph of a forward alive."""
        self._last = None

    def _put(self, layer: LayerSplit, parent: nn.Module, patches: ModelPatches) -> None:
        module, bias = layer.module, getattr(layer.module, "bias", None)
        # A column-split embedding (T5's position bias) takes indices: there is no gradient to sum.
        if layer.style in (Style.COLUMN, Style.GATHERED) and not isinstance(module, nn.Embedding):
            patches.hook(module.register_forward_pre_hook(partial(self._before_columns, layer, parent)))
            if layer.style is Style.GATHERED:
                patches.hook(module.register_forward_hook(partial(self._behind_gathered, layer)))
        elif layer.style is Style.ROW:
            patches.hook(module.register_forward_pre_hook(partial(self._before_rows, layer)))
            if bias is None:
                patches.hook(module.register_forward_hook(partial(self._behind_rows, layer)))
            else:
                patches.override(module, "forward", partial(self._rows_with_bias, layer))
        elif layer.style is Style.VOCABULARY:
            first, numel = self._first_of(layer), self._numel_of(layer)
            if isinstance(module, nn.Embedding):
                self._override_padding(module, layer, first, patches)
                # The inner forward, since Gemma and Bart scale the rows of their embeddings.
                patches.override(module, "forward", partial(self._embedded, layer, first, numel, module.forward))
            else:
                patches.hook(module.register_forward_pre_hook(partial(self._before_logits, layer)))
                patches.hook(module.register_forward_hook(partial(self._behind_logits, first, numel)))
        elif layer.style is Style.EXPERTS:
            ExpertSums(layer, self._exchange, self._parts, patches)
        for key, split in layer.parameters.items():
            if split.is_partial:
                _hook_gradient(module.get_parameter(key), partial(self._added_up, layer, key), patches)

    def _put_on_adapters(
        self, plan: TensorPlan, model: nn.Module, parents: dict[int, nn.Module], patches: ModelPatches
    ) -> None:
        """Draw from the common stream if an adapter sees whole tensors, else from the private stream."""
        styles = {id(layer.module): layer.style for layer in plan.layers}
        self._in_adapters = {id(part) for one in model.modules() if is_lora(one) for part in one.modules()}
        randomness = self._randomness
        for wrapper in filter(is_lora, model.modules()):
            base, outer = base_of(wrapper), parents[id(wrapper)]
            style = styles.get(id(base))
            if randomness is None or style not in (Style.COLUMN, Style.ROW):
                continue
            # PEFT runs the base layer first. Then it drops out the adapter's input: all of it beside columns, a part of
            # it beside rows.
            leave, back = partial(_leave, randomness, outer), partial(_return, randomness)
            if style is Style.COLUMN:
                patches.hook(wrapper.register_forward_pre_hook(back))
                patches.hook(wrapper.register_forward_hook(leave))
            else:
                patches.hook(base.register_forward_hook(leave))
                patches.hook(wrapper.register_forward_hook(back))

    def _override_sizes(self, plan: TensorPlan, patches: ModelPatches) -> None:
        """Set the sizes that a layer reports to those of its part, since users print and check them."""
        for layer in plan.layers:
            weight = layer.parameters.get("weight")
            if weight is None or isinstance(layer.module, nn.Embedding) or layer.style is Style.PARTIAL:
                continue
            sizes = weight.tensor_shards[self._exchange.place].shape
            names = ("nx", "nf") if layer.is_transposed else ("out_features", "in_features")
            for name, size in zip(names, sizes, strict=True):
                patches.override(layer.module, name, size)

    def _override_padding(self, module: nn.Embedding, layer: LayerSplit, first: int, patches: ModelPatches) -> None:
        """Set `padding_idx` to its local row number, or to None if another rank has the row."""
        if module.padding_idx is not None:
            own = module.padding_idx - first
            count = layer.parameters["weight"].tensor_shards[self._exchange.place].shape[0]
            patches.override(module, "padding_idx", own if 0 <= own < count else None)

    # -- columns --------------------------------------------------------------------------------------------------

    def _before_columns(self, layer: LayerSplit, parent: nn.Module, module: nn.Module, args: Any) -> Any:
        given = _input_of(layer, args)
        parts = self._parts_around(module)
        x = None if parts is None else parts.for_columns(given, module, layer.name)
        if x is None:
            # No layer shares the input of a LoRA matrix. If its copy were kept, it would replace the copy that the next
            # projection (keys, values) shares.
            x = self._copied(given, layer.name, is_kept=id(parent) not in self._in_adapters or is_lora(parent))
        # Within a region the block has left the common stream. Behind a gathered layer all ranks compute the same.
        is_drawn = layer.style is Style.COLUMN and parent.training and id(module) not in self._in_adapters
        if parts is None and self._randomness is not None and is_drawn:
            self._randomness.leave_common(parent)
        return x, *args[1:]

    def _parts_around(self, module: nn.Module) -> SequenceParallelRegions | None:
        """Return the token parts that a layer computes with now, or None."""
        return self._parts if self._parts is not None and self._parts.has(module) and not self._parts.is_plain else None

    def _copied(self, x: Tensor, what: str, is_kept: bool = True) -> Tensor:
        """Copy each tensor once: queries, keys and values of one input give a single sum of its gradient."""
        if not (torch.is_grad_enabled() and x.requires_grad):
            return x
        if self._last is not None and self._last[0]() is x:
            return self._last[1]
        copy = copied(x, self._exchange, what)
        if is_kept:
            self._last = weakref.ref(x), copy  # the copy too: autograd may hold only a view of it
        return copy

    def _behind_gathered(self, layer: LayerSplit, module: nn.Module, args: Any, y: Tensor) -> Tensor:
        return joined_columns(y, self._exchange, self._numel_of(layer), layer.name)

    # -- rows -----------------------------------------------------------------------------------------------------

    def _before_rows(self, layer: LayerSplit, module: nn.Module, args: Any) -> Any:
        # Within a region, the last block returns to the common stream.
        if self._randomness is not None and (self._parts is None or not self._parts.has(module)):
            self._randomness.return_to_common()
        self._last = None
        x = _input_of(layer, args)
        low, high = layer.inputs[self._exchange.place]
        whole = layer.inputs[-1][1]
        if x.shape[-1] == high - low:
            return None
        if x.shape[-1] != whole:
            raise ValueError(
                f"'{layer.name}': expected {high - low} inputs (this rank's part of {whole}), found {x.shape[-1]}; "
                "check that the layer before it is split by columns"
            )
        # The layers before this one are whole or gathered ("whole" in a plan), so all ranks have all inputs.
        return parted_columns(x, self._exchange, layer.name), *args[1:]

    def _behind_rows(self, layer: LayerSplit, module: nn.Module, args: Any, y: Tensor) -> Tensor:
        return self._brought_together(y, layer)

    def _brought_together(self, y: Tensor, layer: LayerSplit) -> Tensor:
        parts = self._parts_around(layer.module)
        if parts is not None:
            return parts.behind_rows(y, layer.module, layer.name)
        return summed(y, self._exchange, layer.name)

    def _rows_with_bias(self, layer: LayerSplit, x: Tensor) -> Tensor:
        weight: Tensor = layer.module.weight  # type: ignore[assignment]  # in tiles an alias of the parameter
        bias: Tensor = layer.module.bias  # type: ignore[assignment]
        y = functional.linear(x, weight.t() if layer.is_transposed else weight)
        return self._brought_together(y, layer) + bias.to(y.dtype)  # autocast multiplies in a narrower dtype

    # -- vocabularies ---------------------------------------------------------------------------------------------

    def _first_of(self, layer: LayerSplit) -> int:
        (chunk, _), *_ = layer.parameters["weight"].tensor_shards[self._exchange.place].chunks
        return chunk.offsets[1 if layer.is_transposed else 0]

    def _numel_of(self, layer: LayerSplit) -> int:
        return layer.parameters["weight"].tensor_shards[0].whole[1 if layer.is_transposed else 0]

    def _embedded(
        self, layer: LayerSplit, first: int, numel: int, inner: Callable[[Tensor], Tensor], ids: Tensor
    ) -> Tensor:
        own = ids - first
        is_own = (own >= 0) & (own < layer.parameters["weight"].tensor_shards[self._exchange.place].shape[0])
        is_outside = (ids < 0) | (ids >= numel)  # gets an index outside every rank's rows, so torch raises its error
        found = inner(own.where(is_own, is_outside * numel))
        # Row 0 was looked up for ids of other ranks. The factor clears it, and its gradient.
        total = summed(found * is_own[..., None], self._exchange, layer.name)
        # A pipeline stage that traces this forward must see a torch function that makes the result.
        return total.view_as(total) if torch._C._len_torch_function_stack() else total

    def _before_logits(self, layer: LayerSplit, module: nn.Module, args: Any) -> Any:
        return self._copied(_input_of(layer, args), layer.name), *args[1:]

    def _behind_logits(self, first: int, numel: int, module: nn.Module, args: Any, own: Tensor) -> VocabParallelLogits:
        """Wrap local logits. They may be tiled logits that are not computed yet."""
        return VocabParallelLogits(own, numel, first, self._exchange)

    # -- whole parameters -----------------------------------------------------------------------------------------

    def _added_up(self, layer: LayerSplit, key: str, gradient: Tensor) -> Tensor:
        """Sum a gradient over the ranks that have the same part of the parameter, with the same bits on each."""
        split, what = layer.parameters[key], f"the gradient of '{layer.name}.{key}'"
        tensor_shard = split.tensor_shards[self._exchange.place]
        if tensor_shard.is_all:
            return self._exchange.sum(gradient, what)
        # The sum is over all ranks of the axis, and some have different key heads: each adds zeros around its shard.
        return tensor_shard.take(self._exchange.sum(tensor_shard.put(gradient), what))


def _leave(randomness: Randomness, outer: nn.Module, module: nn.Module, *_: object) -> None:
    if module.training:
        randomness.leave_common(outer)


def _return(randomness: Randomness, *_: object) -> None:
    randomness.return_to_common()


def _input_of(layer: LayerSplit, args: Sequence[Any]) -> Any:
    """Return the first of the arguments. Raises ValueError without: a hook does not see named arguments."""
    if not args:
        raise ValueError(
            f"'{layer.name}': a split layer expects its input as a positional argument, found none; call it as layer(x)"
        )
    return args[0]


def _hook_gradient(param: nn.Parameter, hook: Any, patches: ModelPatches) -> None:
    """Register a hook on a parameter that may be frozen now and trained later."""
    is_trained = param.requires_grad
    # torch refuses hooks on tensors that require no gradient.
    param.requires_grad_(True)
    patches.hook(param.register_hook(hook))  # type: ignore[no-untyped-call]  # as torch has it
    param.requires_grad_(is_trained)
