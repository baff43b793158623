"""Memory of a rank beside its prediction: `engine.memory_report()`, and the files for `lowtide report`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from ...checkpoint.files import folder_path
from ...watch.log import logger
from ..blueprint.footprint import Footprint, MemoryPhase
from ..step.batch import described, made, of_whole
from ..step.features import StepFeature, StepResult
from ..step.parts import Parts
from .memory import ModelStateBytes, measure
from .memory_recording import OTHER, Recorded, Recorder

_MAX_OWNERS = 30  # in a report
_MAX_SAMPLES = 400  # in a report: the largest moments of a step


@dataclass(frozen=True)
class MemoryReport:
    """Bytes of a rank. Memory that ranks of a host share is divided by their number.

    now: parameter_bytes, gradient_bytes and optimizer_bytes, as `engine.memory()`. by_module: unit -> the same kinds,
    now, largest first. predicted: kind -> peak, exact for model states; with activation_bytes if the recorded step
    could be run on the meta device, else why_not gives the reason. measured: kind -> peak in the recorded step; None
    without a recorded step. The kinds may peak at different times: peak_bytes and predicted_peak_bytes are the peaks
    of the total. moment, at_peak and owners describe the measured peak: when it was, its kinds, and the owners of
    memory beside model states, largest first. samples: (moment, bytes by kind) in time order. allocator_bytes: the
    peak of an accelerator's allocator in this process so far.
    """

    rank: int
    world_size: int
    step: int
    now: Mapping[str, int]
    by_module: Mapping[str, Mapping[str, int]]
    predicted: Mapping[str, int]
    why_not: str = ""
    predicted_peak_bytes: int | None = None
    measured: Mapping[str, int] | None = None
    peak_bytes: int | None = None
    moment: str = ""
    at_peak: Mapping[str, int] | None = None
    owners: Sequence[tuple[str, int]] = ()
    samples: Sequence[tuple[str, Mapping[str, int]]] = ()
    allocator_bytes: int | None = None

    def save(self, folder: str | Path) -> Path:
        """Write folder/memory-rank0.json, which `lowtide report` reads. Raise OSError, ValueError for ""."""
        path = folder_path(folder) / f"memory-rank{self.rank}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        # A reader never sees half a file: the name comes with the rename.
        part = path.with_name(f"{path.name}.part")
        part.write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")
        part.replace(path)
        return path

    @classmethod
    def load(cls, path: Path) -> MemoryReport:
        """Read a report. Raise ValueError if the file is no report, OSError if it cannot be read."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            return cls(**values)
        except (json.JSONDecodeError, TypeError, UnicodeDecodeError) as error:
            raise ValueError(
                f"{path}: expected a file that engine.memory_report().save() has written ({error})"
            ) from error


def reports_in(folder: Path) -> list[MemoryReport]:
    """Return the reports of the last run in a folder, by rank. Raise ValueError without reports.

    Files of an earlier run with more ranks are skipped: rank 0 knows the number of ranks.
    """
    found = [MemoryReport.load(path) for path in folder.glob("memory-rank*.json")]
    if not found:
        raise ValueError(
            f"{folder}: expected memory-rank0.json and so on, found none; to record a step, set "
            f'{{"memory_report": {{"folder": "{folder}"}}}} in the config'
        )
    first, *others = sorted(found, key=lambda one: one.rank)
    return [first, *(one for one in others if one.rank < first.world_size)]


@contextmanager
def logged_if_full(key: str) -> Iterator[None]:
    """Log an OSError of writing a report, to the folder that `key` names: a full disk must not end a training."""
    try:
        yield
    except OSError as error:
        logger.error("%s: writing failed: %s", key, error)


