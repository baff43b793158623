"""One forward of a model, of which one stage's part is really computed.

[Note: replay]
                  stage 0            stage 1             stage 2
    embedding     computed           absent              absent
    block 0       computed           skipped             skipped
    block 1       forward is left    computed            skipped
    block 2                          forward is left     computed
    norm, head                                           computed

Every stage calls the whole model. A block before the stage returns what it returned on its own stage, with absent
tensors (see [Note: absent tensors]). At the stage's first block, what was received is bound to the absent tensors
among its arguments. At the first block of the next stage the forward is left with an exception that carries that
block's arguments. So what is carried is all that the block takes and that the next stage cannot compute itself, as the
output of an encoder or a position bias that block 0 made, and what only later code needs (see [Note: names of values]).
Masks and the like every stage computes for itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .absent import Absent, is_missing, resolved
from .carried import Carried, CarriedSpec, OuterValues, description
from .random_streams import RandomStreams
from .split import SplitPlan
from .trees import TensorShape, leaves, map_leaves

BLOCK = "(block)"  # in the name of a value that a block returned


class LeaveForward(BaseException):  # no Exception: a model's own `except Exception` must not catch it
    """Ends a forward at the entry of a block, with the arguments of that block."""

    def __init__(self, block: int, arguments: tuple[Any, Any]) -> None:
        super().__init__(block)
        self.block = block
        self.arguments = arguments


class Replay:
    """The state of one forward on one stage.

    outputs: descriptions of what the blocks before the stage returned.  values: where tensors outside the blocks are
    kept under their names, or None where no stage needs them.  streams: see `RandomStreams`.
    """

    def __init__(
        self,
        plan: SplitPlan,
        stage: int,
        received: Carried | None,
        outputs: Sequence[Any],
        device: torch.device,
        values: OuterValues | None,
        streams: RandomStreams | None = None,
    ) -> None:
        self._streams = streams
        self.stage = stage
        self.blocks = plan.blocks_of(stage)
        self.values = values
        self.returned: dict[int, Any] = {}  # what the stage's own blocks returned, described for the next stage
        self.reached: int | None = None  # the own block that was called last
        self._first: int | None = None  # the own block that was called first
        self._names = plan.blocks
        self._is_last = stage == plan.num_stages - 1
        self._received = received
        self._outputs = outputs
        self._device = device
        self._with_grad = torch.is_grad_enabled()

    def call_block(self, number: int, inner: Callable[..., Any], args: Any, kwargs: Any, active: bool) -> Any:
        """What block `number` returns here. active: within the forward, and not in a later recomputation."""
        if active and self.reached is not None and number < self.reached:
            raise ValueError(
                f"pipeline: expected a forward that calls the blocks in the order {self._names[0]} ... "
                f"{self._names[-1]}, found a call of '{self._names[number]}' after '{self._names[self.reached]}'; "
                "register the blocks in the order of their calls, in one list"
            )
        if number >= self.blocks.stop:
            if self.reached is None:
                raise ValueError(
                    f"pipeline: the forward came to '{self._names[number]}' and has called no block of stage "
                    f"{self.stage} ({self._shown_blocks()}); a stage's blocks may not all be skipped"
                )
            raise LeaveForward(number, (args, kwargs))
        if number < self.blocks.start:
            output = skipped_output(self._outputs[number], self._names[number], self._device, self)
            if active and self._streams is not None:
                self._streams.skipped(number)
        else:
            output = self._call_own(number, inner, args, kwargs, active)
        if active and self.values is not None:
            self.values.keep(BLOCK, number, output)
        return output

    def _call_own(self, number: int, inner: Callable[..., Any], args: Any, kwargs: Any, active: bool) -> Any:
        if active:
            self._first = number if self._first is None else self._first
            self.reached = number
        if number == self._first and self._received is not None:
            args, kwargs = self._bind(number, (args, kwargs), self._received)
        args, kwargs = map_leaves(resolved, (args, kwargs))
        self._check_complete(number, "takes", (args, kwargs))
        output = inner(*args, **kwargs)
        if active and self._streams is not None:
            self._streams.computed(number)
        self._check_complete(number, "returns", output)
        if active and not self._is_last:
            self.returned[number] = description(output, self._names[number])
        return output

    def _bind(self, number: int, arguments: Any, received: Carried) -> Any:
        """The arguments of the stage's first block, with the received tensors in their slots."""
        spec = received.spec
        found = list(leaves(arguments))
        self._check_arguments(number, len(found), spec)
        for name, index in spec.passing:
            missing = self.values.values.get(name) if self.values is not None else None
            if missing is not None:
                self._bind_one(number, missing, received.tensors[index])
        for position, index in spec.slots:
            found[position] = self._bind_one(number, found[position], received.tensors[index])
        remaining = iter(found)
        return map_leaves(lambda leaf: next(remaining), arguments)

    def _bind_one(self, number: int, leaf: Any, value: Tensor) -> Tensor:
        if is_missing(leaf):
            if leaf.shape != value.shape:
                raise ValueError(
                    f"pipeline: stage {self.stage} received a tensor of shape {tuple(value.shape)} for "
                    f"'{self._names[number]}', expected {tuple(leaf.shape)}: it belongs to another microbatch"
                )
            leaf.bind(value)
        return value

    def _check_arguments(self, number: int, count: int, spec: CarriedSpec) -> None:
        if count != spec.num_arguments:
            raise ValueError(
                f"pipeline: '{self._names[number]}' takes {count} arguments on stage {self.stage}, but "
                f"{spec.num_arguments} on the stage before ('{spec.block}'): the stages were given different batches, "
                "or the forward depends on the rank"
            )
        if self._with_grad and not torch.is_grad_enabled() and any(spec.needs_grad):
            raise ValueError(
                f"pipeline: '{self._names[number]}' is called without gradients, as reentrant checkpointing around a "
                "block does, so that its input would get none; checkpoint with use_reentrant=False, or leave it to "
                "activation_checkpointing in the config"
            )

    def _check_complete(self, number: int, verb: str, value: Any) -> None:
        missing = next((leaf for leaf in leaves(value) if is_missing(leaf)), None)
        if missing is not None:
            raise ValueError(
                f"pipeline: '{self._names[number]}' {verb} a tensor of shape {tuple(missing.shape)} that stage "
                f"{self.stage} ({self._shown_blocks()}) does not have: it comes from '{missing.origin}', and "
                f"'{self._names[self.blocks.start]}' does not take it as an argument; pass it to every block. If a "
                "module between the blocks makes it, give initialize a sample_batch: it shows where parameters are used"
            )

    def _shown_blocks(self) -> str:
        return f"{self._names[self.blocks.start]} to {self._names[self.blocks.stop - 1]}"


def skipped_output(described: Any, block: str, device: torch.device, run: Any) -> Any:
    """What a block that is not computed returns: as described, with absent tensors."""

    def absent(leaf: Any) -> Any:
        return Absent(leaf.shape, leaf.dtype, device, block, run) if isinstance(leaf, TensorShape) else leaf

    return map_leaves(absent, described)
