"""Find the places at which a model's forward uses the parameters outside its blocks.

A parameter used at place k is used after k blocks have begun, and before the next block begins. So place 0 is before
all blocks (an embedding), and with n blocks place n is after them (a head). `places_by_run` observes a forward,
`places_by_code` reads its source text.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from ...model.random_states import random_states, set_random_states
from ...model.recomputing import BufferValues
from .blocks import Blocks, check_order

# Attributes that do not use a tensor's values.
_METADATA = frozenset(("dtype", "device", "shape", "size", "dim", "ndim", "numel", "requires_grad", "is_cuda"))
_LOOPS = (ast.For, ast.While, ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)

Places = dict[int, set[int]]  # by id of a parameter or buffer


def places_by_code(model: nn.Module, blocks: Blocks) -> Places:
    """Find the places at which the source text of the forwards names each parameter and buffer outside the blocks.

    A parameter that no forward names is placed by the order of registration. A parameter that is named in the loop over
    the blocks is used at every place of the loop.
    """
    index = {id(block): number for number, block in enumerate(blocks.values())}
    places: Places = {}

    def mark(tensors: Iterable[Tensor], used_at: set[int]) -> None:
        for tensor in tensors:
            places.setdefault(id(tensor), set()).update(used_at)

    def read(module: nn.Module, begin: int) -> None:
        """Place the parameters of a module that contains blocks. begin: the number of blocks before it."""
        spans: dict[str, tuple[int, int]] = {}  # child -> (first block, last block + 1)
        for name, child in module.named_children():
            if inside := [index[id(part)] for part in child.modules() if id(part) in index]:
                spans[name] = min(inside), max(inside) + 1
                if id(child) not in index:
                    read(child, spans[name][0])
        named = _placed(mentions(module), spans, begin) if not isinstance(module, nn.Sequential) else {}
        reached = begin
        for name, child in module.named_children():
            reached = max(reached, spans.get(name, (0, 0))[1])
            if name not in spans:
                mark((*child.parameters(), *child.buffers()), named.get(name) or {reached})
        last = max(end for _, end in spans.values())
        # The registration order of these says nothing.
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            mark([tensor], named.get(name) or {begin, last})

    read(model, 0)
    return places


def places_by_run(model: nn.Module, blocks: Blocks, call: Callable[[nn.Module], Any]) -> Places:
    """Find the places at which `call(model)` passes each parameter to an operation outside the blocks.

    Random state and buffers are restored: rank 0 alone runs this. Raises ValueError if the forward does not call every
    block once, in order.
    """
    device = next(model.parameters()).device
    before = random_states(device)
    watch = _Watch({id(param) for param in model.parameters()})
    # First before a block and last behind it, so that the block's other hooks count as inside.
    handles = [
        block.register_forward_pre_hook(partial(watch.enter_block, number), prepend=True)
        for number, block in enumerate(blocks.values())
    ]
    handles += [block.register_forward_hook(watch.leave_block) for block in blocks.values()]
    try:
        with BufferValues(model), torch.no_grad(), watch:
            call(model)
    finally:
        set_random_states(device, before)
        for handle in handles:
            handle.remove()
    check_order(blocks, watch.entered)
    return watch.places


class _Watch(TorchFunctionMode):
    """Records the place of each use of a wanted tensor (by id) outside the blocks."""

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
        result = func(*args, **(kwargs or {}))
        # An attribute that is no tensor (`weight.shape`) uses no values, but `weight.T` does.
        if not self._depth and (getattr(func, "__name__", "") != "__get__" or isinstance(result, Tensor)):
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, Tensor) and id(leaf) in self._wanted:
                    self.places.setdefault(id(leaf), set()).add(len(self.entered))
        return result


def _placed(found: Sequence[Mention], spans: dict[str, tuple[int, int]], begin: int) -> dict[str, set[int]]:
    """Map each attribute to its places, by its position between the first uses of the attributes that hold blocks."""
    called = {mention.name for mention in found if mention.strong}
    loops = {
        loop: spans[mention.name]
        # The first mention of a loop wins: the dict keeps the last.
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


@dataclass(frozen=True)
class Mention:
    """`self.name` in a forward.

    strong: it is called or looped over: `self.name(...)`, `self.name[0](...)`, `for x in self.name`.
    loops: ids of the loops around it.
    """

    name: str
    strong: bool
    loops: frozenset[int]


def mentions(module: nn.Module) -> list[Mention]:
    """List every `self.name` in the module's forward and in the methods that it calls, in the order of execution.

    Both branches of an `if` count. The list is empty if the source text is not available.
    """
    reader = _ForwardReader(module)
    reader.read("forward")
    return reader.found


class _ForwardReader:
    """Reads the source text of a forward and of the methods that it calls."""

    def __init__(self, module: nn.Module) -> None:
        self.found: list[Mention] = []
        self._module = module
        self._methods: set[str] = set()  # already read
        self._loops: list[int] = []
        self._functions: dict[str, ast.AST] = {}  # local functions of the current method, by name

    def read(self, method: str) -> None:
        """Read a method of the class, once."""
        # A method may call itself. The places of a second call are missed here; a sample finds them.
        if method in self._methods:
            return
        self._methods.add(method)
        tree = _source_of(getattr(type(self._module), method, None))
        if tree is not None and tree.args.args:
            for statement in tree.body:
                self._visit(statement, tree.args.args[0].arg)

    def _visit(self, node: ast.AST, me: str) -> None:
        if isinstance(node, ast.FunctionDef):
            self._functions[node.name] = node  # runs where it is called or passed to a function
        elif isinstance(node, ast.Call):
            self._visit_call(node, me)
        elif isinstance(node, _LOOPS):
            self._visit_loop(node, me)
        elif isinstance(node, (ast.Attribute, ast.Subscript)):
            self._visit_chain(node, me, strong=False)
        elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
            self._visit_all([node.value, *getattr(node, "targets", [getattr(node, "target", None)])], me)
        else:
            self._visit_all(ast.iter_child_nodes(node), me)

    def _visit_all(self, nodes: Iterable[ast.AST | None], me: str) -> None:
        for node in nodes:
            if node is not None:
                self._visit(node, me)

    def _visit_call(self, node: ast.Call, me: str) -> None:
        # These use no values of their arguments.
        if isinstance(node.func, ast.Name) and node.func.id in ("len", "hasattr", "isinstance"):
            return
        given = [node.func, *node.args, *(keyword.value for keyword in node.keywords)]
        functions = [part.id for part in given if isinstance(part, ast.Name) and part.id in self._functions]
        lambdas = [part.body for part in given if isinstance(part, ast.Lambda)]
        arguments = [part for part in given[1:] if not isinstance(part, ast.Lambda)]
        # `self.a(x)(self.b)` runs `self.a` before it reads `self.b`. In `self.a(self.b(x))` the argument runs first.
        called_first = any(isinstance(inner, ast.Call) for inner in ast.walk(node.func))
        if called_first:
            self._visit_chain(node.func, me, strong=True)
        self._visit_all(arguments, me)
        if not called_first:
            self._visit_chain(node.func, me, strong=True)
        for body in [*lambdas, *(part for name in functions for part in ast.iter_child_nodes(self._functions[name]))]:
            self._visit(body, me)

    def _visit_chain(self, node: ast.AST, me: str, strong: bool) -> None:
        """Visit an expression such as `self.a.b[i].c`. strong: it is called."""
        path: list[str] = []
        indexed = False
        while isinstance(node, (ast.Attribute, ast.Subscript)):
            if isinstance(node, ast.Attribute):
                path.append(node.attr)
            else:
                self._visit(node.slice, me)
                indexed = True
            node = node.value
        if not (isinstance(node, ast.Name) and node.id == me and path):
            self._visit(node, me)
            return
        name = path[-1]
        if strong and len(path) == 1 and inspect.isfunction(getattr(type(self._module), name, None)):
            self.read(name)
        elif not _METADATA & set(path[:-1]):
            is_module = indexed or isinstance(_attribute(self._module, reversed(path)), nn.Module)
            self.found.append(Mention(name, strong and is_module, frozenset(self._loops)))

    def _visit_loop(self, node: ast.AST, me: str) -> None:
        generators = [part.iter for part in getattr(node, "generators", [])]
        for iterated in [*generators, *([node.iter] if isinstance(node, ast.For) else [])]:
            begin = len(self.found)
            self._visit(iterated, me)
            self.found[begin:] = [Mention(found.name, True, found.loops | {id(node)}) for found in self.found[begin:]]
        self._loops.append(id(node))
        skipped = {id(part) for part in (*generators, getattr(node, "iter", None))}
        parts = [part for part in ast.iter_child_nodes(node) if id(part) not in skipped]
        self._visit_all([part for part in parts if not isinstance(part, ast.comprehension)], me)
        for part in parts:
            if isinstance(part, ast.comprehension):
                self._visit_all(part.ifs, me)
        self._loops.pop()


def _attribute(value: object, path: Iterable[str]) -> object:
    for name in path:
        value = getattr(value, name, None)
    return value


def _source_of(function: Callable[..., object] | None) -> ast.FunctionDef | None:
    if function is None:
        return None
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    except (OSError, TypeError, SyntaxError):
        return None
    first = tree.body[0] if tree.body else None
    return first if isinstance(first, ast.FunctionDef) else None
