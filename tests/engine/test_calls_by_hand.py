"""What a loop of plain torch does between backward and step is as in torch, or an error: never without effect."""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lowtide
from lowtide import Engine
from lowtide.zero.released import ReleasedParameterError
from lowtide.zero.sequence import StateError
from tests.kit import models
from tests.kit.ranks import RankPool
from tests.kit.training import Case, adamw

CASE = Case(models.mlp, models.vector_batch)
WORDS = (
    "the gradients of this step are reduced and divided over the ranks, so param.grad has no values between backward"
)
STAGES = [0, 1, 2, 3]


def engine_after_backward(stage: int, **options: Any) -> Engine:
    torch.manual_seed(0)
    engine = lowtide.initialize(models.mlp(), CASE.at(stage).as_config(), **options)
    engine.backward(engine(*models.vector_batch(0, 2)))
    return engine


def clip_the_head(engine: Engine) -> object:
    return nn.utils.clip_grad_norm_(engine.module.get_submodule("last").parameters(), 1.0)


def log_a_norm(engine: Engine) -> object:
    return [param.grad.norm() for param in engine.parameters() if param.grad is not None]


def unscale(engine: Engine) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.unscale_(torch.optim.SGD(engine.parameters(), lr=0.1))


USES: list[Callable[[Engine], object]] = [
    lambda engine: nn.utils.clip_grad_value_(engine.parameters(), 1.0),
    lambda engine: torch.optim.SGD(engine.parameters(), lr=0.1, foreach=False).step(),
    clip_the_head,
    log_a_norm,
    unscale,
]


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_that_are_reduced_cannot_be_used_in_place(stage: int) -> None:
    with engine_after_backward(stage) as engine:
        before = engine.full("last.weight")
        for use in USES:
            with pytest.raises((StateError, lowtide.ReleasedParameterError), match=f"{WORDS}|is released: only"):
                use(engine)
        assert torch.equal(engine.full("last.weight"), before)
        bytes_before = engine.memory().gradient_bytes
        assert engine.memory().gradient_bytes == bytes_before
        engine.step()
        assert not torch.equal(engine.full("last.weight"), before)
        assert all(param.grad is None for param in engine.parameters())


def test_a_loss_may_be_weighed_in_place() -> None:
    config = {**CASE.at(3).as_config(), "gradient_predivide_factor": 4.0}  # which the backward of a loss begins with
    gradients = []
    for weighs_in_place in (True, False):
        torch.manual_seed(0)
        with lowtide.initialize(models.mlp(), config) as engine:
            loss = engine(*models.vector_batch(0, 2))
            if weighs_in_place:
                loss *= 3
            engine.backward(loss if weighs_in_place else 3 * loss)
            gradients.append(engine.gradient("last.weight"))
    first, other = gradients
    assert first is not None and other is not None
    assert torch.equal(first, other)


def with_spare() -> nn.Module:
    """Has a layer that nobody uses."""
    torch.manual_seed(0)
    model = models.mlp()
    model.add_module("spare", nn.Linear(2, 2))
    return model


def clear_in_steps(stage: int, zero: dict[str, Any], steps: Any) -> tuple[list[float], dict[str, Any]]:
    """Norms and the state at the end; steps: of each a name of a part, "" for all, and whether to None."""
    norms = []
    config = CASE.at(stage, config={"zero_optimization": zero}, accumulation=2).as_config()
    with lowtide.initialize(with_spare(), config) as engine:
        for number, (name, to_none) in enumerate(steps):
            for part in range(2):
                engine.backward(engine(*models.vector_batch(2 * number + part, 2)))
            engine.module.get_submodule(name).zero_grad(set_to_none=to_none)
            if name == "layers":
                assert (engine.gradient("layers.0.bias") is None) == to_none
            norms.append(engine.step().grad_norm.item())
        return norms, engine.state_dict()


CLEARED = [("first", True), ("", True), ("layers", False), ("layers", True), ("", False), ("last", True)]


