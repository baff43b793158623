"""Finds stacks of blocks between which a rank has a part of the tokens, and the parameters that see only that part.

[Note: the start of a stack]
A block that is recomputed in a backward has no state of its forward except the sequence number of the autograd node,
which tells in which forward it ran. `RegionStarts` keeps the start of each forward by the number of the first node of
its stack.

[Note: uses of token parts]
A block that receives the output of the block before it may not be its only user: a loss on each block's output, or
model outputs made from them, would silently see a part of the tokens. So `PartWatch` watches torch functions during the
first forward of each mode.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from ..model.blocks import find_blocks
from .splits import LayerSplit, ParameterSplit, Style, is_linear

_KEY = "parallel.tensor_sequence"
_ATTENTION = re.compile("att(entio)?n", re.IGNORECASE)


@dataclass(frozen=True)
class RegionBlock:
    """A block of a stack, and the modules in it that get all tokens.

    split_modules: modules that hold column splits. A row split in them or behind them returns a part of the tokens.
    replicated: modules without a row split. All ranks compute the same, and each keeps its part of the output.
    common: the modules of both kinds in which all ranks have the same columns, so that they must draw the same random
    numbers.
    """

    name: str
    module: nn.Module
    split_modules: tuple[nn.Module, ...]
    replicated: tuple[nn.Module, ...] = ()
    common: tuple[nn.Module, ...] = ()


@dataclass(frozen=True)
class SequenceParallelRegion:
    """Blocks that run in sequence, each on the output of the one before."""

    blocks: tuple[RegionBlock, ...]

    def cut(self, groups: Sequence[Set[str]]) -> list[SequenceParallelRegion]:
        """Cut into stacks if tokens are whole between groups of blocks. groups: names of blocks."""
        found = [tuple(block for block in self.blocks if block.name in names) for names in groups]
        return [SequenceParallelRegion(blocks) for blocks in found if blocks]


def find_regions(model: nn.Module, layers: Sequence[LayerSplit]) -> tuple[SequenceParallelRegion, ...]:
    """Find the lists of blocks with split layers. Raises ValueError if there are none."""
    parents = {id(child): module for module in model.modules() for child in module.children()}
    columns = [
        layer.module for layer in layers if layer.style in (Style.COLUMN, Style.GATHERED) and is_linear(layer.module)
    ]
    rows = {id(layer.module) for layer in layers if layer.style is Style.ROW}
    own = {id(one) for one in columns} - {id(one.module) for one in layers if one.style is Style.GATHERED}
    found: dict[int, list[RegionBlock]] = {}
    for name, module in find_blocks(model):
        inner = {id(part) for part in module.modules() if part is not module}
        parent = parents[id(module)]
        if not inner & rows or not isinstance(parent, (nn.ModuleList, nn.Sequential)):
            continue
        givers = {id(parents[id(one)]): parents[id(one)] for one in columns if id(one) in inner}
        # A block keeps its part even if it holds columns itself: its norms and residuals act on parts.
        givers = {key: one for key, one in givers.items() if one is not module and not _is_mlp(one, own | rows)}
        split_modules = tuple(one for one in givers.values() if _has(one, own | rows))
        replicated = [one for one in givers.values() if not _has(one, own | rows)]
        replicated += [one for one in _attentions(module) if not _has(one, {*map(id, columns)} | rows)]
        common = tuple(one for one in split_modules if not _has(one, own)) + tuple(replicated)
        found.setdefault(id(parent), []).append(RegionBlock(name, module, split_modules, tuple(replicated), common))
    if not found:
        raise ValueError(
            f"{_KEY}: expected blocks in a ModuleList with row-split layers in them, found none in "
            f"{type(model).__name__}; set it to false"
        )
    return tuple(SequenceParallelRegion(tuple(blocks)) for blocks in found.values())


def _has(module: nn.Module, layers: Set[int]) -> bool:
    return any(id(part) in layers for part in module.modules())


def _is_mlp(module: nn.Module, split: Set[int]) -> bool:
    """Return whether all parameters are in split layers. These gather tokens themselves; other inputs stay parts.

    An attention needs all tokens in any case, since it uses the shape of its input.
    """
    return not _ATTENTION.search(type(module).__name__) and all(
        id(part) in split for part in module.modules() if part._parameters
    )


def _attentions(block: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost modules with a class name of an attention."""
    for child in block.children():
        if _ATTENTION.search(type(child).__name__) and any(True for _ in child.parameters()):
            yield child
        else:
            yield from _attentions(child)


