"""Muon is the published update at every stage and number of ranks, each matrix orthogonalised once by one rank."""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.engine.config.config import Config, ConfigError
from lowtide.optimizers import whole_tensor
from lowtide.zero.layout import FlatLayout
from lowtide.zero.whole_update import owners_of
from tests.kit.models import short_gpt, short_gpt_float64, token_batch
from tests.kit.ranks import RankPool
from tests.kit.training import Case, Outcome, assert_close, share_of, train_all, train_plainly

PARAMS: dict[str, Any] = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1, "adam_lr": 1e-2, "eps": 1e-8}
CONFIG: dict[str, Any] = {"optimizer": {"type": "Muon", "params": PARAMS}}
CASE = Case(short_gpt_float64, token_batch, clip=0.5, config=CONFIG)


class Muon(torch.optim.Optimizer):
    """Keller Jordan's SingleDeviceMuonWithAuxAdam, in the dtype of the parameters."""

    def __init__(self, params: Any, matrices: set[int]) -> None:
        super().__init__(params, {"lr": PARAMS["lr"]})
        self.matrices = matrices

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for param in self.param_groups[0]["params"]:
            state, gradient = self.state[param], param.grad
            state["step"] = step = state.get("step", 0) + 1
            if id(param) in self.matrices:
                mean = state.setdefault("mean", torch.zeros_like(param))
                mean.lerp_(gradient, 0.1)
                x = gradient.lerp(mean, 0.9)
                is_tall = x.size(0) > x.size(1)
                x = x.mT if is_tall else x
                x = x / (x.norm() + 1e-7)
                for _ in range(5):
                    product = x @ x.mT
                    x = 3.4445 * x + (-4.7750 * product + 2.0315 * product @ product) @ x
                x = x.mT if is_tall else x
                param.mul_(1 - 0.02 * 0.1)
                param.add_(x * max(1, x.size(0) / x.size(1)) ** 0.5, alpha=-0.02)
            else:
                mean, squares = (state.setdefault(name, torch.zeros_like(param)) for name in ("mean", "squares"))
                mean.lerp_(gradient, 0.1)
                squares.lerp_(gradient.square(), 0.05)
                param.mul_(1 - 1e-2 * 0.1)
                param.add_(mean / (1 - 0.9**step) / ((squares / (1 - 0.95**step)).sqrt() + 1e-8), alpha=-1e-2)


def is_matrix(name: str, param: Tensor) -> bool:
    return param.dim() == 2 and "embed" not in name and not name.startswith(("head", "tokens", "positions"))


def published(case: Case, world_size: int) -> Outcome:
    """In one process; the model's own parameters say which are matrices."""
    found: set[int] = set()

    def build() -> nn.Module:
        model = short_gpt_float64()
        embeddings = {id(p) for part in model.modules() if isinstance(part, nn.Embedding) for p in part.parameters()}
        found.update(id(p) for n, p in model.named_parameters() if is_matrix(n, p) and id(p) not in embeddings)
        return model

    make: Callable[[Any], torch.optim.Optimizer] = partial(Muon, matrices=found)
    return train_plainly(Case(build, case.batch, clip=case.clip, config=case.config), world_size, make)


def test_it_is_the_published_update(ranks: RankPool) -> None:
    expected = published(CASE, 2)
    cases = [CASE.at(stage) for stage in range(4)]
    cases += [CASE.at(stage, config={"communication": {"transport": "sockets"}}) for stage in (0, 2)]
    for outcome in ranks(2, train_all, cases)[0]:
        assert_close(outcome, expected, 1e-7, 1e-7)


