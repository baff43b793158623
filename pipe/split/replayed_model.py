"""A model that holds the parameters of some pipeline stages only, and a probe of what the next stage lacks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...model.patches import ModelPatches
from .absent import Absent
from .carried import Name, OuterValues
from .replay import BLOCK, LeaveForward, Replay, skipped_output
from .split import SplitPlan
from .trees import TensorShape, leaves, map_leaves


@dataclass(frozen=True)
class _Outer:
    """A parameter outside the blocks, or a buffer beside one: where it hangs, the parameter's first name, its shape."""

    owner: nn.Module
    attribute: str
    parameter: str
    shape: torch.Size
    dtype: torch.dtype


class ReplayedModel:
    """A model that holds the parameters of some stages only, and replays its forward for each of them."""

    def __init__(self, model: nn.Module, plan: SplitPlan, stages: Sequence[int], ledger: ModelPatches) -> None:
        """Takes all parameters of other stages off the model, for good; the ledger takes back how blocks are called."""
        self.module = model
        self._plan = plan
        self._active: Replay | Probe | None = None
        self._local = {block for stage in stages for block in plan.blocks_of(stage)}
        blocks = {name: model.get_submodule(name) for name in plan.blocks}
        self._outer = _tensors_outside(model, blocks.values())
        kept = {name for stage in stages for name in plan.parameters[stage]}
        self._dropped = _drop_parameters(model, kept)
        _drop_buffers_from_state(model, {name for stage in stages for name in plan.buffers[stage]}, ledger)
        self._examples = _example_of_each_dtype(model)
        for number, block in enumerate(blocks.values()):
            inner = block._compiled_call_impl or block._call_impl
            # Outside of the block's hooks: those of a skipped block must not run (test_stage_hooks).
            ledger.override(block, "_compiled_call_impl", partial(self._call_block, number, inner))

    @property
    def device(self) -> torch.device:
        """Where the parameters are now."""
        owner, attribute = next(iter(self._examples.values()))
        device: torch.device = getattr(owner, attribute).device
        return device

    def run(self, replay: Replay, call: Callable[[nn.Module], Any]) -> Any:
        """What `call` returns, or the `LeaveForward` with which it ended."""
        return self._run(replay, call, set(self._plan.parameters[replay.stage]))

    def _run(self, replay: Replay | Probe, call: Callable[[nn.Module], Any], own: Collection[str]) -> Any:
        """own: names of the parameters outside of blocks that have values."""
        assert self._active is None, "a stage runs within another"
        with self._without_parameters_of_others(replay, own), replay.values or nullcontext():
            self._active = replay
            try:
                return call(self.module)
            except LeaveForward as leave:
                return leave.with_traceback(None)  # the frames hold activations
            finally:
                self._active = None

    def probe(self, probe: Probe, call: Callable[[nn.Module], Any]) -> None:
        """Runs a probe until the model returns; random state is as it was before.

        Parameters outside of blocks that the next stage alone has may be released at this time: they have no values.
        """
        now, following = (set(self._plan.parameters[stage]) for stage in (probe.stage - 1, probe.stage))

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            raise LeaveForward(len(self._plan.blocks), ((), {}))

        handle = self.module.register_forward_hook(leave, prepend=True)
        devices = [self.device] if self.device.type != "cpu" else []
        try:
            with torch.random.fork_rng(devices, device_type=self.device.type):
                self._run(probe, call, now & following)
        except Exception:
            if probe.arguments is None:
                raise
        finally:
            handle.remove()

    def _call_block(self, number: int, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        replay = self._active
        if replay is None:  # a recomputation in the backward, or a call from outside
            replay = next((leaf.run for leaf in leaves((args, kwargs)) if isinstance(leaf, Absent)), None)
        if replay is not None:
            with replay.values.paused() if replay.values is not None else nullcontext():
                return replay.call_block(number, inner, args, kwargs, active=self._active is not None)
        if number in self._local:
            return inner(*args, **kwargs)
        raise ValueError(
            f"pipeline: '{self._plan.blocks[number]}' is not on this rank, which has stage "
            f"{', '.join(str(stage) for stage in sorted({self._plan.stage_of_block(b) for b in self._local}))} of "
            f"{self._plan.num_stages}; call the engine, not the module, under a pipeline"
        )

    @contextmanager
    def _without_parameters_of_others(self, replay: Replay | Probe, own: Collection[str]) -> Iterator[None]:
        """An attribute in `__dict__` hides the parameter of that name."""
        hidden = [outer for outer in self._outer if outer.parameter not in own]
        dtypes = {dtype: getattr(owner, attribute).dtype for dtype, (owner, attribute) in self._examples.items()}
        device = self.device
        for outer in hidden:
            dtype = dtypes.get(outer.dtype, outer.dtype)
            outer.owner.__dict__[outer.attribute] = Absent(outer.shape, dtype, device, outer.parameter, replay)
        try:
            yield
        finally:
            for outer in hidden:
                del outer.owner.__dict__[outer.attribute]
                if (outer.owner, outer.attribute) in self._dropped:
                    outer.owner.__dict__[outer.attribute] = self._dropped[outer.owner, outer.attribute]


def _tensors_outside(model: nn.Module, blocks: Iterable[nn.Module]) -> list[_Outer]:
    """Parameters, and the buffers of their modules: what is not computed must not count as a batch that was seen."""
    inside = {id(part) for block in blocks for part in block.modules()}
    names = {id(param): name for name, param in model.named_parameters()}
    found = []
    for owner in model.modules():
        params = [(attribute, param) for attribute, param in owner._parameters.items() if param is not None]
        if id(owner) in inside or not params:
            continue
        found += [_Outer(owner, attribute, names[id(param)], param.shape, param.dtype) for attribute, param in params]
        first = names[id(params[0][1])]
        buffers = [(attribute, buffer) for attribute, buffer in owner._buffers.items() if buffer is not None]
        found += [_Outer(owner, attribute, first, buffer.shape, buffer.dtype) for attribute, buffer in buffers]
    return found


def _drop_parameters(model: nn.Module, kept: set[str]) -> Mapping[tuple[nn.Module, str], Absent]:
    """Puts an `Absent` in the place of every parameter that is not kept."""
    names = {id(param): name for name, param in model.named_parameters()}
    dropped = {}
    for owner in model.modules():
        for attribute, param in list(owner._parameters.items()):
            if param is not None and names[id(param)] not in kept:
                absent = Absent(param.shape, param.dtype, param.device, names[id(param)])
                del owner._parameters[attribute]
                owner.__dict__[attribute] = dropped[owner, attribute] = absent
    return dropped


def _drop_buffers_from_state(model: nn.Module, kept: set[str], ledger: ModelPatches) -> None:
    """Buffers stay, since masks may be made of them, but only one stage has each in its state dict."""
    for prefix, owner in model.named_modules():
        dropped = {name for name in owner._buffers if (f"{prefix}.{name}" if prefix else name) not in kept}
        if dropped:
            ledger.override(owner, "_non_persistent_buffers_set", owner._non_persistent_buffers_set | dropped)


def _example_of_each_dtype(model: nn.Module) -> dict[torch.dtype, tuple[nn.Module, str]]:
    """A place of a parameter of each dtype: what it has become later tells what became of the others."""
    examples: dict[torch.dtype, tuple[nn.Module, str]] = {}
    for owner in model.modules():
        for attribute, param in owner._parameters.items():
            if isinstance(param, Tensor):
                examples.setdefault(param.dtype, (owner, attribute))
    return examples


@dataclass(frozen=True)
class Needs:
    """positions: of the arguments of the next stage's first block which it lacks.

    passing: the names of values that it lacks, its first block does not take, and code behind that block needs.
    """

    positions: tuple[int, ...]
    passing: tuple[Name, ...]


class Probe:
    """A forward of the next stage with nothing computed: up to its first block as it will run there.

    From that block on it is a look ahead, in which blocks return what the block before the cut returned, for the names
    of the values that are still needed. It ends where the model needs a value or returns; what it has missed is an
    error on the stage that lacks it.
    """

    def __init__(self, plan: SplitPlan, stage: int, outputs: Sequence[Any], device: torch.device) -> None:
        """outputs: descriptions of what the blocks before the stage returned."""
        self.stage = stage
        self.values = OuterValues()
        self.arguments: tuple[Any, Any] | None = None  # of the first block
        self._names = plan.blocks
        self._first = plan.blocks_of(stage).start
        self._outputs = outputs
        self._device = device

    def call_block(self, number: int, inner: Callable[..., Any], args: Any, kwargs: Any, active: bool) -> Any:
        """What block `number` is thought to return."""
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
        """What was found."""
        lacking = [position for position, leaf in enumerate(leaves(self.arguments)) if isinstance(leaf, Absent)]
        return Needs(tuple(lacking), tuple(sorted(self.values.used)))

    def forget(self) -> None:
        """Lets go of the tensors that it has met: absent ones refer to this, so only the garbage collector would, in
        the midst of a later step, whose addresses would move."""
        self.values.values.clear()
        self.arguments = None


def _like(described: Any, arguments: Any) -> Any:
    """The description with the first tensor as large as the first argument: a decoder's block after an encoder's."""
    first = next((leaf for leaf in leaves(arguments) if isinstance(leaf, Tensor)), None)
    pending = [first] if first is not None else []

    def change(leaf: Any) -> Any:
        if isinstance(leaf, TensorShape) and pending:
            return TensorShape(tuple(pending.pop().shape), leaf.dtype)
        return leaf

    return map_leaves(change, described)
