"""What a checkpoint has beside tensors: schedulers, options, random states, the place in the data, config, versions."""

import json
import platform
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.optim import lr_scheduler as schedulers

import lowtide
from lowtide.checkpoint.files import CheckpointError
from lowtide.engine.config.config import Config
from tests.engine.saving import Trip, engine_for, load_trips, run_steps, save_and_go_on, save_trips
from tests.kit.models import Mlp, mlp, tiny_gpt, token_batch, vector_batch
from tests.kit.ranks import RankPool, on_ranks
from tests.kit.training import ADAMW, Case, rank_and_world, refusal, share_of

CASE = Case(mlp, vector_batch)
WARMUP = {"scheduler": {"type": "linear", "params": {"warmup_num_steps": 3, "total_num_steps": 8}}}

# -- schedulers and options ------------------------------------------------------------------------------------------


def one_cycle_with_warmup(optimizer: Any) -> Any:
    first = schedulers.LinearLR(optimizer, 0.1, total_iters=3)
    return schedulers.SequentialLR(optimizer, [first, schedulers.CosineAnnealingLR(optimizer, 5)], [3])


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "lambda": lambda optimizer: schedulers.LambdaLR(optimizer, lambda step: 0.5**step),
    "sequential": one_cycle_with_warmup,
    "cosine restarts": lambda optimizer: schedulers.CosineAnnealingWarmRestarts(optimizer, 2),
    "one cycle": lambda optimizer: schedulers.OneCycleLR(optimizer, 0.1, total_steps=9, cycle_momentum=False),
}


@pytest.mark.parametrize("name", [*SCHEDULERS, "config"])
def test_a_scheduler_goes_on(tmp_path: Path, name: str) -> None:
    """With a new learning rate as if the run had begun with it."""
    options = {"lr_scheduler": SCHEDULERS[name]} if name in SCHEDULERS else {}
    case = CASE if options else CASE.at(1, config=WARMUP)
    doubled = case.at(1, config={"optimizer": {**ADAMW, "params": {**ADAMW["params"], "lr": 2e-2}}})
    trips = [Trip(case, loaded, options, steps_before=3) for loaded in (case.at(3), doubled)]
    (before, _), (after, moved) = save_trips(trips, tmp_path, 1), load_trips(trips, tmp_path, 1)
    assert after.differences(before) == []
    assert len(set(before.lrs)) > 1
    with engine_for(doubled, 1, **options) as engine:
        assert moved.lrs == pytest.approx(run_steps(engine, doubled, 0, 3 + len(moved.lrs)).lrs[3:])


def test_options_that_were_changed_by_hand_come_back(tmp_path: Path) -> None:
    with engine_for(CASE, 1) as engine:
        engine.optimizer.param_groups[0].update(lr=3e-3, betas=(0.5, 0.6), weight_decay=0.7)
        run_steps(engine, CASE, 0, 1)
        engine.save_checkpoint(tmp_path)
        expected = run_steps(engine, CASE, 1, 2)
    with engine_for(CASE, 1) as engine:
        engine.load_checkpoint(tmp_path)
        group = engine.optimizer.param_groups[0]
        assert (group["lr"], group["betas"], group["weight_decay"]) == (3e-3, (0.5, 0.6), 0.7)
        assert run_steps(engine, CASE, 1, 2).differences(expected) == []


@pytest.mark.parametrize("scheduled", [False, True])
def test_an_option_that_the_config_now_says_otherwise_is_the_configs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, scheduled: bool
) -> None:
    """With a schedule of the config, a new learning rate is its peak. Without a change nothing is said."""
    case = CASE.at(0, config=WARMUP) if scheduled else CASE
    before = save_and_go_on(case, tmp_path, 1, "a")
    caplog.set_level("INFO", "lowtide")
    with engine_for(case, 1) as engine:
        engine.load_checkpoint(tmp_path)
    assert "optimizer.params" not in caplog.text
    params = {**ADAMW["params"], "lr": 2e-2, "betas": [0.8, 0.95]}
    with engine_for(case.at(0, config={"optimizer": {**ADAMW, "params": params}}), 1) as engine:
        engine.load_checkpoint(tmp_path)
        group = engine.optimizer.param_groups[0]
        assert tuple(group["betas"]) == (0.8, 0.95) and group["weight_decay"] == 0.1
        assert run_steps(engine, case, 2, 2).lrs == pytest.approx([2 * lr for lr in before.lrs])
    said = [record.getMessage() for record in caplog.records if "optimizer.params" in record.getMessage()]
    assert said == [
        "optimizer.params.betas: [0.8, 0.95] as the config says now, not [0.9, 0.95] as saved",
        "optimizer.params.lr: 0.02 as the config says now, not 0.01 as saved",
    ]


