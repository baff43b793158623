"""Gives each rank a part of the tokens between the split layers of a stack of blocks (Megatron's sequence parallelism).

    whole | part -> norm -> [gather -> columns -> rows -> scatter] -> dropout, residual -> norm -> [...] -> | whole
          first block                                                                          last block

Within the brackets a rank sees all tokens of some columns. Outside, norms, dropout and residuals see all columns of
some tokens. A gather replaces `copied` and a scatter replaces `summed`, with the same bytes moved. Positions, masks and
rotary angles are made before the stack and are whole. If the ranks do not divide the tokens, zeros are added at the
first block, cut off by each gather and added by each scatter, so they count nowhere.
Source: Megatron-LM, arXiv 2205.05198, section 4.2.

[Note: inputs that are parts] A module with column-split layers gets all tokens when it is called, since its code uses
the shape of its input (heads, positions). Gathered are inputs as long as a part, except further inputs of the block
(masks, angles, encoder outputs), which are whole.

[Note: the first run] No rule sees how a block uses its tokens. So each block's first run computes it with all tokens
and with parts, and an error names a block with different results.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..comm import CollectiveError, Collectives
from ..model.patches import ModelPatches
from ..model.recomputing import copy_states, in_eval_mode
from .collectives import gathered_and_joined, joined, lengthened, parted, scattered
from .randomness import Randomness, draws
from .region_blocks import PartWatch, RegionBlock, RegionStarts, SequenceParallelRegion

_WIDE, _NARROW = 1e-3, 0.02  # relative to the largest value: matrix products of other shapes sum in another order
_RECORDED = ("output_hidden_states", "output_router_logits")


@dataclass
class _Stream:
    """The state of one stack's forward. last: output of the block before."""

    length: int = 0
    seed: int = 0
    last: weakref.ref[Tensor] | None = None
    last_name: str = ""


@dataclass(frozen=True)
class _Call:
    """A block that runs now. further_inputs: their identities; the first input is not among them."""

    length: int
    tokens: torch.Size  # shape of a part, without its width
    further_inputs: frozenset[int]


