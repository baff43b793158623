"""The only place that registers hooks on modules and parameters.

[Note: forgotten]
An engine that nobody closes goes with the last name for it, and so do its model, its memory and its threads. Python
finds cycles of Python's objects, but not those through autograd: units keep the node that adds up a parameter's
gradient, the node keeps the parameter, and that its hooks. So what hangs on a parameter knows the engine by weak
references alone.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from types import FrameType, ModuleType, NoneType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from ..kernels.linear_layers import LinearLayers, gradient_of, weight_gradient
from ..model.blocks import has_forward, parameters_read_by
from ..model.ledger import Ledger
from .autograd import at_all_levels, current_graph_task, current_transform
from .released import set_reader
from .sequence import Phase, UnitSequence
from .unit import Unit, Use

R = TypeVar("R")


class UnitHooks:
    """Tells a `UnitSequence` when units are used.

    root     |begin_forward ............................ end_forward|
    block        |enter ... leave|                                     output.grad: enter_backward
    parameter                                                          .grad set:  gradient_arrived
    """

    def __init__(
        self,
        sequence: UnitSequence,
        frees_parameters: bool,
        ledger: Ledger,
        on_block: Callable[[], None] | None = None,
    ) -> None:
        """ledger: of the hooks. on_block: called when the forward of a block begins, recomputed ones included."""
        self._sequence = sequence
        self._on_block = on_block
        self._add = ledger.hook
        self._of_leaves = WeakIdKeyDictionary()  # leaves that were returned -> a list of the newest hook alone
        self._is_around = False  # what runs is `around`: the root's own forward, too, is a part of it
        root = sequence.rest.module
        self._add(root.register_forward_pre_hook(self._before_root, prepend=True))
        self._add(root.register_forward_hook(self._after_root))
        for unit in sequence.blocks:
            self._hook_block(unit)
        self._hooked = set[int]()  # identities of parameters
        for unit in sequence.units:
            self.hook_params(unit)
        if frees_parameters:
            self._hook_users_of_rest(sequence.rest)
            self._modules = frozenset(map(id, root.modules()))
            for unit in sequence.units:
                self._let_read(unit, ledger)

    def _let_read(self, unit: Unit, ledger: Ledger) -> None:
        def read(is_differentiated: bool, together: object) -> bool:
            is_computing = self._sequence.phase is not Phase.IDLE and not self._sequence.has_lost_backward()
            is_of_loss = is_differentiated and unit.is_end and self._sequence.awaits_backward
            may = is_computing or is_of_loss or _is_in_method(self._modules)
            if may:
                self._sequence.read(unit)
            return may

        for group in unit.groups:
            for param in group.params:
                ledger.callback(set_reader(param, read))

    def around(self, run: Callable[[], R]) -> R:
        """What `run` gives, as a forward of the root: it calls the root, once or several times, or parts of it."""
        self._sequence.begin_forward()
        self._is_around = True
        try:
            output = run()
        finally:
            self._is_around = False
        self._end_root(output)
        return output

    def _before_root(self, module: nn.Module, args: Any) -> None:
        if not self._is_around:
            self._sequence.begin_forward()

    def _after_root(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self._is_around:
            self._end_root(output)

    def _end_root(self, output: Any) -> None:
        tensors = _tensors_with_graph(output)
        if self._sequence.phase is Phase.FORWARD and tensors:
            self._on_first_gradient(tensors, partial(self._sequence.enter_forward, self._sequence.last_forward))
        self._sequence.end_forward(keeps_graph=bool(tensors))

    def _hook_block(self, unit: Unit) -> None:
        sequence = self._sequence
        uses: list[Use | None] = []

        def before(module: nn.Module, args: Any) -> None:
            uses.append(sequence.enter(unit))
            if self._on_block is not None:
                self._on_block()

        def after(module: nn.Module, args: Any, output: Any) -> None:
            use = uses.pop()
            uses.clear()  # a forward that ended with an exception has left its own behind
            if use is not None and (tensors := _tensors_with_graph(output)):
                self._on_first_gradient(tensors, partial(sequence.enter_backward, use))
            sequence.leave(unit)

        self._add(unit.module.register_forward_pre_hook(before, prepend=True))
        self._add(unit.module.register_forward_hook(after))

    def _on_first_gradient(self, tensors: Sequence[Tensor], action: Callable[[], None]) -> None:
        """Runs `action` before the first gradient of any of the tensors goes on into the module, once in each backward.

        A leaf, such as a parameter that a module returns, outlives the graph: it has one hook, the newest.
        """
        told: list[int] = []

        def hook(gradient: Tensor) -> None:
            task = current_graph_task()
            if told != [task]:
                told[:] = [task]
                action()

        for tensor in tensors:
            if not tensor.is_leaf:
                tensor.register_hook(hook)  # type: ignore[no-untyped-call]
            elif tensor in self._of_leaves:
                self._of_leaves[tensor][:] = [hook]
            else:
                newest = self._of_leaves[tensor] = [hook]
                self._add(tensor.register_hook(partial(_run_newest, newest)))  # type: ignore[no-untyped-call]

    def hook_params(self, unit: Unit) -> None:
        """Those that have gradients, and no hook yet."""
        unit.find_accumulators()
        sequence, number = weakref.proxy(self._sequence), self._sequence.units.index(unit)  # see [Note: forgotten]
        for gradient in unit.gradients:
            for name, param in gradient.group.plan.params:
                if id(param) in self._hooked:
                    continue
                self._hooked.add(id(param))
                hook = partial(UnitSequence.gradient_arrived, sequence, number, name)  # no call of ours around it
                is_frozen = not param.requires_grad
                if is_frozen:
                    param.requires_grad_(True)  # a frozen one takes no hook; unfrozen later, it has this one
                self._add(param.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
                if is_frozen:
                    param.requires_grad_(False)

    def _hook_users_of_rest(self, rest: Unit) -> None:
        """A module outside the blocks may be called by itself, not through the root: its parameters must be there."""
        sequence = self._sequence
        members = {id(param) for group in rest.groups for param in group.params}

        def before(module: nn.Module, args: Any) -> None:
            if sequence.phase is Phase.IDLE:
                sequence.enter(rest)

        def after(module: nn.Module, args: Any, output: Any) -> None:
            if sequence.phase is Phase.IDLE and not _tensors_with_graph(output):
                rest.release()

        for module in rest.module.modules():
            if module is not rest.module and has_forward(module) and members & set(map(id, parameters_read_by(module))):
                self._add(module.register_forward_pre_hook(before, prepend=True))
                self._add(module.register_forward_hook(after))


def cast_inputs(blocks: Iterable[nn.Module], dtype: torch.dtype, ledger: Ledger) -> None:
    """Casts float32 inputs of blocks, which a buffer has made of narrower ones, to the dtype that blocks compute in."""

    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.dtype == torch.float32 else value

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        return tuple(map(cast, args)), {name: cast(value) for name, value in kwargs.items()}

    for block in blocks:
        ledger.hook(block.register_forward_pre_hook(before, with_kwargs=True))


_MIN_NUMEL = 1 << 17  # of a weight; the copy of a smaller one costs less than a backward that is written in Python


def make_gradients_in_place(sequence: UnitSequence, modules: Iterable[nn.Module], ledger: Ledger) -> None:
    """Saves the linear layers of a model a tensor for each gradient of a large weight, and the copy of it.

        dw = dy^T x  ---written to--->  slot (or shard)  <---view--- param.grad

    Autograd takes a gradient as it is given, so `param.grad` is a view of that memory, and `Staging` sees that nothing
    is left to be copied. Where there is no memory yet, or the gradient has to be cast or added, it is a tensor as ever;
    and where hooks of a user see it, who may keep it for longer than the memory is its own.
    """

    def make(param: nn.Parameter, dy: Tensor, x: Tensor | None, is_transposed: bool) -> Tensor:
        # Hooks of a user, besides the one of `UnitHooks`, see the gradient.
        is_seen = bool(param._backward_hooks) or len(param._post_accumulate_grad_hooks or ()) > 1
        if x is None or not dy.dtype == x.dtype == param.dtype or is_seen:
            return gradient_of(dy, x, is_transposed)
        return weight_gradient(dy, x, is_transposed, sequence.place_for_gradient(param))

    def is_large(module: nn.Module) -> bool:
        weight = dict(module.named_parameters(recurse=False)).get("weight")
        return weight is not None and weight.requires_grad and weight.numel() >= _MIN_NUMEL

    LinearLayers(filter(is_large, modules), make, ledger)


def _is_in_method(modules: Collection[int]) -> bool:
    """Whether the caller is in a method that a class of the modules has beyond those of every module.

    Those are called on all ranks alike, while one rank alone may print a value, or ask for a `state_dict`.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_varnames[:1] == ("self",) and id(frame.f_locals.get("self")) in modules:
            of_all = frame.f_code.co_filename == nn.Module.forward.__code__.co_filename
            return not of_all or frame.f_code in _CALLS
        frame = frame.f_back
    return False


