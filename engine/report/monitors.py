"""Numbers of each step for the monitors of the config: what they are, and when they are read."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

from ...comm.world import World
from ...offload import OnHost
from ...watch.log import logger
from ...watch.progress import Progress
from ...watch.timeline import Timeline
from ..archive.agreement import no_rank_alone
from ..config.config import Config
from ..model.model_flops import ModelFlops
from ..step.step_result import StepResult
from .memory import ModelStateBytes
from .monitor_writers import Row, Writer, writers_for

_PHASES = ("data", "forward", "backward", "pipeline", "update", "wait")
COLUMNS = (
    *(f"train/{name}" for name in ("loss", "lr", "grad_norm", "loss_scale", "skipped")),
    *(f"speed/{name}" for name in ("step_seconds", "samples_per_second", "tokens_per_second", "tflops", "mfu")),
    *(f"memory/{name}" for name in ("parameter_bytes", "gradient_bytes", "optimizer_bytes")),
    *(f"seconds/{phase}" for phase in _PHASES),
)
"""Names of the numbers, in the order of a table."""
Tokens = Sequence[tuple[int, int]]
"""Of each microbatch of a step: its tokens, over all ranks, and the length of its sequences. None: not known."""


class Monitors:
    """Rank 0's. A step is written when the next one ends, whose host wait the values of this one came before.

    tflops: of one rank: those of the model (`ModelFlops`) / ranks / seconds.
    """

    def __init__(
        self,
        writers: Sequence[Writer],
        progress: Progress,
        flops: ModelFlops,
        world_size: int,
        peak_tflops: float | None,
    ) -> None:
        """peak_tflops: of a device; None: not known."""
        self._writers = list(writers)
        self._timeline = Timeline(progress, keeps_spans=False)
        self._flops = flops
        self._world_size = world_size
        self._peak_tflops = peak_tflops
        self._begun = time.perf_counter()
        self._waiting: tuple[int, dict[str, float], dict[str, OnHost]] | None = None

    @classmethod
    def of(cls, config: Config, world: World, flops: ModelFlops | None) -> Monitors | None:
        """None where none is on (`Config.has_monitors`), and on other ranks. flops: of the whole model.

        Raises ValueError where a package is missing or a folder cannot be written, and on other ranks RuntimeError.
        """
        if flops is None:
            return None
        with no_rank_alone(world, "lowtide.initialize"):
            writers = writers_for(config, COLUMNS, world.size) if world.rank == 0 else []
        if not writers:
            return None
        if not flops.attention_width:
            logger.info(
                "monitors: speed/tflops counts no attention: no module has a layer named as that of queries "
                "(q_proj, qkv, query_key_value, c_attn, ...)"
            )
        return cls(writers, world.progress, flops, world.size, config.profile.peak_tflops)

    def after_step(
        self, step: int, result: StepResult, samples: int, given: Tokens, memory: Callable[[], ModelStateBytes]
    ) -> None:
        """samples: of the global batch; 0: not known. given: its tokens."""
        now = time.perf_counter()
        seconds, self._begun = max(now - self._begun, 1e-9), now
        numbers: dict[str, float] = {
            "train/lr": result.lr,
            "train/loss_scale": result.loss_scale,
            "train/skipped": float(result.skipped),
            "speed/step_seconds": seconds,
            **{f"memory/{key}": value for key, value in asdict(memory()).items()},
            **{f"seconds/{phase}": spent for phase, spent in self._timeline.take_seconds().items()},
        }
        if samples:
            numbers["speed/samples_per_second"] = samples / seconds
        if given:
            numbers["speed/tokens_per_second"] = sum(tokens for tokens, _ in given) / seconds
            flops = sum(self._flops.of_tokens(tokens, length) for tokens, length in given)
            numbers["speed/tflops"] = flops / self._world_size / seconds / 1e12
            if self._peak_tflops is not None:
                numbers["speed/mfu"] = numbers["speed/tflops"] / self._peak_tflops
        self.flush()
        tensors = {"train/loss": result.loss, "train/grad_norm": result.grad_norm}
        self._waiting = (step, numbers, {name: OnHost(one) for name, one in tensors.items() if one is not None})

    def close(self) -> None:
        self._timeline.stop()
        self.flush()
        for writer in self._writers:
            writer.close()

    def flush(self) -> None:
        """Writes the step that waits, for which the host may wait: before what is saved of it."""
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


def tokens_of(tokens: Mapping[int, tuple[int, int]] | None, data_size: int, num_parts: int) -> Tokens:
    """Of the global batch, from (rows, length) of each microbatch of this rank, or of its part of the length."""
    sizes = (tokens or {}).values()
    return [(rows * part * num_parts * data_size, part * num_parts) for rows, part in sizes if rows * part]
