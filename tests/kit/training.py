"""The same training twice: by lowtide on several ranks, and by plain torch in one process."""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lowtide
from lowtide.comm.shared_memory import SharedMemoryTransport
from lowtide.comm.sockets import SocketTransport
from lowtide.engine.blueprint.blueprint import Blueprint
from lowtide.engine.blueprint.footprint import MemoryPhase, bytes_of
from lowtide.engine.config.config import Config

ADAMW: dict[str, Any] = {
    "type": "adamw",
    "params": {"lr": 1e-2, "betas": [0.9, 0.95], "eps": 1e-6, "weight_decay": 0.1},
}
ROWS = 2  # of a microbatch
PlainHook = Callable[[Any, Any, int], object]  # of (model, optimizer, step)


def settings(stage: int = 0, **more: Any) -> dict[str, Any]:
    """A quiet config at a stage: AdamW, ROWS rows a microbatch. `more` replaces its sections; those of None leave."""
    values = {
        "train_micro_batch_size_per_gpu": ROWS,
        "optimizer": ADAMW,
        "steps_per_print": 0,
        **more,
        "zero_optimization": {"stage": stage, **more.get("zero_optimization", {})},
    }
    return {key: value for key, value in values.items() if value is not None}


def refusal(action: Callable[..., object], *given: Any, kind: type[Exception] = ValueError, **options: Any) -> str:
    """The text of the error that `action(*given, **options)` raises."""
    with pytest.raises(kind) as caught:
        action(*given, **options)
    text = str(caught.value)
    del caught  # it would hold itself, and what the frames hold
    return text


def limit_waits(engine: lowtide.Engine, seconds: float) -> None:
    """Waits for other ranks that begin from now on end after so long. All before had the time that the config gives.

    With a short time in the config, a rank that is late on a busy machine fails `initialize`, or a step before.
    """
    mesh = engine._mesh
    for axis in (*mesh._lines.values(), *mesh.inner.values()):
        if isinstance(axis.transport, SocketTransport):
            axis.transport._timeout_seconds = seconds
        elif isinstance(axis.transport, SharedMemoryTransport):
            axis.transport._counters._timeout_seconds = seconds
    mesh.peers._in_flight._timeout = (timedelta(seconds=seconds),)


