"""The manners of DeepSpeed's engine."""

import argparse
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lowtide
import lowtide.deepspeed as deepspeed
from lowtide.deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from lowtide.deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum
from lowtide.deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    set_z3_leaf_modules,
)
from tests.checkpoint.making import read_by_library
from tests.engine.test_hugging_face import llama
from tests.integrations.deepspeed.scripts import ROWS, batches, config, engine_of, net, train
from tests.kit.ranks import RankPool, on_ranks
from tests.kit.training import logged, refusal

asserted = partial(refusal, kind=AssertionError)
BF16 = {"bf16": {"enabled": True, "auto_cast": True}}


def own_batches(count: int) -> Any:
    return batches(deepspeed.comm.get_rank(), count)


def within(context: Any) -> None:
    with context:
        pass


@on_ranks(2)
def test_steps_at_the_boundary_alone() -> None:
    engine = engine_of(3)
    (x, y), *_ = batches(0)
    weight = engine.module.c.weight
    before = safe_get_full_fp32_param(weight)
    loss = engine(x, y)
    assert torch.equal(engine.backward(loss), loss / 2)
    assert not engine.is_gradient_accumulation_boundary()
    engine.step()
    assert (engine.global_steps, engine.micro_steps, engine.was_step_applied()) == (0, 1, False)
    assert engine.is_gradient_accumulation_boundary()
    engine.backward(engine(x, y))
    engine.step()
    assert engine.was_step_applied()
    # The caller says which microbatch is the last.
    engine.set_gradient_accumulation_boundary(False)
    engine.backward(engine(x, y))
    engine.set_gradient_accumulation_boundary(True)
    engine.backward(engine(x, y))
    engine.step()
    assert engine.global_steps == 2
    engine.load_module_state_dict({**engine.module_state_dict(), "c.weight": before})
    assert torch.equal(safe_get_full_fp32_param(weight), before)
    safe_set_full_fp32_param(weight, before + 1)
    assert torch.equal(safe_get_full_fp32_param(weight), before + 1)
    engine.set_train_batch_size(4 * engine.train_micro_batch_size_per_gpu() * engine.dp_world_size)
    assert engine.gradient_accumulation_steps() == 4
    said = "expected a multiple of microbatch(4) x ranks(2) = 8, found 12"
    assert said in refusal(engine.set_train_batch_size, 12)
    engine.destroy()


@on_ranks(2)
def test_states_leave_the_device_in_its_words() -> None:
    """As scripts of reinforcement learning ask."""
    engine = engine_of(3)
    asked: list[str] = []
    engine.lowtide.offload_states = lambda kinds, pin_memory: asked.append(f"{sorted(kinds or ())} {pin_memory}")
    some = [OffloadStateTypeEnum.optim_states, OffloadStateTypeEnum.hp_params, OffloadStateTypeEnum.lp_grads]
    engine.optimizer.offload_states(include=some, device=OffloadDeviceEnum.cpu, pin_memory=False, non_blocking=True)
    engine.offload_states()
    engine.offload_states(device=OffloadDeviceEnum.none)
    assert asked == ["['gradients', 'optimizer'] False", "[] True"]
    del engine.lowtide.offload_states
    engine.offload_states(include=["optim_states", "lp_grads"])
    engine.optimizer.reload_states(non_blocking=True)
    engine.reload_states()
    (x, y), *_ = batches(0)
    engine.backward(engine(x, y))
    engine.destroy()


@on_ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_parameters_are_gathered_and_set(stage: int) -> None:
    rank = deepspeed.comm.get_rank()
    engine = engine_of(stage)
    params = list(engine.module.parameters())
    with deepspeed.zero.GatheredParameters(params, modifier_rank=1):
        if rank == 1:
            for param in params:
                param.data.fill_(2.0)
    assert all(torch.equal(safe_get_full_fp32_param(param), torch.full(param.shape, 2.0)) for param in params)
    assert [hasattr(param, "ds_id") for param in params] == [stage == 3] * len(params)
    with deepspeed.zero.GatheredParameters(params[0]):
        assert torch.equal(params[0].detach(), torch.full((16, 8), 2.0))
    numel = sum(param.numel() for param in params)
    assert sum(len(safe_get_local_fp32_param(param)) for param in params) <= numel
    x, y = batches(rank)[0]
    engine.set_gradient_accumulation_boundary(True)
    engine.backward(engine(x, y))
    for param in params:
        safe_set_full_grad(param, torch.ones(param.shape))
    engine.step()
    assert engine.get_global_grad_norm() == pytest.approx(numel**0.5)
    engine.destroy()


