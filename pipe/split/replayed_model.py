"""A model with the parameters of this rank's pipeline stages (`ReplayedModel`), and a `Probe` of the next stage."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from ...model.patches import ModelPatches
from ...model.recomputing import BufferValues
from .absent import Absent
from .carried import Name, OuterValues
from .replay import BLOCK, LeaveForward, Replay, skipped_output
from .split import SplitPlan
from .trees import TensorShape, leaves, map_leaves


@dataclass(frozen=True)
class _Outer:
    """A parameter outside the blocks, or a buffer of the same module: attribute of its owner, shape and dtype."""

    owner: nn.Module
    attribute: str
    origin: str  # first name of the parameter in the model; of a norm without parameters: a buffer
    shape: torch.Size
    dtype: torch.dtype


class ReplayedModel:
    """Replays a model's forward for the stages of this rank. The model holds the parameters of these stages alone."""

    def __init__(self, model: nn.Module, plan: SplitPlan, stages: Sequence[int], patches: ModelPatches) -> None:
        """Remove the parameters of all remaining stages for good. patches: can undo the overrides of the blocks."""
        self.module = model
        self._plan = plan
        self._active: Replay | Probe | None = None
        self._local = {block for stage in stages for block in plan.blocks_of(stage)}
        blocks = {name: model.get_submodule(name) for name in plan.blocks}
        self._outer = _tensors_outside(model, blocks.values())  # first: it reads parameters that are dropped below
        kept = {name for stage in stages for name in plan.parameters[stage]}
        self._dropped = _drop_parameters(model, kept)
        _drop_buffers_from_state(model, {name for stage in stages for name in plan.buffers[stage]}, patches)
        self._examples = _example_of_each_dtype(model)
        for number, block in enumerate(blocks.values()):
            # Around the block's hooks: hooks of a skipped block must not run (test_stage_hooks). If it is set,
            # `nn.Module.__call__` calls `_compiled_call_impl` instead of `_call_impl`, which runs the hooks.
            inner = block._compiled_call_impl or block._call_impl
            patches.override(block, "_compiled_call_impl", partial(self._call_block, number, inner))

    @property
    def device(self) -> torch.device:
        """Where the parameters are now."""
        owner, attribute = next(iter(self._examples.values()))
        device: torch.device = getattr(owner, attribute).device
        return device

    def run(self, replay: Replay, call: Callable[[nn.Module], Any]) -> Any:
        """Run the stage's part of `call`. Returns the result, or the `LeaveForward` that left the forward."""
        return self._run(replay, call, self._names_of(replay.stage))

    def _names_of(self, stage: int) -> set[str]:
        return {*self._plan.parameters[stage], *self._plan.buffers[stage]}

    def _run(self, replay: Replay | Probe, call: Callable[[nn.Module], Any], present: Collection[str]) -> Any:
        """present: names of the parameters and buffers outside the blocks that have values."""
        assert self._active is None, "a stage runs within a stage"
        with self._only(present, replay), replay.values or nullcontext():
            self._active = replay
            try:
                return call(self.module)
            except LeaveForward as leave:
                return leave.with_traceback(None)  # the frames hold activations
            finally:
                self._active = None

    def probe(self, probe: Probe, call: Callable[[nn.Module], Any]) -> None:
        """Run a probe until the model returns, and restore random state and buffers."""
        # Parameters outside the blocks that the next stage alone has may be released now: they have no values.
        now, following = map(self._names_of, (probe.stage - 1, probe.stage))

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            raise LeaveForward(len(self._plan.blocks), ((), {}))

        # Before the hooks of users and before the loss, which need values.
        handle = self.module.register_forward_hook(leave, prepend=True)
        devices = [self.device] if self.device.type != "cpu" else []
        try:
            with BufferValues(self.module), torch.random.fork_rng(devices, device_type=self.device.type):
                self._run(probe, call, now & following)
        except Exception:
            # After the first block, the look-ahead may fail because it needs values. Only an earlier error counts.
            if probe.arguments is None:
                raise
        finally:
            handle.remove()

    def _call_block(self, number: int, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        replay = self._active
        if replay is None:  # a recomputation in backward, or a call from outside the engine
            replay = next((leaf.run for leaf in leaves((args, kwargs)) if isinstance(leaf, Absent)), None)
        if replay is not None:
            with replay.values.paused() if replay.values is not None else nullcontext():
                return replay.call_block(number, inner, args, kwargs, active=self._active is not None)
        if number in self._local:
            return inner(*args, **kwargs)
        raise ValueError(
            f"pipeline: '{self._plan.blocks[number]}' is not on this rank, which has stage "
            f"{', '.join(str(stage) for stage in sorted({self._plan.stage_of_block(b) for b in self._local}))} of "
            f"{self._plan.num_stages}; with a pipeline, call the engine and not the module"
        )

    @contextmanager
    def _only(self, present: Collection[str], replay: Replay | Probe) -> Iterator[None]:
        """Within the context, parameters outside the blocks that are not in `present` read as absent tensors."""
        # An attribute in `__dict__` hides the parameter of that name.
        hidden = [outer for outer in self._outer if outer.origin not in present]
        dtypes = {dtype: getattr(owner, attribute).dtype for dtype, (owner, attribute) in self._examples.items()}
        device = self.device
        for outer in hidden:
            # The model may have been cast since its parameters were dropped.
            dtype = dtypes.get(outer.dtype, outer.dtype)
            outer.owner.__dict__[outer.attribute] = Absent(outer.shape, dtype, device, outer.origin, replay)
        try:
            yield
        finally:
            for outer in hidden:
                del outer.owner.__dict__[outer.attribute]
                # A parameter that this rank does not have reads as absent in every forward.
                if (outer.owner, outer.attribute) in self._dropped:
                    outer.owner.__dict__[outer.attribute] = self._dropped[outer.owner, outer.attribute]


def _tensors_outside(model: nn.Module, blocks: Iterable[nn.Module]) -> list[_Outer]:
    """List the parameters outside the blocks, the buffers of their modules, and the statistics of norms."""
    # Buffers are hidden with their parameters: a batch norm that is not computed must not count the batch.
    inside = {id(part) for block in blocks for part in block.modules()}
    names = {id(param): name for name, param in model.named_parameters()}
    found = []
    for name, owner in model.named_modules():
        params = [(attribute, param) for attribute, param in owner._parameters.items() if param is not None]
        if id(owner) in inside or not (params or isinstance(owner, _NormBase)):
            continue
        found += [_Outer(owner, attribute, names[id(param)], param.shape, param.dtype) for attribute, param in params]
        first = names[id(params[0][1])] if params else f"{name}.running_mean"
        buffers = [(attribute, buffer) for attribute, buffer in owner._buffers.items() if buffer is not None]
        found += [_Outer(owner, attribute, first, buffer.shape, buffer.dtype) for attribute, buffer in buffers]
    return found


def _drop_parameters(model: nn.Module, kept: set[str]) -> Mapping[tuple[nn.Module, str], Absent]:
    """Put an `Absent` in the place of every parameter that is not kept."""
    names = {id(param): name for name, param in model.named_parameters()}
    dropped = {}
    for owner in model.modules():
        for attribute, param in list(owner._parameters.items()):
            if param is not None and names[id(param)] not in kept:
                absent = Absent(param.shape, param.dtype, param.device, names[id(param)])
                del owner._parameters[attribute]
                owner.__dict__[attribute] = dropped[owner, attribute] = absent
    return dropped


def _drop_buffers_from_state(model: nn.Module, kept: set[str], patches: ModelPatches) -> None:
    """Take the buffers that are not kept out of the state dict. They stay in the model: masks may be made of them."""
    for prefix, owner in model.named_modules():
        dropped = {name for name in owner._buffers if (f"{prefix}.{name}" if prefix else name) not in kept}
        if dropped:
            patches.override(owner, "_non_persistent_buffers_set", owner._non_persistent_buffers_set | dropped)


def _example_of_each_dtype(model: nn.Module) -> dict[torch.dtype, tuple[nn.Module, str]]:
    """Find (owner, attribute) of a parameter of each dtype. A later cast of this parameter shows the cast of all."""
    examples: dict[torch.dtype, tuple[nn.Module, str]] = {}
    for owner in model.modules():
        for attribute, param in owner._parameters.items():
            if isinstance(param, Tensor):
                examples.setdefault(param.dtype, (owner, attribute))
    return examples


@dataclass(frozen=True)
class Needs:
    """The values that the next stage lacks.

    positions: of arguments of its first block. passing: names of values that only code after its first block needs.
    """

    positions: tuple[int, ...]
    passing: tuple[Name, ...]


class Probe:
    """Runs a forward of the next stage with absent tensors alone, to find the values that it needs.

    Up to the stage's first block, the forward runs as it will run there. From that block on it looks ahead for needed
    values: blocks return the same shapes as the last block before the cut. The look-ahead ends if the model returns or
    needs values. A need that it does not reach is an error later, on the stage that lacks the value.
    """

    def __init__(self, plan: SplitPlan, stage: int, outputs: Sequence[Any], device: torch.device) -> None:
        """outputs: descriptions of the outputs of earlier stages' blocks."""
        self.stage = stage
        self.values = OuterValues()
        self.arguments: tuple[Any, Any] | None = None  # of the first block
        self._names = plan.blocks
        self._first = plan.blocks_of(stage).start
        self._outputs = outputs
        self._device = device

    def call_block(self, number: int, inner: Callable[..., Any], args: Any, kwargs: Any, active: bool) -> Any:
        """Return the assumed output of block `number`."""
        if number < self._first and self.arguments is None:
            output = skipped_output(self._outputs[number], self._names[number], self._device, self)
            self.values.keep(BLOCK, number, output)
            return output
        if self.arguments is None:
            self.arguments = (args, kwargs)
            self.values.cut(self.arguments)
        self.values.use((args, kwargs))
        return skipped_output(_like(self._outputs[-1], (args, kwargs)), self._names[number], self._device, self)

    def needs(self) -> Needs:
        """Return the values that the forward has used and the stage lacks."""
        lacking = [position for position, leaf in enumerate(leaves(self.arguments)) if isinstance(leaf, Absent)]
        return Needs(tuple(lacking), tuple(sorted(self.values.used)))

    def forget(self) -> None:
        """Free all tensors of the probe."""
        # Absent tensors refer to the probe: the garbage collector would free them in the middle of a later step.
        self.values.values.clear()
        self.arguments = None


def _like(described: Any, arguments: Any) -> Any:
    """Give the description's first tensor the shape of the first argument, since a decoder may follow an encoder."""
    first = next((leaf for leaf in leaves(arguments) if isinstance(leaf, Tensor)), None)
    pending = [first] if first is not None else []

    def change(leaf: Any) -> Any:
        if isinstance(leaf, TensorShape) and pending:
            return TensorShape(tuple(pending.pop().shape), leaf.dtype)
        return leaf

    return map_leaves(change, described)
