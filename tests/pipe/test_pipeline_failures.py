"""What fails over a pipeline says what is wrong and what to do, on every rank; nothing hangs or is mistaken later."""

import contextlib
import os
import signal
import time
import weakref
from collections import UserDict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lowtide
from tests.kit import models
from tests.kit.ranks import RankPool, on_ranks
from tests.kit.training import differences, refusal

WIDTH = 8
CONFIG: dict[str, Any] = {
    "gradient_accumulation_steps": 4,
    "steps_per_print": 0,
    "optimizer": {"type": "adamw", "params": {"lr": 1e-3}},
    "parallel": {"pipeline": 2},
}


class Net(nn.Module):
    """how: "detached" gives a loss without a graph, "late" fails in the last backward of the first stage."""

    def __init__(self, how: str = "", num_blocks: int = 4) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num_blocks))
        self.how, self.num_backwards = how, 0
        if how == "late":
            self.stem.weight.register_hook(self.count)

    def count(self, gradient: Tensor) -> None:
        self.num_backwards += 1
        if self.num_backwards == 4:
            raise KeyError("too late")

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        loss = x.square().mean()
        return loss.detach() if self.how == "detached" else loss


class Between(Net):
    """A layer between the blocks, which the text of the forward does not show as such."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[1](self.blocks[0](x))
        x = self.stem(x)
        return self.blocks[3](self.blocks[2](x)).square().mean()


def text_of(action: Callable[[], object]) -> str:
    """Of its error, with notes."""
    try:
        action()
    except Exception as error:
        return "; ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
    return "no error"


def batch_of(seed: int = 0, rows: int = 8) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))


# -- what initialize refuses ------------------------------------------------------------------------------------------


def split_before() -> None:
    module = Net()
    for _ in range(2):
        with lowtide.initialize(module, CONFIG) as engine:
            engine.train_step(batch_of())


def initialize(build: Any, **config: Any) -> None:
    lowtide.initialize(
        build, CONFIG | config, sample_batch=None if isinstance(build, nn.Module) else batch_of()
    ).close()


def within(budget: int) -> None:
    initialize(Net(), zero_optimization={"stage": 3, "stage3_max_live_parameters": budget})


BY_TIME = {"balance": "time"}
INTERLEAVED = {"schedule": "interleaved", "chunks": 2}
REFUSED: dict[str, tuple[Callable[[], None], str]] = {
    "stages": (lambda: initialize(Net("", 3), pipeline=INTERLEAVED), "ValueError: pipeline: expected 1 to 3 stages, "),
    "time": (
        lambda: initialize(Net(), pipeline=BY_TIME),
        'ValueError: pipeline: balance "time" needs a sample batch to measure with',
    ),
    "builder": (
        lambda: initialize(Net, pipeline=BY_TIME),
        'ValueError: pipeline.balance: "time" needs a constructed model to measure, found a callable',
    ),
    "split before": (
        split_before,
        "ValueError: model: expected a whole model, found a model that an earlier engine has split over a pipeline ('",
    ),
    "budget": (
        partial(within, 10),
        "ValueError: zero_optimization.stage3_max_live_parameters: expected at least 216, the parameters of "
        "pipeline stage 0, found 10; raise it, or split the model over more stages",
    ),
    "a budget that is enough": (partial(within, 1_000), "no error"),
}


@on_ranks(2)
def test_what_initialize_refuses() -> None:
    for name, (action, expected) in REFUSED.items():
        text = text_of(action)
        assert text.startswith(expected)
        assert name != "split before" or text.endswith(
            "is on another rank); build it again, or pass initialize the callable that builds it"
        )


# -- what a step refuses ----------------------------------------------------------------------------------------------


@on_ranks(4)
def test_a_batch_that_differs_in_one_pipeline_fails_on_all() -> None:
    with lowtide.initialize(Net(), CONFIG) as engine:
        seed = engine.rank if engine.data_rank else 9
        which = "ranks 1, 3" if engine.rank % 2 else "not this rank's"
        assert text_of(lambda: engine.train_step(batch_of(seed))).startswith(
            f"ValueError: batch: expected the same batch on the 2 ranks of a pipeline ({which}), found different "
            "batches; divide the data by engine.data_rank and engine.data_size"
        )
        engine.train_step(batch_of())


@on_ranks(2)
def test_calls_that_a_pipeline_does_not_have() -> None:
    """A batch as tokenizers give it, a mapping that is no dictionary; the classic form; and a part of a step."""
    with lowtide.initialize(Net(), CONFIG) as engine:
        whole = f"expected a rank with the whole model, found stages [{engine.rank}] of 2 (parallel.pipeline); use "
        mappings = [UserDict(x=batch_of(4 * engine.rank + number, 2)) for number in range(4)]
        words = "ValueError: batch: expected the same batch on the 2 ranks of a pipeline (ranks 0, 1)"
        assert words in text_of(lambda: engine.train_step(iter(mappings)))
        words = f"ValueError: engine(batch): {whole}engine.eval_step(batch)"
        assert words in text_of(lambda: engine(batch_of()))
        words = f"ValueError: engine.backward(loss): {whole}engine.train_step(batch)"
        assert words in text_of(lambda: engine.backward(torch.ones((), requires_grad=True)))
        with engine.accumulate(last=False):
            words = "expected a config without parallel.pipeline, found it: its train_step runs all microbatches"
            assert words in text_of(lambda: engine.train_step(batch_of()))
        engine.train_step(batch_of())


def two_steps(how: str, timeout_seconds: float = 60.0, shows: bool = False) -> list[str]:
    torch.manual_seed(0)
    config = CONFIG | {"communication": {"timeout_seconds": timeout_seconds}, "pipeline": {"balance": [2, 2]}}
    model = Between() if how == "between" else Net(how)
    engine = lowtide.initialize(model, config, sample_batch=batch_of() if shows else None)
    return [text_of(lambda: engine.train_step(batch_of())) for _ in range(2)]


def test_a_loss_without_a_graph(ranks: RankPool) -> None:
    assert ranks(2, two_steps, "detached")[1][0].startswith(
        "ValueError: pipeline: expected a loss with requires_grad=True, found requires_grad=False; was it computed "
        "under torch.no_grad(), or detached?"
    )


def test_an_error_in_the_last_backward_is_told_to_all_and_the_next_step_is_another_one(ranks: RankPool) -> None:
    failed, other = ranks(2, two_steps, "late")
    assert failed[0].startswith("KeyError: 'too late'") and failed[1] == other[1] == "no error"
    assert other[0] == (
        "RuntimeError: pipeline: a stage of rank 0 failed: KeyError: 'too late' (pipeline: in pipeline action 0B3 "
        "(stage 0, microbatch 3), of schedule 1f1b). No parameter was updated"
    )


def test_a_layer_between_the_blocks_needs_a_sample_batch(ranks: RankPool) -> None:
    assert ranks(2, two_steps, "between", 8.0, True) == [["no error"] * 2] * 2
    text = ranks(2, two_steps, "between", 8.0)[1][0]
    assert text.startswith("ValueError: pipeline: 'blocks.2' takes a tensor of shape (2, 8) that stage 1 ")
    assert "If a module between the blocks makes it, give initialize a sample_batch, to observe the use of" in text


# -- what fails in the middle of a schedule ---------------------------------------------------------------------------


class Broken(nn.Module):
    """A block whose forward fails in one microbatch, or ends the process."""

    def __init__(self, how: str = "works", number: int = 3) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.how, self.number, self.calls = how, number, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == self.number and self.how == "fails":
            raise KeyError("no such expert")
        if self.calls == self.number and self.how == "is stopped":
            raise KeyboardInterrupt
        if self.calls == self.number and self.how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        result: Tensor = self.layer(x)
        return result


def chain(how: str, block: int = 2, number: int = 3) -> models.Chain:
    return models.Chain(*(Broken(how, number) if at == block else Broken() for at in range(4)))


@on_ranks(2)
def test_a_rank_that_was_stopped_in_mid_schedule_joins_no_further_step() -> None:
    engine = lowtide.initialize(chain("is stopped"), CONFIG | {"communication": {"timeout_seconds": 60.0}})
    with contextlib.suppress(KeyboardInterrupt, lowtide.CollectiveError):
        engine.train_step(batch_of())
    text = text_of(lambda: engine.train_step(batch_of()))
    if engine.rank:  # rank 0 waits for it until its connections end
        engine.close()
        dist.destroy_process_group()
    why = "KeyboardInterrupt: " if engine.rank else "CollectiveError: rank 0"
    assert text.startswith(
        "RuntimeError: pipeline: expected ranks at the same place in the schedule, found that an earlier step failed "
        f"on this rank in the middle of its schedule ({why}"
    )
    assert text.endswith("; restart all ranks from the last checkpoint")


def train_broken(how: str) -> tuple[str, float]:
    """The text of the error, and how long it took."""
    engine = lowtide.initialize(chain(how), CONFIG | {"communication": {"timeout_seconds": 60.0}})
    started = time.monotonic()
    return text_of(lambda: engine.train_step(batch_of())), time.monotonic() - started


def test_an_error_in_the_model_names_the_action(ranks: RankPool) -> None:
    (first, waited), (second, _) = ranks(2, train_broken, "fails")
    assert second == (
        "KeyError: 'no such expert'; in the forward of 'blocks.2', Broken, which was given (torch.float32 of shape "
        "(2, 8)); pipeline: in pipeline action 1F2 (stage 1, microbatch 2), of schedule 1f1b"
    )
    assert first.startswith(
        "RuntimeError: pipeline: a stage of rank 1 failed: KeyError: 'no such expert' (in the forward of 'blocks.2', "
    )
    assert "; pipeline: in pipeline action 1F2" in first
    assert waited < 30  # and not when 60 s are over


def test_a_rank_that_dies_in_mid_schedule(ranks: RankPool) -> None:
    text, waited = ranks.fails(2, train_broken, "dies")[0]
    assert text.startswith("CollectiveError: rank 0 in pipeline action ") and "no answer from rank 1" in text
    assert "(stage 0, microbatch " in text and waited < 30


def goes_on(number: int, block: int, config: dict[str, Any]) -> tuple[list[str], float, dict[str, Tensor]]:
    """Texts of a step that fails and of an evaluation that does, their time, and values after another step.

    number: of the microbatch in which it fails; 0: the other step alone.
    """
    torch.manual_seed(0)
    model = chain("fails", block, number)
    broken: Any = model.blocks[block]
    engine = lowtide.initialize(model, CONFIG | config)
    batch = batch_of(0, 8 * engine.data_size).chunk(engine.data_size)[engine.data_rank]
    texts, started = [], time.monotonic()
    for call in (engine.train_step, engine.eval_step) if number else ():
        texts.append(text_of(partial(call, batch)))
        broken.calls = number - 1
    seconds = time.monotonic() - started
    broken.how = "works"
    engine.train_step(batch)
    values = {name: value.clone() for name, value in engine.state_dict().items()}
    engine.close()
    return texts, seconds, values


PLACES: dict[str, tuple[int, int, int, dict[str, Any]]] = {  # ranks, the microbatch, the block, config
    "the first of its kind": (4, 1, 0, {"parallel": {"pipeline": 4}}),
    "the last stage": (4, 3, 3, {"zero_optimization": {"stage": 3}}),
    "in the middle": (2, 2, 1, {"zero_optimization": {"stage": 1}, "pipeline": INTERLEAVED}),
    "halves": (2, 4, 3, {"pipeline": {"schedule": "zb-h1"}}),
    "sockets": (4, 1, 2, {"communication": {"transport": "sockets"}}),
}


@pytest.mark.parametrize(("size", "number", "block", "config"), PLACES.values(), ids=PLACES)
@on_ranks("size")
def test_a_stage_that_fails_ends_the_step_on_all_ranks_and_training_goes_on(
    size: int, number: int, block: int, config: dict[str, Any]
) -> None:
    (_, _, whole), (texts, seconds, values) = (goes_on(one, block, config) for one in (0, number))
    assert len(texts) == 2 and all("KeyError: 'no such expert'" in text for text in texts)
    assert seconds < 60  # where the timeout is longer than the test may take
    assert differences(values, whole) == []


@on_ranks(2)
def test_a_stage_that_fails_frees_its_activations_at_once() -> None:
    model, made, alive = chain("fails", 0), list[weakref.ref[Tensor]](), list[int]()
    model.blocks[0].register_forward_hook(lambda *given: made.append(weakref.ref(given[-1])))
    engine = lowtide.initialize(model, CONFIG | {"pipeline": {"schedule": "zb-h1"}})
    runner: Any = engine._runner
    runner.executor.on_action = lambda *_: alive.append(sum(one() is not None for one in made))
    assert "no such expert" in text_of(lambda: engine.train_step(batch_of()))
    assert engine.rank == 1 or (max(alive), alive[-1]) == (2, 0)  # two microbatches came before it


TEXT = (
    "pipeline: stage 0 returned for microbatch 0 other shapes than for an earlier batch of the same shapes: "
    "expected [(1, 4) torch.float32] for 1 arguments of 'blocks.2' at [0], found [(1, 2, 4) torch.float32] for 1"
)


class Widens(nn.Linear):
    is_wide = False

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(super().forward(x))
        return x.unsqueeze(1).expand(-1, 2, -1) if Widens.is_wide and x.dim() == 2 else x


def train_on_other_shapes(configs: list[dict[str, Any]]) -> list[str]:
    found = []
    for config in configs:
        torch.manual_seed(0)
        config = {"parallel": {"pipeline": 2}, "gradient_accumulation_steps": 2, "optimizer": {"type": "sgd"}, **config}
        engine = lowtide.initialize(models.Chain(*(Widens(4, 4) for _ in range(4))), config)
        for act, rows in ((engine.train_step, 2), (engine.eval_step, 1)):
            Widens.is_wide = False
            act(torch.ones(rows, 4))
            before = engine.state_dict()
            Widens.is_wide = True
            found.append(refusal(act, torch.ones(rows, 4)))
            assert all(torch.equal(value, before[name]) for name, value in engine.state_dict().items())
        Widens.is_wide = False
        assert not engine.train_step(torch.ones(2, 4)).skipped
        engine.close()
    return found


def configs_of(*schedules: str, **config: Any) -> list[dict[str, Any]]:
    return [{"pipeline": {"schedule": schedule}, **config} for schedule in schedules]


def check(found: list[list[str]]) -> None:
    for texts in found:
        assert [text.replace(" without gradient", "").startswith(TEXT) for text in texts] == [True] * len(texts), texts


def test_hosts_and_data_parallel_ranks_are_told(ranks: RankPool) -> None:
    check(ranks(2, train_on_other_shapes, configs_of("1f1b", "zb-h1")))
    check(ranks(4, train_on_other_shapes, configs_of("gpipe", zero_optimization={"stage": 3})))