@on_ranks(2)
def test_a_parameter_without_an_engine_stays_as_it_is() -> None:
    rank = deepspeed.comm.get_rank()
    param = nn.Parameter(torch.full((2,), float(rank)))
    with deepspeed.zero.GatheredParameters(param, modifier_rank=0):
        pass
    assert param.tolist() == [rank, rank]


@on_ranks(2)
def test_checkpoints_have_deepspeeds_return_values(tmp_path: Path) -> None:
    rank, folder = deepspeed.comm.get_rank(), str(tmp_path)
    engine = engine_of(2)
    train(engine, rank, 4)
    assert engine.save_checkpoint(folder, client_state={"epoch": 5, "rank": rank}) is True
    assert engine.save_checkpoint(folder, tag=7, save_latest=False)
    after = train(engine, 5, 2)
    assert engine.load_checkpoint(folder) == (f"{folder}/global_step2", {"epoch": 5, "rank": rank})
    assert (engine.global_steps, engine.micro_steps, engine.global_samples) == (2, 4, 32)
    assert train(engine, 5, 2) == after
    assert engine.load_checkpoint(folder, tag="7")[1] == {}
    assert engine.load_checkpoint(folder, load_module_only=True)[0] == f"{folder}/global_step2"
    assert engine.load_checkpoint(folder, load_optimizer_states=False)[1] == {"epoch": 5, "rank": 0}
    assert engine.load_checkpoint(f"{folder}/none") == (None, None)
    engine.save_checkpoint(folder, tag=f"of-{rank}")  # a warning
    assert engine.load_checkpoint(folder)[0] == f"{folder}/of-0"
    strict = engine_of(0, checkpoint={"tag_validation": "Fail"})
    said = "save_checkpoint: expected one tag on all ranks, found of-0, of-1"
    assert said in asserted(strict.save_checkpoint, folder, tag=f"of-{rank}")
    strict.destroy()
    (tmp_path / "file").touch()
    for bad, words in ((tmp_path / "file" / "inside", "Not a directory"), ("", "expected the path of a folder")):
        text = refusal(engine.save_16bit_model, bad, kind=Exception)
        assert (words if rank == 0 else "save_16bit_model failed on rank 0") in text  # nobody waits for rank 0
    assert engine.save_16bit_model(folder) is True
    if rank == 0:
        found = torch.load(f"{folder}/pytorch_model.bin")
        assert found.keys() == net().state_dict().keys()
        model = deepspeed.utils.zero_to_fp32.load_state_dict_from_zero_checkpoint(net(), folder)
        torch.testing.assert_close(model.state_dict(), found)
        deepspeed.utils.zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(folder, folder, "200B", True)
        assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
        torch.testing.assert_close(read_by_library(tmp_path), found)
    engine.destroy()


@on_ranks(1)
def test_a_load_takes_rates_and_iteration_from_the_parts_that_are_asked_for(tmp_path: Path) -> None:
    """Of a schedule at 0.01 x log(3) / log(5), in iteration 2. A new one is at 0, in iteration -1."""
    engine = engine_of(0)
    train(engine, 0, 6)
    engine.save_checkpoint(tmp_path)
    rate = engine.get_lr()
    engine.destroy()
    for optimizer, schedule in ((True, True), (True, False), (False, True), (False, False)):
        engine = engine_of(0)
        engine.load_checkpoint(tmp_path, load_optimizer_states=optimizer, load_lr_scheduler_states=schedule)
        found = engine.get_lr(), engine.lr_scheduler.last_batch_iteration
        assert found == (rate if optimizer else [0.0], 2 if schedule else -1)
        engine.destroy()
    model = net()
    engine, *_ = deepspeed.initialize(
        model=model, config=config(0, scheduler=None), lr_scheduler=lambda of: torch.optim.lr_scheduler.StepLR(of, 4)
    )
    # Its state is not that of WarmupLR.
    engine.load_checkpoint(tmp_path, load_lr_scheduler_states=False)
    assert engine.lr_scheduler.last_epoch == 0
    engine.destroy()


