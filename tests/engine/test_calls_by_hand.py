"""What a loop of plain torch does between backward and step is as in torch, or an error: never without effect."""

import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lowtide
from lowtide import Engine
from lowtide.zero.released import ReleasedParameterError
from lowtide.zero.sequence import StateError
from tests.kit import models
from tests.kit.ranks import RankPool, on_ranks
from tests.kit.training import Case, adamw, refusal, settings, start

CASE = Case(models.mlp, models.vector_batch)
WORDS = (
    "the gradients of this step are reduced and divided over the ranks, so param.grad has no values between backward"
)
STAGES = [0, 1, 2, 3]
SPECULATIVE = {"offload_optimizer": {"device": "cpu", "overlap": "speculative"}}
AFTER_OR_IN_BACKWARD: list[tuple[int, dict[str, Any]]] = [(0, {}), (2, SPECULATIVE), (3, {})]


def begin(stage: int = 0, zero: dict[str, Any] | None = None, accumulation: int = 1, **config: Any) -> Engine:
    return start(CASE.at(stage, accumulation=accumulation, config={"zero_optimization": zero or {}, **config}))


def batch(step: int = 0) -> tuple[Tensor, ...]:
    return models.vector_batch(step, 2)


def backward(engine: Engine, step: int = 0) -> None:
    engine.backward(engine(*batch(step)))


def after_backward(stage: int = 0, **config: Any) -> Engine:
    engine = begin(stage, **config)
    backward(engine)
    return engine


def clip_the_head(engine: Engine) -> object:
    return nn.utils.clip_grad_norm_(engine.module.get_submodule("last").parameters(), 1.0)


def unscale(engine: Engine) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.unscale_(torch.optim.SGD(engine.parameters(), lr=0.1))


USES: list[Callable[[Engine], object]] = [
    lambda engine: nn.utils.clip_grad_value_(engine.parameters(), 1.0),
    lambda engine: torch.optim.SGD(engine.parameters(), lr=0.1, foreach=False).step(),
    lambda engine: [param.grad.norm() for param in engine.parameters() if param.grad is not None],
    clip_the_head,
    unscale,
]


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_that_are_reduced_cannot_be_used_in_place(stage: int) -> None:
    with after_backward(stage) as engine:
        before = engine.full("last.weight")
        for use in USES:
            with pytest.raises((StateError, ReleasedParameterError), match=f"{WORDS}|is released: only"):
                use(engine)
        assert torch.equal(engine.full("last.weight"), before)
        engine.step()
        assert not torch.equal(engine.full("last.weight"), before)
        assert all(param.grad is None for param in engine.parameters())


def test_the_words_name_what_to_do() -> None:
    with after_backward() as engine:
        assert refusal(clip_the_head, engine, kind=StateError) == (
            f"{WORDS} and engine.step(), and linalg_vector_norm cannot use them. To clip them call "
            "engine.clip_grad_norm_(max_norm), or set gradient_clipping in the config. To read a gradient call "
            "engine.gradient(parameter) (safe_get_full_grad in lowtide.deepspeed). To update call engine.step()"
        )
        assert repr(engine.module.get_parameter("last.bias").grad) in ("None", "ReducedGradient()")


def test_a_loss_may_be_weighed_in_place() -> None:
    gradients: list[Any] = []
    for weighs_in_place in (True, False):
        with begin(3, gradient_predivide_factor=4.0) as engine:  # which the backward of a loss begins with
            loss = engine(*batch())
            if weighs_in_place:
                loss *= 3
            engine.backward(loss if weighs_in_place else 3 * loss)
            gradients.append(engine.gradient("last.weight"))
    assert torch.equal(*gradients)


def with_spare() -> nn.Module:
    """Has a layer that nobody uses."""
    torch.manual_seed(0)
    model = models.mlp()
    model.add_module("spare", nn.Linear(2, 2))
    return model


# Of each step: a part of the model, "" for all, and whether its gradients are cleared to None, or to zero.
CLEARED = [("first", True), ("", True), ("layers", False), ("layers", True), ("", False), ("last", True)]


def clear_in_steps(stage: int, zero: dict[str, Any]) -> tuple[list[float], dict[str, Any]]:
    """Norms and the state at the end."""
    norms = []
    case = CASE.at(stage, build=with_spare, accumulation=2, config={"zero_optimization": zero})
    with start(case) as engine:
        for number, (name, to_none) in enumerate(CLEARED):
            for part in range(2):
                backward(engine, 2 * number + part)
            engine.module.get_submodule(name).zero_grad(set_to_none=to_none)
            assert engine.gradient("spare.weight") is None
            if name == "layers":
                assert (engine.gradient("layers.0.bias") is None) == to_none
            norms.append(engine.step().grad_norm.item())
        return norms, engine.state_dict()


