"""What an engine offers to loops that call forward, backward and step themselves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Literal

import torch
from torch import Tensor, nn

from ..comm import Mesh
from .driver import Driver
from .join import Call, Join
from .steps import Steps
from .turn import Turn, in_turn


class LoopCalls:
    """Whose gradients count, which backward is the last of its step, and what ranks agree on."""

    module: nn.Module
    _mesh: Mesh
    _turn: Turn
    _steps: Steps
    _driver: Driver
    _join: Join

    def scale(self, loss: Tensor) -> Tensor:
        """The loss, whose `backward()` is that of the engine: with float16's loss scale from the loss on, and with the
        loss in the result of the step. Its value is that of `loss`. Raises ValueError for what is no loss, ().
        """
        return self._driver.scale(self._steps, loss)

    def no_sync(self) -> AbstractContextManager[None]:
        """A context whose backwards are not the last of their step: `accumulate(last=False)`, as DDP calls it."""
        return self.accumulate(last=False)

    def accumulate(self, last: bool) -> AbstractContextManager[None]:
        """A context that says whether its backwards are the last of their step, after which `step` acts.

        For loops that count by themselves; a backward outside of any is then the last. Gradients are divided by
        gradient_accumulation_steps all the same: leave it at 1 and weigh the losses.
        """
        return self._steps.accumulate(last)

    @in_turn
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets what the backwards since the last step have added up; `step` does so by itself."""
        if self._steps.num_microbatches:
            self._join.check_outside("engine.zero_grad() in the middle of a step")
        self._steps.refuse_more("engine.zero_grad()")
        self._steps.forget(ends_graphs=False)

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """A context in which no parameter of the engine requires a gradient; that of its inputs is computed."""
        trained = [param for param in self.module.parameters() if param.requires_grad]
        for param in trained:
            param.requires_grad_(False)
        try:
            yield
        finally:
            for param in trained:
                param.requires_grad_(True)

    @in_turn
    def agree(self, flag: bool | Tensor, how: Literal["any", "all"] = "any") -> bool:
        """Whether `flag` is true on any rank, or on all of them: the same answer everywhere. All ranks must call it.

        if engine.agree(loss < best_so_far + 0.01):  # some rank wants to stop: all do
            break
        """
        if how not in ("any", "all"):
            raise ValueError(f'engine.agree: expected how="any" or "all", found {how!r}')
        with self._join.together(Call.AGREEMENT) as num_ranks:
            count = self._count(bool(flag))
        return count == num_ranks if how == "all" else count > 0

    def _count(self, flag: bool) -> int:
        """On how many ranks. A collective."""
        mine = torch.tensor([flag], dtype=torch.int64, device=self._mesh.world.device)
        return int(self._mesh.sum_small(mine, "engine.agree()"))