@on_ranks(1)
def test_what_does_not_leave_out_frozen_parameters_says_so(tmp_path: Path) -> None:
    engine, found = engine_of(0), deepspeed.utils.zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint
    with logged("WARNING") as messages:
        engine.save_checkpoint(tmp_path, exclude_frozen_parameters=True)
        found(tmp_path, exclude_frozen_parameters=True)
    said = "exclude_frozen_parameters=True has no effect; with checkpoint.exclude_frozen_parameters in the config"
    assert [text.split(", checkpoints")[0] for text in messages] == [
        f"save_checkpoint: {said}",
        f"zero_to_fp32: {said}",
    ]
    engine.destroy()


@on_ranks(2)
def test_a_step_begins_anew_after_a_checkpoint_from_within(tmp_path: Path) -> None:
    engine = engine_of(2, zero_optimization={"stage": 2, "offload_optimizer": {"device": "cpu"}})
    weight, mine = engine.module.c.weight, own_batches(2)
    train(engine, 0, 2)
    for number, (x, y) in enumerate(mine):
        engine.backward(engine(x, y))
        engine.save_checkpoint(tmp_path, tag=number)
        engine.step()
    after = safe_get_full_fp32_param(weight)
    for number in range(2):
        assert engine.load_checkpoint(tmp_path, tag=number)[0] == f"{tmp_path}/{number}"
        assert (engine.global_steps, engine.micro_steps) == (1, 2)
        for x, y in mine:
            engine.backward(engine(x, y))
            engine.step()
        assert engine.global_steps == 2 and torch.equal(after, safe_get_full_fp32_param(weight))
    # As if fewer ranks went on: a step of twice the microbatches has all of them from the first step on.
    engine.set_train_batch_size(2 * engine.train_batch_size())
    engine.load_checkpoint(tmp_path)
    ends = []
    for x, y in (*mine, *mine):
        engine.backward(engine(x, y))
        ends.append(engine.is_gradient_accumulation_boundary())
        engine.step()
    assert ends == [False, False, False, True] and engine.global_steps == 2
    engine.destroy()


@on_ranks(2)
def test_a_model_is_initialized_again() -> None:
    first = engine_of(3)
    train(first, deepspeed.comm.get_rank(), 6)
    weight = first.module.c.weight
    before = safe_get_full_fp32_param(weight)
    second, *_ = deepspeed.initialize(model=first.module, config=config(3))
    first.destroy()
    assert torch.equal(before, safe_get_full_fp32_param(weight))
    train(second, 0, 6)  # the rate of the first two steps is 0
    assert not torch.equal(before, safe_get_full_fp32_param(weight))
    assert refusal(first, *batches(0)[0], kind=RuntimeError) == (
        "engine(...): expected an open engine, found a closed engine (engine.close(), destroy() in lowtide.deepspeed); "
        "call it before, or make another engine with initialize"
    )
    second.destroy()


@on_ranks(2)
def test_scripts_may_initialize_in_a_function() -> None:
    """Each engine is lost when the function ends, and nobody destroys it."""
    model = nn.Linear(2, 2)
    settings = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "Adam"}, "zero_optimization": {"stage": 1}}

    def trained() -> float:
        engine: Any = deepspeed.initialize(model=model, config=settings)[0]
        loss = engine(torch.ones(2, 2)).mean()
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    first, second, third = (trained() for _ in range(3))
    assert first > second > third


@on_ranks(2)
def test_gradients_so_far_are_shown_between_microbatches() -> None:
    engine = engine_of(3)
    weight, ((x, y),) = engine.module.c.weight, own_batches(1)
    found = []
    for _ in range(2):
        engine.backward(engine(x, y))
        found.append(safe_get_full_grad(weight))
        engine.step()
    assert found[0].abs().max() > 0
    torch.testing.assert_close(2 * found[0], found[1])
    for call, name in (
        (partial(safe_get_full_grad, weight), "engine.gradient() (safe_get_full_grad in lowtide.deepspeed)"),
        (partial(safe_get_local_grad, weight), "engine.gradient() (safe_get_local_grad in lowtide.deepspeed)"),
        (partial(safe_set_full_grad, weight, x), "engine.set_gradient() (safe_set_full_grad in lowtide.deepspeed)"),
    ):
        said = refusal(call, kind=RuntimeError)
        assert said.startswith(f"{name}: expected ") and "found 0 of 2 microbatches" in said
    with pytest.raises((ValueError, RuntimeError)) as wrong:  # the latter on ranks that have nothing of it
        safe_get_full_optimizer_state(weight, "exp_vag")
    assert str(wrong.value).endswith(
        "engine.full() (safe_get_full_optimizer_state in lowtide.deepspeed): expected a state with the shape of "
        "'c.weight' (exp_avg, exp_avg_sq), found 'exp_vag'"
    )
    engine.destroy()


