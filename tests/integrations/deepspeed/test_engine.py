"""The manners of DeepSpeed's engine."""

import argparse
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
from tests.engine.test_hugging_face import llama
from tests.integrations.deepspeed.scripts import ROWS, batches, config, engine_of, net, train
from tests.kit.ranks import RankPool


def boundaries(stage: int) -> None:
    engine = engine_of(stage)
    (x, y), *_ = batches(0)
    before = safe_get_full_fp32_param(engine.module.c.weight)
    loss = engine(x, y)
    assert torch.equal(engine.backward(loss), loss / 2)
    assert not engine.is_gradient_accumulation_boundary()
    engine.step()
    assert (engine.global_steps, engine.micro_steps, engine.was_step_applied()) == (0, 1, False)
    assert engine.is_gradient_accumulation_boundary()
    engine.backward(engine(x, y))
    gradient = safe_get_full_grad(engine.module.c.weight)
    engine.step()
    assert engine.was_step_applied()
    # The caller says which microbatch is the last.
    engine.set_gradient_accumulation_boundary(False)
    engine.backward(engine(x, y))
    engine.set_gradient_accumulation_boundary(True)
    engine.backward(engine(x, y))
    engine.step()
    assert engine.global_steps == 2
    # One microbatch alone, not divided, has the gradient of both of the first step.
    engine.load_module_state_dict({**engine.module_state_dict(), "c.weight": before})
    safe_set_full_fp32_param(engine.module.c.weight, before)
    assert gradient is not None and gradient.shape == before.shape
    engine.set_train_batch_size(4 * engine.train_micro_batch_size_per_gpu() * engine.dp_world_size)
    assert engine.gradient_accumulation_steps() == 4
    with pytest.raises(ValueError, match=r"expected a multiple of microbatch\(4\) x ranks\(2\) = 8, found 12"):
        engine.set_train_batch_size(12)
    engine.destroy()


def lent(stage: int) -> list[str]:
    """What the engine is asked for, as scripts of reinforcement learning ask."""
    engine = engine_of(stage)
    asked: list[str] = []
    engine.lowtide.offload_states = lambda kinds, pin_memory: asked.append(f"{sorted(kinds or ())} {pin_memory}")
    some = [OffloadStateTypeEnum.optim_states, OffloadStateTypeEnum.hp_params, OffloadStateTypeEnum.lp_grads]
    engine.optimizer.offload_states(include=some, device=OffloadDeviceEnum.cpu, pin_memory=False, non_blocking=True)
    engine.offload_states()
    engine.offload_states(device=OffloadDeviceEnum.none)
    del engine.lowtide.offload_states
    engine.offload_states(include=["optim_states", "lp_grads"])
    engine.optimizer.reload_states(non_blocking=True)
    engine.reload_states()
    (x, y), *_ = batches(0)
    engine.backward(engine(x, y))
    engine.destroy()
    return asked


def test_states_leave_the_device_in_its_words(ranks: RankPool) -> None:
    assert ranks(2, lent, 3)[0] == ["['gradients', 'optimizer'] False", "[] True"]


@pytest.mark.parametrize("stage", [0, 3])
def test_steps_at_the_boundary_alone(ranks: RankPool, stage: int) -> None:
    ranks(2, boundaries, stage)


def gathered_and_set(stage: int) -> None:
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
    assert sum(len(safe_get_local_fp32_param(param)) for param in params) <= sum(param.numel() for param in params)
    x, y = batches(rank)[0]
    engine.set_gradient_accumulation_boundary(True)
    engine.backward(engine(x, y))
    for param in params:
        safe_set_full_grad(param, torch.ones(param.shape))
    engine.step()
    assert engine.get_global_grad_norm() == pytest.approx(sum(param.numel() for param in params) ** 0.5)
    engine.destroy()


@pytest.mark.parametrize("stage", [1, 3])
def test_parameters_are_gathered_and_set(ranks: RankPool, stage: int) -> None:
    ranks(2, gathered_and_set, stage)


def saved_and_loaded(folder: str) -> None:
    rank = deepspeed.comm.get_rank()
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
    with pytest.raises(AssertionError, match=r"save_checkpoint: expected one tag on all ranks, found of-0, of-1"):
        strict.save_checkpoint(folder, tag=f"of-{rank}")
    strict.destroy()
    assert engine.save_16bit_model(folder) is True
    if rank == 0:
        found = torch.load(f"{folder}/pytorch_model.bin")
        assert found.keys() == net().state_dict().keys()
        model = deepspeed.utils.zero_to_fp32.load_state_dict_from_zero_checkpoint(net(), folder)
        torch.testing.assert_close(model.state_dict(), found)
    engine.destroy()


