"""Numbers of each step for the monitors of the config: what they are, and when they are read."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, Self

import torch

from ...offload import OnHost
from ...watch.log import logger
from ...watch.timeline import Timeline
from ..archive.agreement import no_rank_alone
from ..model.model_flops import ModelFlops
from ..step.batch import tokens_in
from ..step.features import StepFeature
from ..step.parts import Parts
from ..step.step_result import StepResult
from .memory import measure
from .monitor_writers import Row, Writer, writers_for

_PHASES = ("data", "forward", "backward", "pipeline", "update", "wait")
COLUMNS = (
    *(f"train/{name}" for name in ("loss", "lr", "grad_norm", "loss_scale", "skipped")),
    *(f"speed/{name}" for name in ("step_seconds", "samples_per_second", "tokens_per_second", "tflops", "mfu")),
    *(f"memory/{name}" for name in ("parameter_bytes", "gradient_bytes", "optimizer_bytes")),
    *(f"seconds/{phase}" for phase in _PHASES),
)
"""Names of the numbers, in the order of a table."""


class Monitors(StepFeature):
    """Rank 0's. A step is written when the next one ends, whose host wait the values of this one came before.

    tflops: of one rank: those of the model (`ModelFlops`) / ranks / seconds.
    """

    def __init__(self, writers: Sequence[Writer], flops: ModelFlops, parts: Parts) -> None:
        self._writers = list(writers)
        self._timeline = Timeline(parts.mesh.world.progress, keeps_spans=False)
        self._flops = flops
        self._parts = parts
        self._begun = time.perf_counter()
        self._sizes: dict[int, tuple[int, int]] = {}  # rows and length of each microbatch of a step
        self._waiting: tuple[int, dict[str, float], dict[str, OnHost]] | None = None

    @classmethod
    def of(cls, parts: Parts) -> Self | None:
        """None where none is on (`Config.has_monitors`), and on other ranks.

        Raises ValueError where a package is missing or a folder cannot be written, and on other ranks RuntimeError.
        """
        flops, world = parts.model_flops, parts.mesh.world
        if flops is None:
            return None
        with no_rank_alone(world, "lowtide.initialize"):
            writers = writers_for(parts.config, COLUMNS, world.size) if world.rank == 0 else []
        if not writers:
            return None
        if not flops.attention_width:
            logger.info(
                "monitors: speed/tflops counts no attention: no module has a layer named as that of queries "
                "(q_proj, qkv, query_key_value, c_attn, ...)"
            )
        return cls(writers, flops, parts)

    def before_forward(self, batches: Sequence[Any], output: Callable[[], Any] | None) -> None:
        """A microbatch may be seen several times, in part too: its largest part counts."""
        if torch.is_grad_enabled():
            for at, batch in enumerate(batches, self._parts.steps.so_far.num_microbatches):
                self._sizes[at] = max(self._sizes.get(at, (0, 0)), tokens_in(batch), key=math.prod)

    def after_step(self, step: int, result: StepResult) -> None:
        parts, config = self._parts, self._parts.config
        samples = config.train_batch_size or 0  # 0: not known
        memory = measure(parts.driver.passes.units, parts.optimizer)
        now = time.perf_counter()
        seconds, self._begun = max(now - self._begun, 1e-9), now
        numbers: dict[str, float] = {
            "train/lr": result.lr,
            "train/loss_scale": result.loss_scale,
            "train/skipped": float(result.skipped),
            "speed/step_seconds": seconds,
            **{f"memory/{key}": value for key, value in asdict(memory).items()},
            **{f"seconds/{phase}": spent for phase, spent in self._timeline.take_seconds().items()},
        }
        if samples:
            numbers["speed/samples_per_second"] = samples / seconds
        given = [
            (rows * length * parts.mesh.data_size, length) for rows, length in self._sizes.values() if rows * length
        ]
        self._sizes.clear()
        if given:
            numbers["speed/tokens_per_second"] = sum(tokens for tokens, _ in given) / seconds
            flops = sum(self._flops.of_tokens(tokens, length) for tokens, length in given)
            numbers["speed/tflops"] = flops / parts.mesh.world.size / seconds / 1e12
            if config.profile.peak_tflops is not None:
                numbers["speed/mfu"] = numbers["speed/tflops"] / config.profile.peak_tflops
        self.before_save()
        tensors = {"train/loss": result.loss, "train/grad_norm": result.grad_norm}
        self._waiting = (step, numbers, {name: OnHost(one) for name, one in tensors.items() if one is not None})

    def close(self) -> None:
        self._timeline.stop()
        self.before_save()
        for writer in self._writers:
            writer.close()

    def after_load(self, step: int) -> None:
        self.before_save()

    def before_save(self) -> None:
        """Writes the step that waits, for which the host may wait: who goes on from here does not write it again."""
        if self._waiting is None:
            return
        (step, numbers, waiting), self._waiting = self._waiting, None
        found = {name: one.read().item() for name, one in waiting.items()} | numbers
        row: Row = {name: found[name] for name in COLUMNS if name in found}
        for writer in list(self._writers):
            self._try(writer, lambda: writer.write(step, row))  # noqa: B023  (called at once)

    def _try(self, writer: Writer, write: Callable[[], None]) -> None:
        """A full disk, or a service that is gone, does not end a training."""
        try:
            write()
        except Exception as error:
            logger.error("%s: writing failed, nothing more is written there: %s", writer.name, error)
            if writer in self._writers:
                self._writers.remove(writer)
                self._try(writer, writer.close)
