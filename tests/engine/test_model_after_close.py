"""A model is one engine's at a time, and as it was when that is closed. Two engines train as each would alone."""

import copy
import gc
import io
import os
import pickle
import threading
import time
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import AveragedModel

import lowtide
from lowtide.engine.model.given_model import take
from lowtide.model.patches import ModelPatches
from lowtide.zero.sequence import StateError
from tests.kit import models
from tests.kit.ranks import RankPool, on_ranks
from tests.kit.training import Case, refusal, settings, start, take_step
from tests.pipe.pipelines import deep_gpt

CONFIGS: dict[str, tuple[int, dict[str, Any]]] = {
    "stage 0": (1, {}),
    "stage 3": (2, {"zero_optimization": {"stage": 3}}),
    "checkpointing and offload": (1, {"activation_checkpointing": {"every": 2, "offload": {"device": "cpu"}}}),
    "zero bubble": (
        2,
        {
            "parallel": {"pipeline": 2},
            "pipeline": {"schedule": "zb-h1"},
            "gradient_accumulation_steps": 4,
            "activation_checkpointing": {"every": 1},
        },
    ),
}


def put_on(model: nn.Module) -> list[str]:
    """Everything about the modules and parameters of a model that an engine might leave behind."""
    found = []
    for name, module in model.named_modules():
        own = {
            key: len(value)
            if "hooks" in key
            else sorted(value)
            if key == "_non_persistent_buffers_set"
            else repr(value)
            for key, value in module.__dict__.items()
            if key not in ("_parameters", "_buffers", "_modules") and "Absent" not in type(value).__name__
        }
        found.append(f"{name} {type(module)!r} {own}")
    for name, param in model.named_parameters():
        hooks = (param._backward_hooks or {}, param._post_accumulate_grad_hooks or {})
        found.append(f"{name} {[len(some) for some in hooks]}")
    return found


def train_and_close(config: dict[str, Any]) -> tuple[list[str], list[str]]:
    model = models.tiny_gpt()
    before = put_on(model)
    with lowtide.initialize(model, settings(**config)) as engine:
        rows = 2 * (engine.config.gradient_accumulation_steps or 1)
        engine.train_step(models.token_batch(engine.data_rank, rows))
    left = {line.split(" ", 1)[0] for line in put_on(model)}  # without what another stage has
    return [line for line in before if line.split(" ", 1)[0] in left], put_on(model)


@pytest.mark.parametrize("name", CONFIGS)
def test_nothing_is_left_on_the_model(ranks: RankPool, name: str) -> None:
    world_size, config = CONFIGS[name]
    for before, after in ranks(world_size, train_and_close, config):
        assert after == before


@pytest.mark.parametrize("steps", [1, 2])
def test_nothing_is_left_of_a_step_that_has_begun(steps: int) -> None:
    """After the last of its backwards, and before."""
    model = models.TinyGPT()
    sizes = {"train_batch_size": 2 * steps, "gradient_accumulation_steps": steps}
    with lowtide.initialize(model, settings(1, **sizes)) as engine:
        engine.backward(engine(*models.token_batch(0, 2)))
    assert [param.grad for param in model.parameters()] == [None] * len(list(model.parameters()))


def test_an_initialize_that_fails_leaves_nothing() -> None:
    model = models.tiny_gpt()
    before = put_on(model)
    config = settings(optimizer=None, kernels={"fuse_modules": True}, gradient_clipping=1.0)
    assert "optimizer: gradient_clipping needs an optimizer, found none" in refusal(lowtide.initialize, model, config)
    assert put_on(model) == before


def test_a_model_that_an_engine_has_divided_is_refused() -> None:
    model = models.tiny_gpt()
    lowtide.initialize(model, settings(3)).close()
    text = refusal(lowtide.initialize, model, settings(3))
    assert "found that an earlier engine released '" in text and "'; build the model again" in text


CLOSE = "of an open engine; close that engine first (engine.close(), destroy() in lowtide.deepspeed, or `with"


