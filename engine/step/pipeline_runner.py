"""The runner with a pipeline: the stages of this rank, and the executor that runs a schedule on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Self

import torch
from torch import Tensor, nn

from ...comm import Activity, Mesh
from ...model.patches import ModelPatches
from ...offload import ActivationOffload
from ...pipe.executor import Executor
from ...pipe.schedules.schedule import Action, Schedule
from ...pipe.split.random_streams import RandomStreams
from ...pipe.stage import make_stages
from ...zero.scheduled_units import ScheduledUnits
from ...zero.unit import Unit
from ..blueprint.axes import PIPE
from ..blueprint.pipeline_plan import PipelinePlan
from .batch import ModelCall, replace_tensors
from .call_guard import CallGuard
from .features import StepFeature
from .join import NO_JOIN, Call
from .parts import Parts
from .steps import Steps


class MicrobatchTurns:
    """Random numbers and offloaded activations of microbatches that take turns in a block."""

    def __init__(self, device: torch.device, activations: ActivationOffload | None) -> None:
        """activations: offloads activations; None: they stay on the device."""
        self.streams = RandomStreams(device)
        self._activations = activations
        self._num_microbatches = 0

    @contextmanager
    def of_step(self, num_microbatches: int) -> Iterator[None]:
        """Wrap all forwards and backwards of a step."""
        self._num_microbatches = num_microbatches
        self.streams.begin(num_microbatches)
        try:
            with self._activations or nullcontext():
                yield
        finally:
            self.streams.end()

    @contextmanager
    def around(self, action: Action) -> Iterator[None]:
        """Wrap the forward of a microbatch through a stage.

        The backward begins with the last stage, and there with microbatch 0: activations are fetched in that order.
        """
        assert action.microbatch is not None
        if self._activations is not None:
            self._activations.begin_block()
            self._activations.begin_part((action.stage + 1) * self._num_microbatches - action.microbatch)
        with self.streams.of(action.microbatch):
            yield


class PipelineRunner(StepFeature):
    """Runs this rank's stages. See `Runner`. All ranks of the pipe axis call the same methods together.

    It is also a feature, which tells all ranks if a stage has failed.
    """

    def __init__(
        self,
        plan: PipelinePlan,
        mesh: Mesh,
        module: nn.Module,
        units: Sequence[Unit],
        model_call: ModelCall,
        patches: ModelPatches,
        turns: MicrobatchTurns | None = None,
    ) -> None:
        """module: the whole model; parts of other ranks are removed from it. turns: for layer-by-layer accumulation."""
        self.whole = plan.whole
        self._plan = plan
        self._mesh = mesh
        streams = None if turns is None else turns.streams
        stages = dict(zip(plan.stages, make_stages(module, plan.split, plan.stages, patches, streams), strict=True))
        members = {stage: plan.members(units, stage) for stage in plan.stages}
        self.passes = ScheduledUnits(units, members, mesh, adds_in_place=not plan.is_layered)
        self._turns = turns
        self.model_call = model_call
        self._failure: str | None = None  # of an earlier step, in the middle of its schedule
        self._training, self._evaluation = (
            Executor(
                schedule,
                plan.place,
                stages,
                self.passes,
                mesh.peers,
                mesh.world.device,
                model_call.output,
                lambda output, ready: model_call.loss(self._marked(output), ready),
                patches,
                *around,
            )
            for schedule, around in ((plan.training, [turns.around] if turns else []), (plan.evaluation, []))
        )

    @classmethod
    def of(cls, parts: Parts) -> Self | None:
        return parts.runner if isinstance(parts.runner, cls) else None

    @property
    def schedule(self) -> Schedule:
        """Return the actions of every rank in a training step."""
        return self._training.schedule

    @property
    def executor(self) -> Executor:
        """Return the executor of training steps. Set its `on_action` to time the actions."""
        return self._training

    def register_groups(self, units: Sequence[Unit]) -> None:
        """Forget the kinds of messages: tensors between stages may need a gradient now that did not before."""
        for executor in (self._training, self._evaluation):
            executor.messages.forget_kinds()

    def watch_backwards(self, steps: Steps, call_guard: CallGuard) -> None:
        """Remember the scale. No backward comes from outside: graphs begin and end in the stages, but for a loss_fn."""
        self._scale = steps.scale

    def train(self, steps: Steps, batch: Any) -> None:
        """Run the step by the schedule. Ranks with the last stage know the losses.

        If ranks of the pipe axis were given different batches, they compute nothing, and the end of the step raises
        ValueError on all ranks.
        """
        given = list(self.model_call.microbatches_of(batch, steps.accumulated.accumulation))
        # Both checks come before the first message: a rank that raises later leaves its partners waiting.
        steps.accumulated.check_whole(len(given))
        self._check_in_step()
        self._mesh.world.progress.enter(Activity.PIPELINE)
        steps.begin_forward(given, lambda: self.tried_loss(self.model_call.ready(given[0], steps.scale.mark_input)))
        ready = (
            [] if steps.accumulated.is_void else [self.model_call.ready(one, steps.scale.mark_input) for one in given]
        )

        def run() -> list[Tensor]:
            if steps.accumulated.is_void:
                # Other data-parallel ranks compute. Their gathers and reductions need this rank, with zeros for
                # gradients.
                return self._training.pass_by()
            with self._turns.of_step(len(ready)) if self._turns is not None else nullcontext():
                return self._training.run(ready, steps.scale.apply)

        with self._remembers_failure():
            losses = steps.backward(run, len(given))
        # A stage that failed has sent zeros in place of its output, so that no partner waits. The sum of the step tells
        # all.
        if _is_void(self._training):
            steps.accumulated.note_inconsistency(self, torch.ones((), dtype=torch.bool, device=self._mesh.world.device))
        steps.accumulated.losses.extend(losses)

    def forward(self, steps: Steps, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        raise self._lacks_whole("engine(batch)", "engine.eval_step(batch)")

    def run(self, steps: Steps, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        raise self._lacks_whole("engine.run(function)", "engine.train_step(batch)")

    def backward(self, steps: Steps, loss: Tensor) -> None:
        raise self._lacks_whole("engine.backward(loss)", "engine.train_step(batch)")

    def scale(self, steps: Steps, loss: Tensor) -> Tensor:
        raise self._lacks_whole("engine.scale(loss)", "engine.train_step(batch)")

    def take_part(self, steps: Steps, call: Call) -> None:
        raise ValueError(NO_JOIN)

    def evaluate(self, steps: Steps, batch: Any) -> list[Tensor]:
        self._check_in_step()
        for check in steps.features.before_evaluation:
            check(batch)
        try:
            with self._remembers_failure():
                losses = self._evaluation.run([self.model_call.ready(batch, steps.scale.mark_input)])
            # An evaluation has no sum of a step that would spread the failure.
            own = torch.full((1,), _is_void(self._evaluation), dtype=torch.int64, device=self._mesh.world.device)
            if self._mesh.sum_small(own, "the outcome of an evaluation").item():
                self._explain(self._evaluation)
            return losses
        finally:
            self.passes.release_all()

    def explain_inconsistency(self) -> None:
        self._explain(self._training)

    def _explain(self, executor: Executor) -> None:
        """Raise on all ranks: ValueError if the output of a stage has changed its form.

        If a stage has failed, raise its error on its rank, and RuntimeError on the other ranks.
        """
        failure = executor.failure
        own = None if failure is None else f"{type(failure).__name__}: {failure} ({'; '.join(failure.__notes__)})"
        found = self._mesh.world.gather_objects((executor.difference, own))
        # This rank raises its error as it is, with the traceback of its stage.
        if failure is not None:
            raise failure
        for rank, (_, text) in enumerate(found):
            if text is not None:
                raise RuntimeError(f"pipeline: a stage of rank {rank} failed: {text}. No parameter was updated")
        if texts := [text for text, _ in found if text is not None]:
            raise ValueError(texts[0])

    def _refuse_trial(self) -> None:
        """Raise on all ranks of this pipeline if a stage has failed in a check before the first step."""
        places = torch.zeros(self._mesh.axes[PIPE].size, dtype=torch.int64)
        places[self._mesh.place(PIPE)] = self._evaluation.failure is not None
        failed = self._mesh.peers.sum_on_host(places, "the outcome of a trial").nonzero().flatten().tolist()
        if self._evaluation.failure is not None:
            raise self._evaluation.failure
        if failed:
            raise RuntimeError(
                f"pipeline: a stage at place {failed[0]} failed in a check before the first step; the output of its "
                "rank says why"
            )

    def _marked(self, output: Any) -> Any:
        """Return the output of the last stage for a loss_fn. Received leaves become views."""

        # `mark_output` marks tensors with a graph only. A received leaf needs the seed too.
        def inner(tensor: Tensor) -> Tensor:
            return tensor.view_as(tensor) if tensor.is_leaf and tensor.requires_grad else tensor

        return output if self._scale.seed == 1.0 else self._scale.mark_output(replace_tensors(output, inner))

    tried_output = None

    def tried_loss(self, ready: Any) -> Tensor | None:
        try:
            with self._remembers_failure():
                losses = self._evaluation.run([ready])
            self._refuse_trial()
            return next(iter(losses), None)
        finally:
            self.passes.release_all()

    def summed_over_stages(self, numbers: Sequence[int]) -> Sequence[int]:
        found: list[int] = self._mesh.peers.sum_on_host(torch.tensor(numbers), "the check of sequences").tolist()
        return found

    @contextmanager
    def _remembers_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._failure = f"{type(error).__name__}: {error}"
            raise

    def _lacks_whole(self, what: str, instead: str) -> ValueError:
        if self._plan.is_layered:
            return ValueError(
                f"{what}: expected a config without zero_optimization.layered_gradient_accumulation, found it: all "
                f"microbatches of a step go through a block before the next block runs; use {instead}"
            )
        return ValueError(
            f"{what}: expected a rank with the whole model, found stages {list(self._plan.stages)} of "
            f"{self._plan.split.num_stages} (parallel.pipeline); use {instead}, which works with every split"
        )

    def _check_in_step(self) -> None:
        """Raise RuntimeError after a failed step: its messages may still arrive, and be taken for new messages."""
        if self._failure is not None:
            raise RuntimeError(
                "pipeline: expected ranks at the same place in the schedule, found that an earlier step failed on "
                f"this rank in the middle of its schedule ({self._failure}); restart all ranks from the last checkpoint"
            )


def _is_void(executor: Executor) -> bool:
    """Return True if the results of the last run must not count."""
    return executor.difference is not None or executor.has_failed