def test_checkpoints_have_deepspeeds_return_values(ranks: RankPool, tmp_path: Path) -> None:
    ranks(2, saved_and_loaded, str(tmp_path))


def saved_within_a_step(stage: int, folder: str, zero: dict[str, Any]) -> None:
    engine = engine_of(stage, zero_optimization={"stage": stage, **zero})
    weight, mine = engine.module.c.weight, batches(deepspeed.comm.get_rank())
    train(engine, 0, 2)
    for number, (x, y) in enumerate(mine[:2]):
        engine.backward(engine(x, y))
        engine.save_checkpoint(folder, tag=number)
        engine.step()
    after = safe_get_full_fp32_param(weight)
    for number in range(2):
        assert engine.load_checkpoint(folder, tag=number)[0] == f"{folder}/{number}"
        assert (engine.global_steps, engine.micro_steps) == (1, 2)
        for x, y in mine[:2]:
            engine.backward(engine(x, y))
            engine.step()
        assert engine.global_steps == 2 and torch.equal(after, safe_get_full_fp32_param(weight))
    engine.destroy()


@pytest.mark.parametrize(("stage", "zero"), [(0, {}), (2, {"offload_optimizer": {"device": "cpu"}}), (3, {})])
def test_a_step_begins_anew_after_a_checkpoint_from_within(
    ranks: RankPool, tmp_path: Path, stage: int, zero: dict[str, Any]
) -> None:
    ranks(2, saved_within_a_step, stage, str(tmp_path), zero)


def initialized_again(stage: int) -> str:
    first = engine_of(stage)
    train(first, deepspeed.comm.get_rank(), 6)
    weight = first.module.c.weight
    before = safe_get_full_fp32_param(weight)
    second, *_ = deepspeed.initialize(model=first.module, config=config(stage))
    first.destroy()
    assert torch.equal(before, safe_get_full_fp32_param(weight))
    train(second, 0, 6)  # the rate of the first two steps is 0
    assert not torch.equal(before, safe_get_full_fp32_param(weight))
    with pytest.raises(RuntimeError) as caught:
        first(*batches(0)[0])
    second.destroy()
    return str(caught.value)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_model_is_initialized_again(ranks: RankPool, stage: int) -> None:
    assert ranks(2, initialized_again, stage)[0] == (
        "engine(...): expected an open engine, found a closed engine (engine.close(), destroy() in lowtide.deepspeed); "
        "call it before, or make another engine with initialize"
    )


def sums_so_far(stage: int, others: dict[str, Any]) -> None:
    engine = engine_of(stage, **others)
    weight, (x, y) = engine.module.c.weight, batches(deepspeed.comm.get_rank())[0]
    found = []
    for _ in range(2):
        engine.backward(engine(x, y))
        found.append(safe_get_full_grad(weight))
        engine.step()
    assert found[0].abs().max() > 0
    torch.testing.assert_close(2 * found[0], found[1])
    called = (
        (lambda: safe_get_full_grad(weight), "engine.gradient() (safe_get_full_grad in lowtide.deepspeed)"),
        (lambda: safe_get_local_grad(weight), "engine.gradient() (safe_get_local_grad in lowtide.deepspeed)"),
        (lambda: safe_set_full_grad(weight, x), "engine.set_gradient() (safe_set_full_grad in lowtide.deepspeed)"),
    )
    for call, name in called:
        with pytest.raises(RuntimeError) as caught:
            call()
        assert str(caught.value).startswith(f"{name}: expected ") and "found 0 of 2 microbatches" in str(caught.value)
    with pytest.raises((ValueError, RuntimeError)) as wrong:  # the latter on ranks that have nothing of it
        safe_get_full_optimizer_state(weight, "exp_vag")
    assert str(wrong.value).endswith(
        "engine.full() (safe_get_full_optimizer_state in lowtide.deepspeed): expected a state with the shape of "
        "'c.weight' (exp_avg, exp_avg_sq), found 'exp_vag'"
    )
    engine.destroy()


@pytest.mark.parametrize(("stage", "others"), [(0, {}), (1, {"bf16": {"enabled": True}}), (2, {}), (3, {})])
def test_gradients_so_far_are_shown_between_microbatches(ranks: RankPool, stage: int, others: dict[str, Any]) -> None:
    ranks(2, sums_so_far, stage, others)