@pytest.mark.parametrize("stage", [0, 3])
def test_a_second_engine_of_a_model_waits_for_the_first_to_close(stage: int) -> None:
    model = models.TinyGPT()
    others: dict[str, nn.Module] = {
        "this TinyGPT is the model": model,
        "this Block is a part of the model": model.blocks[0],
        "its '1' is the model": nn.Sequential(nn.Linear(2, 2), model),
    }
    with lowtide.initialize(model, settings(stage)) as engine:
        for text, other in others.items():
            said = refusal(lowtide.initialize, other, settings(stage))
            assert f"model: expected a model without an engine, found that {text} {CLOSE}" in said
        first = engine.train_step(models.token_batch(0, 2)).loss
    if stage == 3:
        return  # its shards have the values
    with lowtide.initialize(model, settings(0)) as engine:
        assert not torch.equal(engine.train_step(models.token_batch(0, 2)).loss, first)


@on_ranks(2)
def test_a_second_engine_over_a_pipeline() -> None:
    model, config = deep_gpt(), settings(1, parallel={"pipeline": 2})
    with lowtide.initialize(model, config):
        text = refusal(lowtide.initialize, model, config)
    assert text.startswith("model: expected a model without an engine, found that this ")


@on_ranks(2)
def test_a_model_of_parts_is_no_model() -> None:
    model = models.TinyGPT()
    plan = {"blocks.*.up": "column", "blocks.*.down": "row"}
    split: dict[str, Any] = {"parallel": {"tensor": 2}, "tensor_parallel": {"plan": plan}}
    lowtide.initialize(model, settings(**split)).close()
    assert refusal(lowtide.initialize, copy.deepcopy(model), settings()) == (
        "model: expected whole layers, found layers that an earlier engine divided over ranks (parallel.tensor); build "
        "the model again, or pass initialize the callable that builds it"
    )


def trained_in_a_function(model: nn.Module, stage: int) -> torch.optim.Optimizer:
    engine = lowtide.initialize(model, settings(stage))
    engine.train_step(models.token_batch(0, 2))
    optimizer: torch.optim.Optimizer = engine.optimizer
    return optimizer


@pytest.mark.parametrize("stage", [0, 2])
def test_an_engine_that_nobody_has_any_more_is_closed(stage: int) -> None:
    """As after `del engine`, and in scripts that initialize in a function, first to train, then to evaluate."""
    model, plain = models.TinyGPT(), models.TinyGPT()
    plain.load_state_dict(model.state_dict())
    optimizer = trained_in_a_function(model, stage)
    with pytest.raises(StateError, match=r"add_param_group\(\): the engine of this optimizer was freed"):
        optimizer.add_param_group({"params": []})
    with lowtide.initialize(plain, settings(stage)) as engine:
        expected = [engine.train_step(models.token_batch(step, 2)).loss for step in range(2)]
    with lowtide.initialize(model, settings(stage)) as engine:
        assert torch.equal(engine.train_step(models.token_batch(1, 2)).loss, expected[1])
    assert not [key for part in model.modules() for key in part.__dict__ if "lowtide" in key or key == "forward"]


def test_a_model_of_an_open_engine_is_not_copied() -> None:
    text = r"a module of an open engine cannot be copied or pickled, .* engine.export\(folder\) .* engine.ema\(decay\)"
    model = models.TinyGPT()
    with lowtide.initialize(model, settings(2)) as engine:
        engine.train_step(models.token_batch(0, 2))
        for module in (model, model.blocks[0], model.head):
            for make in (copy.deepcopy, pickle.dumps, lambda one: torch.save(one, io.BytesIO()), AveragedModel):
                with pytest.raises(TypeError, match=text):
                    make(module)
    copied = copy.deepcopy(model)
    assert torch.equal(copied.head.weight, model.head.weight)
    with lowtide.initialize(copied, settings(0)) as engine:
        assert engine.train_step(models.token_batch(0, 2)).loss.isfinite()


def test_a_copy_of_an_engines_model_is_no_engines() -> None:
    """While the engine is made."""
    model = nn.Linear(2, 2)
    take(model, ModelPatches())
    take(copy.deepcopy(model), ModelPatches())
    with pytest.raises(ValueError, match="this Linear is the model of an open engine"):
        take(model, ModelPatches())


FIRST = Case(models.short_gpt, models.token_batch, stage=3, clip=0.3)
SECOND = Case(models.mlp, models.vector_batch, stage=1, accumulation=3, config={"bf16": {"enabled": True}})