def splits_of_parts(
    model: nn.Module, regions: Sequence[SequenceParallelRegion], layers: Sequence[LayerSplit], degree: int
) -> list[LayerSplit]:
    """Return partial splits for parameters that see a part of the tokens on each rank, so their gradients are summed.

    These are all parameters of blocks beside split layers, and the biases behind row splits. Modules that are given all
    tokens are excluded: they compute the same on all ranks, or a plan has them as "partial". Raises ValueError for a
    parameter that is also used outside the blocks.
    """
    split = {id(layer.module.get_parameter(key)) for layer in layers for key in layer.parameters}
    rows = {id(layer.module) for layer in layers if layer.style is Style.ROW}
    found = []
    blocks = [block for stack in regions for block in stack.blocks]
    for block in blocks:
        given_all = {id(part) for module in (*block.split_modules, *block.replicated) for part in module.modules()}
        for name, module in block.module.named_modules(prefix=block.name):
            # A row split is given all tokens, but its bias is added to a part of them.
            if id(module) in given_all and id(module) not in rows:
                continue
            own = {key: p for key, p in module.named_parameters(recurse=False) if id(p) not in split}
            if own:
                splits = {key: ParameterSplit.partial(param, degree) for key, param in own.items()}
                found.append(LayerSplit(name, module, Style.PARTIAL, splits))
    _check_elsewhere(model, {id(block.module) for block in blocks}, found)
    return found


def _check_elsewhere(model: nn.Module, blocks: set[int], found: Iterable[LayerSplit]) -> None:
    names = {id(layer.module.get_parameter(key)): f"{layer.name}.{key}" for layer in found for key in layer.parameters}
    for module in _outside(model, blocks):
        shared = [id(param) for param in module.parameters(recurse=False) if id(param) in names]
        if shared:
            raise ValueError(
                f"{_KEY}: '{names[shared[0]]}' is in a block, but a {type(module).__name__} outside of the blocks "
                "uses it too; set it to false"
            )


def _outside(module: nn.Module, blocks: set[int]) -> Iterator[nn.Module]:
    if id(module) not in blocks:
        yield module
        for child in module.children():
            yield from _outside(child, blocks)


# Starts that are kept: more than forwards of different lengths that wait for their backward.
_MOST = 4096


class RegionStarts:
    """The last starts of stacks. See [Note: the start of a stack]."""

    def __init__(self) -> None:
        self._kept: list[tuple[int, int, int]] = []  # (number of the next autograd node, length, seed)

    def note(self, length: int, seed: int) -> None:
        """Record that a forward of a stack begins. seed: of random numbers that ranks share."""
        if not self._kept or self._kept[-1][1:] != (length, seed):  # only starts that differ from the start before
            self._kept.append((torch._C._autograd._get_sequence_nr(), length, seed))
            del self._kept[:-_MOST]

    def of_recomputed(self) -> tuple[int, int]:
        """Return (length, seed) of the forward whose autograd node runs now."""
        number = torch._C._current_autograd_node()._sequence_nr()
        at = bisect_right(self._kept, number, key=lambda start: start[0])
        # A node older than all kept starts gets the oldest start.
        return self._kept[max(at - 1, 0)][1:]


class PartWatch(TorchFunctionMode):
    """A mode around a forward of the model that refuses uses of token parts. See [Note: uses of token parts]."""

    def __init__(self, is_inside: Callable[[], bool]) -> None:
        """is_inside: whether a block runs now. A block may use its tokens freely."""
        self.has_refused = False
        self._is_inside = is_inside
        self._given: dict[int, tuple[Tensor, str]] = {}  # by storage; the tensor keeps its storage from being reused

    def note(self, part: Tensor, name: str) -> None:
        """Record the output of a block."""
        self._given[part.untyped_storage()._cdata] = part, name

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._is_inside() or not self._given:
            return func(*args, **kwargs)
        used = [(one, name) for one in tree_leaves((args, kwargs)) if (name := self._giver(one)) is not None]
        versions = [_version(one) for one, _ in used]
        result = func(*args, **kwargs)
        if used:
            is_new = any(isinstance(x, Tensor) and all(x is not one for one, _ in used) for x in tree_leaves(result))
            # A function that returns no new tensor and changes none (a size, a data pointer) is no use of the tokens.
            if is_new or versions != [_version(one) for one, _ in used]:
                raise self._refusal(used[0][1], getattr(func, "__name__", str(func)))
        return result

    def check(self, output: Any) -> None:
        """Raise ValueError if the model returns a token part. output: of the model."""
        for one in tree_leaves(output):
            if (name := self._giver(one)) is not None:
                raise self._refusal(name, "it in the model's output")

    def _refusal(self, name: str, found: str) -> ValueError:
        self.has_refused = True
        return ValueError(
            f"parallel.tensor_sequence: expected that only the next block uses the output of '{name}', found {found}: "
            "between blocks a rank has a part of the tokens; set it to false"
        )

    def _giver(self, x: Any) -> str | None:
        if type(x) is not Tensor or x.is_meta or x.layout != torch.strided:
            return None
        found = self._given.get(x.untyped_storage()._cdata)
        return None if found is None else found[1]


def _version(x: Tensor) -> int:
    # torch counts no versions of inference tensors, and raises an error.
    return 0 if x.is_inference() else x._version
