"""Evaluation by all ranks, by one alone, and by an engine without an optimizer: training goes on as before."""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.model.recomputing import in_eval_mode
from tests.kit import models
from tests.kit.ranks import on_ranks
from tests.kit.training import Case, Outcome, rank_and_world, refusal, settings, share_of, take_step, train

CASE = Case(partial(models.TinyGPT, layers=2), models.token_batch, clip=0.3, steps=2)


def train_and_evaluate(case: Case) -> tuple[Outcome, list[float]]:
    """With an evaluation of each batch before its step, also by hand, and of a batch of another size after it."""
    evaluated = []

    def take(engine: lowtide.Engine, case: Case, step: int) -> Any:
        with torch.inference_mode():  # whose tensors no backward may save
            own = engine._mesh.world.gather_objects(engine(*case.share(engine, step)).item())
        evaluated.append(engine.eval_step(case.share(engine, step)).item())
        assert engine.module.training
        assert sum(own) / len(own) == pytest.approx(evaluated[-1], rel=1e-6)
        result = take_step(engine, case, step)
        engine.eval_step(share_of(case.batch(99, 6 * engine.world_size)))
        return result

    return train(case, take), evaluated


@on_ranks(2)
def test_eval_step_gives_the_loss_and_changes_nothing() -> None:
    for transport, stage in (("sockets", 0), ("shared_memory", 1), ("sockets", 3)):
        case = CASE.at(stage, config={"communication": {"transport": transport}})
        found, evaluated = train_and_evaluate(case)
        assert found.differences(train(case)) == []
        assert evaluated == pytest.approx(found.losses, rel=1e-6)


def test_eval_step_is_in_eval_mode_and_keeps_the_mode() -> None:
    modes: list[bool] = []
    model = models.Mlp()
    model.layers[0].register_forward_hook(lambda module, *_: modes.append(module.training))
    batch = models.vector_batch(0, 8)
    with lowtide.initialize(model, settings(3)) as engine:
        for mode in (True, False):
            assert engine.train(mode) is engine
            engine.eval_step(batch)
            assert model.training == model.first.training == mode
        assert modes == [False, False]
        assert engine.train() is engine and model.training
        assert engine.eval() is engine and not model.training
        engine.train()
        model.first.eval()  # as a frozen batch norm is kept
        engine.eval_step(batch)
        assert [name for name, part in model.named_modules() if not part.training] == ["first"]


def test_what_is_tried_leaves_modes_and_buffers_as_they_were() -> None:
    class Counter(nn.Module):
        count: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self) -> Tensor:
            self.count += 1
            return self.count

    model = Counter()
    with in_eval_mode(model):
        assert not model.training and [model().item(), model().item()] == [1, 2]
    assert model.training and model.count == 0


ACCUMULATED = Case(partial(models.TinyGPT, layers=2), models.token_batch, accumulation=2)
MLP = Case(models.mlp, models.vector_batch)


class Generating(models.TinyGPT):
    """Calls its parts, and itself, without gradients."""

    @torch.no_grad()
    def generate(self, ids: Tensor, count: int) -> Tensor:
        for _ in range(count):
            x = self.embedding(ids[:, -models.LENGTH :]) + self.position
            for block in self.blocks:
                x = block(x)
            ids = torch.cat([ids, self.head(self.norm(x))[:, -1:].argmax(-1)], dim=1)
        return ids


def engine_of(case: Case, transport: str = "auto", seconds: float = 20, **config: Any) -> lowtide.Engine:
    torch.manual_seed(0)
    communication = {"transport": transport, "timeout_seconds": seconds}
    return lowtide.initialize(
        case.build(), case.at(case.stage, config={"communication": communication, **config}).as_config()
    )


def train_and_look(transport: str, how: str) -> tuple[list[float], list[Any]]:
    """The losses of training, and what rank 0 alone has computed before each step, where it evaluates."""
    losses, seen = [], []
    with engine_of(replace(ACCUMULATED, build=Generating, stage=3), transport) as engine:
        for step in range(2):
            batch = share_of(ACCUMULATED.global_batch(step, engine.world_size))
            if how != "trains":
                with engine.gathered() if how == "gathers" else nullcontext():
                    if engine.rank == 0:
                        with torch.no_grad():
                            seen += [engine(*batch).item(), engine.module(*batch).item()]
                        if how == "gathers":  # it reads a parameter outside of the model's forward
                            seen.append(engine.module.generate(batch[0], 3).tolist())  # type: ignore[operator]
            losses.append(engine.train_step(batch).loss.item())
    return losses, seen


@pytest.mark.parametrize("transport", ["shared_memory", "sockets"])
@on_ranks(2)
def test_one_rank_evaluates_alone(transport: str) -> None:
    """Where parameters come from other ranks, those take part when they come to their next forward or step."""
    expected, _ = train_and_look(transport, "trains")
    for how in ("evaluates", "gathers"):
        losses, seen = train_and_look(transport, how)
        assert losses == expected
        if rank_and_world()[0] == 0:
            assert seen[0] == seen[1] and len(seen) == (6 if how == "gathers" else 4)