@pytest.mark.parametrize(("stage", "zero"), AFTER_OR_IN_BACKWARD)
def test_gradients_that_are_cleared_before_the_step_are_none(ranks: RankPool, stage: int, zero: dict[str, Any]) -> None:
    """Of all parameters, or of some; zero where they were made so, with momentum and decay."""
    model, norms = with_spare(), []
    optimizer = adamw(model.parameters())
    for number, (name, to_none) in enumerate(CLEARED):
        optimizer.zero_grad()
        for part in range(2):
            (model(*batch(2 * number + part)) / 2).backward()
        model.get_submodule(name).zero_grad(set_to_none=to_none)
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), math.inf).item())
        optimizer.step()
    found = ranks(2, clear_in_steps, stage, zero)[0]
    torch.testing.assert_close(found, (norms, dict(model.state_dict())), rtol=1e-4, atol=1e-5)


def test_gradients_that_an_update_in_the_backward_has_used_are_not_cleared() -> None:
    with after_backward(2, zero={"update_in_backward": True}) as engine:
        engine.module.zero_grad()
        words = "found zero_grad() after the backward has updated the parameters; put the earlier"
        assert words in refusal(engine.step, kind=StateError)


def test_gradients_that_are_in_a_sum_are_cleared_together() -> None:
    with after_backward(2, accumulation=2) as engine:
        assert engine.gradient("first.weight") is not None
        engine.module.zero_grad()
        assert engine.gradient("first.weight") is None
        backward(engine)
        engine.zero_grad()
        backward(engine)
        engine.module.get_parameter("first.weight").grad = None
        loss = engine(*batch(1))
        words = "backward: expected all gradients or none cleared after an earlier backward of the step, found some"
        assert words in refusal(engine.backward, loss, kind=StateError)


@pytest.mark.parametrize(
    ("stage", "zero", "is_last"), [(0, {}, True), (2, SPECULATIVE, True), (2, SPECULATIVE, False), (3, {}, False)]
)
@on_ranks(2)
def test_gradients_are_cleared_on_all_ranks_or_on_none(stage: int, zero: dict[str, Any], is_last: bool) -> None:
    """Training goes on after the errors, on both ranks alike."""
    expected = "expected the same gradients cleared on all ranks, since each rank has a part of their sum"
    rows = (
        ("", True, r"after backward 1: first.weight, first.bias, .* \.\.\. on rank 0, none on rank 1"),
        ("first", False, r": first.weight \(to zero\), first.bias \(to zero\) on rank 0, none on rank 1. No parameter"),
        ("layers", True, "layers.0.weight, .* on rank 0, after backward 1: last.weight, last.bias on rank 1"),
    )
    with begin(stage, zero, communication={"transport": "sockets"}) as engine:
        for name, to_none, words in rows:
            backward(engine)
            if engine.rank == 0:
                engine.module.get_submodule(name).zero_grad(set_to_none=to_none)
            elif name == "layers":
                engine.module.get_submodule("last").zero_grad()
            if not is_last:
                backward(engine)
            assert re.search(f"{expected}, found .*{words}", refusal(engine.step, kind=StateError))
        before = engine.full("last.bias")
        engine.train_step(batch(1))
        assert not torch.equal(engine.full("last.bias"), before)
        with engine.gathered():
            values = engine._mesh.world.gather_objects([param.tolist() for param in engine.parameters()])
        assert values[0] == values[1]


LOOKED_AT: list[tuple[int, dict[str, Any]]] = [
    (2, {"zero_optimization": SPECULATIVE, "bf16": {"enabled": True}}),
    (3, {"communication": {"transport": "sockets"}}),
    (3, {"zero_optimization": {"offload_param": {"device": "nvme", "nvme_path": "."}}}),
]


@on_ranks(2)
def test_forwards_between_the_last_backward_and_the_step_change_nothing() -> None:
    """They are of what is not tried: that is not taken for the caller's own change either."""
    for stage, config in LOOKED_AT:
        found: list[list[float]] = [[], []]
        for looks, losses in zip((False, True), found, strict=True):
            with start(CASE.at(stage, config=config)) as engine:
                for step in range(3):
                    loss = engine(*batch(step))
                    engine.backward(loss)
                    assert all(engine(*batch(step)).item() == loss.item() for _ in range(2 if looks else 0))
                    losses.append(engine.step().loss.item())
        assert found[0] == found[1]


def nanogpt_loop(wrap: Callable[[Any, torch.optim.Optimizer], Any]) -> tuple[list[float], Any]:
    """The loop of nanoGPT's train.py. wrap: what stands in the place of its line `model = DDP(model)`."""
    torch.manual_seed(1337)
    accumulation, grad_clip = 3, 0.5
    batches = iter(range(dist.get_rank(), 100, 2))
    model: Any = models.TinyGPT(layers=1, tied=True).double()
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


