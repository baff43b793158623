"""A pipeline stage: a model that holds the parameters of the stage alone, and its part of the forward (`Stage`)."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from ..model.caches import configs_of, without_caches
from ..model.patches import ModelPatches
from .split.absent import is_missing, resolved
from .split.carried import Carried, CarriedSpec, OuterValues
from .split.random_streams import RandomStreams
from .split.replay import LeaveForward, Replay
from .split.replayed_model import Needs, Probe, ReplayedModel
from .split.split import SplitPlan
from .split.trees import TensorShape, leaves, map_leaves

Call = Callable[[nn.Module], Any]


class Stage:
    """A stage of a model that `plan_split` divided. See [Note: replay] in `split/replay.py`.

    `module` is the given model without the parameters of stages on different ranks. Names are unchanged, and
    `module.parameters()` are the parameters of all stages of this rank. Every stage gets the same batch.
    Loss and gradients equal those of the whole model, bitwise in float32 with a single microbatch. Dropout draws
    different numbers, because a stage does not draw the numbers of earlier stages, except with `streams`.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: SplitPlan,
        index: int,
        replayed: ReplayedModel | None = None,
        streams: RandomStreams | None = None,
    ) -> None:
        """replayed: shared by the stages of a rank; None if the rank has this stage alone. streams: random numbers
        per microbatch, if all stages are on this rank; None: each stage draws from the global generators."""
        self._streams = streams
        self.plan = plan
        self.index = index
        self._replayed = replayed if replayed is not None else ReplayedModel(model, plan, [index], ModelPatches())
        self._needs: dict[tuple[Any, ...], Needs] = {}
        self._spec: CarriedSpec | None = None
        for name, module in model.named_modules():
            _check_outputs_of_all_blocks(name, module)
        self._configs = configs_of(model)

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
        """Iterate over the parameters of this stage, a subset of `module.named_parameters()`."""
        names = set(self.plan.parameters[self.index])
        return ((name, param) for name, param in self.module.named_parameters() if name in names)

    def run(self, call: Call, received: Carried | None = None, form: Hashable = None) -> Any:
        """Run this stage's part of `call(module)` for a microbatch.

        call: calls the module with the microbatch, and may compute a loss of its output. It is the same on every
        stage, and returns on the last stage only.
        received: the previous stage's tensors, as leaves that require grad as `spec.needs_grad` says.
        form: of the microbatch (`form_of`); a forward may take other branches for other forms.
        Returns the result of `call` on the last stage, and a `Carried` on every earlier stage. On these, forward
        hooks of modules around the blocks, such as the root, do not run, and the first run calls the model twice: a
        probe finds the tensors that the next stage lacks.
        Raises ValueError, with block and origin, for a value that cannot be carried or is missing.
        """
        self._check_received(received)
        outputs = _expanded(received.spec) if received is not None else []
        values = self._values(received, form)
        replay = Replay(self.plan, self.index, received, outputs, self._replayed.device, values, self._streams)
        if self._streams is not None:
            self._streams.begin_forward()
        # A stage has no keys and values of the remaining stages.
        with without_caches(self._configs):
            result = self._replayed.run(replay, call)
            if isinstance(result, LeaveForward):
                carried = self._carried(call, form, replay, result, outputs)
                # At most once: `_carried` has noted what the next stage needs, so the second run keeps it.
                return carried if carried is not None else self.run(call, received, form)
        self._check_finished(replay)
        replay.values = None
        return map_leaves(resolved, result)

    def _values(self, received: Carried | None, form: Hashable) -> OuterValues | None:
        """Return a store for values outside the blocks, if this stage or a later stage may need a value by name."""
        to_bind = received is not None and received.spec.passing
        known = [needs for (_, *kind, _), needs in self._needs.items() if kind == [self.module.training, form]]
        # Before the first probe the needs are unknown, so values are kept.
        may_pass = not self.is_last and (not known or any(needs.passing for needs in known))
        return OuterValues() if to_bind or may_pass else None

    def _carried(
        self, call: Call, form: Hashable, replay: Replay, leave: LeaveForward, before: Sequence[Any]
    ) -> Carried | None:
        """Collect the tensors for the next stage. None if it needs values by name that this run has not kept."""
        outputs = list(before)
        for number in replay.blocks:  # a block that was skipped by chance is described as its predecessor
            outputs.append(replay.returned[number] if number in replay.returned else outputs[-1] if outputs else None)
        found = list(leaves(map_leaves(resolved, leave.arguments)))
        needs = self._needs_of_next(call, form, leave, found, outputs)
        if needs.passing and replay.values is None:
            return None
        kept = replay.values.values if replay.values is not None else {}
        replay.values = None  # kept values must not outlive the forward
        tensors: dict[int, tuple[int, Tensor]] = {}  # by id: a tensor that is needed twice is sent once

        def index_of(tensor: Tensor) -> int:
            return tensors.setdefault(id(tensor), (len(tensors), tensor))[0]

        slots = tuple((at, index_of(found[at])) for at in needs.positions if not is_missing(found[at]))
        passed = [(name, resolved(kept[name])) for name in needs.passing if name in kept]
        passing = tuple((name, index_of(value)) for name, value in passed if not is_missing(value))
        sent = tuple(tensor for _, tensor in tensors.values())
        spec = CarriedSpec(
            block=self.plan.blocks[leave.block],
            tensors=tuple(TensorShape.of(tensor) for tensor in sent),
            # A parameter may be among the arguments. It requires a gradient in an evaluation too.
            needs_grad=tuple(tensor.requires_grad and torch.is_grad_enabled() for tensor in sent),
            slots=slots,
            num_arguments=len(found),
            passing=passing,
            outputs=tuple((output, len(list(equal))) for output, equal in groupby(outputs)),
        )
        if self._spec is None or spec != self._spec:  # equal specs stay a single object
            self._spec = spec
        return Carried(sent, self._spec)

    def _needs_of_next(
        self, call: Call, form: Hashable, leave: LeaveForward, found: Sequence[Any], outputs: Sequence[Any]
    ) -> Needs:
        """Find the tensors that the next stage lacks, by a probe for each form of a batch and kind of arguments."""
        kinds = tuple(isinstance(leaf, Tensor) for leaf in found)
        # In training a forward may take other branches than in evaluation.
        key = (leave.block, self.module.training, form, kinds)
        if key not in self._needs:
            probe = Probe(self.plan, self.index + 1, outputs, self._replayed.device)
            self._replayed.probe(probe, call)
            theirs = tuple(isinstance(leaf, Tensor) for leaf in leaves(probe.arguments))
            if theirs != kinds:
                raise ValueError(
                    f"pipeline: '{self.plan.blocks[leave.block]}' is called with {len(kinds)} arguments on stage "
                    f"{self.index} and with {len(theirs)} on stage {self.index + 1}: their forwards take different "
                    "branches. Outside the blocks, a forward must not depend on values that a block computes"
                )
            self._needs[key] = probe.needs()
            probe.forget()
        return self._needs[key]

    def _check_received(self, received: Carried | None) -> None:
        if (received is None) != self.is_first:
            expected = "nothing" if self.is_first else f"the output of stage {self.index - 1}"
            raise ValueError(
                f"pipeline: stage {self.index} expected {expected} as `received`, found "
                f"{'nothing' if received is None else 'a Carried'}"
            )

    def _check_finished(self, replay: Replay) -> None:
        blocks = self.plan.blocks
        wanted = self.plan.blocks_of(self.index) if self.is_last else self.plan.blocks_of(self.index + 1)
        if not self.is_last or replay.reached is None:
            raise ValueError(
                f"pipeline: the forward finished on stage {self.index} without a call of "
                f"'{blocks[wanted.start]}', the first block of {'this' if self.is_last else 'the next'} stage; the "
                "model must call each block, as block(...) and not block.forward(...), for every batch"
            )


def make_stages(
    model: nn.Module,
    plan: SplitPlan,
    indices: Sequence[int],
    patches: ModelPatches,
    streams: RandomStreams | None = None,
) -> tuple[Stage, ...]:
    """Make the stages of a rank, in the order of `indices`. They share a module with the parameters of all of them."""
    replayed = ReplayedModel(model, plan, indices, patches)
    return tuple(Stage(model, plan, index, replayed, streams) for index in indices)


def _expanded(spec: CarriedSpec) -> list[Any]:
    return [output for output, count in spec.outputs for _ in range(count)]


def _check_outputs_of_all_blocks(name: str, module: nn.Module) -> None:
    """Refuse a router loss: it needs the outputs of all blocks, and a stage has only some blocks."""
    if getattr(getattr(module, "config", None), "output_router_logits", False) is True:
        raise ValueError(
            f"pipeline: config.output_router_logits of '{name or '(the model)'}' is True: this loss needs the routers "
            "of all blocks on the same rank; set it to False"
        )
