"""Layer by layer, a step has the bits of the plain order, and moves parameters twice."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.comm.sockets import SocketTransport
from lowtide.engine.config.config import Config
from lowtide.offload.file_store import FileStore
from lowtide.pipe.split.random_streams import seeds_behind
from tests.kit import models
from tests.kit.ranks import on_ranks
from tests.kit.training import Case, adamw, assert_alike, refusal, train, train_all
from tests.pipe.hugging_face import batch_for, builder

LAYERED = {"layered_gradient_accumulation": True}
SOCKETS = {"communication": {"transport": "sockets"}}


class Mixed(nn.Module):
    """Blocks that take keywords and return several values; a skip over all of them; dropout outside and inside."""

    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        self.before = nn.Linear(5, 8)
        self.outer = nn.Dropout(rate)
        self.blocks = nn.ModuleList(MixedBlock(rate) for _ in range(4))
        self.behind = nn.Linear(8, 3)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        first = hidden = self.before(self.outer(x))
        scale, means = torch.ones(()), []
        for block in self.blocks:
            hidden, scale, extra = block(hidden=hidden, scale=scale, options={"by": 0.5})
            means.append(extra["mean"])
        found = self.behind(self.outer(hidden + first) * scale)
        return {"loss": (found - y).square().mean() + 0.1 * sum(means), "found": found}


class MixedBlock(nn.Module):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self.layer, self.scale, self.drop = nn.Linear(8, 8), nn.Parameter(torch.ones(())), nn.Dropout(rate)

    def forward(self, *, hidden: Tensor, scale: Tensor, options: dict[str, float]) -> Any:
        made = self.drop(torch.tanh(self.layer(hidden)))
        return hidden + options["by"] * made, scale * self.scale, {"mean": made.mean()}


def zero(**settings: Any) -> dict[str, Any]:
    return {"zero_optimization": settings}


def plain(stage: int, **config: Any) -> Case:
    return Case(models.tiny_gpt, models.token_batch, stage, accumulation=3, clip=0.3, steps=2, config=config)


def layered(case: Case, stage: int | None = None, **settings: Any) -> Case:
    """The same training layer by layer, with other settings of ZeRO."""
    own = {**case.config.get("zero_optimization", {}), **LAYERED, **settings}
    return case.at(case.stage if stage is None else stage, config=zero(**own))


@pytest.mark.parametrize(
    ("size", "case"),
    [
        (2, plain(0, optimizer={"type": "onebitadam", "params": {"lr": 1e-3, "freeze_step": 1}})),
        (1, Case(Mixed, models.vector_batch, 3, 3)),
    ],
)
@on_ranks("size")
def test_the_bits_are_those_of_the_plain_order(size: int, case: Case) -> None:
    """Of what tests/laws lacks: blocks with keywords and several outputs, and messages of signs."""
    assert_alike(train_all([case, layered(case)]))


# -- bytes ------------------------------------------------------------------------------------------------------------


chain = partial(models.linear_chain, 64, 5)


def rows_of(step: int, rows: int) -> tuple[Tensor]:
    return (torch.randn(rows, 64, generator=torch.Generator().manual_seed(step)),)


def config_of(accumulation: int = 2, **settings: Any) -> dict[str, Any]:
    return Case(chain, rows_of, 3, accumulation, config={**SOCKETS, **zero(**settings)}).as_config()


def trained(settings: dict[str, Any], accumulation: int) -> lowtide.Engine:
    """After a step."""
    engine = lowtide.initialize(chain(), config_of(accumulation, **settings))
    engine.train_step(rows_of(0, 2 * accumulation))
    return engine


@pytest.mark.parametrize(
    ("settings", "accumulation", "gathers", "reductions"),
    [(LAYERED, 1, 2 * 5 - 1, 5), (LAYERED, 4, 2 * 5 - 1, 5), ({}, 4, 4 * (2 * 5 - 1), 4 * 5)],
)
@on_ranks(2)
def test_parameters_cross_the_wire_twice_a_step(
    settings: dict[str, Any], accumulation: int, gathers: int, reductions: int
) -> None:
    """Of five blocks, the last one once: it stays between forward and backward."""
    counted = Counter[str]()
    send = SocketTransport._send

    def count(self: SocketTransport, tensors: dict[int, Tensor], tag: int, what: str) -> Any:
        counted[what.partition(" of ")[0]] += sum(one.numel() for one in tensors.values())
        return send(self, tensors, tag, what)

    engine = trained(settings, accumulation)
    shard = engine._runner.passes.units[-1].groups[0].layout.shard_numel
    with patch.object(SocketTransport, "_send", count):
        engine.train_step(rows_of(1, 2 * accumulation))
    engine.close()
    assert (counted["gather"], counted["reduction"]) == (gathers * shard, reductions * shard)


def read(settings: dict[str, Any], accumulation: int, folder: Path) -> int:
    """Blocks that come from files in the forwards and backwards of a step."""
    engine = trained({**settings, "offload_param": {"device": "nvme", "nvme_path": str(folder)}}, accumulation)
    load, counted = FileStore.load, list[int]()

    def count(self: FileStore, key: str, out: Tensor) -> Any:
        counted.append(out.nbytes)
        return load(self, key, out)

    with patch.object(FileStore, "load", count):
        engine._runner.train(engine._steps, rows_of(1, 2 * accumulation))
    nbytes = 4 * engine._runner.passes.units[-1].numel
    engine._steps.forget()
    engine.close()
    return sum(counted) // nbytes


def test_parameters_are_read_twice_a_step(tmp_path: Path) -> None:
    assert [read(LAYERED, accumulation, tmp_path) for accumulation in (1, 8)] == [9, 9]
    assert read({}, 8, tmp_path) == 8 * 9


# -- what a model may be ----------------------------------------------------------------------------------------------


def numbers(build: Callable[[], nn.Module], batches: Callable[[int], Any], loss_fn: Any, **zero: Any) -> list[float]:
    """Losses and norms of two steps, and the loss of an evaluation."""
    torch.manual_seed(0)
    with lowtide.initialize(build(), config_of(2, **zero), loss_fn=loss_fn) as engine:
        results = [engine.train_step(batches(step)) for step in range(2)]
        found = [number.item() for result in results for number in (result.loss, result.grad_norm)]
        return [*found, engine.eval_step(models.vector_batch(5, 7)).item()] if loss_fn else found


def distance(output: Any, batch: Any) -> Any:
    return (output["found"] - batch[1]).abs().mean()


@pytest.mark.parametrize("name", ["a loss_fn", "T5ForConditionalGeneration"])
def test_a_loss_fn_and_hugging_face(name: str) -> None:
    build, loss_fn = (Mixed, distance) if name == "a loss_fn" else (builder(name), None)

    def batches(step: int) -> Any:
        return (
            models.vector_batch(step, 4) if loss_fn else iter([batch_for(name, 2 * step + half) for half in range(2)])
        )

    ordered, found = numbers(build, batches, loss_fn), numbers(build, batches, loss_fn, **LAYERED)
    assert found == (ordered if loss_fn else pytest.approx(ordered, rel=1e-5))


def test_a_step_that_fp16_skips() -> None:
    case = plain(2, fp16={"enabled": True, "initial_scale_power": 18, "hysteresis": 1})
    expected, found = train_all([case, layered(case)])
    assert expected.skipped == found.skipped == [True, False] and expected.differences(found) == []


def test_each_microbatch_draws_what_a_forward_draws_behind_its_seed() -> None:
    """The first one what follows the generator; dropout outside of blocks too, of which each stage runs the code."""
    torch.manual_seed(0)
    model, batch = Mixed(rate=0.3), models.vector_batch(0, 6)
    torch.manual_seed(0)
    with lowtide.initialize(Mixed(rate=0.3), layered(plain(3).at(3, clip=0.0)).as_config()) as engine:
        torch.manual_seed(7)
        losses = [engine.train_step(batch).loss.item() for _ in range(2)]
    optimizer = adamw(model.parameters())
    torch.manual_seed(7)
    for expected in losses:
        seeds, total = seeds_behind(torch.get_rng_state(), 2), 0.0
        for at, part in enumerate(zip(*(one.chunk(3) for one in batch), strict=True)):
            if at:
                torch.manual_seed(seeds[at - 1])
            loss = model(*part)["loss"]
            if not at:
                behind = torch.get_rng_state()
            (loss / 3).backward()
            total += loss.item() / 3
        torch.set_rng_state(behind)
        optimizer.step()
        optimizer.zero_grad()
        assert total == pytest.approx(expected, rel=1e-5)


def test_tied_weights_are_summed_in_another_order() -> None:
    """Those of the head first, of all microbatches; so the last bits may differ."""
    case = replace(plain(3), build=models.tied_gpt_float64)
    expected, found = train(case), train(layered(case))
    assert found.losses == pytest.approx(expected.losses, rel=1e-12)
    for name, value in expected.state.items():
        torch.testing.assert_close(found.state[name], value, rtol=1e-9, atol=1e-12)


# -- what it refuses --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "part"),
    [
        ({"parallel": {"pipeline": 2}}, "parallel.pipeline: {} needs 1, found 2: a pipeline schedule already runs"),
        ({"parallel": {"sequence": 2}}, "parallel.sequence: {} needs 1, found 2: its ranks exchange data of a single"),
        ({"parallel": {"expert": 2}}, "parallel.expert: {} needs 1, found 2: its ranks exchange data of a single"),
        ({"torch_autocast": {"enabled": True}}, "torch_autocast.enabled: {} needs false, found true: blocks run"),
    ],
)
def test_what_does_not_go_together(values: dict[str, Any], part: str) -> None:
    text = refusal(Config.load, {**values, **zero(**LAYERED)})
    assert part.format("zero_optimization.layered_gradient_accumulation") in text


def test_models_that_cannot_be_cut_and_loops_by_hand() -> None:
    text = refusal(lowtide.initialize, nn.Linear(3, 3), config_of(**LAYERED))
    assert "a stage for each block, found: pipeline: Linear has no repeated blocks" in text
    with lowtide.initialize(chain(), config_of(**LAYERED)) as engine:
        backward = partial(engine.backward, torch.zeros((), requires_grad=True))
        for call in (partial(engine, *rows_of(0, 2)), backward, partial(engine.run, lambda: None)):
            assert "without zero_optimization.layered_gradient_accumulation, found it" in refusal(call)
        with pytest.raises(ValueError, match="so a step cannot have fewer"), engine.join():
            pass
        with engine.no_sync():
            assert "train_step runs all microbatches of a step" in refusal(engine.train_step, rows_of(0, 4))