def cleared(stage: int) -> None:
    engine = engine_of(stage, scheduler=None)
    weight, (x, y) = engine.module.c.weight, batches(deepspeed.comm.get_rank())[0]
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
    torch.testing.assert_close(safe_get_full_grad(weight), whole if stage >= 2 else whole / 2)
    engine.step()
    assert not torch.equal(before, safe_get_full_fp32_param(weight))
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_zero_grad_after_the_last_backward_forgets_the_step(ranks: RankPool, stage: int) -> None:
    ranks(2, cleared, stage)


def saved_by_rank_0_alone(folder: str) -> str:
    engine = engine_of(0)
    if dist.get_rank() == 1:
        engine.destroy()
        dist.destroy_process_group()
        return ""
    with pytest.raises(lowtide.CollectiveError) as caught:
        engine.save_checkpoint(folder)
    return str(caught.value)


def test_rank_0_that_saves_alone_is_told_so(ranks: RankPool, tmp_path: Path) -> None:
    text = ranks(2, saved_by_rank_0_alone, str(tmp_path))[0]
    assert text.startswith("rank 0 in save_checkpoint: not all ranks came (")
    assert text.endswith("Every rank must call engine.save_checkpoint(), not one alone.")


def scaled(fp16: dict[str, Any]) -> list[tuple[float, int, bool]]:
    model = nn.Linear(4, 4)
    set_z3_leaf_modules(model, [nn.Linear])
    options = {"fp16": {"enabled": True, **fp16}, "optimizer": {"type": "Adam"}, "train_batch_size": 1}
    engine, optimizer, *_ = deepspeed.initialize(model=model, config=options)
    found = []
    for factor in (1.0, float("inf"), 1.0):
        engine.backward(engine(torch.ones(1, 4, dtype=torch.half)).float().sum() * factor)
        engine.step()
        scaler = optimizer.loss_scaler
        assert scaler == optimizer.loss_scale_config and scaler.loss_scale == optimizer.cur_scale == scaler.cur_scale
        assert scaler.dynamic == optimizer.dynamic_loss_scale == optimizer.needs_scaler() == ("loss_scale" not in fp16)
        found.append((scaler.cur_scale, scaler.cur_iter, optimizer.overflow))
    assert optimizer.leaf_parameters == {model: [model.weight, model.bias]}
    with pytest.raises(AttributeError, match="cannot assign to field 'cur_scale'"):
        optimizer.loss_scaler.cur_scale = 2.0
    with pytest.raises(AttributeError, match="'DeepSpeedOptimizer' object has no attribute 'scaler'"):
        _ = optimizer.scaler
    engine.destroy()
    return found


def test_the_loss_scaler_tells_the_scale(ranks: RankPool) -> None:
    dynamic = {"initial_scale_power": 8, "hysteresis": 1, "loss_scale_window": 100}
    assert ranks(1, scaled, dynamic)[0] == [(256.0, 1, False), (128.0, 2, True), (128.0, 3, False)]
    assert ranks(1, scaled, {"loss_scale": 64.0})[0] == [(64.0, 1, False), (64.0, 2, True), (64.0, 3, False)]


