"""Profile some steps of this rank: a trace for chrome://tracing, a table of collectives, operations by module."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from ...checkpoint.files import folder_path
from ...offload.store import listen
from ...watch.log import logger
from ...watch.timeline import COMPUTE, LANES, OFFLOAD, Timeline
from ..model.model_flops import attention_formulas
from ..step.features import StepFeature, StepResult
from ..step.parts import Parts
from .memory_report import logged_if_full

_NAME = "profile-rank{}.json"


@dataclass(frozen=True)
class Collective:
    """A row of the table: how often a collective began, and the seconds that the host waited in it.

    message_bytes: of the whole messages, whatever part of them a transport moves; None: unknown.
    """

    name: str
    count: int
    message_bytes: int | None
    seconds: float


class StepProfile(StepFeature):
    """Records until `steps` steps are done."""

    def __init__(self, parts: Parts, done: int, steps: int) -> None:
        """done: steps before it. steps: to record. Raises ValueError for less than 1, and during another profile."""
        self._features, world = parts.steps.features, parts.mesh.world
        if (other := self._features.find(StepProfile)) is not None and other.is_on:
            raise ValueError("engine.profile(): expected no profile in progress, found a profile; it ends by itself")
        if steps < 1:
            raise ValueError(f"engine.profile(): expected at least 1 step, found {steps}")
        from torch.utils.flop_counter import FlopCounterMode  # imports triton: [Note: what few trainings use]

        self.first_step, self.steps = done + 1, steps
        self.is_done = False
        self._left = steps
        self._rank, self._data_size = world.rank, parts.mesh.data_size
        groups = (group for unit in parts.runner.passes.units for group in unit.groups)
        self._sizes = {one.plan.name: one.layout.padded_numel * one.plan.dtype.itemsize for one in groups}
        self._root = type(parts.module).__name__
        self._timeline = Timeline(world.progress)
        self._stop_transfers = listen(self._timeline.begin_wait, self._timeline.end_wait)
        self._counter = FlopCounterMode(display=False, custom_mapping=attention_formulas())
        self._counter.__enter__()  # type: ignore[no-untyped-call]  # torch's has no types
        self._features.turn_on(self)

    def after_step(self, step: int, result: StepResult) -> None:
        if self._left == self.steps:
            self.first_step = step  # a checkpoint may have been loaded since
        self._left -= 1
        self.is_done = self._left == 0

    def before_next_step(self, step: int) -> None:
        # Not in `after_step`: there a recording of memory still runs, and its mode lies above this mode on torch's
        # stack.
        if self.is_done:
            self.close()

    def close(self) -> None:
        """End the profile early, and keep what was recorded."""
        if self.is_on:
            self._features.turn_off(self)
            # In reverse order of the beginning: each `stop` restores what it found.
            self._counter.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # torch's has no types
            self._stop_transfers()
            self._timeline.stop()

    # -- what was found -------------------------------------------------------------------------------------------

    @property
    def flops_by_module(self) -> dict[str, int]:
        """Return module -> floating-point operations of forwards and backwards of all steps; "": the whole model.

        A module includes its submodules. Matrix products, convolutions and attention count; recomputation counts
        again.
        """
        found: dict[str, int] = {}
        for name, operations in self._counter.get_flop_counts().items():
            # FlopCounterMode calls the model by its class, and the names of its parts begin with that.
            own = "" if name in ("Global", self._root) else name.removeprefix(f"{self._root}.")
            # "Global" and the class of the model count the same operations: not their sum.
            found[own] = max(found.get(own, 0), int(sum(operations.values())))
        return found

    @property
    def collectives(self) -> list[Collective]:
        """Return the rows of the table, most bytes first."""
        seconds: dict[str, float] = {}
        for lane, name, begin, end in self._timeline.spans:
            if lane not in (COMPUTE, OFFLOAD):
                seconds[name] = seconds.get(name, 0.0) + (end - begin) / 1e9
        rows = []
        for name in dict.fromkeys([*self._timeline.collectives, *seconds]):
            count, nbytes = self._timeline.collectives[name], self._bytes_of(name)
            # The time of a collective that never made the host wait is 0: on a device it is in no lane.
            rows.append(Collective(name, count, None if nbytes is None else nbytes * count, seconds.get(name, 0.0)))
        return sorted(rows, key=lambda row: (-(row.message_bytes or 0), -row.seconds))

    def _bytes_of(self, what: str) -> int | None:
        """Return the message bytes of a collective, such as "gather of layers.7"; None if it is of no unit."""
        kind, _, name = what.partition(" of ")
        return self._sizes.get(name) if kind in ("gather", "reduction") else None

    @property
    def seconds_by_lane(self) -> dict[str, float]:
        """Return the seconds of compute, and of each kind of wait. Waits are within compute."""
        found = dict.fromkeys(LANES, 0.0)
        for lane, _, begin, end in self._timeline.spans:
            found[lane] += (end - begin) / 1e9
        return found

    def trace(self) -> dict[str, Any]:
        """Return events for chrome://tracing and Perfetto, a thread for each lane."""
        spans = self._timeline.spans
        start = min((begin for _, _, begin, _ in spans), default=0)
        lanes = {lane: number for number, lane in enumerate(LANES)}
        rank = self._rank
        names = [
            {"ph": "M", "name": "thread_name", "pid": rank, "tid": number, "args": {"name": lane}}
            for lane, number in lanes.items()
        ]
        events = [
            {
                "ph": "X",
                "name": name,
                "cat": lane,
                "pid": rank,
                "tid": lanes[lane],
                # Chrome's format counts microseconds.
                "ts": (begin - start) / 1e3,
                "dur": (end - begin) / 1e3,
            }
            for lane, name, begin, end in spans
        ]
        process = {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
        return {"traceEvents": [process, *names, *events], "displayTimeUnit": "ms"}

    def as_dict(self) -> dict[str, Any]:
        """Return the profile without the trace, for JSON."""
        return {
            "rank": self._rank,
            "first_step": self.first_step,
            "steps": self.steps,
            "seconds_by_lane": self.seconds_by_lane,
            "collectives": [vars(row) for row in self.collectives],
            "flops_by_module": self.flops_by_module,
        }

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write trace-rankR.json and profile-rankR.json of this rank. Raise ValueError for ""."""
        place = folder_path(folder)
        place.mkdir(parents=True, exist_ok=True)
        rank = self._rank
        (place / f"trace-rank{rank}.json").write_text(json.dumps(self.trace()), encoding="utf-8")
        (place / _NAME.format(rank)).write_text(json.dumps(self.as_dict(), indent=2), encoding="utf-8")

    def table(self, module_depth: int = -1, top_modules: int = 10) -> str:
        """Return the profile as text. module_depth: -1: all depths. top_modules: of each depth; 0: all."""
        lines = [f"profile of {self.steps} step{'s' if self.steps > 1 else ''} from step {self.first_step} on:"]
        lines += [f"  {lane:<10} {seconds:>10.4f} s" for lane, seconds in self.seconds_by_lane.items() if seconds]
        lines.append(f"  {'collective':<44} {'count':>7} {'message bytes':>15} {'waited, s':>11}")
        for row in self.collectives:
            nbytes = "-" if row.message_bytes is None else f"{row.message_bytes:,}"
            lines.append(f"  {row.name[:44]:<44} {row.count:>7} {nbytes:>15} {row.seconds:>11.4f}")
        lines.append(f"  {'module':<44} {'flops':>23}")
        for name, flops in self._chosen(module_depth, top_modules):
            # The end of a long name says more: names of layers begin alike.
            lines.append(f"  {name[-44:] or 'all':<44} {flops:>23,}")
        return "\n".join(lines)

    def _chosen(self, module_depth: int, top_modules: int) -> list[tuple[str, int]]:
        """Return (module, flops) by depth."""
        by_depth: dict[int, list[tuple[str, int]]] = {}
        for name, flops in self.flops_by_module.items():
            by_depth.setdefault(name.count(".") + bool(name), []).append((name, flops))
        chosen: list[tuple[str, int]] = []
        for depth in sorted(by_depth):
            if module_depth < 0 or depth <= module_depth:
                rows = sorted(by_depth[depth], key=lambda row: -row[1])
                chosen += rows[: top_modules or None]
        return chosen


class ProfileSection(StepFeature):
    """Profiles the steps that the config's section `profile` names, and logs the table."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._due: StepProfile | None = None

    @classmethod
    def of(cls, parts: Parts) -> Self | None:
        return cls(parts) if parts.config.profile.enabled else None

    def before_next_step(self, step: int) -> None:
        wanted = self._parts.config.profile
        if self._due is not None and not self._due.is_on:
            profile, self._due = self._due, None
            if profile.is_done and wanted.folder is not None:
                with logged_if_full("profile.folder"):
                    profile.save(wanted.folder)
            if profile.is_done and self._parts.mesh.world.rank == 0:
                logger.info("%s", profile.table(wanted.module_depth, wanted.top_modules))
        # A profile that the user has begun by `engine.profile` goes on, since two cannot record at once.
        running = self._parts.steps.features.find(StepProfile)
        if step == wanted.step - 1 and not (running is not None and running.is_on):
            self._due = StepProfile(self._parts, step, wanted.steps)

    def after_load(self, step: int) -> None:
        if self._due is not None:
            # A load moves the step number, so the profile of the section begins again if its step is next.
            self._due.close()
        self.before_next_step(step)


def profiles_in(folder: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the profiles that `save` has written in a folder, by rank."""
    found = []
    for path in Path(folder).rglob(_NAME.format("*")):
        try:
            found.append((int((profile := json.loads(path.read_text(encoding="utf-8")))["rank"]), profile))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}: expected a profile that lowtide has written ({error!r})") from error
    return [profile for _, profile in sorted(found, key=lambda one: one[0])]
