"""Where a model's forward uses the parameters outside its blocks.

A place is a number of blocks: a parameter used at place k is used after k blocks have begun and before the next one.
So place 0 is in front of the blocks (an embedding), and with n blocks place n is behind them (a head).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from ...model.buffers import BufferValues
from .blocks import Block, check_order
from .forward_code import Mention, mentions

Places = dict[int, set[int]]  # by the identity of a parameter


def places_by_code(model: nn.Module, blocks: Sequence[Block]) -> Places:
    """The places at which the source text of the forwards names each parameter outside the blocks.

    What no forward names is placed by the order of registration; what is named in the loop over the blocks is used at
    every place of the loop.
    """
    index = {id(block.module): i for i, block in enumerate(blocks)}
    return _CodeReader(index).read(model)


def places_by_run(model: nn.Module, blocks: Sequence[Block], call: Callable[[nn.Module], Any]) -> Places:
    """The places at which `call(model)` passes each parameter to an operation.

    Raises ValueError where it does not call every block once, in order.
    """
    watch = _Watch({id(param) for param in model.parameters()})
    handles = [
        block.module.register_forward_pre_hook(partial(watch.enter_block, number), prepend=True)
        for number, block in enumerate(blocks)
    ]
    handles += [block.module.register_forward_hook(watch.leave_block) for block in blocks]
    try:
        with BufferValues(model), torch.no_grad(), watch:
            call(model)
    finally:
        for handle in handles:
            handle.remove()
    check_order(blocks, watch.entered)
    return watch.places


class _Watch(TorchFunctionMode):
    def __init__(self, wanted: set[int]) -> None:
        super().__init__()
        self._wanted = wanted
        self.entered: list[int] = []
        self._depth = 0
        self.places: Places = {}

    def enter_block(self, number: int, module: nn.Module, args: Any) -> None:
        self.entered.append(number)
        self._depth += 1

    def leave_block(self, module: nn.Module, args: Any, output: Any) -> None:
        self._depth -= 1

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._depth and getattr(func, "__name__", "") != "__get__":
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, Tensor) and id(leaf) in self._wanted:
                    self.places.setdefault(id(leaf), set()).add(len(self.entered))
        return func(*args, **(kwargs or {}))


class _CodeReader:
    def __init__(self, index: dict[int, int]) -> None:
        self._index = index
        self._places: Places = {}

    def read(self, model: nn.Module) -> Places:
        self._read(model, 0)
        return self._places

    def _span(self, module: nn.Module) -> tuple[int, int] | None:
        """(first block, one past the last) of the blocks in it."""
        inside = [self._index[id(part)] for part in module.modules() if id(part) in self._index]
        return (min(inside), max(inside) + 1) if inside else None

    def _read(self, module: nn.Module, begin: int) -> None:
        """module: holds blocks, and is none. begin: the number of blocks before it."""
        spans: dict[str, tuple[int, int]] = {}
        for name, child in module.named_children():
            span = self._span(child)
            if span is not None:
                spans[name] = span
                if id(child) not in self._index:
                    self._read(child, span[0])
        named = _placed(mentions(module), spans, begin) if not isinstance(module, nn.Sequential) else {}
        reached = begin
        for name, child in module.named_children():
            reached = max(reached, spans.get(name, (0, 0))[1])
            if name not in spans:
                self._mark(child.parameters(), named.get(name) or {reached})
        last = max(end for _, end in spans.values())
        for name, param in module.named_parameters(recurse=False):  # registered apart from modules: no order to read
            self._mark([param], named.get(name) or {begin, last})

    def _mark(self, params: Any, places: set[int]) -> None:
        for param in params:
            self._places.setdefault(id(param), set()).update(places)


def _placed(found: Sequence[Mention], spans: dict[str, tuple[int, int]], begin: int) -> dict[str, set[int]]:
    """Attribute -> places, by where it stands between the first uses of the attributes that hold blocks."""
    called = {mention.name for mention in found if mention.strong}
    loops = {
        loop: spans[mention.name]
        for mention in reversed(found)
        if mention.name in spans and mention.strong
        for loop in mention.loops
    }
    places: dict[str, set[int]] = {}
    reached = begin
    for mention in found:
        if mention.name in spans:
            if mention.strong or mention.name not in called:
                reached = max(reached, spans[mention.name][1])
            continue
        around = [loops[loop] for loop in mention.loops if loop in loops]
        everywhere = {place for first, end in around for place in range(first, end + 1)}
        places.setdefault(mention.name, set()).update(everywhere or {reached})
    return places