_CALLS = (nn.Module._call_impl.__code__, nn.Module._wrapped_call_impl.__code__)


def _run_newest(newest: Sequence[Callable[[Tensor], None]], gradient: Tensor) -> None:
    newest[0](gradient)


def _tensors_with_graph(output: Any) -> list[Tensor]:
    """Those through which a backward is possible, of what a module returned."""
    if not torch.is_grad_enabled():
        return []
    if isinstance(output, Tensor) and current_transform() is None:
        return [output] if output.requires_grad else []
    return [tensor for tensor in at_all_levels(tensors_in(output)) if tensor.requires_grad]


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors in nested lists, tuples, sets, mappings, and attributes of objects; not those of modules."""
    if isinstance(value, Tensor):
        return [value]
    found: list[Tensor] = []
    seen: dict[int, Any] = {}  # holds what it has seen, so that identities are not given to others
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Tensor):
            found.append(value)
        elif not isinstance(value, _WITHOUT_TENSORS) and id(value) not in seen:
            seen[id(value)] = value
            waiting.extend(_items(value))
    return found


_WITHOUT_TENSORS = (NoneType, bool, int, float, complex, str, bytes, type, ModuleType, nn.Module)


def _items(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, (list, tuple, set, frozenset)):
        return value
    slots = [name for kind in type(value).__mro__ for name in _names(getattr(kind, "__slots__", ()))]
    return [*getattr(value, "__dict__", {}).values(), *(getattr(value, name, None) for name in slots)]


def _names(slots: str | Iterable[str]) -> Iterable[str]:
    return (slots,) if isinstance(slots, str) else slots