@on_ranks(2)
def test_zero_grad_after_the_last_backward_forgets_the_step() -> None:
    engine = engine_of(3, scheduler=None)
    weight, ((x, y),) = engine.module.c.weight, own_batches(1)
    before = safe_get_full_fp32_param(weight)
    for clear in (engine.zero_grad, engine.optimizer.zero_grad):
        for is_last in (False, True):
            engine.backward(engine(x, y))
            assert engine.lowtide.is_step_complete is is_last
            if is_last:
                whole = safe_get_full_grad(weight)
                clear()
            engine.step()
        assert torch.equal(before, safe_get_full_fp32_param(weight))
    engine.backward(engine(x, y))
    engine.step()
    engine.zero_grad()  # before the last backward
    engine.backward(engine(x, y))
    torch.testing.assert_close(safe_get_full_grad(weight), whole)
    engine.step()
    assert not torch.equal(before, safe_get_full_fp32_param(weight))
    engine.destroy()


def fail(gradient: torch.Tensor) -> None:
    raise ZeroDivisionError


@on_ranks(2)
@pytest.mark.parametrize("cut", ["backward", "loss", "load"])
def test_a_step_that_was_cut_begins_again(cut: str) -> None:
    """By an error, after which `zero_grad` comes (in `loss.backward()` it goes past the engine), or by new weights."""
    found = []
    is_loss = cut == "loss"
    for is_cut in (False, True):
        engine = engine_of(2, scheduler=None)
        ((x, y),) = own_batches(1)
        if is_cut:
            engine.backward(engine(x, y))
            engine.step()
        if is_cut and cut == "load":
            engine.load_module_state_dict(engine.module_state_dict())
        elif is_cut:
            hook = engine.module.c.weight.register_hook(fail)
            loss = engine(x, y)
            with pytest.raises(ZeroDivisionError):
                loss.backward() if is_loss else engine.backward(loss)
            hook.remove()
            for ask in () if is_loss else (engine.step, partial(engine.backward, engine(x, y))):
                assert "expected all microbatches of the step, found 1 lost: " in refusal(ask, kind=RuntimeError)
            engine.zero_grad()
        for part in range(2):
            assert (engine.micro_steps, engine.global_steps) == (part, 0)
            engine.backward(engine(x * (part + 1), y))
            engine.step()
        assert engine.was_step_applied()
        found.append(safe_get_full_fp32_param(engine.module.c.weight))
        engine.destroy()
    assert torch.equal(*found)


@on_ranks(2)
def test_rank_0_that_saves_alone_is_told_so(tmp_path: Path) -> None:
    engine = engine_of(0)
    if dist.get_rank() == 0:
        said = refusal(engine.save_checkpoint, str(tmp_path), kind=lowtide.CollectiveError)
        assert said.startswith("rank 0 in save_checkpoint: not all ranks came (")
        assert said.endswith("Every rank must call engine.save_checkpoint(), not one alone.")
    else:
        engine.destroy()
        dist.destroy_process_group()


DYNAMIC = {"initial_scale_power": 8, "hysteresis": 1, "loss_scale_window": 100}


@on_ranks(1)
@pytest.mark.parametrize(("fp16", "scales"), [(DYNAMIC, [256.0, 128.0, 128.0]), ({"loss_scale": 64.0}, [64.0] * 3)])
def test_the_loss_scaler_tells_the_scale(fp16: dict[str, Any], scales: list[float]) -> None:
    model = nn.Linear(4, 4)
    set_z3_leaf_modules(model, [nn.Linear])
    options = {"fp16": {"enabled": True, **fp16}, "optimizer": {"type": "Adam"}, "train_batch_size": 1}
    engine, optimizer, *_ = deepspeed.initialize(model=model, config=options)
    for number, factor in enumerate((1.0, float("inf"), 1.0)):
        engine.backward(engine(torch.ones(1, 4, dtype=torch.half)).float().sum() * factor)
        engine.step()
        scaler = optimizer.loss_scaler
        assert scaler == optimizer.loss_scale_config and scaler.loss_scale == optimizer.cur_scale == scaler.cur_scale
        assert scaler.dynamic == optimizer.dynamic_loss_scale == optimizer.needs_scaler() == ("loss_scale" not in fp16)
        assert (scaler.cur_scale, scaler.cur_iter, optimizer.overflow) == (scales[number], number + 1, number == 1)
        assert (engine.get_global_grad_norm() == float("inf")) == (number == 1)
        assert bool(optimizer._global_grad_norm.isfinite()) == (number != 1)
    assert optimizer.leaf_parameters == {model: [model.weight, model.bias]}
    assert "cannot assign to field 'cur_scale'" in refusal(setattr, scaler, "cur_scale", 2.0, kind=AttributeError)
    said = "'DeepSpeedOptimizer' object has no attribute 'scaler'"
    assert said in refusal(getattr, optimizer, "scaler", kind=AttributeError)
    engine.destroy()