def started() -> None:
    """What `initialize` takes and gives."""
    deepspeed.init_distributed()
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--deepspeed"])
    assert args.deepspeed and args.deepspeed_config is None
    own = {"train_batch_size": ROWS, "optimizer": {"type": "Adam", "params": {"lr": 1e-3}}}
    data = [(torch.randn(8), torch.randn(4)) for _ in range(3 * ROWS)]
    model: Any = net()
    engine, optimizer, loader, scheduler = deepspeed.initialize(
        args,
        model,
        model_parameters=[{"params": model.a.parameters(), "lr": 0.5}, {"params": model.c.parameters()}],
        training_data=data,
        config_params=own,
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


def test_initialize_takes_what_scripts_give_it(ranks: RankPool) -> None:
    ranks(1, started)


class BySamples:
    """As Megatron's: its step needs the number of samples."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.seen = optimizer, [0]

    def step(self, increment: int) -> None:
        self.seen.append(increment)


def refusals() -> None:
    model = net()
    with pytest.raises(AssertionError, match="expected a model, found none"):
        deepspeed.initialize(config=config(0))
    with pytest.raises(AssertionError, match="expected initialize"):
        deepspeed.initialize(model=model)
    with pytest.raises(AssertionError, match=r"found both args.deepspeed_config and a config passed"):
        deepspeed.initialize(argparse.Namespace(deepspeed_config="x.json"), model, config={})
    with pytest.raises(AssertionError, match="expected train_batch_size or train_micro_batch_size_per_gpu"):
        deepspeed.initialize(model=model, config={})
    with pytest.raises(AssertionError, match="expected a callable from an optimizer to a scheduler, found a StepLR"):
        scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.Adam(model.parameters()), 1)
        deepspeed.initialize(model=model, lr_scheduler=scheduler, config=config(0))
    mpu = type("Mpu", (), {"get_model_parallel_world_size": lambda self: 2})()
    with pytest.raises(NotImplementedError, match=r"mpu: expected one rank .*, found 2. .*\"tensor\": 2"):
        deepspeed.initialize(model=model, config=config(0), mpu=mpu)
    with pytest.raises(NotImplementedError, match="mesh_param: expected none"):
        deepspeed.initialize(model=model, config=config(0), mesh_param=(1, 1))
    with pytest.raises(NotImplementedError, match="FusedAdam: expected bias_correction=True, found False"):
        FusedAdam(model.parameters(), bias_correction=False)
    with pytest.raises(ValueError, match="safe_get_full_grad: expected a parameter of a model given"):
        safe_get_full_grad(model.a.weight)
    engine, *_ = deepspeed.initialize(model=model, config={"train_batch_size": 4})
    with pytest.raises(AssertionError, match=r"engine.backward\(\): expected an optimizer"):
        engine.backward(engine(*batches(0)[0]))
    loss = engine(*batches(0)[0])
    with pytest.raises(AssertionError, match=r"engine.scale\(\): expected an optimizer"):
        engine.scale(loss)
    with pytest.raises(AttributeError, match=r"register_compile_pass is not in lowtide.deepspeed: use engine.compile"):
        _ = engine.register_compile_pass
    with pytest.raises(
        ValueError, match=r"offload_states: expected device 'cpu', found 'nvme'. To keep states in files always"
    ):
        engine.offload_states(device=OffloadDeviceEnum.nvme)
    with pytest.raises(AttributeError, match="'DeepSpeedEngine' object has no attribute 'nothing'"):
        _ = engine.nothing
    with pytest.raises(NotImplementedError, match="custom_load_fn: expected none"):
        engine.load_module_state_dict({}, custom_load_fn=print)
    engine.destroy()
    engine = engine_of(2)
    for call, name in (
        (engine.backward, "engine.backward"),
        (engine.scale, "engine.scale"),
        (engine.optimizer.backward, "optimizer.backward"),
    ):
        with pytest.raises(
            AssertionError, match=f"{name}: expected a loss with a single element .* shape .2,., requires_gr"
        ):
            call(torch.ones(2, requires_grad=True))
    with pytest.raises(AssertionError, match=r"expected engine.backward\(loss\) for a loss of tiled .* 2\. loss"):
        engine._check_undivided(torch.ones(1))
    with pytest.raises(AssertionError, match=r"no_sync\(\): expected stage 0 or 1, found stage 2"), engine.no_sync():
        pass
    engine.destroy()
    engine = engine_of(0)
    with engine.no_sync():
        engine.backward(engine(*batches(0)[0]))
        with pytest.raises(AssertionError, match=r"step\(\): called inside engine.no_sync"):
            engine.step()
        with pytest.raises(AssertionError, match="cannot be entered inside itself"), engine.no_sync():
            pass
    engine.destroy()
    engine = engine_of(1)
    engine.set_gradient_accumulation_boundary(True)
    engine.module.c.bias.grad = torch.ones(4)
    with pytest.raises(AssertionError, match=r"step\(\): expected gradients of a backward, .* 'c.bias' is set by hand"):
        engine.step()
    engine.destroy()
    model = net()
    engine, _, _, scheduler = deepspeed.initialize(
        model=model, optimizer=FusedAdam(model.parameters()), lr_scheduler=BySamples, config=config(0)
    )
    train(engine, 0, 4)
    assert scheduler.seen == [0, 8, 8]
    engine.destroy()


def test_what_deepspeed_asserts_says_what_to_do(ranks: RankPool) -> None:
    ranks(1, refusals)


def backwards(stage: int, half: bool) -> None:
    """Norms of a step of two microbatches and a metric of its gradient, by three kinds of backward."""
    found = []
    for kind in ("engine", "loss", "scale"):
        changes = {"fp16": {"enabled": True, "initial_scale_power": 4}} if half else {}
        engine = engine_of(stage, gradient_clipping=0.1, **changes)
        for x, y in batches(deepspeed.comm.get_rank())[:2]:
            x.requires_grad_()
            loss = engine(x, y)
            if kind == "engine":
                engine.backward(loss)
            elif kind == "loss":
                loss.backward()
            else:
                engine.scale(loss).backward()
            engine._backward_epilogue()
            engine.step()
        assert (engine.global_steps, engine.micro_steps) == (1, 2)
        assert all(param.ds_persist is False for param in engine.module.parameters() if hasattr(param, "ds_id"))
        found.append(engine.get_global_grad_norm())
        of_input = [torch.autograd.grad(engine(x, y), x)[0]]  # not divided by anything
        engine.set_train_batch_size(engine.train_micro_batch_size_per_gpu() * engine.dp_world_size)
        of_input.append(torch.autograd.grad(engine(x, y), x)[0])
        assert torch.equal(*of_input)
        engine.destroy()
    assert found[0] > 0 and found[1:] == pytest.approx(found[:1] * 2, rel=1e-3 if half else 1e-6)


@pytest.mark.parametrize(("stage", "half"), [(0, False), (3, False), (2, True)])
def test_every_backward_has_the_gradients_of_the_engines(ranks: RankPool, stage: int, half: bool) -> None:
    ranks(2, backwards, stage, half)


def timed(folder: str) -> None:
    """A script of transformers, with the two changed imports."""
    transformers = pytest.importorskip("transformers")
    from lowtide.deepspeed import HfDeepSpeedConfig
    from lowtide.huggingface import from_pretrained

    settings = HfDeepSpeedConfig({**config(3, scheduler=None), "gradient_accumulation_steps": 1})
    assert settings.is_zero3() and not settings.is_offload() and settings.get_value("optimizer.type") == "AdamW"
    tokens = torch.arange(12).reshape(2, 6)
    losses: list[float] = []
    for build in (
        transformers.LlamaForCausalLM.from_pretrained,
        partial(from_pretrained, transformers.LlamaForCausalLM),
    ):
        model: Any = build(folder) if not losses else lambda: build(folder)  # noqa: B023  (called at once)
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


def coalesced(stage: int) -> None:
    """Two microbatches by each way to say that they are one step, and the samples that were counted."""
    batch, found = batches(deepspeed.comm.get_rank())[:2], []
    for kind in ("counted", "unmanaged", "coalesced"):
        changes = {"managed_gradient_accumulation": False} if kind == "unmanaged" else {}
        engine = engine_of(stage, scheduler=None, **changes, **({"gradient_allreduce_op": "SUM"} if stage == 1 else {}))
        assert engine.gradient_average is (stage != 1)
        before = safe_get_full_fp32_param(engine.module.c.weight)
        if kind == "coalesced":
            with engine.coalesce_grad_reduction():
                for x, y in batch:
                    engine.backward(engine(x, y))
                with pytest.raises(AssertionError, match=r"called inside engine.coalesce_grad_reduction\(\)"):
                    engine.step()
                with pytest.raises(AssertionError, match=r"cannot be entered inside no_sync or inside itself"):  # noqa: SIM117
                    with engine.coalesce_grad_reduction():
                        pass
            engine.set_gradient_accumulation_boundary(True)
        for x, y in batch if kind != "coalesced" else ():
            engine.backward(engine(x, y))
            if kind == "counted":
                engine.step()
        if kind == "unmanaged":
            assert not engine.is_gradient_accumulation_boundary() and not engine.managed_gradient_accumulation()
            for call in (partial(engine.set_gradient_accumulation_boundary, True), engine.coalesce_grad_reduction):
                with pytest.raises(AssertionError, match="expected managed_gradient_accumulation true"):  # noqa: SIM117
                    with call():
                        pass
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


@pytest.mark.parametrize("stage", [1, 3])
def test_the_caller_says_when_a_step_ends(ranks: RankPool, stage: int) -> None:
    ranks(2, coalesced, stage)


def trained_by_deepspeeds_names(model: nn.Module) -> float:
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "Adam"}, "zero_optimization": {"stage": 1}}
    engine: Any = deepspeed.initialize(model=model, config=config)[0]
    loss = engine(torch.ones(2, 2)).mean()
    engine.backward(loss)
    engine.step()
    return float(loss.detach())


def lost_twice() -> list[float]:
    model = nn.Linear(2, 2)
    return [trained_by_deepspeeds_names(model) for _ in range(3)]


def test_scripts_of_deepspeed_may_initialize_in_a_function(ranks: RankPool) -> None:
    for losses in ranks(2, lost_twice):
        assert losses[0] > losses[1] > losses[2]
