"""An optimizer of the caller's own: a class, a callable, an instance with groups, and the schedulers beside it."""

import re
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import lowtide
from tests.kit import models
from tests.kit.ranks import RankPool
from tests.kit.training import Case, Outcome, assert_close, share_of, train, train_plainly

CASES = [
    Case(models.mlp_float64, models.vector_batch_float64, stage=stage, steps=3, clip=clip, config={"optimizer": None})
    for stage, clip in ((0, 0.0), (3, 0.05))
]
CHOICES: list[Any] = [
    torch.optim.RMSprop,
    partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1),
    partial(torch.optim.Adam, lr=1e-2, amsgrad=True),
    partial(torch.optim.NAdam, lr=1e-2),
    partial(torch.optim.Rprop, lr=1e-2),
    partial(torch.optim.SGD, lr=1e-2, momentum=0.8, maximize=True),
]


def two_groups(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Weights decay and learn faster than biases."""
    weights = [param for param in params if param.dim() > 1]
    biases = [param for param in params if param.dim() == 1]
    groups: list[dict[str, Any]] = [{"params": weights, "lr": 2e-2, "weight_decay": 0.2}, {"params": biases}]
    return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.0)


def two_groups_of_rmsprop(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    weights = [param for param in params if param.dim() > 1]
    biases = [param for param in params if param.dim() == 1]
    groups: list[dict[str, Any]] = [{"params": weights, "lr": 2e-2, "alpha": 0.8}, {"params": biases}]
    return torch.optim.RMSprop(groups, lr=1e-2, momentum=0.5)


def decay(step: int) -> float:
    return 0.5**step


def train_with_choices(cases: list[Case]) -> list[Outcome]:
    return [train(case, optimizer=choice) for choice in CHOICES for case in cases]


def train_with_instances(case: Case) -> list[Outcome]:
    """Optimizers over the model's own parameters, with a torch scheduler bound to them."""
    outcomes = []
    for make in (two_groups, two_groups_of_rmsprop):
        torch.manual_seed(0)
        model = case.build()
        optimizer = make(list(model.parameters()))
        scheduler = LambdaLR(optimizer, [decay, lambda step: 1.0])
        engine = lowtide.initialize(model, case.as_config(), optimizer=optimizer, lr_scheduler=scheduler)
        outcome = Outcome()
        for step in range(case.steps):
            result = engine.train_step(share_of(case.global_batch(step, engine.world_size)))
            outcome.losses.append(result.loss.item())
            outcome.norms.append(result.grad_norm.item())
            outcome.lrs.append(result.lr)
        outcome.state = engine.state_dict()
        engine.close()
        outcomes.append(outcome)
    return outcomes


class WithScheduler:
    """A torch optimizer that takes its scheduler along after each step."""

    def __init__(self, optimizer: torch.optim.Optimizer, *factors: Any) -> None:
        self._optimizer = optimizer
        self._scheduler = LambdaLR(optimizer, list(factors) if len(factors) > 1 else factors[0])
        self.param_groups = optimizer.param_groups
        self.zero_grad = optimizer.zero_grad

    def step(self) -> None:
        self._optimizer.step()
        self._scheduler.step()


def test_a_class_or_callable_trains_as_it_does_in_torch(ranks: RankPool) -> None:
    work = [(choice, case) for choice in CHOICES for case in CASES]
    for (choice, case), outcome in zip(work, ranks(2, train_with_choices, CASES)[0], strict=True):
        assert_close(outcome, train_plainly(case, 2, choice), 1e-9, 1e-9, f"{choice}, stage {case.stage}")


class Narrow(torch.optim.AdamW):
    """Takes a learning rate alone."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, lr=lr, betas=(0.8, 0.95), weight_decay=0.1)


class NarrowWithAnUpdateOfItsOwn(Narrow):
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for param in group["params"]:
                    param.clamp_(-0.4, 0.4)


class NarrowMomentum(torch.optim.RMSprop):
    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=1e-2, momentum=0.5)


NARROW: list[Any] = [Narrow, NarrowWithAnUpdateOfItsOwn, NarrowMomentum]


def train_with_narrow(cases: list[Case]) -> list[Outcome]:
    return [train(case, optimizer=choice) for choice in NARROW for case in cases]


def test_a_subclass_may_take_less_than_its_base(ranks: RankPool) -> None:
    work = [(choice, case) for choice in NARROW for case in CASES]
    for (choice, case), outcome in zip(work, ranks(2, train_with_narrow, CASES)[0], strict=True):
        assert_close(outcome, train_plainly(case, 2, choice), 1e-9, 1e-9, f"{choice}, stage {case.stage}")


def test_a_subclass_with_nothing_but_an_init_is_updated_by_the_fused_rule() -> None:
    found = {}
    for choice in NARROW:
        engine = lowtide.initialize(models.mlp(), {"steps_per_print": 0}, optimizer=choice)
        found[choice] = engine.optimizer.kind
        engine.close()
    assert found == {
        Narrow: "adamw",
        NarrowWithAnUpdateOfItsOwn: "NarrowWithAnUpdateOfItsOwn",
        NarrowMomentum: "NarrowMomentum",
    }


class NeedsMore(torch.optim.RMSprop):
    def __init__(self, params: Any, model: nn.Module) -> None:
        super().__init__(params)


def test_a_class_that_cannot_be_made_again_is_named() -> None:
    model = models.mlp()
    words = r"found NeedsMore, whose __init__ fails .*missing 1 required positional argument: 'model'. Give all further"
    with pytest.raises(ValueError, match=words):
        lowtide.initialize(model, {}, optimizer=NeedsMore(model.parameters(), model))


@pytest.mark.parametrize(("stage", "world_size"), [(0, 1), (3, 2)])
def test_an_instance_keeps_its_groups_and_its_scheduler(ranks: RankPool, stage: int, world_size: int) -> None:
    case = Case(models.mlp_float64, models.vector_batch_float64, stage=stage, steps=4, config={"optimizer": None})
    outcomes = ranks(world_size, train_with_instances, case)[0]
    for make, outcome in zip((two_groups, two_groups_of_rmsprop), outcomes, strict=True):

        def with_scheduler(params: Any, make: Any = make) -> Any:
            return WithScheduler(make(params), decay, lambda step: 1.0)

        expected = train_plainly(case, world_size, with_scheduler)
        assert_close(outcome, expected, 1e-9, 1e-9, make.__name__)
        assert outcome.lrs == [2e-2, 1e-2, 5e-3, 2.5e-3]


@pytest.mark.parametrize("update_in_backward", [False, True])
def test_a_scheduler_may_be_a_callable_that_gets_the_optimizer(update_in_backward: bool) -> None:
    zero = {"zero_optimization": {"update_in_backward": update_in_backward}}
    case = Case(models.mlp_float64, models.vector_batch_float64, stage=2, config=zero)
    outcome = train(case, lr_scheduler=lambda optimizer: LambdaLR(optimizer, decay))

    def with_scheduler(params: Any) -> Any:
        return WithScheduler(torch.optim.AdamW(params, 1e-2, (0.9, 0.95), 1e-6, 0.1), decay)

    expected = train_plainly(case, 1, with_scheduler)
    assert_close(outcome, expected, 1e-9, 1e-9)


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        *(
            (choice, f'found {name}, which updates whole parameters; set "optimizer": {{"type": "{name.lower()}"')
            for name, choice in (
                ("Muon", torch.optim.Muon),  # torch refuses to make it where there is a bias
                ("Muon", partial(torch.optim.Muon, lr=0.1)),
                ("Muon", lambda params: torch.optim.Muon(param for param in params if param.dim() == 2)),
                ("Adafactor", torch.optim.Adafactor),
            )
        ),
        (torch.optim.LBFGS, "found LBFGS, which failed on a flat parameter"),
    ],
)
def test_an_optimizer_that_is_not_elementwise_is_refused(choice: Any, words: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
    with pytest.raises(ValueError, match=re.escape(words)) as caught:
        lowtide.initialize(model, {"train_micro_batch_size_per_gpu": 1}, optimizer=choice)
    assert re.match("optimizer: expected a torch optimizer that updates each element by itself", str(caught.value))