@contextmanager
def logged(level: str = "INFO") -> Iterator[list[str]]:
    """The messages of lowtide's log meanwhile; on ranks too, where no caplog is."""
    found: list[str] = []
    handler, logger = logging.Handler(level), logging.getLogger("lowtide")
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield found
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def differences(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[str]:
    """What is not the same to the last bit: names, dtypes, shapes and values."""
    if found.keys() != expected.keys():
        return sorted(found.keys() ^ expected.keys())
    return [
        name
        for name, value in expected.items()
        if found[name].dtype != value.dtype or found[name].shape != value.shape or not torch.equal(found[name], value)
    ]


@dataclass(frozen=True)
class Case:
    """One training: a model, its global batches, and a config."""

    build: Callable[[], nn.Module]
    batch: Callable[[int, int], tuple[Tensor, ...]]  # (step, rows) -> global batch
    stage: int = 0
    accumulation: int = 1
    steps: int = 3
    clip: float = 0.0
    config: Mapping[str, Any] = field(default_factory=dict)

    def at(self, stage: int, **changes: Any) -> "Case":
        """The same case at another stage; `config` is added to."""
        config = {**self.config, **changes.pop("config", {})}
        return replace(self, stage=stage, config=config, **changes)

    def as_config(self) -> dict[str, Any]:
        own = {"gradient_accumulation_steps": self.accumulation, "gradient_clipping": self.clip}
        return settings(self.stage, **{**own, **self.config})

    def global_batch(self, step: int, world_size: int) -> tuple[Tensor, ...]:
        return self.batch(step, ROWS * self.accumulation * world_size)

    def share(self, engine: lowtide.Engine, step: int) -> tuple[Tensor, ...]:
        """The rows of the engine's rank in the global batch of a step."""
        batch = self.global_batch(step, engine.data_size)
        return tuple(tensor.chunk(engine.data_size)[engine.data_rank] for tensor in batch)

    def microbatches(self, engine: lowtide.Engine, step: int) -> list[tuple[Tensor, ...]]:
        """The same rows in parts, one for each microbatch."""
        return list(zip(*(tensor.chunk(self.accumulation) for tensor in self.share(engine, step)), strict=True))


@dataclass
class Outcome:
    """What a training gave: one value for each step, and the final state on rank 0."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    lrs: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    state: dict[str, Tensor] = field(default_factory=dict)

    def add(self, result: Any) -> None:
        """Takes the values of one more step."""
        self.losses.append(result.loss.item())
        self.norms.append(result.grad_norm.item())
        self.lrs.append(result.lr)
        self.scales.append(result.loss_scale)
        self.skipped.append(result.skipped)

    def differences(self, other: "Outcome") -> list[str]:
        """What is not the same to the last bit; empty where all is."""
        told = [{name: str(getattr(one, name)) for name in ("losses", "norms")} for one in (self, other)]  # with NaN
        found = [name for name in told[0] if told[0][name] != told[1][name]]
        found += ["order"] if list(self.state) != list(other.state) else []
        return found + differences(self.state, other.state)


def rank_and_world() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def share_of(batch: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """This rank's rows of a global batch."""
    rank, world_size = rank_and_world()
    return tuple(tensor.chunk(world_size)[rank] for tensor in batch)


def start(case: Case, **initialize_options: Any) -> lowtide.Engine:
    """An engine for the case, with the values of seed 0."""
    torch.manual_seed(0)
    return lowtide.initialize(case.build(), case.as_config(), **initialize_options)


def take_step(engine: lowtide.Engine, case: Case, step: int) -> lowtide.StepResult:
    """One step on this rank's share of a global batch of the case."""
    return engine.train_step(case.share(engine, step))


@contextmanager
def trained(case: Case, num_steps: int, **initialize_options: Any) -> Iterator[lowtide.Engine]:
    """An engine that has taken so many steps of the case; runs on every rank."""
    with start(case, **initialize_options) as engine:
        for step in range(num_steps):
            take_step(engine, case, step)
        yield engine


def train(
    case: Case, take: Callable[[lowtide.Engine, Case, int], Any] = take_step, **initialize_options: Any
) -> Outcome:
    """Trains by lowtide; runs on every rank. take: makes one step, and returns its result."""
    engine = start(case, **initialize_options)
    outcome = Outcome()
    for step in range(case.steps):
        outcome.add(take(engine, case, step))
    outcome.state = engine.state_dict()
    engine.close()
    return outcome


def wrong_bytes(engine: lowtide.Engine, case: Case) -> str:
    """Where the bytes between steps differ from those that the blueprint of the case says; empty if nowhere."""
    with torch.device("meta"):
        model = case.build()
    blueprint = Blueprint.of(Config.load(case.as_config()).resolve(engine.world_size), model, engine.world_size)
    said, there = bytes_of(blueprint, engine.rank, MemoryPhase.BETWEEN_STEPS), engine.memory()
    planned = said.parameters, said.gradients, said.optimizer
    taken = there.parameter_bytes, there.gradient_bytes, there.optimizer_bytes
    return "" if planned == taken else f"planned {planned}, taken {taken}"


def train_all(cases: Sequence[Case], **initialize_options: Any) -> list[Outcome]:
    """One call of the pool for many cases."""
    return [train(case, **initialize_options) for case in cases]


def assert_alike(outcomes: Sequence[Outcome], what: object = "") -> None:
    """All trainings gave the same, to the last bit."""
    assert [other.differences(outcomes[0]) for other in outcomes[1:]] == [[]] * (len(outcomes) - 1), what


@contextmanager
def one_thread() -> Iterator[None]:
    """Sums in the order in which the ranks of the pool, with one thread each, make them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def adamw(params: Any) -> torch.optim.Optimizer:
    """What ADAMW says, by torch."""
    return torch.optim.AdamW(params, lr=1e-2, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1)


@one_thread()
def train_plainly(
    case: Case,
    world_size: int,
    make_optimizer: Callable[[Any], torch.optim.Optimizer] = adamw,
    num_parts: int = 1,
    before_step: PlainHook = lambda model, optimizer, step: None,
    before_update: PlainHook = lambda model, optimizer, step: None,
    loss_fn: Callable[[Any, Any], Tensor] = lambda output, batch: output,
) -> Outcome:
    """Trains by torch alone, on global batches.

    num_parts: the loss is the mean over so many parts of a batch. before_update: sees the gradients before they are
    clipped.
    """
    torch.manual_seed(0)
    model = case.build()
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = make_optimizer(params)
    outcome = Outcome()
    for step in range(case.steps):
        before_step(model, optimizer, step)
        batch = case.global_batch(step, world_size)
        optimizer.zero_grad()
        losses = []
        for part in zip(*(tensor.chunk(num_parts) for tensor in batch), strict=True):
            loss = loss_fn(model(*part), part)
            (loss / num_parts).backward()
            losses.append(loss.item())
        before_update(model, optimizer, step)
        norm = torch.nn.utils.clip_grad_norm_(params, case.clip or math.inf)
        outcome.lrs.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        outcome.losses.append(sum(losses) / num_parts)
        outcome.norms.append(norm.item())
    outcome.state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return outcome


def assert_close(found: Outcome, expected: Outcome, rtol: float, atol: float, what: str = "") -> None:
    """Losses, norms, learning rates and final values agree. Source of the form: torch.testing.assert_close."""
    for name in ("losses", "norms", "lrs"):
        ours, theirs = getattr(found, name), getattr(expected, name)
        text = f"{what}: {name} {ours} expected {theirs}"
        assert len(ours) == len(theirs), text
        assert all(math.isclose(a, b, rel_tol=rtol, abs_tol=atol) for a, b in zip(ours, theirs, strict=True)), text
    assert list(found.state) == list(expected.state), what
    for name, value in expected.state.items():
        torch.testing.assert_close(found.state[name], value, rtol=rtol, atol=atol, msg=f"{what} {name}: {{}}".format)