class MemoryReports(StepFeature):
    """Records steps of an engine, and makes reports."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self.is_on = parts.config.memory_report.folder is not None
        self._recorded: Recorded | None = None
        self._recorder: Recorder | None = None
        self._batch: Any = None
        self._remove: Callable[[], None] | None = None
        self._num_steps = 0  # of this engine, without the steps of a checkpoint

    @classmethod
    def of(cls, parts: Parts) -> Self | None:
        return cls(parts)

    def before_next_step(self, step: int) -> None:
        """Begin to record if the section `memory_report` names the next step."""
        wanted = self._parts.config.memory_report
        if wanted.folder is not None and self._num_steps == wanted.step - 1:
            self.begin()

    def after_step(self, step: int, result: StepResult) -> None:
        """Write the report of the recorded step."""
        self._num_steps += 1
        wanted = self._parts.config.memory_report
        if wanted.folder is not None and self._num_steps == wanted.step:
            self.end()
            with logged_if_full("memory_report.folder"):
                path = self.report(step).save(wanted.folder)
                if not self._parts.mesh.world.rank:
                    logger.info("memory of step %d: `lowtide report %s`", step, path.parent)

    def memory(self) -> ModelStateBytes:
        return measure(self._parts.runner.passes.units, self._parts.optimizer)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the steps inside. The last recorded step counts."""
        self.begin()
        try:
            yield
        except BaseException:
            self.close()
            raise
        self.end()

    def begin(self) -> None:
        """Begin to record. Raise ValueError during another recording."""
        if self._recorder is not None:
            raise ValueError(
                "engine.record_memory(): expected no recording in progress, found a recording; leave it first"
            )
        parts, progress = self._parts, self._parts.mesh.world.progress
        # The recorder asks it for the moment of the step. It is off unless a launcher or the config reads it.
        progress.turn_on()
        units = parts.runner.passes.units
        self._recorder = Recorder(parts.module, units, self.memory, parts.mesh.slot_bytes, progress)
        # prepend: it sees the inputs before any other hook of the model can change them.
        self._remove = parts.module.register_forward_pre_hook(self._see, with_kwargs=True, prepend=True).remove
        self._batch = None
        self._recorder.__enter__()

    def end(self) -> None:
        recorder = self._recorder
        self.close()
        if recorder is not None:
            self._recorded = recorder.recorded()

    def close(self) -> None:
        """End a recording without a result, after an error or at the end of the engine."""
        recorder, self._recorder = self._recorder, None
        if recorder is not None and self._remove is not None:
            recorder.__exit__(None, None, None)
            self._remove()

    def _see(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # A description has either form: a model that is called with both cannot be predicted (`why_not`).
        if self._batch is None and not (args and kwargs):
            self._batch = of_whole(described(kwargs or args), self._parts.config.parallel.sequence)

    def report(self, step: int) -> MemoryReport:
        """Return the report. step: number of steps of the engine."""
        report = MemoryReport(
            rank=self._parts.mesh.world.rank,
            world_size=self._parts.mesh.world.size,
            step=step,
            now=asdict(self.memory()),
            by_module=self._by_module(),
            predicted=self._predicted_states(),
            allocator_bytes=allocator_bytes(self._parts.mesh.world.device),
        )
        recorded = self._recorded
        if recorded is None:
            return replace(
                report, why_not="no step was recorded: engine.record_memory(), or memory_report in the config"
            )
        peak = recorded.peak
        kinds = peak.bytes.keys()
        most = sorted(recorded.samples, key=lambda one: -one.total)[:_MAX_SAMPLES]
        # The largest moments, but in time order.
        kept = {id(one) for one in most}
        report = replace(
            report,
            measured={kind: max(one.bytes[kind] for one in recorded.samples) for kind in kinds},
            peak_bytes=peak.total,
            moment=peak.moment,
            at_peak=peak.bytes,
            owners=recorded.owners[:_MAX_OWNERS],
            samples=[(one.moment, one.bytes) for one in recorded.samples if id(one) in kept],
        )
        with _disable_current_modes():  # a profile must not count the prediction
            return self._with_prediction(report)

    def _predicted_states(self) -> dict[str, int]:
        footprint = Footprint(self._parts.blueprint, self._parts.mesh.world.rank)
        # Asked for a single moment: the gathered peak does not depend on it, and costs a run through the units.
        moments = [footprint.at(moment, gathers=moment is MemoryPhase.REDUCED) for moment in MemoryPhase]
        return {
            "parameter_bytes": max(one.parameters for one in moments) + max(one.gathered for one in moments),
            "gradient_bytes": max(one.gradients for one in moments),
            "optimizer_bytes": max(one.optimizer for one in moments),
            "buffer_bytes": max(one.staging for one in moments),
        }

    def _with_prediction(self, report: MemoryReport) -> MemoryReport:
        """Add the predicted peak of a step with the recorded batch."""
        predict = self._parts.memory_prediction
        if isinstance(predict, str):
            return replace(report, why_not=predict)
        if self._batch is None:
            return replace(report, why_not="the model was called with positional and named inputs together")
        try:
            kinds, peak = predict(made(self._batch))
        except ValueError as error:
            return replace(report, why_not=str(error))
        slots = report.predicted["buffer_bytes"] + kinds["slot_bytes"]
        activations = kinds["activation_bytes"] + kinds["loss_bytes"]
        predicted = {**report.predicted, "buffer_bytes": slots, OTHER: activations}
        return replace(report, predicted=predicted, predicted_peak_bytes=peak)

    def _by_module(self) -> dict[str, dict[str, int]]:
        by_group: dict[int, int] = {}
        for shard in self._parts.optimizer.shards:
            by_group[id(shard.group)] = by_group.get(id(shard.group), 0) + self._parts.optimizer.bytes_of(shard)
        found = {}
        for unit in self._parts.runner.passes.units:
            states = measure([unit], self._parts.optimizer)
            found[unit.name] = {
                "parameter_bytes": states.parameter_bytes,
                "gradient_bytes": states.gradient_bytes,
                "optimizer_bytes": sum(by_group.get(id(group), 0) for group in unit.groups),
            }
        return dict(sorted(found.items(), key=lambda one: -sum(one[1].values())))


def allocator_bytes(device: torch.device) -> int | None:
    """Return the peak bytes of tensors in an accelerator's allocator; None on the CPU."""
    return None if device.type == "cpu" else int(torch.accelerator.max_memory_allocated(device))