@on_ranks(2)
def test_steps_inside_of_gathered_go_on_with_what_they_have_made() -> None:
    """Parameters that a step has changed are not kept as they were."""
    with engine_of(replace(ACCUMULATED, build=Generating, stage=3), "sockets") as engine, engine.gathered():
        found = [engine.train_step(share_of(ACCUMULATED.global_batch(step, 2))).loss.item() for step in range(2)]
    assert found == train_and_look("sockets", "trains")[0]


@on_ranks(2)
def test_a_call_of_all_ranks_that_one_makes_alone_is_an_error() -> None:
    """Rank 0 evaluates as only all ranks together can, and the other goes on to a step."""
    engine = engine_of(ACCUMULATED.at(3), "shared_memory", 0.5)
    batch = share_of(ACCUMULATED.global_batch(0, 2))

    def step() -> None:
        if engine.rank == 0:
            with torch.no_grad():
                engine.eval_step(batch)
        engine.train_step(batch)

    text = refusal(step, kind=lowtide.CollectiveError)
    assert "Do all ranks make the same calls of the engine in the same order?" in text or engine.rank == 1


@pytest.mark.parametrize("transport", ["shared_memory", "sockets", "native"])
@on_ranks(2)
def test_ranks_agree(transport: str) -> None:
    engine = engine_of(MLP.at(2), transport)
    is_second = engine.rank == 1
    assert engine.agree(True) and engine.agree(is_second) and engine.agree(True, how="all")
    assert not engine.agree(torch.tensor(is_second), how="all") and not engine.agree(False, how="any")
    engine.train_step(share_of(models.vector_batch(0, 4)))
    assert engine.agree(not is_second)


@on_ranks(2)
def test_small_sums_of_different_calls_are_not_mixed() -> None:
    """Rank 0 asks the others, which are in another small sum."""
    engine = engine_of(MLP)
    call: Any = engine.eval_step if engine.rank else engine.agree
    text = refusal(call, models.vector_batch(0, 2) if engine.rank else True, kind=lowtide.CollectiveError)
    what = "the mean of the loss" if engine.rank else "engine.agree()"
    assert text.startswith(f"rank {engine.rank} in {what}: rank {1 - engine.rank} made a different call of the engine.")


def test_how_ranks_agree_is_one_of_two() -> None:
    text = refusal(engine_of(MLP).agree, True, how="most")
    assert text == 'engine.agree: expected how="any" or "all", found \'most\''


NVME = {"device": "nvme"}
CONFIG = settings(optimizer=None)


def build() -> nn.Module:
    torch.manual_seed(0)
    return models.tiny_gpt()


@on_ranks(2)
def test_it_computes_what_torch_does(tmp_path: Path) -> None:
    """In several ways, with no bytes beside the parameters."""
    model, whole = build(), models.token_batch(0, 4)
    losses = [model(*(part.chunk(2)[rank] for part in whole)).detach() for rank in range(2)]
    for stage, config in ((1, {}), (3, {"offload_param": NVME | {"nvme_path": str(tmp_path)}})):
        batch, folder = share_of(whole), tmp_path / str(stage)
        with lowtide.initialize(build(), settings(stage, optimizer=None, zero_optimization=config)) as engine:
            found, mean = [engine(*batch)], engine.eval_step(batch)
            assert not found[0].requires_grad and engine.lr == 0
            memory = engine.memory()
            assert memory.gradient_bytes + memory.optimizer_bytes == 0
            engine.export(folder / "plain")
            engine.save_checkpoint(folder / "saved")
            expected = dict(model.state_dict()) if engine.rank == 0 else {}
            torch.testing.assert_close(engine.state_dict(), expected, rtol=0, atol=0)
            weight = engine.module.get_parameter("head.weight")
            with engine.gathered(weight, modify=True):
                weight.mul_(2)
            assert engine(*batch) != found[0]
            engine.load_checkpoint(folder / "saved")
            found.append(engine(*batch))
            engine.load_weights(folder / "plain")
            found.append(engine(*batch))
            torch.testing.assert_close(found, [losses[engine.rank]] * 3)
            torch.testing.assert_close(mean, torch.stack(losses).mean())


def test_it_says_that_it_does_not_train() -> None:
    model, batch = build(), models.token_batch(0, 2)
    with lowtide.initialize(model, CONFIG) as engine:
        for name, given in {"train_step": [batch], "backward": [engine(*batch)], "step": []}.items():
            words = f"engine.{name}: expected an engine with an optimizer, found an engine without; put an optimizer in"
            assert words in refusal(getattr(engine, name), *given)
        assert not any(param.requires_grad for param in model.parameters())
    assert all(param.requires_grad for param in model.parameters())


@pytest.mark.parametrize(
    ("more", "key"),
    [
        ({"scheduler": {"type": "WarmupLR"}}, "scheduler"),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, "zero_optimization.offload_optimizer"),
        ({"zero_optimization": {"update_in_backward": True}}, "zero_optimization.update_in_backward"),
    ],
)
def test_a_config_of_a_training_and_a_scheduler_need_one(more: dict[str, Any], key: str) -> None:
    text = refusal(lowtide.initialize, build(), settings(optimizer=None, **more))
    assert text.startswith(f"optimizer: {key} needs an optimizer, found none; set it in the config, for example")
    text = refusal(lowtide.initialize, build(), CONFIG, lr_scheduler=torch.optim.lr_scheduler.LinearLR)
    assert "lr_scheduler: expected an optimizer too, in the config or passed" in text
