"""Stacks of blocks, between which a rank has some of the tokens, and what of their parameters sees these alone.

[Note: what a stack was begun with]
A block that is recomputed in a backward has no state of its forward but the number of autograd's node, which says in
which forward it was. `RegionStarts` keeps what each forward was begun with, by the number of the first node of its
stack.

[Note: who uses parts of tokens]
That a block is given what the one before it gave does not say that nobody else is: a loss of each block's output, or
what a model returns of them, would be of a part, without an error. So `PartWatch` watches functions of torch in the
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
from ..offload import TensorShard
from .splits import LayerSplit, ParameterSplit, Style, is_linear

_KEY = "parallel.tensor_sequence"
_ATTENTION = re.compile("att(entio)?n", re.IGNORECASE)


@dataclass(frozen=True)
class RegionBlock:
    """One block.

    wholes: its modules that compute columns of what they are given, and so are given all tokens; rows end them.
    alike: those that all ranks compute with all tokens, and that no rows end: of what they give each has its part.
    common: of both, those in which no rank has columns of its own.
    """

    name: str
    module: nn.Module
    wholes: tuple[nn.Module, ...]
    alike: tuple[nn.Module, ...] = ()
    common: tuple[nn.Module, ...] = ()


@dataclass(frozen=True)
class SequenceParallelRegion:
    """Blocks that run one behind the other, each on what the one before it gives."""

    blocks: tuple[RegionBlock, ...]

    def cut(self, groups: Sequence[Set[str]]) -> list[SequenceParallelRegion]:
        """Where tokens are whole between groups of blocks, that have these names."""
        found = [tuple(block for block in self.blocks if block.name in names) for names in groups]
        return [SequenceParallelRegion(blocks) for blocks in found if blocks]


def find_stacks(model: nn.Module, layers: Sequence[LayerSplit]) -> tuple[SequenceParallelRegion, ...]:
    """The lists of blocks that have split layers in them. Raises ValueError where there is none."""
    parents = {id(child): module for module in model.modules() for child in module.children()}
    columns = [layer.module for layer in layers if _takes_columns(layer)]
    rows = {id(layer.module) for layer in layers if layer.style is Style.ROW}
    own = {id(one) for one in columns} - {id(one.module) for one in layers if one.style is Style.GATHERED}
    found: dict[int, list[RegionBlock]] = {}
    for name, module in find_blocks(model):
        inner = {id(part) for part in module.modules() if part is not module}
        parent = parents[id(module)]
        if not inner & rows or not isinstance(parent, (nn.ModuleList, nn.Sequential)):
            continue
        givers = {id(parents[id(one)]): parents[id(one)] for one in columns if id(one) in inner}
        givers = {key: one for key, one in givers.items() if one is not module and not _is_mlp(one, own | rows)}
        wholes = tuple(one for one in givers.values() if _has(one, own | rows))
        alike = [one for one in givers.values() if not _has(one, own | rows)]
        alike += [one for one in _attentions(module) if not _has(one, {*map(id, columns)} | rows)]
        common = tuple(one for one in wholes if not _has(one, own)) + tuple(alike)
        found.setdefault(id(parent), []).append(RegionBlock(name, module, wholes, tuple(alike), common))
    if not found:
        raise ValueError(
            f"{_KEY}: expected blocks in a ModuleList with layers in them that are split by rows, found none "
            f"in {type(model).__name__}; set it to false"
        )
    return tuple(SequenceParallelRegion(tuple(blocks)) for blocks in found.values())


def _has(module: nn.Module, layers: Set[int]) -> bool:
    return any(id(part) in layers for part in module.modules())


def _is_mlp(module: nn.Module, split: Set[int]) -> bool:
    """Whether split layers are all that it has: these ask for all tokens themselves, and what else it is given stays a
    part. An attention goes by the shape of what it is given."""
    return not _ATTENTION.search(type(module).__name__) and all(
        id(part) in split for part in module.modules() if part._parameters
    )


def _attentions(block: nn.Module) -> Iterator[nn.Module]:
    """The outermost modules that are attentions by the name of their class."""
    for child in block.children():
        if _ATTENTION.search(type(child).__name__) and any(True for _ in child.parameters()):
            yield child
        else:
            yield from _attentions(child)


def _takes_columns(layer: LayerSplit) -> bool:
    return layer.style in (Style.COLUMN, Style.GATHERED) and is_linear(layer.module)


def splits_of_parts(
    model: nn.Module, stacks: Sequence[SequenceParallelRegion], layers: Sequence[LayerSplit], degree: int
) -> list[LayerSplit]:
    """Parameters of blocks that act on a part of the tokens on each rank: a part of the gradient is there.

    That is all beside split layers, and the biases behind rows; but for what is in a module that is given all tokens:
    it computes the same on all ranks, or a plan has it as "partial". Raises ValueError for one that is used elsewhere.
    """
    split = {id(layer.module.get_parameter(key)) for layer in layers for key in layer.parameters}
    rows = {id(layer.module) for layer in layers if layer.style is Style.ROW}
    found = []
    blocks = [block for stack in stacks for block in stack.blocks]
    for block in blocks:
        given_all = {id(part) for module in (*block.wholes, *block.alike) for part in module.modules()}
        for name, module in block.module.named_modules(prefix=block.name):
            if id(module) in given_all and id(module) not in rows:
                continue
            own = {key: p for key, p in module.named_parameters(recurse=False) if id(p) not in split}
            if own:
                splits = {key: _partial(param, degree) for key, param in own.items()}
                found.append(LayerSplit(name, module, Style.PARTIAL, splits))
    _check_elsewhere(model, {id(block.module) for block in blocks}, found)
    return found


def _partial(param: nn.Parameter, degree: int) -> ParameterSplit:
    return ParameterSplit((TensorShard.all_of(tuple(param.shape)),) * degree, is_partial=True)


def _check_elsewhere(model: nn.Module, blocks: set[int], found: Iterable[LayerSplit]) -> None:
    names = {id(layer.module.get_parameter(key)): f"{layer.name}.{key}" for layer in found for key in layer.parameters}
    for module in _outside(model, blocks):
        shared = [id(param) for param in module.parameters(recurse=False) if id(param) in names]
        if shared:
            raise ValueError(
                f"{_KEY}: expected parameters that blocks alone use, found '{names[shared[0]]}', which is in a "
                f"{type(module).__name__} outside of them too; set it to false"
            )


def _outside(module: nn.Module, blocks: set[int]) -> Iterator[nn.Module]:
    if id(module) not in blocks:
        yield module
        for child in module.children():
            yield from _outside(child, blocks)


_MOST = 4096


@dataclass(frozen=True)
class RegionStart:
    """One. number: of the node of autograd that is made next. seed: of what all ranks draw alike."""

    number: int
    length: int
    seed: int


class RegionStarts:
    """The last ones."""

    def __init__(self) -> None:
        self._kept: list[RegionStart] = []  # those that differ from the one before

    def note(self, length: int, seed: int) -> None:
        """A forward of a stack begins."""
        if not self._kept or (self._kept[-1].length, self._kept[-1].seed) != (length, seed):
            self._kept.append(RegionStart(torch._C._autograd._get_sequence_nr(), length, seed))
            del self._kept[:-_MOST]

    def of_recomputed(self) -> RegionStart:
        """Of the forward that has the node at which autograd is."""
        number = torch._C._current_autograd_node()._sequence_nr()
        at = bisect_right(self._kept, number, key=lambda start: start.number)
        return self._kept[max(at - 1, 0)]


class PartWatch(TorchFunctionMode):
    """To be entered around a forward of the model."""

    def __init__(self, is_inside: Callable[[], bool]) -> None:
        """is_inside: whether a block runs now, which may do with its tokens what it likes."""
        self._is_inside = is_inside
        self._given: dict[int, tuple[Tensor, str]] = {}  # by storage; kept, so that another one is not there

    def note(self, part: Tensor, name: str) -> None:
        """What the block of that name has given."""
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
            if is_new or versions != [_version(one) for one, _ in used]:
                raise _error(used[0][1], getattr(func, "__name__", str(func)))
        return result

    def check(self, output: Any) -> None:
        """output: of the model. Raises ValueError."""
        for one in tree_leaves(output):
            if (name := self._giver(one)) is not None:
                raise _error(name, "it in what the model gives")

    def _giver(self, x: Any) -> str | None:
        if type(x) is not Tensor or x.is_meta or x.layout != torch.strided:
            return None
        found = self._given.get(x.untyped_storage()._cdata)
        return None if found is None else found[1]


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version


def _error(name: str, found: str) -> ValueError:
    return ValueError(
        f"parallel.tensor_sequence: expected that the next block alone uses what '{name}' gives, found {found}: "
        "between blocks a rank has a part of the tokens; set it to false"
    )
