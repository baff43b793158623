"""The pipeline of an engine: from the config's words to stages, a schedule, and the executor that runs it."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..comm import Activity, Mesh, World
from ..model.ledger import Ledger
from ..pipe.executor import Executor, shapes_in
from ..pipe.schedules.action import Action, Op
from ..pipe.schedules.costs import Costs
from ..pipe.schedules.passes import complete
from ..pipe.schedules.schedule import Schedule
from ..pipe.split.split import SplitPlan, plan_split
from ..pipe.split.trees import leaves
from ..pipe.stage import make_stages
from ..zero.domain import Copies
from ..zero.scheduled_units import ScheduledUnits
from ..zero.sequence import Unit
from ..zero.units import UnitPlan
from .archive.named_state import Whole
from .batch import call, call_for_loss, loss_of
from .config.config import Config
from .config.parallel import schedule_of
from .steps import Steps

LossFn = Callable[[Any, Any], Tensor] | None
PIPE = "pipe"
_TIED = "(tied {})"


@dataclass(frozen=True)
class PipelinePlan:
    """Which rank has which stages, and which of the model's units: before memory is taken, and before it is split."""

    schedule: Schedule  # F, B, I and W
    split: SplitPlan
    place: int  # of this rank on the pipe axis
    numel: tuple[int, ...]  # parameter elements of each stage
    whole: Whole

    @classmethod
    def of(cls, config: Config, world: World, module: nn.Module, sample_batch: Any, loss_fn: LossFn) -> PipelinePlan:
        """Rank 0's plan, on every rank. Raises ValueError for a model that cannot be split so."""
        assert config.gradient_accumulation_steps is not None
        schedule = schedule_of(config.parallel, config.pipeline, config.gradient_accumulation_steps)
        split, failure = None, None
        if world.rank == 0:  # it alone: two measurements would not be the same
            try:
                split = _split(config, module, schedule.num_stages, sample_batch, loss_fn)
            except Exception as error:  # of the model's forward too
                failure = error
        split, text = world.broadcast_object((split, None if failure is None else str(failure)))
        if failure is not None:
            raise failure
        if text is not None:
            raise ValueError(text)
        params = dict(module.named_parameters())
        return cls(
            schedule=schedule,
            split=split,
            place=world.rank // (world.size // schedule.num_ranks),
            numel=tuple(sum(params[name].numel() for name in names) for names in split.parameters),
            whole=Whole(
                {name: param for name, param in params.items() if param.requires_grad},
                tuple(module.state_dict(keep_vars=True)),
            ),
        )

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages of this rank."""
        return self.schedule.stages_of_rank(self.place)

    @property
    def places_of_tied(self) -> dict[str, tuple[int, ...]]:
        """Parameters that stages of several places use -> these places."""
        places = {
            name: tuple(sorted({self.schedule.rank_of_stage[stage] for stage in stages}))
            for name, stages in self.split.tied.items()
        }
        return {name: found for name, found in places.items() if len(found) > 1}

    def own_units(self, units: Sequence[UnitPlan]) -> list[UnitPlan]:
        """The units of the whole model as far as this rank has them; each parameter of several places alone in one."""
        tied = self.places_of_tied
        own = {name for stage in self.stages for name in self.split.parameters[stage]}
        found = [
            replace(unit, params=tuple((name, p) for name, p in unit.params if name in own and name not in tied))
            for unit in units
        ]
        root = units[0].module
        params = {name: param for unit in units for name, param in unit.params}
        shared = [
            UnitPlan(_TIED.format(name), root, ((name, params[name]),), (Copies(PIPE, places),))
            for name, places in tied.items()
            if name in own
        ]
        return [found[0], *shared, *(unit for unit in found[1:] if unit.params)]


class Pipeline:
    """A driver for this rank's stages: see `Driver`. All ranks of the pipe axis call the same methods together."""

    def __init__(
        self,
        plan: PipelinePlan,
        config: Config,
        mesh: Mesh,
        module: nn.Module,
        units: Sequence[Unit],
        frees_parameters: bool,
        loss_fn: LossFn,
        ledger: Ledger,
    ) -> None:
        """module: the whole model; what other ranks have is taken out of it."""
        self.whole = plan.whole
        self._plan = plan
        self._mesh = mesh
        stages = dict(zip(plan.stages, make_stages(module, plan.split, plan.stages, ledger), strict=True))
        names = {stage: set(plan.split.parameters[stage]) for stage in plan.stages}
        members = {
            stage: [unit for unit in units if any(names[stage] & {*group.names} for group in unit.groups)]
            for stage in plan.stages
        }
        self.passes = ScheduledUnits(units, members, mesh)
        costs = replace(Costs.uniform(plan.schedule.num_stages), parameter_bytes=tuple(map(float, plan.numel)))
        budget = config.zero_optimization.stage3_max_live_parameters
        if frees_parameters:
            _check_budget(plan.numel, budget)
        self._failure: str | None = None  # of an earlier step, in the middle of its schedule
        self._training, self._evaluation = (
            Executor(
                complete(schedule, costs, gathers=frees_parameters and not schedule.has_any(Op.GATHER), budget=budget),
                plan.place,
                stages,
                self.passes,
                mesh.peers,
                mesh.world.device,
                lambda model, batch: call_for_loss(model, batch, loss_fn),
                lambda output, batch: loss_of(output, batch, loss_fn),
                ledger,
            )
            for schedule in (plan.schedule, _evaluation(plan.schedule))
        )

    @property
    def schedule(self) -> Schedule:
        """All that every rank does in a training step."""
        return self._training.schedule

    @property
    def executor(self) -> Executor:
        """What runs training steps; its `on_action` can be set to time them."""
        return self._training

    def train(self, steps: Steps, microbatches: Iterator[Any]) -> None:
        """Losses are those of the ranks that have the last stage.

        Raises ValueError where ranks of the pipe axis were given other batches.
        """
        given = list(microbatches)
        ready = [steps.prepared(microbatch) for microbatch in given]
        steps.guard.check()
        self._mesh.world.progress.enter(Activity.PIPELINE)
        self._check_same(given)
        with self._remembers_failure(), steps.backward(len(given)):
            losses = self._training.run(ready, steps.scale.seed)
        steps.losses.extend(losses)

    def forward(self, steps: Steps, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        raise self._lacks_whole("engine(batch)", "engine.eval_step(batch)")

    def backward(self, steps: Steps, loss: Tensor) -> None:
        raise self._lacks_whole("engine.backward(loss)", "engine.train_step(batch)")

    def evaluate(self, steps: Steps, batch: Any) -> list[Tensor]:
        ready = steps.prepared(batch)
        self._check_same([batch])
        try:
            with self._remembers_failure():
                return self._evaluation.run([ready])
        finally:
            self.passes.release_all()

    @contextmanager
    def _remembers_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._failure = f"{type(error).__name__}: {error}"
            raise

    def _lacks_whole(self, what: str, instead: str) -> ValueError:
        return ValueError(
            f"{what}: expected a rank with the whole model, found stages {list(self._plan.stages)} of "
            f"{self._plan.split.num_stages} (parallel.pipeline); use {instead}, which works at every split"
        )

    def _check_same(self, batches: Sequence[Any]) -> None:
        """A loader that divides its data by rank and world_size gives each stage another part: wrong, and not seen."""
        if self._failure is not None:  # messages may still be under way, and would be taken for those of this step
            raise RuntimeError(
                "pipeline: expected ranks that are in step with each other, found that an earlier step has failed on "
                f"this one in the middle of its schedule ({self._failure}); start all ranks again, from the last "
                "checkpoint"
            )
        digest, what = _digest_of(batches), "the check of the batch"
        pipe, device = self._mesh.axes[PIPE], self._mesh.world.device
        total = pipe.route.sum_small(torch.tensor([digest], dtype=torch.int64, device=device), what)
        differs = anywhere = int(total) != digest * pipe.size
        if self._mesh.data_size > 1:  # a step that fails must fail on all ranks, for the next one to be the same
            anywhere = bool(self._mesh.sum_small(torch.tensor([differs], dtype=torch.int64, device=device), what))
        if anywhere:
            where = f"ranks {', '.join(map(str, pipe.ranks))}" if differs else "not this rank's"
            raise ValueError(
                f"batch: expected the same one on the {pipe.size} ranks of a pipeline ({where}), found different ones; "
                "divide the data by engine.data_rank and engine.data_size, not by engine.rank and engine.world_size"
            )


def _split(config: Config, module: nn.Module, num_stages: int, sample_batch: Any, loss_fn: LossFn) -> SplitPlan:
    sample = None
    has_values = all(param.untyped_storage().nbytes() >= param.nbytes for param in module.parameters())
    if config.pipeline.balance == "time" and not has_values:
        raise ValueError(
            'pipeline.balance: "time" needs a constructed model to measure, found a callable that builds one, which no '
            'rank ever holds as a whole; pass the model, or set "parameters" or a list of numbers of blocks'
        )
    if sample_batch is not None:

        def sample(model: nn.Module) -> Any:
            return loss_of(call(model, sample_batch), sample_batch, loss_fn)

    return plan_split(module, num_stages, config.pipeline.balance, sample)


def _check_budget(numel: Sequence[int], budget: int | None) -> None:
    stage = max(range(len(numel)), key=numel.__getitem__)
    if budget is not None and numel[stage] > budget:
        raise ValueError(
            f"zero_optimization.stage3_max_live_parameters: expected at least the {numel[stage]} parameters of "
            f"pipeline stage {stage}, which is gathered as a whole, found {budget}; raise it, or split the model over "
            "more stages"
        )


def _evaluation(schedule: Schedule) -> Schedule:
    """One microbatch forward through all stages."""
    return replace(
        schedule,
        name=f"{schedule.name}, evaluation",
        num_microbatches=1,
        actions=tuple(
            tuple(Action(Op.F, stage, 0) for stage in schedule.stages_of_rank(rank))
            for rank in range(schedule.num_ranks)
        ),
    )


def _digest_of(batches: Sequence[Any]) -> int:
    """A number that differs where batches do: of shapes, and of the values that are on the CPU."""
    digest = zlib.crc32(repr(shapes_in(batches)).encode())
    for leaf in leaves(batches):
        if isinstance(leaf, Tensor) and leaf.device.type == "cpu" and leaf.numel():
            values = leaf.detach().contiguous().reshape(-1).view(torch.uint8)
            digest = zlib.crc32(values.numpy().data, digest)
    return digest