@pytest.mark.parametrize(
    ("stage", "zero"),
    [*((stage, {}) for stage in STAGES), (2, {"offload_optimizer": {"device": "cpu", "overlap": "speculative"}})],
)
def test_gradients_that_are_cleared_before_the_step_are_none(ranks: RankPool, stage: int, zero: dict[str, Any]) -> None:
    """Of all parameters, or of some; zero where they were made so, with momentum and decay."""
    model, norms = with_spare(), []
    optimizer = adamw(model.parameters())
    for number, (name, to_none) in enumerate(CLEARED):
        optimizer.zero_grad()
        for part in range(2):
            (model(*models.vector_batch(2 * number + part, 2)) / 2).backward()
        model.get_submodule(name).zero_grad(set_to_none=to_none)
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), math.inf).item())
        optimizer.step()
    found = ranks(2, clear_in_steps, stage, zero, CLEARED)[0]
    torch.testing.assert_close(found, (norms, dict(model.state_dict())), rtol=1e-4, atol=1e-5)


def test_gradients_that_an_update_in_the_backward_has_used_are_not_cleared() -> None:
    config = {**CASE.at(2).as_config(), "zero_optimization": {"stage": 2, "update_in_backward": True}}
    with lowtide.initialize(models.mlp(), config) as engine:
        engine.backward(engine(*models.vector_batch(0, 2)))
        engine.module.zero_grad()
        with pytest.raises(StateError, match=r"has updated the parameters, found zero_grad\(\); put the earlier"):
            engine.step()


def test_gradients_that_are_in_a_sum_are_cleared_together() -> None:
    with lowtide.initialize(models.mlp(), CASE.at(2, accumulation=2).as_config()) as engine:
        engine.backward(engine(*models.vector_batch(0, 2)))
        assert engine.gradient("first.weight") is not None
        engine.module.zero_grad()
        assert engine.gradient("first.weight") is None
        engine.backward(engine(*models.vector_batch(0, 2)))
        engine.zero_grad()
        engine.backward(engine(*models.vector_batch(0, 2)))
        engine.module.get_parameter("first.weight").grad = None
        with pytest.raises(
            StateError,
            match="backward: expected all gradients or none cleared after an earlier backward of the step, found some",
        ):
            engine.backward(engine(*models.vector_batch(1, 2)))


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize(
    ("stage", "zero"), [(0, {}), (3, {}), (2, {"offload_optimizer": {"device": "cpu", "overlap": "speculative"}})]
)
def test_a_step_whose_gradients_are_all_cleared_is_none(
    tmp_path: Path, stage: int, zero: dict[str, Any], to_none: bool
) -> None:
    """As where the step of a generator has left gradients in the critic, which then is saved, or gets a group."""
    model = models.mlp()
    model.get_submodule("first").requires_grad_(False)
    config = {**CASE.at(stage, config={"zero_optimization": zero}).as_config(), "optimizer": None}
    trained = [param for param in model.parameters() if param.requires_grad]
    with lowtide.initialize(model, config, optimizer=adamw(trained)) as engine:
        engine.train_step(models.vector_batch(0, 2))
        before = engine.full("last.weight")

        def clear(part: nn.Module) -> None:
            engine.backward(engine(*models.vector_batch(1, 2)))
            part.zero_grad(set_to_none=to_none)

        for act in (
            lambda: engine.save_checkpoint(tmp_path),
            lambda: engine.optimizer.add_param_group({"params": model.get_submodule("first").parameters()}),
        ):
            clear(model.get_submodule("last"))
            with pytest.raises((StateError, ValueError), match="microbatches"):
                act()
            clear(model)
            act()
        assert torch.equal(engine.full("last.weight"), before)
        engine.train_step(models.vector_batch(1, 2))


def test_forwards_after_the_last_backward_are_of_what_is_not_tried() -> None:
    """What a speculative update has tried is not taken for the caller's own change either."""
    zero = {"offload_optimizer": {"device": "cpu", "overlap": "speculative"}}
    config = CASE.at(2, config={"zero_optimization": zero, "bf16": {"enabled": True}}).as_config()
    with lowtide.initialize(models.mlp(), config) as engine:
        before = engine(*models.vector_batch(0, 2))
        engine.backward(before)
        assert [engine(*models.vector_batch(0, 2)).item() for _ in range(2)] == [before.item()] * 2
        engine.step()


