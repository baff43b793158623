"""A forward of a model in which only the part of a stage is computed (`Replay`).

[Note: replay]
                  stage 0            stage 1             stage 2
    embedding     computed           absent              absent
    block 0       computed           skipped             skipped
    block 1       forward is left    computed            skipped
    block 2                          forward is left     computed
    norm, head                                           computed

Every stage calls the whole model. A block of an earlier stage returns the same structure as it returned there, with
absent tensors (see [Note: absent tensors]). At the stage's first block, the received tensors are bound to the absent
tensors among its arguments. At the first block of the next stage, an exception with that block's arguments leaves the
forward. The stage sends the arguments that the next stage cannot compute, such as the output of an encoder or a
position bias from block 0, and values that only later code needs (see [Note: names of values]). Every stage computes
masks and position ids itself.
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


class LeaveForward(BaseException):  # no Exception: an `except Exception` in the model must not catch it
    """Leaves a forward at the entry of a block, with the arguments of that block."""

    def __init__(self, block: int, arguments: tuple[Any, Any]) -> None:
        super().__init__(block)
        self.block = block
        self.arguments = arguments


class Replay:
    """The state of a forward on a stage.

    outputs: descriptions of the outputs of earlier stages' blocks. values: keeps tensors outside the blocks by name;
    None if no stage needs them. streams: see `RandomStreams`.
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
        self.returned: dict[int, Any] = {}  # descriptions of the outputs of this stage's blocks
        self.reached: int | None = None  # the last called block of this stage
        self._first: int | None = None  # the first called block of this stage
        self._names = plan.blocks
        self._is_last = stage == plan.num_stages - 1
        self._received = received
        self._outputs = outputs
        self._device = device
        self._with_grad = torch.is_grad_enabled()

    def call_block(self, number: int, inner: Callable[..., Any], args: Any, kwargs: Any, active: bool) -> Any:
        """Return the output of block `number`, computed or absent. active: False in a recomputation in backward."""
        if active and self.reached is not None and number < self.reached:
            raise ValueError(
                f"pipeline: expected a forward that calls the blocks in the order {self._names[0]} ... "
                f"{self._names[-1]}, found a call of '{self._names[number]}' after '{self._names[self.reached]}'; "
                "register the blocks in a single list, in the order of their calls"
            )
        if number >= self.blocks.stop:
            if self.reached is None:
                raise ValueError(
                    f"pipeline: the forward came to '{self._names[number]}' and has called no block of stage "
                    f"{self.stage} ({self._shown_blocks()}); it must call at least one block of each stage"
                )
            raise LeaveForward(number, (args, kwargs))
        if number < self.blocks.start:
            output = skipped_output(self._outputs[number], self._names[number], self._device, self)
            if active and self._streams is not None:
                self._streams.skipped(number)
        else:
            output = self._compute(number, inner, args, kwargs, active)
        if active and self.values is not None:
            self.values.keep(BLOCK, number, output)
        return output

    def _compute(self, number: int, inner: Callable[..., Any], args: Any, kwargs: Any, active: bool) -> Any:
        if active:
            self._first = number if self._first is None else self._first
            self.reached = number
        # Also in a recomputation: a checkpoint around several blocks calls skipped blocks again, and these return new
        # absent tensors.
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
        """Put the received tensors into the arguments of the stage's first block."""
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
                    f"'{self._names[number]}', expected {tuple(leaf.shape)}: it belongs to a different microbatch"
                )
            leaf.bind(value)
        return value

    def _check_arguments(self, number: int, count: int, spec: CarriedSpec) -> None:
        if count != spec.num_arguments:
            raise ValueError(
                f"pipeline: '{self._names[number]}' takes {count} arguments on stage {self.stage}, but "
                f"{spec.num_arguments} on the previous stage ('{spec.block}'): the stages got different batches, or "
                "the forward depends on the rank"
            )
        if self._with_grad and not torch.is_grad_enabled() and any(spec.needs_grad):
            raise ValueError(
                f"pipeline: '{self._names[number]}' is called without gradients, as reentrant checkpointing around a "
                "block does, so its input would get no gradient; checkpoint with use_reentrant=False, or set "
                "activation_checkpointing in the config"
            )

    def _check_complete(self, number: int, verb: str, value: Any) -> None:
        missing = next((leaf for leaf in leaves(value) if is_missing(leaf)), None)
        if missing is not None:
            raise ValueError(
                f"pipeline: '{self._names[number]}' {verb} a tensor of shape {tuple(missing.shape)} that stage "
                f"{self.stage} ({self._shown_blocks()}) does not have: it comes from '{missing.origin}', and "
                f"'{self._names[self.blocks.start]}' does not take it as an argument; pass it to every block. If a "
                "module between the blocks makes it, give initialize a sample_batch, to observe the use of parameters"
            )

    def _shown_blocks(self) -> str:
        return f"{self._names[self.blocks.start]} to {self._names[self.blocks.stop - 1]}"


def skipped_output(described: Any, block: str, device: torch.device, run: Any) -> Any:
    """Make the output of a block that is not computed: as described, with absent tensors."""

    def absent(leaf: Any) -> Any:
        return Absent(leaf.shape, leaf.dtype, device, block, run) if isinstance(leaf, TensorShape) else leaf

    return map_leaves(absent, described)
