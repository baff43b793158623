"""Optimizers that look at whole parameters: the published updates at every stage, wherever their states rest."""

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
from tests.kit.grids import pairs
from tests.kit.models import Chain, short_gpt, short_gpt_float64, token_batch
from tests.kit.ranks import RankPool
from tests.kit.training import Case, assert_close, refusal, settings, train_all, train_plainly, trained
from tests.zero.test_optimizers import Formula, moments

ADAFACTOR: dict[str, Any] = {"lr": 0.05, "eps": [1e-20, 1e-3], "weight_decay": 0.1}
MUON: dict[str, Any] = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1, "adam_lr": 1e-2, "eps": 1e-8}
CONFIGS: dict[str, dict[str, Any]] = {
    "lamb": {"optimizer": {"type": "lamb", "params": {"lr": 1e-2, "weight_decay": 0.1}}},
    "adafactor": {"optimizer": {"type": "Adafactor", "params": ADAFACTOR}},
    "muon": {"optimizer": {"type": "Muon", "params": MUON}},
}


class Product(nn.Module):
    """Whose gradient is what it is given."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.clone())

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum()


def paper(weight: Tensor, gradients: list[Tensor], most: float, scales: bool, is_relative: bool) -> Tensor:
    """arXiv 1804.04235, algorithms 4 (matrices) and 5 (vectors), with eps1 0; most: 0.01 there, of relative steps."""
    rows = columns = moments = torch.zeros(())
    for t, gradient in enumerate(gradients, start=1):
        beta = 1 - t**-0.8
        if gradient.dim() == 2:
            rows = beta * rows + (1 - beta) * gradient.square().sum(1)
            columns = beta * columns + (1 - beta) * gradient.square().sum(0)
            moments = rows[:, None] * columns[None] / rows.sum()
        else:
            moments = beta * moments + (1 - beta) * gradient.square()
        step = gradient / moments.sqrt()
        step = step / max(1.0, step.square().mean().sqrt().item())
        size = max(1e-3, weight.square().mean().sqrt().item()) if scales else 1.0
        weight = weight - size * (min(most, t**-0.5) if is_relative else most) * step
    return weight


@pytest.mark.parametrize(("shape", "scales", "is_relative"), pairs([(7, 5), (11,)], [True, False], [True, False]))
def test_adafactor_is_the_papers_update(shape: tuple[int, ...], scales: bool, is_relative: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, *gradients = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(5))
    params = {"lr": 0.6, "eps": [1e-30, 1e-3], "scale_parameter": scales, "relative_step": is_relative}
    config = settings(optimizer={"type": "adafactor", "params": params}, train_micro_batch_size_per_gpu=None)
    with lowtide.initialize(Product(weight), config) as engine:
        for gradient in gradients:
            engine.train_step(gradient)
        expected = paper(weight, gradients, 0.6, scales, is_relative)
        torch.testing.assert_close(engine.full("weight"), expected, rtol=1e-12, atol=1e-13)


def muon(param: Tensor, gradient: Tensor, state: dict[str, Any], group: Any) -> None:
    """Keller Jordan's SingleDeviceMuonWithAuxAdam, in the dtype of the parameters; matrices say that they are."""
    mean, squares = moments(param, gradient, state, group)
    if not hasattr(param, "is_matrix"):
        step = state["step"]
        param.mul_(1 - 1e-2 * 0.1)
        param.add_(mean / (1 - 0.9**step) / ((squares / (1 - 0.95**step)).sqrt() + 1e-8), alpha=-1e-2)
        return
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


def gpt_with_matrices() -> nn.Module:
    """All but the embedding and the head."""
    model = short_gpt_float64()
    for name, param in model.named_parameters():
        if param.dim() == 2 and not name.startswith(("embedding", "head")):
            param.is_matrix = True  # type: ignore[attr-defined]
    return model


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("adafactor", partial(torch.optim.Adafactor, lr=0.05, eps=(1e-20, 1e-3), weight_decay=0.1)),
        ("muon", partial(Formula, formula=muon, lr=0.02, betas=(0.9, 0.95))),
    ],
    ids=["adafactor", "muon"],
)
def test_it_is_the_published_update(ranks: RankPool, name: str, published: Callable[[Any], Any]) -> None:
    case = Case(gpt_with_matrices, token_batch, clip=0.5, config=CONFIGS[name])
    expected = train_plainly(case, 2, published)
    for outcome in ranks(2, train_all, [case.at(stage) for stage in (0, 3)])[0]:
        assert_close(outcome, expected, 1e-7, 1e-7)


# -- what a rank does and holds ---------------------------------------------------------------------------------------


