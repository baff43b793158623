"""Lines of the log about steps, and about parts of the model without gradients."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterator
from itertools import accumulate
from typing import Self

from ...watch.log import logger
from ..step.features import StepFeature, StepResult
from ..step.parts import Parts

UNUSED_STEPS = 20
_NUM_NAMED = 5


class StepLog(StepFeature):
    """Logs a line every few steps, through the logger `lowtide`."""

    def __init__(self, every: int, samples: int | None) -> None:
        """every: steps between two lines. samples: rows of a global batch; None: unknown."""
        self._every, self._samples = every, samples
        self._since = time.monotonic()

    @classmethod
    def of(cls, parts: Parts) -> Self | None:
        every = parts.config.steps_per_print
        return cls(every, parts.samples_per_step) if every and parts.mesh.world.rank == 0 else None

    def after_step(self, step: int, result: StepResult) -> None:
        if step % self._every:
            return
        now = time.monotonic()
        # The first line also counts the seconds since the engine was made.
        steps_per_second = self._every / max(now - self._since, 1e-9)
        self._since = now
        logger.info(
            "step %d: %sgradient norm %.3f, learning rate %.3g%s%s",
            step,
            # No wait: loss and norm were read with the sum of the step, and are on the host.
            "" if result.loss is None else f"loss {result.loss.item():.4f}, ",
            result.grad_norm.item(),
            result.lr,
            f", loss scale {result.loss_scale:g}" if result.loss_scale != 1 else "",
            "" if self._samples is None else f", {self._samples * steps_per_second:.1f} samples/s",
        )


class UnusedParts(StepFeature):
    """Names each part of the model, once, that got no gradient on any rank in UNUSED_STEPS steps in a row."""

    def __init__(self, parts: Parts) -> None:
        self._names = {id(param): name for unit in parts.blueprint.units for name, param in unit.params}
        self._optimizer = parts.optimizer
        self._named: set[str] = set()
        self._begin()

    @classmethod
    def of(cls, parts: Parts) -> Self | None:
        return cls(parts) if parts.mesh.world.rank == 0 else None

    def after_step(self, step: int, result: StepResult) -> None:
        """Every UNUSED_STEPS steps, look at the counts that the optimizer keeps anyway."""
        counts = self._optimizer.counts
        done = counts.num_steps - self._begun
        if 0 <= done < UNUSED_STEPS:
            return
        # Any other number of steps: a checkpoint was loaded meanwhile, so the count begins again.
        if done == UNUSED_STEPS and counts.unused:
            self._look({p for p in counts.unused if counts.missed[p] - self._missed[p] == UNUSED_STEPS})
        self._begin()

    def _begin(self) -> None:
        counts = self._optimizer.counts
        self._begun, self._missed = counts.num_steps, Counter(counts.missed)

    def _look(self, unused: Collection[int]) -> None:
        # The user may have frozen a parameter since: then it is unused on purpose.
        trained = [p for group in self._optimizer.param_groups for p in group["params"] if p.requires_grad]
        numel_of = {self._names[id(p)]: p.numel() for p in trained}
        # A module with any used parameter counts as used, so the largest module without any is named.
        used = {part for p in trained if id(p) not in unused for part in _modules_of(self._names[id(p)])}
        parts: Counter[str] = Counter()  # the largest unused modules, and single unused parameters
        for name in (self._names[id(p)] for p in trained if id(p) in unused):
            parts[next(part for part in _modules_of(name) if part not in used)] += numel_of[name]
        new = [part for part in parts if part not in self._named]
        if not new:
            return
        self._named.update(new)
        more = f" and {len(new) - _NUM_NAMED} more parts" if len(new) > _NUM_NAMED else ""
        logger.info(
            "model: %s%s got no gradient in %d steps: if that is intended, requires_grad_(False) before "
            "lowtide.initialize saves %.0f %% of all gradients and optimizer states",
            ", ".join(new[:_NUM_NAMED]),
            more,
            UNUSED_STEPS,
            100 * sum(parts[part] for part in new) / sum(numel_of.values()),
        )


def _modules_of(name: str) -> Iterator[str]:
    """Yield the modules around a parameter, largest first, and the parameter: "a", "a.b", "a.b.weight"."""
    return accumulate(name.split("."), "{}.{}".format)