def test_a_scheduler_goes_on_if_the_saved_learning_rate_was_0(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """OneCycleLR sets all rates itself; a factor from a rate of 0 to another does not exist."""
    options = {"lr_scheduler": SCHEDULERS["one cycle"]}
    case = CASE.at(1, config={"optimizer": {**ADAMW, "params": {**ADAMW["params"], "lr": 0.0}}})
    trip = Trip(case, CASE.at(1), options, steps_before=3)
    before = save_trips([trip], tmp_path, 1)[0]
    assert load_trips([trip], tmp_path, 1)[0].differences(before) == []
    assert "optimizer.params.lr: 0.01 has no effect on OneCycleLR, which continues with its saved rates" in caplog.text


# -- random generators -----------------------------------------------------------------------------------------------


class Noisy(Mlp):
    """Draws from every random generator of the process."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        factor = 1 + 0.1 * random.random() + 0.1 * float(np.random.rand())
        return super().forward(functional.dropout(x, 0.3) * factor, y)


NOISY = Case(Noisy, vector_batch)


def go_on_noisily(stage: int, folder: Path, loads: bool) -> list[float]:
    """Every rank has another seed."""
    case = NOISY.at(stage)
    rank, world_size = rank_and_world()
    with engine_for(case, world_size) as engine:
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(rank + 10 * loads)
        if loads:
            engine.load_checkpoint(folder)
        else:
            run_steps(engine, case, 0, 2)
            engine.save_checkpoint(folder)
        return run_steps(engine, case, 2, 3).losses


def test_the_random_generators_of_each_rank_go_on_or_are_left_alone(
    ranks: RankPool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = ranks(2, go_on_noisily, 3, tmp_path, False)
    assert ranks(2, go_on_noisily, 0, tmp_path, True) == expected
    with engine_for(NOISY, 1) as engine:  # another number of ranks
        before = torch.get_rng_state(), random.getstate()
        caplog.set_level("INFO", "lowtide")
        engine.load_checkpoint(tmp_path)
        assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]
    text = "random generators go on as they are: the checkpoint has the states of 2 ranks, there are 1"
    assert text in caplog.messages


# -- the state of modules --------------------------------------------------------------------------------------------


class Counting(Mlp):
    calls = 0

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x * (1 + 0.1 * self.calls), y)

    def get_extra_state(self) -> Any:
        return torch.ones(self.calls)  # a tensor that grows

    def set_extra_state(self, state: Any) -> None:
        self.calls = len(state)


def test_what_a_module_keeps_beside_parameters_and_buffers_goes_on(tmp_path: Path) -> None:
    trip = Trip(Case(Counting, vector_batch), Case(Counting, vector_batch, 3))
    before = save_trips([trip], tmp_path, 1)[0]
    assert load_trips([trip], tmp_path, 1)[0].differences(before) == []


# -- client state ----------------------------------------------------------------------------------------------------


class Loader:
    """Shuffles, and knows its place."""

    def __init__(self, seed: int = 0) -> None:
        self.seed, self.place = seed, 0

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        while True:
            self.place += 1
            yield vector_batch(self.seed + self.place, 8)

    def state_dict(self) -> dict[str, Any]:
        return {"seed": self.seed, "place": self.place, "history": (1, torch.arange(3))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seed, self.place = state["seed"], state["place"]
        assert isinstance(state["history"], tuple)


def train_with_loader(folder: Path, loads: bool) -> tuple[list[float], dict[str, Any], int]:
    rank, world_size = rank_and_world()
    with engine_for(CASE.at(3), world_size) as engine:
        loader = engine.client_state["loader"] = Loader(0 if loads else 100 * rank)
        engine.client_state["epoch"] = 0 if loads else 7 + rank
        returned: dict[str, Any] = {}
        batches = iter(loader)
        if loads:
            returned = engine.load_checkpoint(folder)
        else:
            for _ in range(3):
                engine.train_step(share_of(next(batches)))
            engine.save_checkpoint(folder, client_state={"note": b"mine", "epoch": 9})
        losses = [engine.train_step(share_of(next(batches))).loss.item() for _ in range(3)]
        assert engine.client_state.keys() == {"loader", "epoch"} and engine.client_state["loader"] is loader
        return losses, returned, engine.client_state["epoch"]


def test_each_ranks_loader_goes_on_or_that_of_rank_0(ranks: RankPool, tmp_path: Path) -> None:
    before = ranks(2, train_with_loader, tmp_path, False)
    after = ranks(2, train_with_loader, tmp_path, True)
    for rank, ((expected, _, _), (found, returned, epoch)) in enumerate(zip(before, after, strict=True)):
        assert found == expected
        assert returned["loader"]["seed"] == 100 * rank and returned["loader"]["place"] == 3
        assert returned["note"] == b"mine" and set(returned) == {"loader", "epoch", "note"}
        assert returned["epoch"] == epoch == 9  # what is given to save_checkpoint counts before what was registered
    for _, returned, _ in ranks(4, train_with_loader, tmp_path, True):
        assert returned["loader"]["seed"] == 0


@on_ranks(2)
def test_stages_that_take_the_same_data_get_the_same_loader(tmp_path: Path) -> None:
    """The ranks that saved them had each its own data."""
    case = Case(tiny_gpt, token_batch)
    with engine_for(case, 2) as engine:
        engine.save_checkpoint(tmp_path, client_state={"place": 5 + engine.rank})
    with engine_for(case.at(0, config={"parallel": {"pipeline": 2}}), 2) as engine:
        assert engine.load_checkpoint(tmp_path) == {"place": 5}


def test_client_state_that_is_not_registered_is_returned_alone(tmp_path: Path) -> None:
    with engine_for(CASE, 1) as engine:
        state: dict[Any, Any] = {"a": (1, float("nan"), np.float32(2)), 3: {"x": {1, 2}}}
        engine.save_checkpoint(tmp_path, client_state=state)
    with engine_for(CASE, 1) as engine:
        assert repr(engine.load_checkpoint(tmp_path)) == repr(state)
        assert engine.client_state == {}


class Unknown:
    pass


def test_client_state_with_an_unknown_object_names_its_place(tmp_path: Path) -> None:
    with engine_for(CASE, 1) as engine:
        state = {"sampler": {"parts": [1, Unknown()]}}
        text = refusal(engine.save_checkpoint, tmp_path, "a", client_state=state, kind=CheckpointError)
        assert text.startswith(f"saving checkpoint 'a' to {tmp_path} failed on rank 0: ")
        assert "client_state.sampler.parts[1]: expected numbers, strings" in text
        assert f"found {__name__}.Unknown. A checkpoint holds no pickles" in text
        assert text.endswith("What was saved before is as it was, and training can go on.")
        assert list(tmp_path.iterdir()) == []
        run_steps(engine, CASE, 0, 1)


# -- the description -------------------------------------------------------------------------------------------------


class WithConfiguration(Mlp):
    class Configuration:
        dtype = None
        architectures = ()

        def save_pretrained(self, folder: str) -> None:
            values = {"model_type": "mlp", "dtype": str(self.dtype), "architectures": self.architectures}
            (Path(folder) / "config.json").write_text(json.dumps(values))

    def __init__(self) -> None:
        super().__init__()
        self.config = self.Configuration()


def test_the_file_says_what_was_saved(ranks: RankPool, tmp_path: Path) -> None:
    case = Case(WithConfiguration, vector_batch, 3, config={"zero_optimization": {"shard_size": 1}})
    ranks(2, save_and_go_on, case, tmp_path, 2, "mine")
    content = json.loads((tmp_path / "mine" / "lowtide.json").read_text())["content"]
    assert content["tag"] == "mine" and content["step"] == 2 and content["has_own_tag"] is True
    assert content["versions"]["torch"] == torch.__version__
    assert content["versions"]["python"] == platform.python_version()
    assert content["versions"]["lowtide"] == lowtide.__version__ if hasattr(lowtide, "__version__") else True
    assert content["topology"] == {"world_size": 2, "stage": 3, "shard_size": 1, "replicas": 2, "pipeline": 1}
    assert Config.load(content["config"]).optimizer == Config.load(case.as_config()).optimizer
    assert content["tensors"]["model.first.weight"] == ["float32", [7, 5]]
    assert content["tensors"]["optim.state.first.weight.exp_avg"] == ["float32", [7, 5]]
    configuration = {"model_type": "mlp", "dtype": "torch.float32", "architectures": ["WithConfiguration"]}
    assert content["model_files"] == {"config.json": configuration}
    names = {entry["name"] for entry in content["files"]}
    assert names == {"__0_0.distcp", "__1_0.distcp", "rank0.json", "rank1.json", ".metadata"}
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "mine").iterdir()}
    assert sizes.pop("lowtide.json")
    assert sizes == {entry["name"]: entry["nbytes"] for entry in content["files"]}
