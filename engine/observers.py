"""Who looks at the steps of a training, and takes no part in them; a trial ends it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from ..watch.log import logger
from .parts import Parts
from .report.memory import ModelStateBytes, measure
from .report.memory_report import MemoryReports
from .report.monitors import Monitors, tokens_of
from .report.step_log import StepLog, UnusedParts
from .report.step_profile import StepProfile, Workload
from .step.step_result import StepResult
from .trial import Trial


class Observers:
    """The log, monitors, profiles and memory reports of one engine, and the trial that it may be made for."""

    def __init__(self, parts: Parts, data_size: int) -> None:
        """data_size: ranks by which data are divided."""
        config, world = parts.config, parts.mesh.world
        self._parts, self._data_size = parts, data_size
        units = parts.driver.passes.units
        self.reports = MemoryReports(parts.blueprint, parts.mesh, parts.module, units, parts.optimizer, parts.meta_run)
        self._writes_report = config.memory_report.folder is not None
        self._log = StepLog(config.steps_per_print if world.rank == 0 else 0)
        params = (named for unit in parts.blueprint.units for named in unit.params)
        self._unused = UnusedParts(params, parts.optimizer) if world.rank == 0 else None
        self._monitors = Monitors.of(config, world, parts.model_flops)
        if self._monitors is not None:
            parts.steps.so_far.tokens = {}
        self._profiler: StepProfile | None = None
        self._due_profile: StepProfile | None = None  # the config's
        self._profile_if_due(0)

    def memory(self) -> ModelStateBytes:
        """Of model states on this rank now."""
        return measure(self._parts.driver.passes.units, self._parts.optimizer)

    def profile(self, done: int, steps: int) -> StepProfile:
        """Of the `steps` steps that follow on `done`. Raises ValueError while one is being made."""
        if self._profiler is not None:
            raise ValueError("engine.profile(): expected no profile that is being made, found one; it ends by itself")
        mesh = self._parts.mesh
        workload = Workload.of(self._parts.driver.passes.units, mesh.world.rank, mesh.data_size)
        self._profiler = StepProfile(workload, self._parts.module, mesh.world.progress, done, steps)
        return self._profiler

    @property
    def trial(self) -> Trial | None:
        """Of `lowtide tune`, where the engine is made for one: nothing is written then."""
        return self._parts.trial

    def after_step(self, step: int, result: StepResult, close: Callable[[], None]) -> None:
        """step: how many are done. close: the engine, where a trial ends with it, by SystemExit."""
        config = self._parts.config
        self._log.after_step(step, result, config.train_batch_size or 0)
        if self._unused is not None:
            self._unused.after_step()
        if self._monitors is not None:
            tokens = tokens_of(self._parts.steps.so_far.tokens, self._data_size, config.parallel.sequence)
            self._monitors.after_step(step, result, config.train_batch_size or 0, tokens, self.memory)
            self._parts.steps.so_far.tokens = {}
        # Both stand on torch's stack of modes, where what is entered last is left first, whoever leaves: a step whose
        # memory is recorded lies in a profile, or beside it.
        if self._writes_report:
            self.reports.after_step(step)
        if self._profiler is not None and self._profiler.after_step(step):
            self._end_profile()
        self._profile_if_due(step)
        if self._writes_report:
            self.reports.begin_if_due()
        if self._parts.trial is not None:
            self._parts.trial.after_step(close)

    def go_on_at(self, step: int) -> None:
        """The training goes on at another step: what is written and profiled is of that one."""
        self.flush()
        if self._profiler is not None and self._profiler is self._due_profile:
            self._end_profile()
        self._profile_if_due(step)

    def flush(self) -> None:
        """A job that goes on from here does not write what was seen again."""
        if self._monitors is not None:
            self._monitors.flush()

    def close(self) -> None:
        with ExitStack() as closing:  # the last one first, each whatever becomes of the others
            closing.callback(self._end_profile)
            closing.callback(self.reports.abort)
            if self._monitors is not None:
                closing.callback(self._monitors.close)

    # -- pieces of it ---------------------------------------------------------------------------------------------

    def _profile_if_due(self, done: int) -> None:
        wanted = self._parts.config.profile
        if wanted.enabled and self._profiler is None and done == wanted.step - 1:
            self._due_profile = self.profile(done, wanted.steps)

    def _end_profile(self) -> None:
        """Of the config's profile it says what was found."""
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        profiler.stop()
        wanted = self._parts.config.profile
        if profiler is self._due_profile and profiler.is_done:
            if wanted.folder is not None:
                profiler.save(wanted.folder)
            if self._parts.mesh.world.rank == 0:
                logger.info("%s", profiler.table(wanted.module_depth, wanted.top_modules))