def clear_on_rank_0(stage: int, zero: dict[str, Any], is_last: bool) -> list[str]:
    """The errors of clearings that ranks do not have in common. Training goes on after them, on both ranks alike."""
    found = []
    config = CASE.at(stage, config={"zero_optimization": zero, "communication": {"transport": "sockets"}}).as_config()
    with lowtide.initialize(models.mlp(), config) as engine:
        for name, to_none in (("", True), ("first", False), ("layers", True)):
            engine.backward(engine(*models.vector_batch(0, 2)))
            if engine.rank == 0:
                engine.module.get_submodule(name).zero_grad(set_to_none=to_none)
            elif name == "layers":
                engine.module.get_submodule("last").zero_grad()
            if not is_last:
                engine.backward(engine(*models.vector_batch(0, 2)))
            with pytest.raises(StateError) as caught:
                engine.step()
            found.append(str(caught.value))
        before = engine.full("last.bias")
        engine.train_step(models.vector_batch(1, 2))
        assert not torch.equal(engine.full("last.bias"), before)
        with engine.gathered():
            values = engine._mesh.world.gather_objects([param.tolist() for param in engine.parameters()])
        assert values[0] == values[1]
    return found


@pytest.mark.parametrize("is_last", [True, False])
@pytest.mark.parametrize(
    ("stage", "zero"), [(0, {}), (2, {"offload_optimizer": {"device": "cpu", "overlap": "speculative"}}), (3, {})]
)
def test_gradients_are_cleared_on_all_ranks_or_on_none(
    ranks: RankPool, stage: int, zero: dict[str, Any], is_last: bool
) -> None:
    first, second = ranks(2, clear_on_rank_0, stage, zero, is_last)
    assert first == second
    expected = "expected the same gradients cleared on all ranks, since each rank has a part of their sum"
    found = (
        r"after backward 1: first.weight, first.bias, .* \.\.\. on rank 0, none on rank 1",
        r"after backward 1: first.weight \(to zero\), first.bias \(to zero\) on rank 0, none on rank 1. No parameter",
        "layers.0.weight, .* on rank 0, after backward 1: last.weight, last.bias on rank 1",
    )
    for text, words in zip(first, found, strict=True):
        assert re.search(f"{expected}, found .*{words}", text)


def test_the_words_name_what_to_do() -> None:
    with engine_after_backward(0) as engine, pytest.raises(StateError) as caught:
        clip_the_head(engine)
    assert str(caught.value) == (
        f"{WORDS} and engine.step(), and linalg_vector_norm cannot use them. To clip them call "
        "engine.clip_grad_norm_(max_norm), or set gradient_clipping in the config. To read a gradient call "
        "engine.gradient(parameter) (safe_get_full_grad in lowtide.deepspeed). To update call engine.step()"
    )
    assert repr(engine.module.get_parameter("last.bias").grad) in ("None", "ReducedGradient()")


def steps_of(stage: int, clears: bool) -> list[float]:
    """Losses of a loop with accumulation that clears gradients as loops of torch do, or does not."""
    torch.manual_seed(0)
    losses = []
    model = models.mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = {**CASE.at(stage, accumulation=2).as_config()}
    del config["optimizer"]
    with lowtide.initialize(model, config, optimizer=optimizer) as engine:
        for step in range(3):
            for clear in (engine.optimizer.zero_grad, optimizer.zero_grad, engine.module.zero_grad) if clears else ():
                clear()
            for microbatch in range(2):
                loss = engine(*models.vector_batch(2 * step + microbatch, 2))
                engine.backward(loss)
                losses.append(loss.item())
            engine.step()
            for clear in (engine.optimizer.zero_grad, optimizer.zero_grad) if clears else ():
                clear()
    return losses


@pytest.mark.parametrize("stage", STAGES)
def test_clearing_gradients_changes_nothing_of_a_step(stage: int) -> None:
    assert steps_of(stage, clears=True) == steps_of(stage, clears=False)


