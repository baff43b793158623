"""An optimizer is one record: this file defines one, and nothing else knows of it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import Field
from torch import Tensor

from lowtide.configs.section import Float
from lowtide.engine.config.config import Config, ConfigError
from lowtide.engine.config.schema import json_schema
from lowtide.optimizers import OPTIMIZERS
from lowtide.optimizers.optimizer import Optimizer, OptimizerParams, Options, State, StateDtype
from tests.engine.saving import Continuation, Trip, load_trips, save_trips
from tests.kit import models
from tests.kit.ranks import RankPool
from tests.kit.training import Case, Outcome, assert_close, train, train_all, train_plainly


class RMSpropParams(OptimizerParams):
    """Keyword arguments of RMSprop. Source: torch.optim.RMSprop."""

    lr: Float = Field(default=1e-2, ge=0)
    alpha: Float = Field(default=0.99, ge=0, lt=1)
    eps: Float = Field(default=1e-8, ge=0)
    weight_decay: Float = Field(default=0.0, ge=0)
    state_dtype: StateDtype = "fp32"


def rmsprop(weight: Tensor, gradient: Tensor, states: Sequence[Tensor], step: Tensor, options: Options) -> None:
    gradient = gradient.add(weight, alpha=options["weight_decay"])
    (square_avg,) = states
    square_avg.mul_(options["alpha"]).addcmul_(gradient, gradient, value=1 - options["alpha"])
    weight.addcdiv_(gradient, square_avg.sqrt().add_(options["eps"]), value=-options["lr"])


RMSPROP = Optimizer(
    title="RMSprop",
    params=RMSpropParams,
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


def on_ranks(folder: Path) -> tuple[list[Outcome], list[Continuation]]:
    trip = Trip(GPT.at(3), GPT.at(0))
    with the_record():
        outcomes = train_all([WIDE.at(stage) for stage in (0, 1, 2, 3)])
        outcomes.append(train(WIDE.at(3, config={"optimizer": None}), optimizer=TWIN))
        return outcomes, save_trips([trip], folder, 2) + load_trips([trip], folder, 2)


def test_it_trains_as_torch_at_every_stage_and_goes_on_where_it_was_saved(ranks: RankPool, tmp_path: Path) -> None:
    (*outcomes, own), (before, after) = ranks(2, on_ranks, tmp_path)[0]
    expected = train_plainly(WIDE, 2, TWIN)
    for stage, outcome in enumerate(outcomes):
        assert_close(outcome, expected, 1e-9, 1e-9, f"stage {stage}")
    assert own.differences(outcomes[3]) == []  # the caller's own of torch is known to be the same
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