class SequenceParallelRegions:
    """Splits the tokens of a model's stacks. `SplitLayers` asks it for the input of columns and the output of rows."""

    def __init__(
        self,
        regions: tuple[SequenceParallelRegion, ...],
        tiled: frozenset[int],
        model: nn.Module,
        exchange: Collectives,
        randomness: Randomness,
        patches: ModelPatches,
    ) -> None:
        """tiled: identities of modules in tiles; a tile holds tokens of a part."""
        self._exchange, self._randomness = exchange, randomness
        self._starts = RegionStarts()
        self._streams: list[_Stream] = []
        self._tried = set[int]()
        self.is_plain = False
        self._call: _Call | None = None
        self._brought: tuple[weakref.ref[Tensor], Tensor, Tensor] | None = None  # part, gathered, joined
        self._of_blocks = {id(part) for s in regions for block in s.blocks for part in block.module.modules()}
        # Without the tiled module itself: it gets a part of the tokens, and the layers in it get tiles of this part.
        self._tiled = {id(p) for m in model.modules() if id(m) in tiled for p in m.modules() if p is not m}
        self._given_all = set[int]()  # identities of modules that get all tokens
        self._whole_inputs = set[tuple[int, Any]]()  # (module, input) that is a further input of the block
        self._watch: PartWatch | None = None
        self._watched = set[tuple[bool, bool]]()
        self._draws_alike = False  # whether a module in a block draws equal numbers on all ranks
        for stack in regions:
            stream = _Stream()
            self._streams.append(stream)
            for index, block in enumerate(stack.blocks):
                is_last = index + 1 == len(stack.blocks)
                run = partial(self._run, stream, block, index == 0, is_last, block.module.forward)
                patches.override(block.module, "forward", run)
                for module in (*block.split_modules, *block.replicated):
                    if id(module) not in tiled | self._tiled:
                        self._given_all |= {id(part) for part in module.modules()}
                        hook = module.register_forward_pre_hook(self._before_whole, with_kwargs=True)
                        patches.hook(hook)
                for module in block.replicated:
                    patches.hook(module.register_forward_hook(partial(self._behind_replicated, block)))
                for module in filter(draws, block.common):
                    randomness.draw_alike(module, partial(self._seed_of, stream), lambda: self.is_plain, patches)
                    self._draws_alike = True
        patches.hook(model.register_forward_pre_hook(self._begin, with_kwargs=True))
        patches.hook(model.register_forward_hook(self._end))
        patches.hook(model.register_forward_hook(self._stop_watch, always_call=True))

    def has(self, layer: nn.Module) -> bool:
        """Return whether the layer is in a block."""
        return id(layer) in self._of_blocks

    def has_part(self, layer: nn.Module) -> bool:
        """Return whether the layer is in a block and gets a part of the tokens now."""
        return self.has(layer) and not self.is_plain and id(layer) not in self._given_all

    # -- around the model -----------------------------------------------------------------------------------------

    def _begin(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        self._randomness.begin()
        self._call = self._brought = None
        for stream in self._streams:
            stream.last = None
        config = getattr(model, "config", None)
        for key in _RECORDED:
            if kwargs.get(key) or (kwargs.get(key) is None and getattr(config, key, False)):
                raise ValueError(
                    f"parallel.tensor_sequence: expected {key} to be false, found true: between blocks a rank has a "
                    f"part of the tokens; set {key} or parallel.tensor_sequence to false"
                )

        mode = model.training, torch.is_grad_enabled()
        if not self.is_plain and self._watch is None and mode not in self._watched:
            # Here, not at the end: a stage of a pipeline may leave a forward without its end.
            self._watched.add(mode)
            self._watch = PartWatch(lambda: self._call is not None)
            # By hand, since the model's forward runs between two hooks. `_stop_watch` leaves the mode, also after an
            # error.
            self._watch.__enter__()  # type: ignore[no-untyped-call]  # as torch has it

    def _stop_watch(self, model: nn.Module, *_: object) -> None:
        if self._watch is not None:
            watch, self._watch = self._watch, None
            if watch.has_refused:  # the next forward is watched again
                self._watched.discard((model.training, torch.is_grad_enabled()))
            watch.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _end(self, model: nn.Module, args: Any, output: Any) -> None:
        if self._watch is not None:
            self._watch.check(output)
        for stream in self._streams:
            if stream.last is not None:
                raise ValueError(
                    f"parallel.tensor_sequence: expected a forward through all blocks, found that it stopped after "
                    f"'{stream.last_name}', with a part of the tokens; set parallel.tensor_sequence to false"
                )

    # -- blocks ---------------------------------------------------------------------------------------------------

    def _run(
        self,
        stream: _Stream,
        block: RegionBlock,
        is_first: bool,
        is_last: bool,
        inner: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        key, hidden = _hidden_of(block, args, kwargs)
        if self.is_plain:
            output = inner(*args, **kwargs)
            return _with_first(output, _first_of(block, output))
        is_again = torch._C._current_graph_task_id() != -1  # autograd runs: a recomputation in the backward
        if is_first:
            length, seed = hidden.shape[-2], 0
            if block.module.training and self._draws_alike:
                # Also in a recomputation, so that the next numbers are the same.
                seed = int(torch.empty((), dtype=torch.int64).random_())
            if not is_again:
                stream.length, stream.seed = length, seed
                self._starts.note(length, seed)
            if block.module.training:
                self._randomness.leave_common(stream)
            own = parted(lengthened(hidden, -2, self._padded(length)), self._exchange, hidden.dim() - 2, block.name)
        else:
            length, own = self._starts.of_recomputed()[0] if is_again else stream.length, hidden
            self._check_follows(stream, block, hidden, length, is_again)
        call, args, kwargs = self._call_of(key, own, length, args, kwargs)
        if id(block.module) not in self._tried and not is_again and not hidden.is_meta:
            self._try(block, call, key, own, inner, args, kwargs)
        with self._within(call):
            output = inner(*args, **kwargs)
        made = _first_of(block, output)
        if made.shape[:-1] != own.shape[:-1]:
            raise ValueError(
                f"parallel.tensor_sequence: '{block.name}': expected {tuple(own.shape[:-1])} tokens, this rank's part, "
                f"found {tuple(made.shape[:-1])}; set it to false"
            )
        if is_last:
            made = self._all_of(made, length, block.name)
        if not is_again:
            stream.last, stream.last_name = None if is_last else weakref.ref(made), block.name
            if self._watch is not None and not is_last:
                self._watch.note(made, block.name)
        # A recomputation may be of this block alone. The code behind it must find the common state, as in the forward.
        if is_last or is_again:
            self._randomness.return_to_common()
        return _with_first(output, made)

    def _all_of(self, part: Tensor, length: int, what: str) -> Tensor:
        whole = joined(part, self._exchange, part.dim() - 2, what)
        return whole if whole.shape[-2] == length else whole.narrow(-2, 0, length)

    def _padded(self, length: int) -> int:
        return -(-length // self._exchange.size) * self._exchange.size

    def _check_follows(self, stream: _Stream, block: RegionBlock, hidden: Tensor, length: int, is_again: bool) -> None:
        """Raise ValueError unless the input is the unchanged output of the block before."""
        last = None if stream.last is None else stream.last()
        # A hook or a checkpoint may pass on a view of the output.
        is_same = last is not None and (hidden is last or hidden.data_ptr() == last.data_ptr())
        if (is_again or is_same) and hidden.shape[-2] * self._exchange.size == self._padded(length):
            return
        raise ValueError(
            f"parallel.tensor_sequence: '{block.name}': expected the unchanged output of the block before it, this "
            f"rank's part of {length} tokens, found a different tensor, {tuple(hidden.shape)}: code between blocks "
            "sees a part of the tokens; set it to false"
        )

    def _call_of(self, key: Any, own: Tensor, length: int, args: Any, kwargs: Any) -> tuple[_Call, Any, Any]:
        if isinstance(key, int):
            args = (*args[:key], own, *args[key + 1 :])
        else:
            kwargs = {**kwargs, key: own}
        others = (one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor) and one is not own)
        return _Call(length, own.shape[:-1], frozenset(map(id, others))), args, kwargs

    @contextmanager
    def _within(self, call: _Call) -> Iterator[None]:
        before, self._call = self._call, call
        try:
            yield
        finally:
            self._call, self._brought = before, None

    # -- the first run --------------------------------------------------------------------------------------------

    def _try(
        self, block: RegionBlock, call: _Call, key: Any, own: Tensor, inner: Callable[..., Any], args: Any, kwargs: Any
    ) -> None:
        """See [Note: the first run]. Raises ValueError."""
        states = self._randomness.states()
        watched = [
            part.register_forward_pre_hook(partial(self._check_given_part, name, call), with_kwargs=True)
            for name, part in block.module.named_modules(prefix=block.name)
            if part is not block.module and part._parameters and id(part) not in self._given_all
        ]
        try:
            with in_eval_mode(block.module):
                apart, failed = None, None
                try:
                    with self._within(call):
                        apart = _first_of(block, inner(*copy_states(args), **copy_states(kwargs)))
                    apart = self._all_of(apart, call.length, block.name)
                except (RuntimeError, IndexError) as error:  # sizes that do not fit; they are the same on all ranks
                    # These come on a single rank, or tell that a rank is lost: the ranks would not meet in the next
                    # collective.
                    if isinstance(error, torch.OutOfMemoryError | CollectiveError):
                        raise
                    failed = error
                for handle in watched:
                    handle.remove()
                whole = self._all_of(own, call.length, block.name)
                _, args, kwargs = self._call_of(key, whole, call.length, args, kwargs)
                with self.with_all_tokens():
                    together = _first_of(block, inner(*copy_states(args), **copy_states(kwargs)))
        finally:
            for handle in watched:
                handle.remove()
            self._randomness.restore(states)
        # Here and after an error the next forward tries this block again.
        if failed is None and not bool(together.isfinite().all()):
            return  # the step reports values that are not finite
        is_narrow = together.itemsize < 4 or torch.is_autocast_enabled(together.device.type)
        most = (_NARROW if is_narrow else _WIDE) * together.abs().max() + 1e-6
        if apart is None or together.shape != apart.shape or bool((together - apart).abs().max() > most):
            found = "its output differs" if failed is None else f"it fails ({failed})"
            raise ValueError(
                f"parallel.tensor_sequence: expected that '{block.name}' ({type(block.module).__name__}) mixes tokens "
                f"only between column and row splits; with a part of the tokens on each rank {found}. Split the layers "
                "that mix tokens in tensor_parallel.plan, or set it to false"
            ) from failed
        self._tried.add(id(block.module))

    def _check_given_part(self, name: str, call: _Call, module: nn.Module, args: Any, kwargs: Any) -> None:
        leaves = tree_leaves((args, kwargs))
        given = [one for one in leaves if isinstance(one, Tensor) and id(one) in call.further_inputs]
        floating = [one for one in given if one.is_floating_point()]
        if floating and len(floating) == len(leaves):
            raise ValueError(
                f"parallel.tensor_sequence: '{name}': expected this rank's part of the tokens, found a further input "
                f"of the block, {tuple(floating[0].shape)}, which is equal on all ranks; set it to false"
            )

    # -- split layers ---------------------------------------------------------------------------------------------

    @contextmanager
    def with_all_tokens(self) -> Iterator[None]:
        """Let blocks compute with all tokens in this context."""
        self.is_plain = True
        try:
            yield
        finally:
            self.is_plain = False

    def _before_whole(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """See [Note: inputs that are parts]."""
        if self.is_plain:
            return None

        def given(which: int | str, value: Any) -> Any:
            return self._bring(value, module)[1] if self._is_part(value, (id(module), which)) else value

        return tuple(map(given, range(len(args)), args)), {name: given(name, value) for name, value in kwargs.items()}

    def _behind_replicated(self, block: RegionBlock, module: nn.Module, args: Any, output: Any) -> Any:
        """Keep this rank's part of an output that all ranks have."""
        if self.is_plain:
            return None
        whole = _first_of(block, output)
        whole = lengthened(whole, -2, self._padded(whole.shape[-2]))
        return _with_first(output, parted(whole, self._exchange, whole.dim() - 2, block.name))

    def _seed_of(self, stream: _Stream) -> int:
        """Return the shared seed of a stack's forward, also in its recomputation."""
        return stream.seed if torch._C._current_graph_task_id() == -1 else self._starts.of_recomputed()[1]

    def _is_part(self, value: Any, at: tuple[int, Any]) -> bool:
        """Return whether an input is a part. at: (module, input); a recomputed block knows no more about its inputs."""
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.dim() < 2:
            return False
        if self._call is None:
            length = self._length_in_backward(value)
            return value.shape[-2] * self._exchange.size == self._padded(length) and at not in self._whole_inputs
        if id(value) in self._call.further_inputs:
            self._whole_inputs.add(at)
            return False
        return value.shape[:-1] == self._call.tokens

    def _length_in_backward(self, x: Tensor) -> int:
        if torch._C._current_graph_task_id() == -1:
            raise ValueError(
                "parallel.tensor_sequence: expected that split layers run within a forward of their block, found a "
                f"direct call with {tuple(x.shape)}; call the model, or the block"
            )
        return self._starts.of_recomputed()[0]

    def _bring(self, part: Tensor, what: object, is_cut: bool = True) -> tuple[Tensor, Tensor]:
        """Gather all tokens, for columns and for equal use on ranks. Modules with the same input share them."""
        if self._brought is not None and self._brought[0]() is part:
            return self._brought[1:]
        # In a tile (not is_cut) each rank has as many tokens, and the padding is among them.
        length = part.shape[-2] * self._exchange.size
        if is_cut:
            length = self._call.length if self._call is not None else self._length_in_backward(part)
        name = what if isinstance(what, str) else type(what).__name__
        both = gathered_and_joined(part, self._exchange, part.dim() - 2, length, name)
        self._brought = weakref.ref(part), *both
        return both

    def for_columns(self, x: Tensor, layer: nn.Module, name: str) -> Tensor | None:
        """Return the gathered input of a column split, or None if all ranks have the same x."""
        # A module that was given all tokens passes on the joined tensor. Its columns need the gathered
        # tensor: the backward sums that gradient over the ranks.
        if self._brought is not None and (x is self._brought[2] or x is self._brought[1]):
            return self._brought[1]
        if id(layer) in self._tiled:
            return self._bring(x, name, is_cut=False)[0]
        if id(layer) in self._given_all or not self._is_part(x, (id(layer), 0)):
            return None
        return self._bring(x, name)[0]

    def behind_rows(self, y: Tensor, layer: nn.Module, name: str) -> Tensor:
        """Return this rank's part of the sum of y over the ranks."""
        if id(layer) not in self._tiled:
            length = self._call.length if self._call is not None else self._length_in_backward(y)
            if y.shape[-2] != length:
                raise ValueError(
                    f"parallel.tensor_sequence: '{name}': expected {length} tokens, as in the input of its block, "
                    f"found {y.shape[-2]}; set it to false"
                )
            y = lengthened(y, -2, self._padded(length))
        if self._call is None:
            self._brought = None  # a recomputation of the layer alone ends here
        return scattered(y, self._exchange, y.dim() - 2, name)


def _hidden_of(block: RegionBlock, args: Any, kwargs: Any) -> tuple[Any, Tensor]:
    """Return the key and the tensor of the tokens among a block's inputs. Raises ValueError."""
    found = next(((at, one) for at, one in enumerate(args) if isinstance(one, Tensor)), None)
    named = ((name, one) for name, one in kwargs.items() if isinstance(one, Tensor))
    found = found or next(named, None)
    if found is None or found[1].dim() < 2 or not found[1].is_floating_point():
        shown = "no tensor" if found is None else f"{tuple(found[1].shape)} of {found[1].dtype}"
        raise ValueError(
            f"parallel.tensor_sequence: '{block.name}': expected its tokens, (..., tokens, width), as its first input, "
            f"found {shown}; set it to false"
        )
    return found


def _first_of(block: RegionBlock, output: Any) -> Tensor:
    first = output[0] if isinstance(output, (tuple, list)) and output else output
    if not isinstance(first, Tensor):
        raise ValueError(
            f"parallel.tensor_sequence: '{block.name}': expected a tensor, or a tuple that starts with a tensor, as "
            f"its output, found {type(output).__name__}; set it to false"
        )
    return first


def _with_first(output: Any, first: Tensor) -> Any:
    return first if isinstance(output, Tensor) else type(output)((first, *output[1:]))