def counts() -> list[tuple[int, int, dict[str, list[str]]]]:
    """By stage: orthogonalisations of this rank in three steps, matrices of the model, and states by name."""
    found = []
    for stage in (0, 1, 3):
        case = Case(short_gpt, token_batch, stage, config=CONFIGS["muon"])
        counted = patch.object(whole_tensor, "orthogonalised", wraps=whole_tensor.orthogonalised)
        with counted as calls, trained(case, 3) as engine:
            states = {shard.group.plan.name: list(shard.memory.states) for shard in engine.optimizer.shards}
            found.append((calls.call_count, len(engine.optimizer.param_groups[0]["params"]), states))
    return found


def test_each_matrix_is_orthogonalised_once_in_a_step_and_has_one_state(ranks: RankPool) -> None:
    for of_ranks in zip(*ranks(2, counts), strict=True):
        (_, matrices, states), _ = of_ranks
        calls = [calls for calls, _, _ in of_ranks]
        assert sum(calls) == 3 * matrices and min(calls) > 0  # both ranks have some
        for name, kinds in states.items():
            assert kinds == (["momentum_buffer"] if "matrices" in name else ["exp_avg", "exp_avg_sq"])


def test_owners_are_balanced_by_cost() -> None:
    shapes = [("a", (64, 64)), ("b", (64, 192)), ("c", (64, 256)), ("d", (256, 64)), ("e", (8, 8))]
    owners = owners_of(FlatLayout.of(shapes, 3), 3)
    assert owners[2] != owners[3] and owners[1] not in (owners[2], owners[3]) and owners[0] == owners[1]


def state_bytes() -> int:
    with lowtide.initialize(
        Chain(*(nn.Linear(128, 128) for _ in range(4))), settings(2, optimizer={"type": "adafactor"})
    ) as engine:
        engine.train_step(torch.ones(2, 128))
        return engine.memory().optimizer_bytes


def test_states_of_adafactor_are_below_a_byte_of_a_parameter_and_on_one_rank_each(ranks: RankPool) -> None:
    factors, vectors = 4 * (128 + 128) * 4, 4 * 128 * 4
    padding = 2 * 1024 * 4 * 4  # shards are whole blocks
    assert factors + vectors <= sum(ranks(2, state_bytes)) <= factors + vectors + padding


class HasEmpty(nn.Module):
    """A matrix without elements, in either direction, beside one that has some."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.ones(2, 3))
        self.tall, self.wide = nn.Parameter(torch.empty(5, 0)), nn.Parameter(torch.empty(0, 5))

    def forward(self, x: Tensor) -> Tensor:  # (rows, 3)
        return (x @ self.matrix.T).square().mean() + self.tall.sum() + self.wide.sum()


def test_matrices_may_be_empty() -> None:
    with lowtide.initialize(HasEmpty(), settings(**CONFIGS["muon"])) as engine:
        engine.train_step(torch.ones(2, 3))
        assert not torch.equal(engine.full("matrix"), torch.ones(2, 3))


def num_matrices(model: nn.Module) -> int:
    with lowtide.initialize(model, settings(**CONFIGS["muon"])) as engine:
        return len(engine.optimizer.param_groups[0]["params"])


def test_a_parameter_may_say_that_it_is_no_matrix() -> None:
    model = short_gpt()
    model.get_parameter("position").use_muon = False  # type: ignore[attr-defined]
    assert num_matrices(model) == num_matrices(short_gpt()) - 1


# -- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "more", "words"),
    [
        ("lamb", {"parallel": {"expert": 2}}, "parallel.expert: .* needs 1, found 2"),
        (
            "lamb",
            {"optimizer": {"type": "Lamb", "params": {"min_coeff": 20}}},
            r"min_coeff: expected at most max_coeff \(10\), found 20",
        ),
        ("muon", {"parallel": {"sequence": 2}}, "parallel.sequence: .* needs 1, found 2"),
    ],
)
def test_what_does_not_go_together(name: str, more: dict[str, Any], words: str) -> None:
    """What else does not is asked in tests/laws."""
    with pytest.raises(ConfigError, match=words):
        Config.load({**CONFIGS[name], **more})


def test_what_has_no_two_dimensions_is_no_matrix() -> None:
    model = nn.Conv2d(2, 3, 1)
    model.weight.use_muon = True  # type: ignore[attr-defined]  # of the caller's
    text = refusal(lowtide.initialize, model, settings(**CONFIGS["muon"]))
    assert "weight.use_muon: expected a parameter of two dimensions, found 4" in text


@pytest.mark.parametrize(
    ("params", "rates"), [({"muon_lr": 0.1, "adam_lr": 0.3}, (0.1, 0.3)), ({"lr": 0.2, "muon_lr": 0.1}, (0.1, 0.2))]
)
def test_words_of_deepspeed(params: dict[str, float], rates: tuple[float, float]) -> None:
    optimizer = Config.load({"optimizer": {"type": "Muon", "params": params}}).optimizer
    assert optimizer is not None and (optimizer.options["lr"], optimizer.options["adam_lr"]) == rates
