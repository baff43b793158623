"""Moving averages of an engine's weights: kept up with each step, and shown in the place of the weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..comm import BODY, Activity
from ..zero.averages import Averages
from ..zero.optimizer import ShardedOptimizer
from .archive.archive import Archive
from .step.steps import Access, Steps
from .step.turn import Turn, in_turn


class AveragedWeights:
    """An exponential moving average (EMA) of the master weights, divided over the ranks as optimizer states are."""

    optimizer: ShardedOptimizer
    _turn: Turn
    _steps: Steps
    _archive: Archive

    @in_turn
    def ema(self, decay: float = 0.999) -> None:
        """From now on each step that is not skipped updates an average: decay x average + (1 - decay) x weight.

        The numbers of torch's AveragedModel with get_ema_multi_avg_fn(decay): the first step copies the weights. Master
        weights are averaged where there are any, in their dtype, and at least float32; buffers are not. Call it once,
        on all ranks, after `initialize`, and before `load_checkpoint` to go on with averages that were saved. Takes
        that much memory, which `memory()` counts with the optimizer. Raises ValueError for a decay that is not from 0
        to 1, and where it was called before.
        """
        if self.optimizer.averages is not None:
            raise ValueError(
                f"engine.ema(): expected one call, found another: averages with decay "
                f"{self.optimizer.averages.decay:g} are kept already"
            )
        with self._steps.apart(Activity.WEIGHTS, Access.READS):
            self.optimizer.averages = Averages(self.optimizer.shards, decay)

    @contextmanager
    def ema_weights(self) -> Iterator[None]:
        """A context in which the averages are the weights: for `eval_step`, forwards, `state_dict` and `export`.

        All ranks must enter and leave it. In the end every weight has the bits that it had before. Raises ValueError
        where `ema` was not called; what would change the weights in it (`backward`, `step`, `gathered(modify=True)`,
        `load_weights`, ...) or leave them as those of the training (`save_checkpoint`, `close`) raises
        StateError.
        """
        averages = self.optimizer.averages
        if averages is None:
            raise ValueError("engine.ema_weights(): expected averages, found none; call engine.ema(decay) first")
        self._swap(averages, shown=True)
        try:
            with self._turn.raised.call(f"{BODY}engine.ema_weights()", is_context=True):
                yield
        finally:
            averages.are_shown = False
            if not self._turn.is_over:
                self._swap(averages, shown=False)

    def _swap(self, averages: Averages, shown: bool) -> None:
        with self._turn.of("engine.ema_weights()"):
            with self._steps.apart(Activity.WEIGHTS, Access.CHANGES):
                self._archive.swap(averages, shown)
            averages.are_shown = shown
