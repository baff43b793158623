"""A pipeline stage: a module with its own parameters only, and its part of the forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..model.patches import ModelPatches
from .split.absent import is_missing, resolved
from .split.carried import Carried, CarriedSpec, OuterValues, run_lengths
from .split.random_streams import RandomStreams
from .split.replay import LeaveForward, Replay
from .split.replayed_model import Needs, Probe, ReplayedModel
from .split.split import SplitPlan
from .split.trees import TensorShape, leaves, map_leaves

Call = Callable[[nn.Module], Any]


class Stage:
    """One stage of a model that was cut by `plan_split`. See [Note: replay].

    `module` is the given model, from which the parameters of other stages have been taken: names are unchanged, and
    `module.parameters()` are the stage's own (those of all stages of this rank, where it has several). Every stage is
    given the same batch. Loss and gradients are those of the whole model, bit by bit in float32 at one microbatch;
    dropout draws other numbers than in the whole model, because a stage does not draw those of the stages before; but
    with `streams`.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: SplitPlan,
        index: int,
        replayed: ReplayedModel | None = None,
        streams: RandomStreams | None = None,
    ) -> None:
        """replayed: what the stages of one rank share; by default the rank has this stage alone, for good. streams:
        where all stages are on the rank; None: each draws as it comes."""
        self._streams = streams
        self.plan = plan
        self.index = index
        self._replayed = replayed if replayed is not None else ReplayedModel(model, plan, [index], ModelPatches())
        self._needs: dict[tuple[Any, ...], Needs] = {}
        self._spec: CarriedSpec | None = None
        for name, module in model.named_modules():
            _check_outputs_of_all_blocks(name, module)
        self._configs = list({id(config): config for config in map(_config_of, model.modules())}.values())

    @property
    def module(self) -> nn.Module:
        return self._replayed.module

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.plan.num_stages - 1

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This stage's parameters, without those of other stages of the rank."""
        own = set(self.plan.parameters[self.index])
        return ((name, param) for name, param in self.module.named_parameters() if name in own)

    def run(self, call: Call, received: Carried | None = None) -> Any:
        """This stage's part of `call(module)` for one microbatch.

        call: calls the module with the microbatch, and may compute a loss of what it returns; it is the same on every
        stage. On stages that are not the last it does not return.
        received: from the stage before, tensors as leaves that require grad where `spec.needs_grad` says so.
        Returns what `call` returns on the last stage, a `Carried` on the others. Forward hooks of modules around the
        blocks, such as the root, do not run on the others. The first run of a stage that is not the last calls the
        model twice: once to see what the next stage will lack.
        Raises ValueError for what cannot be carried or does not arrive, naming block and origin.
        """
        self._check_received(received)
        outputs = _expanded(received.spec) if received is not None else []
        values = self._values(received)
        replay = Replay(self.plan, self.index, received, outputs, self._replayed.device, values, self._streams)
        if self._streams is not None:
            self._streams.begin_forward()
        with _without_caches(self._configs):
            result = self._replayed.run(replay, call)
            if isinstance(result, LeaveForward):
                carried = self._carried(call, replay, result, outputs)
                return carried if carried is not None else self.run(call, received)
        self._check_finished(replay)
        replay.values = None
        return map_leaves(resolved, result)

    def _values(self, received: Carried | None) -> OuterValues | None:
        """Where to keep the values outside the blocks, if this stage or one behind it may need one by its name."""
        to_bind = received is not None and received.spec.passing
        may_pass = not self.is_last and (not self._needs or any(needs.passing for needs in self._needs.values()))
        return OuterValues() if to_bind or may_pass else None

    def _carried(self, call: Call, replay: Replay, leave: LeaveForward, before: Sequence[Any]) -> Carried | None:
        """What goes to the next stage; None where that has values in it which only another run can keep."""
        outputs = list(before)
        for number in replay.blocks:  # a block that was skipped by chance is described as the one before it
            outputs.append(replay.returned[number] if number in replay.returned else outputs[-1] if outputs else None)
        found = list(leaves(map_leaves(resolved, leave.arguments)))
        needs = self._needs_of_next(call, leave, found, outputs)
        if needs.passing and replay.values is None:
            return None
        kept = replay.values.values if replay.values is not None else {}
        replay.values = None  # what is kept must not outlive the forward
        tensors: dict[int, tuple[int, Tensor]] = {}

        def index_of(tensor: Tensor) -> int:
            return tensors.setdefault(id(tensor), (len(tensors), tensor))[0]

        slots = tuple((at, index_of(found[at])) for at in needs.positions if not is_missing(found[at]))
        passed = [(name, resolved(kept[name])) for name in needs.passing if name in kept]
        passing = tuple((name, index_of(value)) for name, value in passed if not is_missing(value))
        sent = tuple(tensor for _, tensor in tensors.values())
        spec = CarriedSpec(
            block=self.plan.blocks[leave.block],
            tensors=tuple(TensorShape.of(tensor) for tensor in sent),
            needs_grad=tuple(tensor.requires_grad and torch.is_grad_enabled() for tensor in sent),
            slots=slots,
            num_arguments=len(found),
            passing=passing,
            outputs=run_lengths(outputs),
        )
        if self._spec is None or spec != self._spec:
            self._spec = spec
        return Carried(sent, self._spec)

    def _needs_of_next(self, call: Call, leave: LeaveForward, found: Sequence[Any], outputs: Sequence[Any]) -> Needs:
        """What the next stage lacks; found out once for each kind of arguments."""
        kinds = tuple(isinstance(leaf, Tensor) for leaf in found)
        key = (leave.block, self.module.training, kinds)
        if key not in self._needs:
            probe = Probe(self.plan, self.index + 1, outputs, self._replayed.device)
            self._replayed.probe(probe, call)
            theirs = tuple(isinstance(leaf, Tensor) for leaf in leaves(probe.arguments))
            if theirs != kinds:
                raise ValueError(
                    f"pipeline: '{self.plan.blocks[leave.block]}' is called with {len(kinds)} arguments on stage "
                    f"{self.index} and with {len(theirs)} on stage {self.index + 1}, whose forward takes another "
                    "course; outside its blocks a forward must not depend on what is computed in them"
                )
            self._needs[key] = probe.needs()
            probe.forget()
        return self._needs[key]

    def _check_received(self, received: Carried | None) -> None:
        if (received is None) != self.is_first:
            expected = "nothing" if self.is_first else f"the output of stage {self.index - 1}"
            raise ValueError(
                f"pipeline: stage {self.index} expected {expected} as received, found "
                f"{'nothing' if received is None else 'a Carried'}"
            )

    def _check_finished(self, replay: Replay) -> None:
        blocks = self.plan.blocks
        wanted = self.plan.blocks_of(self.index) if self.is_last else self.plan.blocks_of(self.index + 1)
        if not self.is_last or replay.reached is None:
            raise ValueError(
                f"pipeline: the forward finished on stage {self.index} without a call of "
                f"'{blocks[wanted.start]}' ({'its own' if self.is_last else 'the next'} first block); the model must "
                "call each block itself, as block(...) and not block.forward(...), for every batch"
            )


