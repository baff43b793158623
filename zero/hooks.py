"""The hooks on modules and parameters. No other file of this folder registers any.

[Note: forgotten] If nobody closes an engine, it is freed with the last reference to it, and so are its model, memory
and threads. Python collects cycles of Python objects, but not cycles through autograd: a unit holds the node that
accumulates a parameter's gradient, the node holds the parameter, and the parameter holds its hooks. A block may keep
the graph of a forward, as that of an auxiliary loss, and the graph holds its hooks. So hooks on parameters and in
graphs hold the engine and the model by weak references only.
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
from ..model.patches import ModelPatches
from .autograd import at_all_levels, current_graph_task, current_transform
from .released import set_reader
from .sequence import Phase, UnitSequence
from .unit import Unit, Use

R = TypeVar("R")

_MADE_IN = "lowtide: the use of a block that made this tensor"


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
        patches: ModelPatches,
        on_block: Callable[[], None] | None = None,
    ) -> None:
        """patches: removes the hooks later. on_block: called when a block's forward or recomputed forward begins."""
        self._sequence = sequence
        self._on_block = on_block
        self._add = patches.hook
        self._of_leaves = WeakIdKeyDictionary()  # returned leaves -> [the newest hook]
        self._is_around = False  # `around` runs, and the root's forward is a part of it
        self._uses: list[list[Use | None]] = []  # of each block, the forwards that run: more than one in a recursion
        self._of_params: list[tuple[dict[int, Callable[..., None]], int]] = []  # (hooks of a parameter, key of ours)
        root = sequence.root.module
        # prepend: parameters are gathered before hooks of the user read them.
        self._add(root.register_forward_pre_hook(self._before_root, prepend=True))
        self._add(root.register_forward_hook(self._after_root))
        for unit in sequence.blocks:
            self._hook_block(unit)
        self._hooked = set[int]()  # identities of parameters
        for unit in sequence.units:
            self.hook_params(unit)
        if frees_parameters:
            self._hook_users_of_root(sequence.root)
            self._modules = frozenset(map(id, root.modules()))
            for unit in sequence.units:
                self._let_read(unit, patches)

    def _let_read(self, unit: Unit, patches: ModelPatches) -> None:
        def read(is_differentiated: bool, together: object) -> bool:
            is_computing = self._sequence.phase is not Phase.IDLE and not self._sequence.has_lost_backward()
            is_of_loss = is_differentiated and unit.is_end and self._sequence.awaits_backward
            may = is_computing or is_of_loss or _is_in_method(self._modules)
            if may:
                self._sequence.read(unit)
            return may

        for group in unit.groups:
            for param in group.params:
                patches.callback(set_reader(param, read))

    def around(self, run: Callable[[], R]) -> R:
        """Call `run` as a forward of the root. `run` calls the root once or several times, or parts of it."""
        self._before_root(self._sequence.root.module, ())
        self._is_around = True
        try:
            output = run()
        finally:
            self._is_around = False
        # Not after an error: `failing_forward`, in which the runner calls this, frees the units.
        self._after_root(self._sequence.root.module, (), output)
        return output

    def _before_root(self, module: nn.Module, args: Any) -> None:
        if self._is_around:
            return
        for uses in self._uses:  # a forward that raised has left its use behind
            uses.clear()
        for hooks, key in self._of_params:
            # Ours empties `param.grad`, so it comes after hooks that the user has registered since.
            if len(hooks) > 1 and next(reversed(hooks)) != key:
                hooks[key] = hooks.pop(key)
        self._sequence.begin_forward()

    def _after_root(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._is_around:
            return
        tensors = _tensors_with_graph(output)
        if self._sequence.phase is Phase.FORWARD and tensors:
            # The hook keeps the `Forward` alive as long as its graph.
            sequence = weakref.proxy(self._sequence)
            self._on_first_gradient(tensors, partial(UnitSequence.enter_forward, sequence, sequence.forwards.last))
        self._sequence.end_forward(keeps_graph=bool(tensors))

    def _hook_block(self, unit: Unit) -> None:
        sequence = self._sequence
        uses: list[Use | None] = []
        self._uses.append(uses)

        def before(module: nn.Module, args: Any) -> None:
            for value in args:
                node: Any = value.grad_fn if isinstance(value, Tensor) else None
                if node is not None:
                    node.metadata.setdefault(_MADE_IN, None)
            uses.append(sequence.enter(unit))
            if self._on_block is not None:
                self._on_block()

        def after(module: nn.Module, args: Any, output: Any) -> None:
            if (use := uses.pop()) is not None:
                made = []
                for tensor in _tensors_with_graph(output):
                    # A tensor that the block passes on as it is, such as a dropped layer, was made before this use.
                    node: Any = tensor.grad_fn
                    if node is None or node.metadata.setdefault(_MADE_IN, use) is use:
                        made.append(tensor)
                if made:
                    self._on_first_gradient(made, partial(UnitSequence.enter_backward, weakref.proxy(sequence), use))
            sequence.leave(unit)

        self._add(unit.module.register_forward_pre_hook(before, prepend=True))
        self._add(unit.module.register_forward_hook(after))

    def _on_first_gradient(self, tensors: Sequence[Tensor], action: Callable[[], None]) -> None:
        """Call `action` once in each backward, before the first gradient of any of the tensors enters the module.

        A leaf, such as a returned parameter, outlives the graph, so it keeps only the newest hook.
        """
        last_task: list[int] = []

        def hook(gradient: Tensor) -> None:
            task = current_graph_task()
            if last_task != [task]:
                # A list, as the hook of every output tensor shares it.
                last_task[:] = [task]
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
        """Hook the parameters that have gradients and no hook yet."""
        unit.find_accumulators()
        sequence, number = weakref.proxy(self._sequence), self._sequence.units.index(unit)  # see [Note: forgotten]
        for gradient in unit.gradients:
            for name, param in gradient.group.plan.params:
                if id(param) in self._hooked:
                    continue
                self._hooked.add(id(param))
                # Not a lambda: saves a call per gradient.
                hook = partial(UnitSequence.gradient_arrived, sequence, number, name)
                is_frozen = not param.requires_grad
                if is_frozen:
                    param.requires_grad_(True)  # torch refuses hooks on frozen parameters; it may be unfrozen later
                handle = param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                self._add(handle)
                self._of_params.append((param._post_accumulate_grad_hooks, handle.id))
                if is_frozen:
                    param.requires_grad_(False)

    def _hook_users_of_root(self, root: Unit) -> None:
        """Gather the root unit for modules outside of the blocks that are called directly, not through the root."""
        sequence = self._sequence
        members = {id(param) for group in root.groups for param in group.params}

        def before(module: nn.Module, args: Any) -> None:
            if sequence.phase is Phase.IDLE:
                sequence.enter(root)

        def after(module: nn.Module, args: Any, output: Any) -> None:
            if sequence.phase is Phase.IDLE and not _tensors_with_graph(output):
                root.release()

        for module in root.module.modules():
            if module is not root.module and has_forward(module) and members & set(map(id, parameters_read_by(module))):
                self._add(module.register_forward_pre_hook(before, prepend=True))
                self._add(module.register_forward_hook(after))


def cast_inputs(blocks: Iterable[nn.Module], dtype: torch.dtype, patches: ModelPatches) -> None:
    """Cast float32 inputs of blocks (a float32 buffer has promoted them) to the dtype in which blocks compute."""

    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.dtype == torch.float32 else value

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        return tuple(map(cast, args)), {name: cast(value) for name, value in kwargs.items()}

    for block in blocks:
        patches.hook(block.register_forward_pre_hook(before, with_kwargs=True))


_MIN_NUMEL = 1 << 17  # of a weight; copying a smaller gradient costs less than a backward in Python


def make_gradients_in_place(sequence: UnitSequence, modules: Iterable[nn.Module], patches: ModelPatches) -> None:
    """Let linear layers write the gradients of large weights into their message or shard, without a copy.

        dw = dy^T x  ---written to--->  slot (or shard)  <---view--- param.grad

    Autograd stores a gradient without a copy, so `param.grad` is a view of that memory, and `Staging` finds nothing to
    copy. If no memory is ready, if the gradient has to be cast or added, or if hooks of a user see it (who may keep it
    longer than the memory lives), the gradient is a normal tensor.
    """

    def make(param: nn.Parameter, dy: Tensor, x: Tensor | None, is_transposed: bool) -> Tensor:
        # A hook of the user, beside the hook of `UnitHooks`, sees the gradient.
        is_seen = bool(param._backward_hooks) or len(param._post_accumulate_grad_hooks or ()) > 1
        if x is None or not dy.dtype == x.dtype == param.dtype or is_seen:
            # Under autocast dy has a different dtype than the parameter: autograd casts the result to a copy.
            return gradient_of(dy, x, is_transposed)
        return weight_gradient(dy, x, is_transposed, sequence.place_for_gradient(param))

    def is_large(module: nn.Module) -> bool:
        weight = dict(module.named_parameters(recurse=False)).get("weight")
        return weight is not None and weight.requires_grad and weight.numel() >= _MIN_NUMEL

    LinearLayers(filter(is_large, modules), make, patches)


def _is_in_method(modules: Collection[int]) -> bool:
    """Whether the caller is in a method that a class of these modules defines, except methods that every module has.

    All ranks call these methods, but a single rank may print a value or ask for a `state_dict`. A merge of adapters
    does not count: it writes to weights, and gathered values are dropped later.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        # The name is checked first, as `f_locals` builds a dictionary of all variables of the frame.
        if frame.f_code.co_varnames[:1] == ("self",) and id(frame.f_locals.get("self")) in modules:
            of_all = frame.f_code.co_filename == nn.Module.forward.__code__.co_filename
            return frame.f_code.co_name not in _MERGES and (not of_all or frame.f_code in _CALLS)
        frame = frame.f_back
    return False


_MERGES = ("merge", "unmerge", "get_delta_weight")  # of PEFT's layers
_CALLS = (nn.Module._call_impl.__code__, nn.Module._wrapped_call_impl.__code__)


def _run_newest(newest: Sequence[Callable[[Tensor], None]], gradient: Tensor) -> None:
    newest[0](gradient)


def _tensors_with_graph(output: Any) -> list[Tensor]:
    """Return the tensors in a module's output through which a backward is possible."""
    if not torch.is_grad_enabled():
        return []
    if isinstance(output, Tensor) and current_transform() is None:
        return [output] if output.requires_grad else []
    return [tensor for tensor in at_all_levels(tensors_in(output)) if tensor.requires_grad]


def tensors_in(value: Any) -> list[Tensor]:
    """Return all tensors in nested lists, tuples, sets, mappings and attributes of objects, except modules."""
    if isinstance(value, Tensor):
        return [value]
    found: list[Tensor] = []
    seen: dict[int, Any] = {}  # keeps the objects alive, so that ids are not reused
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
