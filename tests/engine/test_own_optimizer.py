"""An optimizer of the caller's own: a class, a callable, an instance with groups, or a record of its own."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.engine.config.config import Config, ConfigError
from lowtide.engine.config.schema import json_schema
from lowtide.optimizers import OPTIMIZERS
from lowtide.optimizers.optimizer import L2, STATE_DTYPE, Beta, Optimizer, Options, State, epsilon, rate
from lowtide.zero.sequence import StateError
from tests.engine.saving import Continuation, Trip, load_trips, save_trips
from tests.kit import models
from tests.kit.ranks import RankPool, on_ranks
from tests.kit.training import (
    Case,
    Outcome,
    assert_close,
    refusal,
    start,
    take_step,
    train,
    train_all,
    train_plainly,
)

CASE = Case(models.mlp_float64, models.vector_batch_float64, config={"optimizer": None})


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


class NarrowThatFails(NarrowWithAnUpdateOfItsOwn):
    errors: ClassVar[list[Exception | None]] = []  # of the next steps, the last first

    def step(self, closure: Any = None) -> Any:
        if self.errors and (error := self.errors.pop()) is not None:
            raise error
        return super().step(closure)


class NarrowMomentum(torch.optim.RMSprop):
    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=1e-2, momentum=0.5)


CHOICES: list[Any] = [
    torch.optim.RMSprop,
    partial(torch.optim.Adam, lr=1e-2, amsgrad=True),
    partial(torch.optim.Rprop, lr=1e-2),
    partial(torch.optim.SGD, lr=1e-2, momentum=0.8, maximize=True),
    Narrow,
    NarrowWithAnUpdateOfItsOwn,
    NarrowMomentum,
]
CLIPPED = CASE.at(3, clip=0.05)


def train_with_choices() -> list[Outcome]:
    return [train(CLIPPED, optimizer=choice) for choice in CHOICES]


def test_a_class_or_callable_trains_as_it_does_in_torch(ranks: RankPool) -> None:
    """A subclass may take less than its base."""
    for choice, outcome in zip(CHOICES, ranks(2, train_with_choices)[0], strict=True):
        assert_close(outcome, train_plainly(CLIPPED, 2, choice), 1e-9, 1e-9, f"{choice}")


@pytest.mark.parametrize(
    ("choice", "kind"),
    [
        (Narrow, "adamw"),
        (NarrowWithAnUpdateOfItsOwn, "NarrowWithAnUpdateOfItsOwn"),
        (NarrowMomentum, "NarrowMomentum"),
    ],
)
def test_a_subclass_with_nothing_but_an_init_is_updated_by_the_fused_rule(choice: Any, kind: str) -> None:
    with lowtide.initialize(models.mlp(), {"steps_per_print": 0}, optimizer=choice) as engine:
        assert engine.optimizer.kind == kind


class NeedsMore(torch.optim.RMSprop):
    def __init__(self, params: Any, model: nn.Module) -> None:
        super().__init__(params)


def test_a_class_that_cannot_be_made_again_is_named() -> None:
    model = models.mlp()
    text = refusal(lowtide.initialize, model, {}, optimizer=NeedsMore(model.parameters(), model))
    words = r"found NeedsMore, whose __init__ fails .*missing 1 required positional argument: 'model'. Give all further"
    assert re.search(words, text)


def before_each_step(change: Callable[[dict[str, Any], Any], object]) -> type[torch.optim.Optimizer]:
    """An optimizer that calls change(group, states by parameter) first."""

    class Changed(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            change(self.param_groups[0], self.state)
            return super().step(closure)

    return Changed


def divide_by_the_norm_of_all(group: dict[str, Any], states: Any) -> None:
    torch.nn.utils.clip_grads_with_norm_(group["params"], 1.0, nn.utils.get_total_norm(p.grad for p in group["params"]))


WHOLE = 'found {}, which updates whole parameters; set "optimizer": {{"type": "{}"'
MUON, ADAFACTOR = WHOLE.format("Muon", "muon"), WHOLE.format("Adafactor", "adafactor")


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        (torch.optim.Muon, MUON),  # torch refuses to make it where there is a bias
        (partial(torch.optim.Muon, lr=0.1), MUON),
        (lambda params: torch.optim.Muon(param for param in params if param.dim() == 2), MUON),
        (torch.optim.Adafactor, ADAFACTOR),
        (torch.optim.LBFGS, "found LBFGS, which failed on a flat parameter"),
        (
            before_each_step(divide_by_the_norm_of_all),
            "Its result depends on the shape of the parameter or on other el",
        ),
        (  # as schedule-free optimizers do
            before_each_step(lambda group, _: group.update(lr=group["lr"] / 2)),
            "found Changed, whose step() changes the option 'lr' of its parameter group",
        ),
        (
            before_each_step(lambda _, states: states["k"].update(step=1)),
            "found Changed, whose state['k'] belongs to no parameter",
        ),
        (  # as 8-bit states, which have a scale for each block
            before_each_step(lambda group, states: states[group["params"][0]].update(scales=torch.ones(4))),
            "found Changed, whose state 'scales' has tensors of the shapes [(4,)] for (8, 128)",
        ),
    ],
)
def test_an_optimizer_that_is_not_elementwise_is_refused(choice: Any, words: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
    text = refusal(lowtide.initialize, model, {"train_micro_batch_size_per_gpu": 1}, optimizer=choice)
    assert text.startswith("optimizer: expected a torch optimizer that updates each element by itself")
    assert words in text


def rmsprop(weight: Tensor, gradient: Tensor, states: Sequence[Tensor], step: Tensor, options: Options) -> None:
    gradient = gradient.add(weight, alpha=options["weight_decay"])
    (square_avg,) = states
    square_avg.mul_(options["alpha"]).addcmul_(gradient, gradient, value=1 - options["alpha"])
    weight.addcdiv_(gradient, square_avg.sqrt().add_(options["eps"]), value=-options["lr"])


RMSPROP = Optimizer(
    title="RMSprop",
    text="Keyword arguments of RMSprop. Source: torch.optim.RMSprop.",
    keys={
        "lr": rate(1e-2),
        "alpha": (Beta, 0.99, "Decay of the running mean of squares."),
        "eps": epsilon(1e-8),
        "weight_decay": L2,
        "state_dtype": STATE_DTYPE,
    },
    states=(State("square_avg", is_mean_of_squares=True),),
    apply=rmsprop,
    torch_class="RMSprop",
    torch_options={"momentum": 0, "centered": False},
    deepspeed_names=("cpurmsprop",),
)
OPTIONS: dict[str, Any] = {"lr": 1e-2, "alpha": 0.9, "weight_decay": 0.1}
CONFIG: dict[str, Any] = {"optimizer": {"type": "CPURMSprop", "params": OPTIONS}}
TWIN = partial(torch.optim.RMSprop, **OPTIONS)
WIDE = Case(models.mlp_float64, models.vector_batch_float64, config=CONFIG)
NARROW = {"optimizer": {"type": "RMSprop", "params": {**OPTIONS, "state_dtype": "int8"}}}
GPT = Case(partial(models.TinyGPT, layers=2), models.token_batch, clip=0.5, config=NARROW)


@contextmanager
def the_record() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(OPTIMIZERS, RMSPROP.name, RMSPROP)
        yield


def train_and_save(folder: Path) -> tuple[list[Outcome], list[Continuation]]:
    trip = Trip(GPT.at(3), GPT.at(0))
    with the_record():
        outcomes = train_all([WIDE.at(stage) for stage in (0, 3)])
        outcomes.append(train(WIDE.at(3, config={"optimizer": None}), optimizer=TWIN))
        return outcomes, save_trips([trip], folder, 2) + load_trips([trip], folder, 2)


def test_it_trains_as_torch_at_every_stage_and_goes_on_where_it_was_saved(ranks: RankPool, tmp_path: Path) -> None:
    (*outcomes, own), (before, after) = ranks(2, train_and_save, tmp_path)[0]
    expected = train_plainly(WIDE, 2, TWIN)
    for outcome in outcomes:
        assert_close(outcome, expected, 1e-9, 1e-9)
    assert own.differences(outcomes[-1]) == []  # the caller's own of torch is known to be the same
    assert after.differences(before) == [] and "state.head.weight.square_avg" in before.restored


def test_the_config_knows_its_names_its_keys_and_its_defaults() -> None:
    with the_record():
        config = Config.load(CONFIG)
        assert config.optimizer is not None and config.optimizer.type == "rmsprop"
        assert config.as_dict()["optimizer"]["params"] == {**OPTIONS, "eps": 1e-8, "state_dtype": "fp32"}
        assert "RMSpropOptimizer" in json_schema()["$defs"]
        with pytest.raises(ConfigError, match='unknown key "alhpa"; did you mean "alpha"'):
            Config.load({"optimizer": {"type": "RMSprop", "params": {"alhpa": 0.9}}})
    with pytest.raises(ConfigError, match='unknown optimizer "CPURMSprop"'):
        Config.load(CONFIG)


@on_ranks(2)
def test_an_update_that_fails_midway_ends_the_training_until_a_load(tmp_path: Path) -> None:
    """Else a step would follow in which some parameters have an update more. No gradient of the failed step remains."""
    found, told = [], ""
    for fails in (False, True):
        with start(CASE, optimizer=NarrowThatFails) as engine:
            engine.save_checkpoint(tmp_path / str(fails))
            if fails:
                before = engine.state_dict()
                NarrowThatFails.errors += [MemoryError("full"), None]
                with pytest.raises(MemoryError, match="full") as caught:
                    take_step(engine, CASE, 0)
                (told,) = caught.value.__notes__
                after = engine.state_dict()
                assert engine.rank or 0 < sum(map(torch.equal, before.values(), after.values())) < len(before)
                for call in (partial(take_step, engine, CASE, 1), partial(engine.save_checkpoint, tmp_path / "half")):
                    assert refusal(call, kind=StateError) == told
                engine.load_checkpoint(tmp_path / str(fails))
            result = take_step(engine, CASE, 1)
            found.append((result.loss, result.grad_norm, engine.optimizer.num_steps))
    assert found[0] == found[1]
    assert told == (
        "engine.step(): an error interrupted this update, so some parameters may be updated and others not; continue "
        "from a checkpoint (engine.load_checkpoint), or start again"
    )