def one_closes_first() -> list[float]:
    """The first engine makes the process group, and leaves it before the second."""
    first, second = start(SECOND), start(SECOND)
    first.close()
    first.close()
    losses = [take_step(second, SECOND, 0).loss.item()]
    second.close()
    return losses


def one_after_the_other(late_rank: int) -> list[float]:
    """Each engine makes the process group anew, while one rank has not left that of the engine before."""
    leave, losses = dist.destroy_process_group, []

    def leave_late() -> None:
        time.sleep(0.1 * (dist.get_rank() == late_rank))
        leave()

    with mock.patch("torch.distributed.destroy_process_group", leave_late):
        for _ in range(3):
            with start(SECOND) as engine:
                losses.append(take_step(engine, SECOND, 0).loss.item())
    return losses


def refused_at_once() -> list[float]:
    """Each time the process group is made, and left before the other rank is surely connected."""
    for _ in range(3):
        with pytest.raises(ValueError, match="expected real parameters"):
            lowtide.initialize(nn.Linear(2, 2, dtype=torch.complex64), {})
    return one_closes_first()


def with_a_store_that_outlives_groups() -> list[float]:
    """As under torchrun, whose agent keeps the store that the ranks meet in."""
    port, rank = int(os.environ["MASTER_PORT"]), int(os.environ["RANK"])
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    with mock.patch.dict(os.environ, {"TORCHELASTIC_USE_AGENT_STORE": "True"}):
        losses = one_after_the_other(late_rank=0)
    store.add("left", 1)
    while rank == 0 and store.add("left", 0) < 2:
        time.sleep(0.01)
    return losses


@pytest.mark.parametrize(
    ("train", "given", "seconds"),
    [
        (one_after_the_other, (0,), 60),
        (one_after_the_other, (1,), 60),
        (refused_at_once, (), 60),
        (with_a_store_that_outlives_groups, (), 10),
    ],
)
def test_engines_make_and_leave_process_groups(
    ranks: RankPool, train: Any, given: tuple[int, ...], seconds: int
) -> None:
    """No group is there before. A rank may come to the next engine before another has left the last."""
    both = ranks(2, train, *given, process_group=False, timeout=seconds)
    assert both[0] == both[1] == len(both[0]) * both[0][:1]


def keeping() -> nn.Module:
    """A block keeps the graph of its forward, as blocks do that keep an auxiliary loss."""
    model = models.TinyGPT()
    model.blocks[0].register_forward_hook(lambda block, args, output: setattr(block, "kept", output * 1))
    return model


FILES = {"device": "nvme", "nvme_path": "files"}
FORGOTTEN: dict[str, Case] = {
    "shared memory": FIRST,
    "sockets": FIRST.at(3, config={"communication": {"transport": "sockets"}}),
    "in files": FIRST.at(3, config={"zero_optimization": {"offload_optimizer": FILES, "offload_param": FILES}}),
    "delayed": FIRST.at(2, config={"zero_optimization": {"offload_optimizer": {**FILES, "overlap": "delayed"}}}),
    "in backward": FIRST.at(3, clip=0.0, config={"zero_optimization": {"update_in_backward": True}}),
    "recomputed, bf16": FIRST.at(3, config={"activation_checkpointing": {"every": 1}, "bf16": {"enabled": True}}),
    "pipeline": FIRST.at(1, build=keeping, config={"parallel": {"pipeline": 2}}),
    "a kept graph": FIRST.at(3, build=keeping),
}


@on_ranks(2)
def test_nothing_is_left_of_an_engine_that_is_forgotten(tmp_path: Path) -> None:
    """No thread of an engine that nobody has closed, and no model."""
    os.chdir(tmp_path)
    for name, case in FORGOTTEN.items():
        before = set(threading.enumerate())
        engine = start(case)
        take_step(engine, case, 0)
        model = weakref.ref(engine.module)
        del engine
        deadline = time.monotonic() + 60  # a thread keeps what it works with until it ends
        while (set(threading.enumerate()) - before or model() is not None) and time.monotonic() < deadline:
            gc.collect()
            time.sleep(0.01)
        assert (set(threading.enumerate()) - before, model()) == (set(), None), name