class BySamples:
    """As Megatron's: its step needs the number of samples."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.seen = optimizer, [0]

    def step(self, increment: int) -> None:
        self.seen.append(increment)


@on_ranks(1)
def test_initialize_takes_what_scripts_give_it() -> None:
    deepspeed.init_distributed()
    args = deepspeed.add_config_arguments(argparse.ArgumentParser()).parse_args(["--deepspeed"])
    assert args.deepspeed and args.deepspeed_config is None
    model: Any = net()
    engine, optimizer, loader, scheduler = deepspeed.initialize(
        args,
        model,
        model_parameters=[{"params": model.a.parameters(), "lr": 0.5}, {"params": model.c.parameters()}],
        training_data=[(torch.randn(8), torch.randn(4)) for _ in range(3 * ROWS)],
        config_params={"train_batch_size": ROWS, "optimizer": {"type": "Adam", "params": {"lr": 1e-3}}},
    )
    assert isinstance(optimizer, FusedAdam) and scheduler is None and len(loader) == 3
    assert engine.get_lr() == [0.5, 1e-3] and [group["weight_decay"] for group in optimizer.param_groups] == [0, 0]
    assert not engine.monitor.enabled and engine.monitor is engine.monitor
    assert engine.gradient_clipping() == 1.0 and engine.config["gradient_clipping"] == 1.0
    frozen = model.b[0].weight.detach().clone()
    for x, y in loader:
        engine.backward(engine(x, y))
        engine.step()
    assert torch.equal(model.b[0].weight, frozen)  # in no group
    assert isinstance(engine, nn.Module) and engine.local_rank == 0 and engine.device.type == "cpu"
    assert next(name for name, _ in engine.named_parameters()) == "module.a.weight"
    assert engine.b is model.b and not engine.eval().module.training
    assert (engine.zero_optimization_stage(), engine.fp16_enabled(), engine.optimizer_name()) == (0, False, "adam")
    engine.destroy()
    client = DeepSpeedCPUAdam(model.parameters(), lr=1e-2)
    engine, optimizer, _, scheduler = deepspeed.initialize(
        model=model,
        optimizer=client,
        lr_scheduler=lambda of: torch.optim.lr_scheduler.StepLR(of, 1, 0.5),
        config={**config(0), "scheduler": {"type": "WarmupLR"}, "gradient_accumulation_steps": 1},
    )
    assert optimizer is client
    train(engine, 0, 2)
    assert engine.get_lr() == scheduler.get_last_lr() == [0.0025]
    engine.destroy()
    engine, _, _, scheduler = deepspeed.initialize(
        model=model, optimizer=FusedAdam(model.parameters()), lr_scheduler=BySamples, config=config(0)
    )
    train(engine, 0, 4)
    assert scheduler.seen == [0, 8, 8]
    engine.destroy()


@on_ranks(1)
def test_what_deepspeed_asserts_says_what_to_do() -> None:
    model, batch = net(), batches(0)[0]
    start = partial(deepspeed.initialize, model=model, config=config(0))
    named = argparse.Namespace(deepspeed_config="x.json")
    scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.Adam(model.parameters()), 1)
    assert "expected a model, found none" in asserted(start, model=None)
    assert "expected initialize(config=...) or args with a deepspeed_config" in asserted(start, config=None)
    assert "found both args.deepspeed_config and a config passed" in asserted(start, named, config={})
    assert "expected train_batch_size or train_micro_batch_size_per_gpu" in asserted(start, config={})
    said = "expected a callable from an optimizer to a scheduler, found a StepLR"
    assert said in asserted(start, lr_scheduler=scheduler)
    missing = partial(refusal, kind=NotImplementedError)
    mpu = type("Mpu", (), {"get_model_parallel_world_size": lambda self: 2})()
    assert re.match(r'mpu: expected one rank .*, found 2\. .*"tensor": 2', missing(start, mpu=mpu))
    assert "mesh_param: expected none" in missing(start, mesh_param=(1, 1))
    said = "FusedAdam: expected bias_correction=True, found False"
    assert said in missing(FusedAdam, model.parameters(), bias_correction=False)
    said = "safe_get_full_grad: expected a parameter of a model given"
    assert said in refusal(safe_get_full_grad, model.a.weight)

    engine, *_ = start(config={"train_batch_size": 4})
    loss = engine(*batch)
    assert "engine.backward(): expected an optimizer" in asserted(engine.backward, loss)
    assert "engine.scale(): expected an optimizer" in asserted(engine.scale, loss)
    for name, said in (
        ("register_compile_pass", "register_compile_pass is not in lowtide.deepspeed: use engine.compile"),
        ("nothing", "'DeepSpeedEngine' object has no attribute 'nothing'"),
    ):
        assert said in refusal(getattr, engine, name, kind=AttributeError)
    said = "offload_states: expected device 'cpu', found 'nvme'. To keep states in files always"
    assert said in refusal(engine.offload_states, device=OffloadDeviceEnum.nvme)
    assert "custom_load_fn: expected none" in missing(engine.load_module_state_dict, {}, custom_load_fn=print)
    engine.destroy()

    engine = engine_of(2)
    for call, name in ((engine.backward, "engine"), (engine.scale, "engine"), (engine.optimizer.backward, "optimizer")):
        said = asserted(call, torch.ones(2, requires_grad=True))
        expected = rf"{name}.{call.__name__}: expected a loss with a single element .* shape .2,., requires_gr"
        assert re.search(expected, said)
    said = "for a loss of tiled logits (tiles.logits) with gradient_accumulation_steps 2. loss.backward() would not"
    assert said in asserted(engine._check_undivided, torch.ones(1))
    assert "no_sync(): expected stage 0 or 1, found stage 2" in asserted(within, engine.no_sync())
    engine.destroy()
    engine = engine_of(0)
    with engine.no_sync():
        engine.backward(engine(*batch))
        assert "step(): called inside engine.no_sync" in asserted(engine.step)
        assert "cannot be entered inside itself" in asserted(within, engine.no_sync())
    engine.destroy()
    engine = engine_of(1)
    engine.backward(engine(*batch))
    engine.step()
    assert "expected a backward of the last microbatch of the step, found 1 of earlier" in asserted(engine.step)
    engine.zero_grad()
    engine.set_gradient_accumulation_boundary(True)
    engine.module.c.bias.grad = torch.ones(4)
    said = "engine.step(): expected gradients of a backward, found none, but the .grad of 'c.bias' is set by hand"
    assert said in asserted(engine.step)
    engine.destroy()


@on_ranks(2)
@pytest.mark.parametrize(("stage", "half"), [(3, False), (2, True)])
def test_every_backward_has_the_gradients_of_the_engines(stage: int, half: bool) -> None:
    """The norm of a step of two microbatches, and a metric of its gradient, by four kinds of backward."""
    norms = []
    batch = {"train_micro_batch_size_per_gpu": ROWS, "gradient_accumulation_steps": 2}
    critic, *_ = deepspeed.initialize(model=nn.PReLU(init=1.0), config=batch)  # the identity
    for kind in ("engine", "loss", "scale", "through"):
        changes = {"fp16": {"enabled": True, "initial_scale_power": 4, "auto_cast": True}} if half else {}
        engine = engine_of(stage, gradient_clipping=0.1, **changes)
        backward = {
            "engine": engine.backward,
            "loss": torch.Tensor.backward,
            "scale": lambda loss: engine.scale(loss).backward(),  # noqa: B023  (called at once)
            "through": lambda loss: engine.backward(critic(loss.float())),  # noqa: B023
        }[kind]
        for x, y in own_batches(2):
            x.requires_grad_()
            backward(engine(x, y))
            engine._backward_epilogue()
            engine.step()
        assert (engine.global_steps, engine.micro_steps) == (1, 2)
        assert all(param.ds_persist is False for param in engine.module.parameters() if hasattr(param, "ds_id"))
        norms.append(engine.get_global_grad_norm())
        of_input = [torch.autograd.grad(engine(x, y), x)[0]]  # not divided by anything
        engine.set_train_batch_size(engine.train_micro_batch_size_per_gpu() * engine.dp_world_size)
        of_input.append(torch.autograd.grad(engine(x, y), x)[0])
        assert torch.equal(*of_input)
        engine.destroy()
    critic.destroy()
    assert norms[0] > 0 and norms[1:] == pytest.approx(norms[:1] * 3, rel=1e-3 if half else 1e-6)


def timed(folder: str) -> None:
    """With the two changed imports."""
    transformers = pytest.importorskip("transformers")
    from lowtide.deepspeed import HfDeepSpeedConfig
    from lowtide.huggingface import from_pretrained

    settings = HfDeepSpeedConfig({**config(3, scheduler=None), "gradient_accumulation_steps": 1})
    assert settings.is_zero3() and not settings.is_offload() and settings.get_value("optimizer.type") == "AdamW"
    tokens = torch.arange(12).reshape(2, 6)
    losses: list[float] = []
    for model in (
        transformers.LlamaForCausalLM.from_pretrained(folder),
        partial(from_pretrained, transformers.LlamaForCausalLM, folder),
    ):
        engine, *_ = deepspeed.initialize(model=model, config=settings.config)
        timer = engine.tput_timer
        timer.stop(global_step=True)  # not started: nothing
        for step in range(4):
            assert (timer.avg_samples_per_sec() > 0) == (step == 3)
            timer.start()
            loss = engine(tokens, labels=tokens).loss
            engine.backward(loss)
            engine.step()
        assert (timer.micro_step_count, timer.global_step_count) == (4, 4)
        timer.update_epoch_count()
        assert (timer.epoch_count, timer.micro_step_count) == (1, 0)
        losses.append(loss.item())
        engine.destroy()
    assert losses[0] == losses[1]


def test_a_script_of_transformers(ranks: RankPool, tmp_path: Path) -> None:
    model: Any = llama()
    model.save_pretrained(tmp_path)
    ranks(1, timed, str(tmp_path))


@on_ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_the_caller_says_when_a_step_ends(stage: int) -> None:
    """Two microbatches by each way to say that they are one step, and the samples that were counted."""
    batch, found = own_batches(2), []
    for kind in ("counted", "unmanaged", "coalesced"):
        changes = {"managed_gradient_accumulation": False} if kind == "unmanaged" else {}
        engine = engine_of(stage, scheduler=None, **changes, **({"gradient_allreduce_op": "SUM"} if stage == 1 else {}))
        assert engine.gradient_average is (stage != 1)
        before = safe_get_full_fp32_param(engine.module.c.weight)
        if kind == "coalesced":
            with engine.coalesce_grad_reduction():
                for x, y in batch:
                    engine.backward(engine(x, y))
                assert "called inside engine.coalesce_grad_reduction()" in asserted(engine.step)
                said = "cannot be entered inside no_sync or inside itself"
                assert said in asserted(within, engine.coalesce_grad_reduction())
            engine.set_gradient_accumulation_boundary(True)
        for x, y in batch if kind != "coalesced" else ():
            engine.backward(engine(x, y))
            if kind == "counted":
                engine.step()
        if kind == "unmanaged":
            assert not engine.is_gradient_accumulation_boundary() and not engine.managed_gradient_accumulation()
            said = "expected managed_gradient_accumulation true"
            assert said in asserted(engine.set_gradient_accumulation_boundary, True)
            assert said in asserted(lambda: within(engine.coalesce_grad_reduction()))  # noqa: B023  (called at once)
        if kind != "counted":
            engine.step()
        assert (engine.global_steps, engine.global_samples) == (1, 16)
        after = safe_get_full_fp32_param(engine.module.c.weight)
        found.append((engine.get_global_grad_norm(), after))
        assert not torch.equal(before, after)
        if kind == "unmanaged":  # a step of one microbatch
            engine.backward(engine(*batch[0]))
            engine.step()
            assert (engine.global_steps, engine.global_samples) == (2, 24)
        engine.destroy()
    for norm, after in found[1:]:
        assert norm == pytest.approx(found[0][0], rel=1e-6)
        torch.testing.assert_close(after, found[0][1])
