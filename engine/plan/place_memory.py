"""Bytes of a rank of one place of a pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ...zero.plan import GroupPlan
from ..blueprint.blueprint import Blueprint
from ..blueprint.footprint import Footprint
from .estimate import Resting
from .pipeline_run import ScheduleRun
from .stages import Stages


class PlaceMemory:
    """What rests there, and what a schedule adds to it."""

    def __init__(self, blueprint: Blueprint, place: int, by_stage: Sequence[Sequence[GroupPlan]]) -> None:
        """by_stage: the groups that are trained there, by stage of the place."""
        footprint, plan = Footprint(blueprint, blueprint.first_rank_of(place)), blueprint.places[place]
        self.rests = Resting.of(blueprint, footprint, place)
        self._by_stage = by_stage
        # Without a budget a stage stays gathered from its first use to its last, which lie around those of the others.
        self._gathered = sum(map(footprint.gathered, plan.groups)) if footprint.frees_memory else 0
        is_native = blueprint.route == "native"
        self._staged = 2 * max((one.slot_bytes for one in plan.trained), default=0) if is_native else 0
        flat = any(group.is_added_up_flat for group in plan.trained)
        self._takes_each = blueprint.policy.reduces_every_backward or flat
        self._adds_in_place = all(footprint.adds_in_place(group) for group in plan.trained)

    def most(self, stages: Stages, run: ScheduleRun, place: int) -> tuple[Mapping[str, int], int]:
        """(the most of each kind, the most at a moment)."""
        computed, held = self._computed(stages, run, place)
        loss = stages.profile.loss_bytes if len(stages.parts) - 1 in run.recurrence.stages[place] else 0
        kinds = {
            **self.rests.kinds,
            "gathered_bytes": self._gathered,
            "activation_bytes": max(0, held - loss),
            "loss_bytes": loss,
            "buffer_bytes": self.rests.kinds["buffer_bytes"] + self._staged + stages.profile.slot_bytes,
        }
        beside = self._gathered + self._staged + computed
        return kinds, max(self.rests.after_backward, self.rests.bytes + beside) + stages.profile.slot_bytes

    def _computed(self, stages: Stages, run: ScheduleRun, place: int) -> tuple[int, int]:
        """(the most of activations and gradients together, of activations) while something is computed."""
        own, at = list(run.recurrence.stages[place]), run.recurrence.computing[place]
        whole, put_off = (np.array(sizes)[own] for sizes in (stages.kept_bytes, stages.put_off_bytes))
        held = at.held @ whole + (at.kept - at.held) @ put_off
        before, between, final = self._gradients.T
        gradients = before.sum() + at.begun @ (between - before) + at.ended @ (final - between)
        # What is added to gradients that are there goes at once, unless each backward gives its own away.
        plain, holding = (np.array([stages.working_bytes(stage, holds) for stage in own]) for holds in (False, True))
        is_begun = np.take_along_axis(at.begun, at.places[:, None], axis=1)[:, 0] > 0
        holds = (not self._adds_in_place) & (self._takes_each | ~is_begun)
        working = np.where(holds, holding[at.places, at.codes], plain[at.places, at.codes])
        passing = self._passing_bytes(stages, run, place)
        activations = held + plain[at.places, at.codes]
        return passing + int((held + working + gradients).max()), passing + int(activations.max())

    @staticmethod
    def _passing_bytes(stages: Stages, run: ScheduleRun, place: int) -> int:
        """Of a step's inputs that are cast, and of messages: one at each end of a stage, one ahead for each stage."""
        own = run.recurrence.stages[place]
        sizes = [max(stages.input_bytes(stage), stages.output_bytes(stage)) for stage in own]
        messages = sum(stages.output_bytes(stage) for stage in run.ends(place)) + sum(sizes)
        return messages + run.num_microbatches * stages.profile.cast_bytes

    @cached_property
    def _gradients(self) -> NDArray[np.int64]:
        """(stages of this place, 3) gradients before its first backward has ended, from then on, and after its last."""
        sizes = ([self.rests.by_group[group.name] for group in groups] for groups in self._by_stage)
        return np.array([np.sum(own or [(0, 0, 0)], axis=0) for own in sizes])
