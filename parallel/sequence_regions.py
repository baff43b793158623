"""Between the split layers of a stack of blocks, each rank has a part of the tokens (Megatron's sequence parallelism).

    whole | part -> norm -> [gather -> columns -> rows -> scatter] -> dropout, residual -> norm -> [...] -> | whole
          first block                                                                          last block

What is in brackets sees all tokens of some columns; beside it norms, dropout and residuals see all columns of some
tokens. The blocks take the place of `copied` by a gather and of `summed` by a scatter, which move the same bytes.
Positions, masks and rotary angles are made before the stack, and are whole. Where the ranks do not divide the tokens,
zeros are added at the first block, cut off by each gather and added by each scatter: they count nowhere.
Source: Megatron-LM, arXiv 2205.05198, section 4.2.

[Note: what is a part] A module with layers that are split by columns is given all tokens as it is called, since its own
code goes by the shape of what it is given (heads, positions). Of its inputs those are gathered that are as long as a
part, and are none of the block's other inputs (masks, angles, what an encoder gave), which are whole.

[Note: the first run] No rule sees what a block does with its tokens. So the first time that a block runs, it is
computed with all tokens and with parts, and an error says where that is not the same.
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
from ..model.recomputing import BufferValues, copy_states
from .collectives import gathered_and_joined, joined, lengthened, parted, scattered
from .randomness import CommonDraws, Randomness, draws
from .region_blocks import PartWatch, RegionBlock, RegionStarts, SequenceParallelRegion

_WIDE, _NARROW = 1e-3, 0.02  # of the largest value: products of other shapes are added in another order
_RECORDED = ("output_hidden_states", "output_router_logits")


@dataclass
class _Stream:
    """What the blocks of one stack are at. last: what the block before gave."""

    length: int = 0
    seed: int = 0
    last: weakref.ref[Tensor] | None = None
    last_name: str = ""


@dataclass(frozen=True)
class _Call:
    """A block that runs now. wholes: identities of its other inputs."""

    length: int
    tokens: torch.Size  # shape of a part, but for its width
    wholes: frozenset[int]


class SequenceParallelRegions:
    """Puts parts on the stacks of a model; `SplitLayers` asks it what goes into columns and comes out of rows."""

    def __init__(
        self,
        stacks: tuple[SequenceParallelRegion, ...],
        tiled: frozenset[int],
        model: nn.Module,
        exchange: Collectives,
        randomness: Randomness,
        ledger: ModelPatches,
    ) -> None:
        """tiled: identities of modules in tiles, whose tiles are of parts."""
        self._exchange, self._randomness = exchange, randomness
        self._starts = RegionStarts()
        self._streams: list[_Stream] = []
        self._tried = set[int]()
        self._is_plain = False
        self._call: _Call | None = None
        self._brought: tuple[weakref.ref[Tensor], Tensor, Tensor] | None = None  # a part, for columns, for the rest
        self._of_blocks = {id(part) for s in stacks for block in s.blocks for part in block.module.modules()}
        self._tiled = {id(p) for m in model.modules() if id(m) in tiled for p in m.modules() if p is not m}
        self._given_all = set[int]()  # modules in what is given all tokens
        self._whole_inputs = set[tuple[int, Any]]()  # (module, which): given what its block was given beside tokens
        self._watch: PartWatch | None = None
        self._watched = set[tuple[bool, bool]]()
        self._common = CommonDraws(randomness, lambda: self._is_plain)
        for stack in stacks:
            stream = _Stream()
            self._streams.append(stream)
            for index, block in enumerate(stack.blocks):
                is_last = index + 1 == len(stack.blocks)
                run = partial(self._run, stream, block, index == 0, is_last, block.module.forward)
                ledger.override(block.module, "forward", run)
                for module in (*block.wholes, *block.alike):
                    if id(module) not in tiled | self._tiled:
                        self._given_all |= {id(part) for part in module.modules()}
                        hook = module.register_forward_pre_hook(self._before_whole, with_kwargs=True)
                        ledger.hook(hook)
                for module in block.alike:
                    ledger.hook(module.register_forward_hook(partial(self._behind_alike, block)))
                for module in filter(draws, block.common):
                    self._common.put_on(module, partial(self._seed_of, stream), ledger)
        ledger.hook(model.register_forward_pre_hook(self._begin, with_kwargs=True))
        ledger.hook(model.register_forward_hook(self._end))
        ledger.hook(model.register_forward_hook(self._stop_watch, always_call=True))

    def has(self, layer: nn.Module) -> bool:
        """Whether the layer is in a block."""
        return id(layer) in self._of_blocks

    def has_part(self, layer: nn.Module) -> bool:
        """Whether the layer is in a block, and is given a part of the tokens now."""
        return self.has(layer) and not self._is_plain and id(layer) not in self._given_all

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
                    "part of the tokens; set it to false, or parallel.tensor_sequence"
                )

        mode = model.training, torch.is_grad_enabled()
        if not self._is_plain and self._watch is None and mode not in self._watched:
            self._watched.add(mode)
            self._watch = PartWatch(lambda: self._call is not None)
            self._watch.__enter__()  # type: ignore[no-untyped-call]  # as torch has it

    def _stop_watch(self, *_: object) -> None:
        if self._watch is not None:
            watch, self._watch = self._watch, None
            watch.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _end(self, model: nn.Module, args: Any, output: Any) -> None:
        if self._watch is not None:
            self._watch.check(output)
        for stream in self._streams:
            if stream.last is not None:
                raise ValueError(
                    f"parallel.tensor_sequence: expected a forward through all blocks, found that '{stream.last_name}' "
                    "was the last one: what it gave is a part of the tokens; set parallel.tensor_sequence to false"
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
        if self._is_plain:
            output = inner(*args, **kwargs)
            return _with_first(output, _first_of(block, output))
        is_again = torch._C._current_graph_task_id() != -1
        if is_first:
            length, seed = hidden.shape[-2], 0
            if block.module.training and len(self._common):
                seed = int(torch.empty((), dtype=torch.int64).random_())  # again too: what is drawn next is the same
            if not is_again:
                stream.length, stream.seed = length, seed
                self._starts.note(length, seed)
            if block.module.training:
                self._randomness.leave_common(stream)
            own = parted(lengthened(hidden, -2, self._padded(length)), self._exchange, hidden.dim() - 2, block.name)
        else:
            length, own = self._starts.of_recomputed().length if is_again else stream.length, hidden
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
        if is_last or is_again:
            self._randomness.return_to_common()
        return _with_first(output, made)

    def _all_of(self, part: Tensor, length: int, what: str) -> Tensor:
        whole = joined(part, self._exchange, part.dim() - 2, what)
        return whole if whole.shape[-2] == length else whole.narrow(-2, 0, length)

    def _padded(self, length: int) -> int:
        return -(-length // self._exchange.size) * self._exchange.size

    def _check_follows(self, stream: _Stream, block: RegionBlock, hidden: Tensor, length: int, is_again: bool) -> None:
        """Whether it is given what the block before has given, untouched."""
        last = None if stream.last is None else stream.last()
        is_same = last is not None and (hidden is last or hidden.data_ptr() == last.data_ptr())
        if (is_again or is_same) and hidden.shape[-2] * self._exchange.size == self._padded(length):
            return
        raise ValueError(
            f"parallel.tensor_sequence: '{block.name}': expected what the block before it gave, this rank's part of "
            f"{length} tokens, found another tensor, {tuple(hidden.shape)}: what lies between blocks sees a part "
            "of the tokens; set it to false"
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
        modes = [(part, part.training) for part in block.module.modules()]
        states = self._randomness.states()
        watched = [
            part.register_forward_pre_hook(partial(self._check_given_part, name, call), with_kwargs=True)
            for name, part in block.module.named_modules(prefix=block.name)
            if part is not block.module and part._parameters and id(part) not in self._given_all
        ]
        block.module.eval()
        try:
            with BufferValues(block.module), torch.no_grad():
                apart, failed = None, None
                try:
                    with self._within(call):
                        apart = _first_of(block, inner(*copy_states(args), **copy_states(kwargs)))
                    apart = self._all_of(apart, call.length, block.name)
                except (RuntimeError, IndexError) as error:  # of sizes; on all ranks, which have the same
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
            for part, was_training in modes:
                part.training = was_training
            self._randomness.restore(states)
        if failed is None and not bool(together.isfinite().all()):
            return  # the step says of values that are not finite
        self._tried.add(id(block.module))
        is_narrow = together.itemsize < 4 or torch.is_autocast_enabled(together.device.type)
        most = (_NARROW if is_narrow else _WIDE) * together.abs().max() + 1e-6
        if apart is None or together.shape != apart.shape or bool((together - apart).abs().max() > most):
            found = "it is not what it is with all of them" if failed is None else f"it fails ({failed})"
            raise ValueError(
                f"parallel.tensor_sequence: expected that '{block.name}' ({type(block.module).__name__}) mixes tokens "
                f"between columns and rows alone; computed with a part of the tokens on each rank {found}. Split what "
                "mixes them in tensor_parallel.plan, or set it to false"
            ) from failed

    def _check_given_part(self, name: str, call: _Call, module: nn.Module, args: Any, kwargs: Any) -> None:
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor) and id(one) in call.wholes]
        floating = [one for one in given if one.is_floating_point()]
        if floating and len(floating) == len(tree_leaves((args, kwargs))):
            raise ValueError(
                f"parallel.tensor_sequence: '{name}': expected this rank's part of the tokens, found what the block "
                f"was given beside them, {tuple(floating[0].shape)}, of which all ranks have the same; set it to false"
            )

    # -- split layers ---------------------------------------------------------------------------------------------

    @contextmanager
    def with_all_tokens(self) -> Iterator[None]:
        """In it, blocks compute with all tokens."""
        self._is_plain = True
        try:
            yield
        finally:
            self._is_plain = False

    @property
    def is_plain(self) -> bool:
        """Whether layers are to compute with all tokens now."""
        return self._is_plain

    def _before_whole(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """See [Note: what is a part]."""
        if self._is_plain:
            return None

        def given(which: int | str, value: Any) -> Any:
            return self._bring(value, module)[1] if self._is_part(value, (id(module), which)) else value

        return tuple(map(given, range(len(args)), args)), {name: given(name, value) for name, value in kwargs.items()}

    def _behind_alike(self, block: RegionBlock, module: nn.Module, args: Any, output: Any) -> Any:
        """This rank's part of what all have."""
        if self._is_plain:
            return None
        whole = _first_of(block, output)
        whole = lengthened(whole, -2, self._padded(whole.shape[-2]))
        return _with_first(output, parted(whole, self._exchange, whole.dim() - 2, block.name))

    def _seed_of(self, stream: _Stream) -> int:
        """Of what all ranks draw alike in the forward of a stack, also where it is computed again."""
        return stream.seed if torch._C._current_graph_task_id() == -1 else self._starts.of_recomputed().seed

    def _is_part(self, value: Any, at: tuple[int, Any]) -> bool:
        """at: the module that is given it, and which of its inputs that is; a block that is recomputed has no more."""
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.dim() < 2:
            return False
        if self._call is None:
            length = self._length_in_backward(value)
            return value.shape[-2] * self._exchange.size == self._padded(length) and at not in self._whole_inputs
        if id(value) in self._call.wholes:
            self._whole_inputs.add(at)
            return False
        return value.shape[:-1] == self._call.tokens

    def _length_in_backward(self, x: Tensor) -> int:
        if torch._C._current_graph_task_id() == -1:
            raise ValueError(
                "parallel.tensor_sequence: expected split layers in a forward of their block, found a call beside it, "
                f"of {tuple(x.shape)}; call the model, or the block"
            )
        return self._starts.of_recomputed().length

    def _bring(self, part: Tensor, what: object, is_cut: bool = True) -> tuple[Tensor, Tensor]:
        """All tokens: for columns, and for what all ranks compute alike. Once for what several modules are given."""
        if self._brought is not None and self._brought[0]() is part:
            return self._brought[1:]
        length = part.shape[-2] * self._exchange.size
        if is_cut:
            length = self._call.length if self._call is not None else self._length_in_backward(part)
        name = what if isinstance(what, str) else type(what).__name__
        both = gathered_and_joined(part, self._exchange, part.dim() - 2, length, name)
        self._brought = weakref.ref(part), *both
        return both

    def for_columns(self, x: Tensor, layer: nn.Module, name: str) -> Tensor | None:
        """What a column split computes with; None where all ranks have the same x, and it is to be copied."""
        if self._brought is not None and (x is self._brought[2] or x is self._brought[1]):
            return self._brought[1]
        if id(layer) in self._tiled:
            return self._bring(x, name, is_cut=False)[0]
        if id(layer) in self._given_all or not self._is_part(x, (id(layer), 0)):
            return None
        return self._bring(x, name)[0]

    def behind_rows(self, y: Tensor, layer: nn.Module, name: str) -> Tensor:
        """This rank's part of the sum of the ranks' y."""
        if id(layer) not in self._tiled:
            length = self._call.length if self._call is not None else self._length_in_backward(y)
            if y.shape[-2] != length:
                raise ValueError(
                    f"parallel.tensor_sequence: '{name}': expected {length} tokens, as its block was given, found "
                    f"{y.shape[-2]}; set it to false"
                )
            y = lengthened(y, -2, self._padded(length))
        if self._call is None:
            self._brought = None  # of what is computed again by itself
        return scattered(y, self._exchange, y.dim() - 2, name)


def _hidden_of(block: RegionBlock, args: Any, kwargs: Any) -> tuple[Any, Tensor]:
    """Where among the inputs of a block its tokens are, and these. Raises ValueError."""
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
            f"parallel.tensor_sequence: '{block.name}': expected that it gives a tensor, or a tuple with it in front, "
            f"found {type(output).__name__}; set it to false"
        )
    return first


def _with_first(output: Any, first: Tensor) -> Any:
    return first if isinstance(output, Tensor) else type(output)((first, *output[1:]))
