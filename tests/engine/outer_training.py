"""Islands in one process: DiLoCo by plain torch, and the same by lowtide on ranks."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import lowtide
from tests.zero.training import Case, adamw, one_thread

EVERY = 4


@dataclass(frozen=True)
class Plan:
    """What an `outer` section says, for the oracle."""

    every: int = EVERY
    optimizer: str = "nesterov"
    lr: float = 0.7
    momentum: float = 0.9
    fragments: int = 1
    overlap: int = 0
    alpha: float = 0.0
    dtype: str | None = None
    lost: tuple[int, int] | None = None  # an island, and the step from which on it does not count

    def as_config(self, ranks: int) -> dict[str, Any]:
        values = {
            "every": self.every,
            "ranks": ranks,
            "optimizer": self.optimizer,
            "fragments": self.fragments,
            "overlap": self.overlap,
            "alpha": self.alpha,
            "dtype": self.dtype,
            "timeout_seconds": 60,
        }
        return values if self.optimizer == "average" else {**values, "lr": self.lr, "momentum": self.momentum}


def rows_of(case: Case, step: int, island: int, num_islands: int, ranks: int) -> tuple[Tensor, ...]:
    """What the ranks of an island have of a global batch."""
    return tuple(one.chunk(num_islands)[island] for one in case.global_batch(step, num_islands * ranks))


def train_islands(case: Case, outer: dict[str, Any], **config: Any) -> tuple[list[float], dict[str, Tensor]]:
    """On a rank: its losses, and the parameters of its island in the end (rank 0 of it)."""
    torch.manual_seed(0)
    with lowtide.initialize(case.build(), {**case.as_config(), "outer": outer, **config}) as engine:
        losses = [engine.train_step(batch_of(engine, case, step)).loss.item() for step in range(case.steps)]
        return losses, engine.state_dict()


def batch_of(engine: lowtide.Engine, case: Case, step: int) -> tuple[Tensor, ...]:
    batch = case.global_batch(step, engine.data_size)
    return tuple(tensor.chunk(engine.data_size)[engine.data_rank] for tensor in batch)


@one_thread()
def by_torch(case: Case, plan: Plan, num_islands: int, ranks: int, units: Sequence[Sequence[str]]) -> list[Any]:
    """(losses, parameters) of each island. units: prefixes of the names of each, in the order of units."""
    torch.manual_seed(0)
    models = [case.build()]
    for _ in range(1, num_islands):
        models.append(case.build())
        models[-1].load_state_dict(models[0].state_dict())
    inner = [adamw(model.parameters()) for model in models]
    synced = {name: value.detach().clone() for name, value in models[0].named_parameters()}
    buffers = {name: torch.zeros_like(value) for name, value in synced.items()}
    fragments = [
        [name for unit in units[first :: plan.fragments] for name in synced if _is_of(name, unit, units)]
        for first in range(plan.fragments)
    ]
    assert sorted(name for names in fragments for name in names) == sorted(synced)
    losses: list[list[float]] = [[] for _ in models]
    means: dict[int, tuple[int, dict[str, Tensor]]] = {}  # fragment -> the step that it is due in, and what has come
    for step in range(1, case.steps + 1):
        for island, model in enumerate(models):
            batch = rows_of(case, step - 1, island, num_islands, ranks)
            inner[island].zero_grad()
            loss = model(*batch)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), case.clip or math.inf)
            inner[island].step()
            losses[island].append(loss.item())
        for fragment, names in enumerate(fragments):
            if fragment in means and means[fragment][0] == step:
                _take_over(models, means.pop(fragment)[1], plan, synced, buffers)
            if step % plan.every == fragment * plan.every // plan.fragments:
                left = [
                    m for i, m in enumerate(models) if plan.lost is None or i != plan.lost[0] or step < plan.lost[1]
                ]
                of_all = [dict(model.named_parameters()) for model in left]
                mean = {name: _mean([synced[name] - of_one[name].detach() for of_one in of_all]) for name in names}
                if plan.overlap:
                    means[fragment] = step + plan.overlap, mean
                else:
                    _take_over(models, mean, plan, synced, buffers)
    return [
        (own, {name: value.detach() for name, value in model.state_dict().items()})
        for own, model in zip(losses, models, strict=True)
    ]


def _is_of(name: str, unit: Sequence[str], units: Sequence[Sequence[str]]) -> bool:
    owner = next((one for one in units if any(name.startswith(prefix) for prefix in one if prefix)), units[0])
    return owner is unit


def _mean(terms: list[Tensor]) -> Tensor:
    total = terms[0].clone()
    for term in terms[1:]:
        total += term
    return total / len(terms)


@torch.no_grad()
def _take_over(
    models: list[nn.Module], mean: dict[str, Tensor], plan: Plan, synced: dict[str, Tensor], buffers: dict[str, Tensor]
) -> None:
    for name, gradient in mean.items():
        if plan.optimizer == "average":
            synced[name] = synced[name] - gradient
        else:
            buffers[name] = plan.momentum * buffers[name] + gradient
            step = gradient + plan.momentum * buffers[name] if plan.optimizer == "nesterov" else buffers[name]
            synced[name] = synced[name] - plan.lr * step
        for model in models:
            own = model.get_parameter(name)
            own.copy_(plan.alpha * own + (1 - plan.alpha) * synced[name])


def resumed(case: Case, outer: dict[str, Any], folder: str, save_at: int, **config: Any) -> dict[str, Tensor]:
    """Trains to the end, saves on the way, and in the end has gone on from there again in another engine."""
    options = {**case.as_config(), "outer": outer, **config}
    torch.manual_seed(0)
    with lowtide.initialize(case.build(), options) as engine:
        for step in range(case.steps):
            engine.train_step(batch_of(engine, case, step))
            if step + 1 == save_at:
                engine.save_checkpoint(folder)
        expected = engine.state_dict()
    gone_on = go_on(case, outer, folder, **config)
    assert expected.keys() == gone_on.keys()
    assert all(torch.equal(gone_on[name], value) for name, value in expected.items())
    return expected


def go_on(case: Case, outer: dict[str, Any], folder: str, **config: Any) -> dict[str, Tensor]:
    """From a checkpoint to the end."""
    torch.manual_seed(1)
    with lowtide.initialize(case.build(), {**case.as_config(), "outer": outer, **config}) as engine:
        engine.load_checkpoint(folder)
        for step in range(engine.global_step, case.steps):
            engine.train_step(batch_of(engine, case, step))
        return engine.state_dict()


def meets(case: Case, outer: dict[str, Any], averages: bool = False, **config: Any) -> dict[str, Tensor]:
    """Parameters of this rank's island after the last step, which is one of an exchange."""
    torch.manual_seed(0)
    with lowtide.initialize(case.build(), {**case.as_config(), "outer": outer, **config}) as engine:
        if averages:
            engine.ema(0.9)
        for step in range(case.steps):
            engine.train_step(batch_of(engine, case, step))
        island = engine._mesh.world.islands
        assert engine.data_size == 4 // engine.config.parallel.ranks_of_sample and island is not None
        assert engine.data_rank // (engine.data_size // 2) == island.island
        assert engine.config.train_batch_size == 2 * case.accumulation * engine.data_size
        return engine.state_dict()


def loaded(case: Case, outer: dict[str, Any] | None, folder: str, tag: str | None = None) -> Any:
    """What an engine has after it has loaded: step, parameters, and sums of what islands keep, of this rank's."""
    config = {**case.as_config(), **({"outer": outer} if outer is not None else {})}
    torch.manual_seed(1)
    with lowtide.initialize(case.build(), config) as engine:
        try:
            engine.load_checkpoint(folder, tag)
        except lowtide.NoCheckpointError as error:
            return str(error)
        state = engine.state_dict()
        kept = dict.fromkeys(("synced", "momentum"), 0.0)
        for kind in kept if outer is not None else ():
            kept[kind] = sum(
                fragment.values.double().square().sum().item() for fragment in engine._archive.named.outer(kind)
            )
        return engine.global_step, state, kept