def count(stage: int) -> tuple[int, int, dict[str, list[str]]]:
    """(orthogonalisations of this rank in three steps, matrices of the model, states by name)."""
    calls = 0
    plain = whole_tensor.orthogonalised

    def counted(matrix: Tensor, steps: int) -> Tensor:
        nonlocal calls
        calls += 1
        return plain(matrix, steps)

    with (
        patch.object(whole_tensor, "orthogonalised", counted),
        lowtide.initialize(short_gpt(), Case(short_gpt, token_batch, config=CONFIG).at(stage).as_config()) as engine,
    ):
        for step in range(3):
            engine.train_step(share_of(token_batch(step, 2 * engine.world_size)))
        states = {shard.group.plan.name: list(shard.memory.states) for shard in engine.optimizer.shards}
        return calls, len(engine.optimizer.param_groups[0]["params"]), states


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_each_matrix_is_orthogonalised_once_in_a_step_and_has_one_state(ranks: RankPool, stage: int) -> None:
    found = ranks(2, count, stage)
    matrices = found[0][1]
    assert matrices and sum(calls for calls, _, _ in found) == 3 * matrices
    assert all(calls for calls, _, _ in found)  # both have some
    for name, states in found[0][2].items():
        assert states == (["momentum_buffer"] if "matrices" in name else ["exp_avg", "exp_avg_sq"])


@pytest.mark.parametrize(
    ("params", "rates"), [({"muon_lr": 0.1, "adam_lr": 0.3}, (0.1, 0.3)), ({"lr": 0.2, "muon_lr": 0.1}, (0.1, 0.2))]
)
def test_words_of_deepspeed(params: dict[str, float], rates: tuple[float, float]) -> None:
    config = Config.load({"optimizer": {"type": "Muon", "params": params}})
    assert config.optimizer is not None
    options = config.optimizer.options
    assert (options["lr"], options["adam_lr"]) == rates


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}},
            "zero_hpz_partition_size: .* needs 1, found 2",
        ),
        ({"parallel": {"sequence": 2}}, "parallel.sequence: .* needs 1, found 2"),
    ],
)
def test_what_does_not_go_together(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Config.load({**CONFIG, **config})


def groups_by_hand() -> list[int]:
    model = short_gpt()
    dict(model.named_parameters())["position"].use_muon = False  # type: ignore[attr-defined]  # says so itself
    with lowtide.initialize(model, Case(short_gpt, token_batch, config=CONFIG).as_config()) as engine:
        return [len(group["params"]) for group in engine.optimizer.param_groups]


def test_a_parameter_may_say_that_it_is_no_matrix(ranks: RankPool) -> None:
    num_matrices = ranks(2, count, 1)[0][1]
    assert ranks(2, groups_by_hand)[0][0] == num_matrices - 1


def test_what_has_no_two_dimensions_is_no_matrix() -> None:
    model = nn.Conv2d(2, 3, 1)
    model.weight.use_muon = True  # type: ignore[attr-defined]  # of the caller's
    with pytest.raises(ValueError, match=r"weight.use_muon: expected a parameter of two dimensions, found 4"):
        lowtide.initialize(model, Case(short_gpt, token_batch, config=CONFIG).as_config())


def test_owners_are_balanced_by_cost() -> None:
    shapes = [("a", (64, 64)), ("b", (64, 192)), ("c", (64, 256)), ("d", (256, 64)), ("e", (8, 8))]
    owners = owners_of(FlatLayout.of(shapes, 3), 3)
    assert owners[2] != owners[3] and owners[1] not in (owners[2], owners[3]) and owners[0] == owners[1]


class HasEmpty(nn.Module):
    """A matrix without elements, in either direction, beside one that has some."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.ones(2, 3))
        self.tall, self.wide = nn.Parameter(torch.empty(5, 0)), nn.Parameter(torch.empty(0, 5))

    def forward(self, x: Tensor) -> Tensor:  # (rows, 3)
        return (x @ self.matrix.T).square().mean() + self.tall.sum() + self.wide.sum()


def test_matrices_may_be_empty() -> None:
    with lowtide.initialize(HasEmpty(), Case(HasEmpty, token_batch, config=CONFIG).as_config()) as engine:
        engine.train_step(torch.ones(2, 3))
        assert not torch.equal(engine.full("matrix"), torch.ones(2, 3))