def make_stages(
    model: nn.Module,
    plan: SplitPlan,
    indices: Sequence[int],
    ledger: ModelPatches,
    streams: RandomStreams | None = None,
) -> tuple[Stage, ...]:
    """The stages of one rank, in the order of `indices`: one module with the parameters of them all."""
    replayed = ReplayedModel(model, plan, indices, ledger)
    return tuple(Stage(model, plan, index, replayed, streams) for index in indices)


def _expanded(spec: CarriedSpec) -> list[Any]:
    return [output for output, count in spec.outputs for _ in range(count)]


@contextmanager
def _without_caches(configs: Sequence[Any]) -> Iterator[None]:
    """Training keeps no keys and values of other stages: `config.use_cache`, where a module has it, is off for now."""
    caching = [config for config in configs if getattr(config, "use_cache", None) is True]
    for config in caching:
        config.use_cache = False
    try:
        yield
    finally:
        for config in caching:
            config.use_cache = True


def _config_of(module: nn.Module) -> Any:
    return getattr(module, "config", None)


def _check_outputs_of_all_blocks(name: str, module: nn.Module) -> None:
    """A loss over the outputs of all routers cannot be computed where only some blocks are."""
    if getattr(_config_of(module), "output_router_logits", False) is True:
        raise ValueError(
            f"pipeline: config.output_router_logits of '{name or '(the model)'}' is on: its loss needs the routers of "
            "all blocks on one rank; set it to False"
        )