def initialize(config: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> Engine:
    return lowtide.initialize(model, config, optimizer=optimizer)


def train_as_nanogpt() -> list[tuple[list[float], dict[str, Any]]]:
    """By DDP, and by lowtide."""
    numbers, model = nanogpt_loop(lambda model, optimizer: nn.parallel.DistributedDataParallel(model))
    found = [(numbers, dict(model.module.state_dict()))]
    for stage, transport in ((0, "shared_memory"), (2, "sockets"), (3, "sockets")):
        config = settings(stage, communication={"transport": transport}, optimizer=None)
        del config["train_micro_batch_size_per_gpu"]
        numbers, engine = nanogpt_loop(partial(initialize, config))
        found.append((numbers, dict(engine.state_dict())))
        engine.close()
    return found


def test_a_loop_of_ddp_changes_the_line_that_wraps(ranks: RankPool) -> None:
    (plain, *first), (plain_of_rank_1, *second) = ranks(2, train_as_nanogpt)
    for found in first:
        torch.testing.assert_close(found, plain, rtol=1e-9, atol=1e-12)
    for numbers, _ in second:
        torch.testing.assert_close(numbers, plain_of_rank_1[0], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_step_of_the_own_optimizer_is_that_of_the_engine(stage: int) -> None:
    model = models.mlp()
    own = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(own, 1)
    config = settings(stage, gradient_accumulation_steps=2, optimizer=None)
    with lowtide.initialize(model, config, optimizer=own, lr_scheduler=scheduler) as engine:
        backward(engine)
        words = "AdamW.step(): expected a call after the last microbatch of a step"
        assert words in refusal(own.step, kind=StateError)
        backward(engine, 1)
        assert refusal(own.step, float, kind=StateError) == (
            "AdamW.step(): expected no closure, found a closure; run the backward before the call"
        )
        assert refusal(engine.optimizer.step, kind=StateError) == (
            "engine.optimizer.step(): expected engine.step(), which updates the shards of all ranks with the reduced "
            "gradients, found a call of the optimizer, which has no gradients; call engine.step() instead. zero_grad() "
            "is not needed"
        )
        before = engine.full("last.weight")
        options = own.state_dict()  # before the first step there are no states
        own.step()
        assert engine.global_step == 1
        assert not torch.equal(engine.full("last.weight"), before)
        assert not own.state
        calls: dict[str, Callable[[], Any]] = {
            "state_dict": own.state_dict,
            "load_state_dict": partial(own.load_state_dict, options),
        }
        for name, call in calls.items():
            assert refusal(call, kind=StateError) == (
                f"AdamW.{name}(): expected engine.save_checkpoint and engine.load_checkpoint, which save and load the "
                "states of all ranks, found a call of the optimizer, whose states are divided over the ranks; "
                "engine.full(parameter, state) shows the state of a parameter"
            )
    own.load_state_dict(own.state_dict())  # it is the caller's again
    own.step()


def test_what_torch_clips_in_the_middle_of_a_loop_is_its_own_without_an_engine() -> None:
    """Halves of torch's function that are replaced are there again, and other gradients go their own way."""
    halves = "_get_total_norm", "_clip_grads_with_norm_"
    before = [getattr(nn.utils.clip_grad, name) for name in halves]
    other = nn.Linear(2, 2)
    other.weight.grad = torch.full((2, 2), 3.0)
    with after_backward():
        assert nn.utils.clip_grad_norm_(other.parameters(), 1.0) == 6.0
        torch.testing.assert_close(other.weight.grad, torch.full((2, 2), 0.5))
    assert [getattr(nn.utils.clip_grad, name) for name in halves] == before


def test_hooks_see_gradients_as_before() -> None:
    """Of blocks too, whose gradients are staged as they arrive."""
    seen: dict[nn.Parameter, float] = {}
    with begin(2) as engine:
        for param in engine.parameters():
            param.register_post_accumulate_grad_hook(lambda param: seen.update({param: param.grad.norm().item()}))
        for step in range(2):
            backward(engine, step)
            assert len(seen) == len(list(engine.parameters()))
            while seen:
                seen_param, norm = seen.popitem()
                gradient = engine.gradient(seen_param)
                assert gradient is not None and gradient.norm().item() == pytest.approx(norm, rel=1e-6)
            engine.step()


@pytest.mark.parametrize("stage", [0, 3])
def test_a_gradient_that_is_put_in_after_the_backward_is_not_overlooked(stage: int) -> None:
    with after_backward(stage) as engine:
        engine.module.get_parameter("last.weight").grad = torch.zeros(3, 7)
        words = "'last.weight': its grad was replaced after the backward, but engine.step() uses the reduced"
        assert words in refusal(engine.step, kind=StateError)
