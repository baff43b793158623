"""Messages of a rank of one place of a pipeline, and what it waits for them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ...zero.plan import GroupPlan
from ..blueprint.blueprint import Blueprint
from ..blueprint.footprint import Footprint
from .exchange import CollectiveCosts, Message
from .pipeline_run import ScheduleRun
from .stages import Stages


class PlaceTraffic:
    """Collectives of its groups, outputs of stages and their gradients, and sums of tied weights."""

    def __init__(
        self, blueprint: Blueprint, exchange: CollectiveCosts, place: int, by_stage: Sequence[Sequence[GroupPlan]]
    ) -> None:
        """by_stage: the groups that are trained there, by stage of the place."""
        plan, footprint = blueprint.places[place], Footprint(blueprint, blueprint.first_rank_of(place))
        gathers = [exchange.gather(group) for group in plan.groups] if footprint.frees_memory else []
        reduces = [exchange.reduce(group) for group in plan.trained]
        sums = [*reduces, *(exchange.all_reduce(group, blueprint.first_rank_of(place)) for group in plan.trained)]
        refreshes = [exchange.refresh(group) for group in plan.updated]
        self.waits_for_gathers = _seconds(gathers) / len(by_stage)  # of the first; others come beside it
        self.waits_for_sums = _seconds(sums) / len(by_stage)
        self.waits_for_refreshes = _seconds(refreshes)
        again = reduces if blueprint.policy.reduces_every_backward else []  # after each microbatch
        taken = {group.name: message for group, message in zip(plan.trained, again, strict=False)}
        messages = [[(group, taken[group.name]) for group in groups if taken] for groups in by_stage]
        self.reducing = [_seconds(one for _, one in some) for some in messages]
        halves = [[one for group, one in some if group.is_added_up_flat] for some in messages]
        self.shares_of_halves = [  # of `reducing`, what is collected of an I before its W
            _seconds(some) / (whole or 1.0) for some, whole in zip(halves, self.reducing, strict=True)
        ]
        self._sent_of_halves = list(map(_sent, halves))
        self._tied_bytes = sum(  # sums over the places that have a copy: each sends its own to each of the others
            (len(copies.places) - 1) * group.layout.shard_numel * group.accumulation_dtype.itemsize
            for group in plan.trained
            for copies in group.domain.tied
            if copies.are_added
        )
        self._sending, self._sending_again = _seconds([*gathers, *sums]), _seconds(again)
        self._sent, self._sent_again = _sent([*gathers, *sums, *refreshes]), _sent(again)

    def sending_seconds(self, num_microbatches: int) -> float:
        """Of gathers and reductions in a step, waited for or not."""
        return self._sending + (num_microbatches - 1) * self._sending_again

    def sent(self, stages: Stages, run: ScheduleRun, place: int) -> dict[str, int]:
        """By link, with outputs of stages, their gradients, and sums of tied weights."""
        messages = run.num_microbatches * sum(map(stages.output_bytes, run.ends(place)))
        earlier = run.num_microbatches - 1
        sent = {link: nbytes + earlier * self._sent_again[link] for link, nbytes in self._sent.items()}
        for stage, of_half in zip(run.recurrence.stages[place], self._sent_of_halves, strict=True):
            for link, nbytes in stages.exchanged[stage].items():
                sent[link] += run.num_microbatches * nbytes
            for link, nbytes in of_half.items():
                sent[link] += int(run.recurrence.halves[place, stage]) * nbytes
        return {**sent, "pipe": messages + self._tied_bytes}


def _seconds(messages: Iterable[Message]) -> float:
    return sum(one.seconds for one in messages)


def _sent(messages: Sequence[Message]) -> dict[str, int]:
    """Bytes by link."""
    return {link: sum(getattr(one, link) for one in messages) for link in ("intra", "inter")}