def nanogpt_loop(wrap: Callable[[Any, torch.optim.Optimizer], Any]) -> tuple[list[float], Any]:
    """The loop of nanoGPT's train.py. wrap: what stands in the place of its line `model = DDP(model)`."""
    torch.manual_seed(1337)
    accumulation, grad_clip = 3, 0.5
    batches = iter(range(dist.get_rank(), 100, 2))
    model: Any = models.tied_gpt().double()
    decayed = [param for param in model.parameters() if param.dim() >= 2]
    others = [param for param in model.parameters() if param.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    model = wrap(model, optimizer)
    numbers = []
    X, Y = models.token_batch(next(batches), 2)
    for iter_num in range(4):
        for param_group in optimizer.param_groups:
            param_group["lr"] = 1e-2 / (1 + iter_num)
        if iter_num % 2 == 0:
            model.eval()
            with torch.no_grad():
                numbers.append(model(*models.token_batch(77, 2)).item())
            model.train()
        for micro_step in range(accumulation):
            model.require_backward_grad_sync = micro_step == accumulation - 1
            loss = model(X, Y) / accumulation
            X, Y = models.token_batch(next(batches), 2)
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip, error_if_nonfinite=True)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        numbers += [loss.item() * accumulation, norm.item()]
    return numbers, model


def train_as_nanogpt(config: dict[str, Any] | None) -> tuple[list[float], dict[str, Any]]:
    if config is None:
        numbers, model = nanogpt_loop(lambda model, optimizer: nn.parallel.DistributedDataParallel(model))
        return numbers, dict(model.module.state_dict())
    numbers, engine = nanogpt_loop(lambda model, optimizer: lowtide.initialize(model, config, optimizer=optimizer))
    state = engine.state_dict()
    engine.close()
    return numbers, dict(state)


