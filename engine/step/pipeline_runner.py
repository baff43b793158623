"""The pipeline of an engine: its stages, and the executor that runs its schedule on them."""

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
from .batch import replace_tensors
from .call_guard import CallGuard
from .features import StepFeature
from .join import NO_JOIN, Call
from .model_call import ModelCall
from .parts import Parts
from .steps import Steps


class MicrobatchTurns:
    """Random numbers that go on where the microbatch has left off, and activations in the order of the backward."""

    def __init__(self, device: torch.device, activations: ActivationOffload | None) -> None:
        """activations: what saves them elsewhere."""
        self.streams = RandomStreams(device)
        self._activations = activations
        self._num_microbatches = 0

    @contextmanager
    def of_step(self, num_microbatches: int) -> Iterator[None]:
        """Around all forwards and backwards of a step."""
        self._num_microbatches = num_microbatches
        self.streams.begin(num_microbatches)
        try:
            with self._activations or nullcontext():
                yield
        finally:
            self.streams.end()

    @contextmanager
    def around(self, action: Action) -> Iterator[None]:
        """Around the forward of a microbatch through a stage. The backward comes to the last stage first, and there to
        microbatch 0."""
        assert action.microbatch is not None
        if self._activations is not None:
            self._activations.begin_block()
            self._activations.begin_part((action.stage + 1) * self._num_microbatches - action.microbatch)
        with self.streams.of(action.microbatch):
            yield


class PipelineRunner(StepFeature):
    """A driver for this rank's stages: see `Runner`. All ranks of the pipe axis call the same methods together.

    It is a feature too, which tells all ranks of a stage that has failed.
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
        """module: the whole model; what other ranks have is taken out of it. turns: layer by layer."""
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
        """All that every rank does in a training step."""
        return self._training.schedule

    @property
    def executor(self) -> Executor:
        """What runs training steps; its `on_action` can be set to time them."""
        return self._training

    def register_groups(self, units: Sequence[Unit]) -> None:
        """The schedule says when they are reduced. What stages send may need a gradient now that did not before."""
        for executor in (self._training, self._evaluation):
            executor.messages.forget_kinds()

    def watch_backwards(self, steps: Steps, call_guard: CallGuard) -> None:
        """Its graphs begin and end in its own stages, but for what a loss_fn adds."""
        self._scale = steps.scale

    def train(self, steps: Steps, batch: Any) -> None:
        """Losses are those of the ranks that have the last stage.

        Where ranks of the pipe axis were given other batches they compute nothing, and the end of the step is a
        ValueError on all ranks.
        """
        given = list(self.model_call.microbatches_of(steps, batch))
        steps.accumulated.check_whole(len(given))
        self._check_in_step()
        self._mesh.world.progress.enter(Activity.PIPELINE)
        steps.begin_forward(given, lambda: self.tried_loss(self.model_call.ready(steps, given[0])))
        ready = [] if steps.accumulated.is_void else [self.model_call.ready(steps, one) for one in given]

        def run() -> list[Tensor]:
            if steps.accumulated.is_void:
                return self._training.pass_by()
            with self._turns.of_step(len(ready)) if self._turns is not None else nullcontext():
                return self._training.run(ready, steps.scale.apply)

        with self._remembers_failure():
            losses = steps.backward(run, len(given))
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
                losses = self._evaluation.run([self.model_call.ready(steps, batch)])
            own = torch.full((1,), _is_void(self._evaluation), dtype=torch.int64, device=self._mesh.world.device)
            if self._mesh.sum_small(own, "the outcome of an evaluation").item():
                self._explain(self._evaluation)
            return losses
        finally:
            self.passes.release_all()

    def explain_inconsistency(self) -> None:
        self._explain(self._training)

    def _explain(self, executor: Executor) -> None:
        """Raises on all ranks: ValueError where a stage has returned another thing; where one has failed its own error
        there, and RuntimeError on the others."""
        failure = executor.failure
        own = None if failure is None else f"{type(failure).__name__}: {failure} ({'; '.join(failure.__notes__)})"
        found = self._mesh.world.gather_objects((executor.difference, own))
        if failure is not None:
            raise failure
        for rank, (_, text) in enumerate(found):
            if text is not None:
                raise RuntimeError(f"pipeline: a stage of rank {rank} failed: {text}. No parameter was updated")
        if texts := [text for text, _ in found if text is not None]:
            raise ValueError(texts[0])

    def _refuse_trial(self) -> None:
        """Raises on all ranks of this pipeline where a stage has failed in what is tried before the first step."""
        places = torch.zeros(self._mesh.axes[PIPE].size, dtype=torch.int64)
        places[self._mesh.place(PIPE)] = self._evaluation.failure is not None
        failed = self._mesh.peers.sum_on_host(places, "the outcome of a trial").nonzero().flatten().tolist()
        if self._evaluation.failure is not None:
            raise self._evaluation.failure
        if failed:
            raise RuntimeError(
                f"pipeline: a stage at place {failed[0]} failed in what is tried before the first step; the output of "
                "its rank says why"
            )

    def _marked(self, output: Any) -> Any:
        """The output of the last stage as a loss_fn is to see it. What it has received is no leaf then."""

        def inner(tensor: Tensor) -> Tensor:
            return tensor.view_as(tensor) if tensor.is_leaf and tensor.requires_grad else tensor

        return output if self._scale.seed == 1.0 else self._scale.mark_output(replace_tensors(output, inner))

    passes_output = False

    def tried_loss(self, ready: Any) -> Tensor | None:
        try:
            with self._remembers_failure():
                losses = self._evaluation.run([ready])
            self._refuse_trial()
            return next(iter(losses), None)
        finally:
            self.passes.release_all()

    def tried_output(self, ready: Any) -> Any:
        raise NotImplementedError

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
                f"{what}: expected a config without zero_optimization.layered_gradient_accumulation, found it, with "
                f"which all microbatches of a step go through a block before the next block does; use {instead}"
            )
        return ValueError(
            f"{what}: expected a rank with the whole model, found stages {list(self._plan.stages)} of "
            f"{self._plan.split.num_stages} (parallel.pipeline); use {instead}, which works at every split"
        )

    def _check_in_step(self) -> None:
        """Raises RuntimeError where messages of an earlier step may be under way: they would be taken for new ones."""
        if self._failure is not None:
            raise RuntimeError(
                "pipeline: expected ranks that are in step with each other, found that an earlier step has failed on "
                f"this one in the middle of its schedule ({self._failure}); start all ranks again, from the last "
                "checkpoint"
            )


def _is_void(executor: Executor) -> bool:
    """Whether nothing of the last run may count."""
    return executor.difference is not None or executor.has_failed
