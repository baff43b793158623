"""Every optimizer of the config trains as its twin in torch does."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import lowtide
from lowtide.optimizers import OPTIMIZERS as RECORDS
from tests.kit import models
from tests.kit.ranks import RankPool
from tests.kit.training import Case, assert_close, settings, train_all, train_plainly


class Formula(torch.optim.Optimizer):
    """An update that is written out: formula(parameter, gradient, state, group); state["step"] counts from 1."""

    def __init__(
        self, params: Any, formula: Callable[[Tensor, Any, dict[str, Any], Any], None], **options: Any
    ) -> None:
        super().__init__(params, options)
        self.formula = formula

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["step"] = self.state[param].get("step", 0) + 1
                self.formula(param, param.grad, self.state[param], group)


def moments(param: Tensor, gradient: Tensor, state: dict[str, Any], group: Any) -> tuple[Tensor, Tensor]:
    beta1, beta2 = group["betas"]
    mean, squares = (state.setdefault(name, torch.zeros_like(param)) for name in ("mean", "squares"))
    mean.copy_(beta1 * mean + (1 - beta1) * gradient)
    squares.copy_(beta2 * squares + (1 - beta2) * gradient**2)
    return mean, squares


def lion(param: Tensor, gradient: Tensor, state: dict[str, Any], group: Any) -> None:
    """Program 1 of arXiv 2302.06675, as it stands there."""
    beta1, beta2 = group["betas"]
    momentum = state.setdefault("momentum", torch.zeros_like(param))
    update = torch.sign(beta1 * momentum + (1 - beta1) * gradient)
    momentum.copy_(beta2 * momentum + (1 - beta2) * gradient)
    param -= group["lr"] * (update + group["weight_decay"] * param)


def uncorrected_adamw(param: Tensor, gradient: Tensor, state: dict[str, Any], group: Any) -> None:
    """AdamW without the factors of its first steps, as DeepSpeed has it with bias_correction false."""
    mean, squares = moments(param, gradient, state, group)
    param *= 1 - group["lr"] * group["weight_decay"]
    param -= group["lr"] * mean / (squares.sqrt() + group["eps"])


def lamb(param: Tensor, gradient: Tensor, state: dict[str, Any], group: Any) -> None:
    """Algorithm 2 of arXiv 1904.00962, with bounds of the ratio."""
    mean, squares = moments(param, gradient, state, group)
    first, second = (m / (1 - beta ** state["step"]) for m, beta in zip((mean, squares), group["betas"], strict=True))
    update = first / (second.sqrt() + group["eps"]) + group["weight_decay"] * param
    ratio = (param.norm() / update.norm()).clamp(group["least"], group["most"])
    param -= group["lr"] * (1.0 if param.norm() == 0 else ratio) * update


ADAM: dict[str, Any] = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-7, "weight_decay": 0.1}
NESTEROV: dict[str, Any] = {"lr": 1e-2, "momentum": 0.8, "weight_decay": 0.1, "nesterov": True}
HEAVY_BALL: dict[str, Any] = {"lr": 1e-2, "momentum": 0.8, "dampening": 0.3}
LION: dict[str, Any] = {"lr": 1e-3, "betas": (0.8, 0.95), "weight_decay": 0.1}
ADAGRAD: dict[str, Any] = {"lr": 1e-2, "lr_decay": 0.1, "weight_decay": 0.1, "eps": 1e-7}
ADAGRAD["initial_accumulator_value"] = 0.2
RMSPROP: dict[str, Any] = {"lr": 1e-2, "alpha": 0.9, "momentum": 0.5, "centered": True, "weight_decay": 0.1}
NADAM: dict[str, Any] = {**ADAM, "momentum_decay": 0.1}
APART: dict[str, Any] = {**ADAM, "decoupled_weight_decay": True}
RADAM: dict[str, Any] = {**APART, "betas": (0.8, 0.7)}
OPTIMIZERS: list[tuple[str, dict[str, Any], Callable[..., torch.optim.Optimizer]]] = [
    ("adamw", ADAM, partial(torch.optim.AdamW, **ADAM)),
    ("adamw", {}, torch.optim.AdamW),
    ("adam", {**ADAM, "adam_w_mode": False}, partial(torch.optim.Adam, **ADAM)),
    ("sgd", {"lr": 1e-2}, partial(torch.optim.SGD, lr=1e-2)),
    ("sgd", {"lr": 1e-2, "weight_decay": 0.1}, partial(torch.optim.SGD, lr=1e-2, weight_decay=0.1)),
    ("sgd", HEAVY_BALL, partial(torch.optim.SGD, **HEAVY_BALL)),
    ("sgd", NESTEROV, partial(torch.optim.SGD, **NESTEROV)),
    ("lion", LION, partial(Formula, formula=lion, **LION)),
    ("adagrad", ADAGRAD, partial(torch.optim.Adagrad, **ADAGRAD)),
    ("adagrad", {}, torch.optim.Adagrad),
    ("adamw", {**ADAM, "bias_correction": False}, partial(Formula, formula=uncorrected_adamw, **ADAM)),
    ("rmsprop", RMSPROP, partial(torch.optim.RMSprop, **RMSPROP)),
    ("RMSprop", {}, torch.optim.RMSprop),
    ("adamax", ADAM, partial(torch.optim.Adamax, **ADAM)),
    ("nadam", NADAM, partial(torch.optim.NAdam, **NADAM)),
    ("NAdam", APART, partial(torch.optim.NAdam, **APART)),
    ("radam", ADAM, partial(torch.optim.RAdam, **ADAM)),
    ("RAdam", RADAM, partial(torch.optim.RAdam, **RADAM)),
    ("FusedLamb", ADAM, partial(Formula, formula=lamb, **ADAM, least=0.01, most=10.0)),
    ("lamb", {**ADAM, "max_coeff": 1.5, "min_coeff": 0.9}, partial(Formula, formula=lamb, **ADAM, least=0.9, most=1.5)),
    ("adadelta", {"weight_decay": 0.1, "rho": 0.8}, partial(torch.optim.Adadelta, weight_decay=0.1, rho=0.8)),
]
MODELS = [
    Case(models.mlp_float64, models.vector_batch_float64, steps=6),  # RAdam's sixth step is its first adaptive one
    Case(models.short_gpt_float64, models.token_batch, steps=3, clip=0.3),
]


def test_every_optimizer_equals_its_torch_twin(ranks: RankPool) -> None:
    """Each with one model at one stage, in turn."""
    work = [
        (MODELS[number % 2].at(number // 2 % 2 * 3, config={"optimizer": {"type": name, "params": params}}), twin)
        for number, (name, params, twin) in enumerate(OPTIMIZERS)
    ]
    for (case, twin), outcome in zip(work, ranks(2, train_all, [case for case, _ in work])[0], strict=True):
        expected = train_plainly(case, 2, twin)
        assert_close(outcome, expected, 1e-9, 1e-9, f"{case.config['optimizer']}, stage {case.stage}")


def test_adagrad_starts_all_groups_with_the_value_of_its_constructor() -> None:
    """torch does not read `initial_accumulator_value` of a group."""

    def made() -> tuple[nn.Sequential, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
        groups: list[dict[str, Any]] = [
            {"params": [*model[0].parameters()], "initial_accumulator_value": 0.5},
            {"params": [*model[1].parameters()]},
        ]
        return model, torch.optim.Adagrad(groups, lr=0.1, initial_accumulator_value=0.1)

    (model, twin), x = made(), torch.linspace(-1.0, 1.0, 6).view(2, 3)
    model(x).square().mean().backward()
    twin.step()
    trained, optimizer = made()
    with lowtide.initialize(trained, settings(optimizer=None), optimizer=optimizer) as engine:
        engine.backward(engine(x).square().mean())
        engine.step()
    torch.testing.assert_close(trained.state_dict(), model.state_dict())


def test_rmsprop_without_momentum_again_equals_torch() -> None:
    """A scheduler may set the momentum to 0: the buffer stays, and is not read."""
    record, options = RECORDS["rmsprop"], RECORDS["rmsprop"].params(**RMSPROP).model_dump()
    param = torch.nn.Parameter(torch.linspace(-1.0, 1.0, 7, dtype=torch.float64))
    twin, weight = torch.optim.RMSprop([param], **RMSPROP), param.detach().clone()
    states = [torch.zeros_like(weight) for _ in record.states_for(options)]
    for step, momentum in enumerate((0.5, 0.5, 0.0, 0.0), start=1):
        twin.param_groups[0]["momentum"] = options["momentum"] = momentum
        gradient = weight.detach().cos() * step
        param.grad = gradient.clone()
        twin.step()
        record.apply(weight, gradient, states, torch.tensor(float(step)), options)
        torch.testing.assert_close(weight, param.detach(), rtol=1e-12, atol=1e-12)