@pytest.mark.parametrize("transport", ["shared_memory", "sockets"])
def test_a_loop_of_ddp_changes_the_line_that_wraps(ranks: RankPool, transport: str) -> None:
    plain = ranks(2, train_as_nanogpt, None)
    for stage in STAGES:
        config = {
            "zero_optimization": {"stage": stage},
            "communication": {"transport": transport},
            "steps_per_print": 0,
        }
        found = ranks(2, train_as_nanogpt, config)
        torch.testing.assert_close(found[0], plain[0], rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(found[1][0], plain[1][0], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_step_of_the_own_optimizer_is_that_of_the_engine(stage: int) -> None:
    model = models.mlp()
    own = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(own, 1)
    config = {**CASE.at(stage).as_config(), "gradient_accumulation_steps": 2}
    for key in ("optimizer", "train_batch_size"):
        config.pop(key, None)
    engine = lowtide.initialize(model, config, optimizer=own, lr_scheduler=scheduler)
    engine.backward(engine(*models.vector_batch(0, 2)))
    with pytest.raises(
        StateError, match=re.escape("AdamW.step(): expected a call after the last microbatch of a step")
    ):
        own.step()
    engine.backward(engine(*models.vector_batch(1, 2)))
    for name, step in {
        "AdamW.step()": lambda: own.step(float),
        "engine.optimizer.step()": engine.optimizer.step,
    }.items():
        with pytest.raises(StateError) as caught:
            step()
        assert str(caught.value) == (
            f"{name}: expected engine.step(), which updates the shards of all ranks with the reduced gradients, found "
            "a call of the optimizer, which has no gradients; call engine.step() instead. zero_grad() is not needed"
        )
    before = engine.full("last.weight")
    own.step()
    assert engine.global_step == 1
    assert not torch.equal(engine.full("last.weight"), before)
    assert not own.state
    engine.close()
    own.step()  # it is the caller's again


def test_what_torch_clips_in_the_middle_of_a_loop_is_its_own_without_an_engine() -> None:
    """Halves of torch's function that are replaced are there again, and other gradients go their own way."""
    halves = "_get_total_norm", "_clip_grads_with_norm_"
    before = [getattr(nn.utils.clip_grad, name) for name in halves]
    other = nn.Linear(2, 2)
    other.weight.grad = torch.full((2, 2), 3.0)
    with engine_after_backward(0):
        assert nn.utils.clip_grad_norm_(other.parameters(), 1.0) == 6.0
        torch.testing.assert_close(other.weight.grad, torch.full((2, 2), 0.5))
    assert [getattr(nn.utils.clip_grad, name) for name in halves] == before


def test_hooks_see_gradients_as_before() -> None:
    seen: list[float] = []
    with lowtide.initialize(models.mlp(), CASE.at(2).as_config()) as engine:
        weight = engine.module.get_parameter("last.weight")

        def look(param: Any) -> None:
            seen.append(param.grad.norm().item())

        weight.register_post_accumulate_grad_hook(look)
        for step in range(2):
            engine.backward(engine(*models.vector_batch(step, 2)))
            gradient = engine.gradient(weight)
            assert gradient is not None and gradient.norm().item() == pytest.approx(seen[-1], rel=1e-6)
            engine.step()
    assert len(seen) == 2


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_that_are_cleared_before_another_backward_are_forgotten(stage: int, to_none: bool) -> None:
    """As a GAN's loop forgets what the generator's loss has left in the discriminator."""
    torch.manual_seed(0)
    model = models.mlp()
    optimizer = adamw(model.parameters())
    with engine_after_backward(stage) as engine:
        for step in (1, 2):
            engine.module.zero_grad(set_to_none=to_none)
            engine.backward(engine(*models.vector_batch(step, 2)))
            optimizer.zero_grad()
            model(*models.vector_batch(step, 2)).backward()
        assert engine.step().grad_norm.item() == pytest.approx(
            nn.utils.clip_grad_norm_(model.parameters(), math.inf).item(), rel=1e-5
        )
        optimizer.step()
        for name, value in model.state_dict().items():
            torch.testing.assert_close(engine.full(name), value, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_gradient_that_is_put_in_after_the_backward_is_not_overlooked(stage: int) -> None:
    with engine_after_backward(stage) as engine:
        weight = engine.module.get_parameter("last.weight")
        weight.grad = torch.zeros(3, 7)
        words = r"'last.weight': its grad was replaced after the backward, but engine.step\(\) uses the reduced"
        with pytest.raises(StateError, match=words):
            engine.step()


@pytest.mark.parametrize("stage", STAGES)
def test_a_backward_that_comes_to_frozen_parameters_alone_is_no_microbatch(stage: int) -> None:
    torch.manual_seed(0)
    with lowtide.initialize(models.mlp(), CASE.at(stage).as_config() | {"gradient_accumulation_steps": 2}) as engine:
        loss = engine(*models.vector_batch(0, 2))
        with engine.frozen():
            loss.backward()
        assert engine.microbatches_done == 0
        for done in (1, 2):
            engine(*models.vector_batch(0, 2)).backward()
            assert engine.microbatches_done == done
        assert engine.step().grad_norm > 0 and engine.global_step == 1


def steps_after_a_forward(call: str, layer: int) -> list[float]:
    """Two losses after a call that has failed behind a layer, "": without one."""

    def fail(*_: Any) -> None:
        raise RuntimeError("on purpose")

    torch.manual_seed(0)
    case = CASE.at(3).as_config() | {"communication": {"transport": "sockets"}}
    with lowtide.initialize(models.mlp(), case) as engine:
        if call:
            hook = engine.module.get_submodule(f"layers.{layer}").register_forward_hook(fail)
            batch = models.vector_batch(0, 2)
            with pytest.raises(RuntimeError, match="on purpose"):
                engine(*batch) if call == "forward" else getattr(engine, call)(batch)
            hook.remove()
            for param in engine.module.parameters():
                with pytest.raises(ReleasedParameterError):
                    param.sum()
        return [engine.train_step(models.vector_batch(step, 2)).loss.item() for step in range(2)]


def steps_after_forwards() -> list[list[float]]:
    return [
        steps_after_a_forward(call, layer)
        for call, layer in (("", 0), ("forward", 0), ("forward", 2), ("train_step", 1), ("eval_step", 1))
    ]


def test_a_forward_that_fails_leaves_no_parameters_gathered(ranks: RankPool) -> None:
    expected, *found = ranks(2, steps_after_forwards)[0]
    assert found == [expected] * 4
