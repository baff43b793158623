"""What scripts and DeepSpeed's own tests ask for before they train: operations, keys, experts, the batch triple."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import lowtide.deepspeed as deepspeed
from lowtide.deepspeed.moe.utils import has_moe_layers, split_params_into_different_moe_groups_for_optimizer
from lowtide.deepspeed.monitor.monitor import MonitorMaster
from lowtide.deepspeed.ops.op_builder import FusedAdamBuilder
from lowtide.deepspeed.runtime import lr_schedules
from lowtide.deepspeed.start import _check_settled
from tests.kit.ranks import on_ranks
from tests.kit.training import refusal


def config_of(world_size: int = 1, **more: Any) -> Any:
    return deepspeed.DeepSpeedConfig({"train_batch_size": 1, **more}, world_size=world_size)


def refused(**more: Any) -> str:
    return refusal(config_of, kind=deepspeed.DeepSpeedConfigError, **more)


def test_operations_say_whether_they_are_here() -> None:
    here = deepspeed.ops.__compatible_ops__
    assert here["fused_adam"] and here["cpu_adam"] and not here["async_io"]
    with pytest.raises(NotImplementedError, match=r"FusedAdamBuilder is not in lowtide\.deepspeed: kernels are"):
        FusedAdamBuilder().load()


def test_keys_of_schedulers_are_text() -> None:
    params = {lr_schedules.WARMUP_MIN_LR: 0.1, lr_schedules.WARMUP_MAX_LR: 0.2, lr_schedules.WARMUP_NUM_STEPS: 4}
    params[lr_schedules.WARMUP_TYPE] = lr_schedules.WARMUP_LINEAR_RATE
    section = {"type": lr_schedules.WARMUP_LR, "params": params}
    found = config_of(scheduler=section).checked.scheduler
    assert found is not None and found.params.model_dump()["warmup_num_steps"] == 4


def test_one_cycle_moves_the_betas_too() -> None:
    optimizer = torch.optim.Adam([nn.Parameter(torch.ones(1))], lr=1.0)
    params = {"cycle_min_lr": 0.1, "cycle_max_lr": 0.3, "cycle_first_step_size": 2}
    scheduler = lr_schedules.OneCycle(optimizer, cycle_min_mom=0.5, cycle_max_mom=0.75, **params)
    assert scheduler.get_mom() == [(0.75, 0.99)]  # DeepSpeed's, before the first step
    found = [optimizer.param_groups[0]["betas"]]
    for _ in range(4):
        scheduler.step()
        found.append(scheduler.get_mom()[0])
        assert optimizer.param_groups[0]["betas"] == found[-1]
    assert [beta for beta, _ in found] == pytest.approx([0.5, 0.625, 0.5, 0.625, 0.75])
    assert {beta for _, beta in found} == {0.99}


def test_a_model_without_experts_is_one_group() -> None:
    model = nn.Linear(2, 2)
    group = {"params": model.parameters(), "name": "all"}
    assert [len(one["params"]) for one in split_params_into_different_moe_groups_for_optimizer(group)] == [2]
    assert has_moe_layers(model) == (False, 0)


@on_ranks(1)
def test_parameters_that_not_all_ranks_have_are_refused() -> None:
    model = nn.Linear(2, 2)
    setattr(model.bias, "allreduce", False)  # noqa: B010  # as DeepSpeed's MoE marks a parameter
    with pytest.raises(NotImplementedError, match=r"found 1 with allreduce=False, .* set \"parallel\""):
        deepspeed.initialize(model=model, config={"train_batch_size": 1})


def test_a_file_may_be_hjson(tmp_path: Path) -> None:
    pytest.importorskip("hjson")
    path = tmp_path / "config.json"
    path.write_text("{\n  train_batch_size: 4\n  optimizer: {\n    type: Adam\n  }\n}", encoding="utf-8")
    assert deepspeed.DeepSpeedConfig(path, world_size=2).train_micro_batch_size_per_gpu == 2
    path.write_text("{ train_batch_size: [", encoding="utf-8")
    with pytest.raises(ValueError, match="not valid JSON"):
        deepspeed.DeepSpeedConfig(path, world_size=2)


def test_text_for_a_value_is_said_and_told_as_the_value(caplog: pytest.LogCaptureFixture) -> None:
    text: dict[str, Any] = {"zero_optimization": {"stage": "2", "sub_group_size": "77"}, "dataloader_drop_last": "true"}
    config = config_of(train_batch_size="1", **text)
    assert (config.stage, config.zero_sub_group_size, config.dataloader_drop_last) == (2, 77, True)
    assert 'config: zero_optimization.sub_group_size: read "77" as 77' in caplog.text


def test_keys_that_act_here_are_not_said_to_have_no_effect() -> None:
    checkpoint = {"tag_validation": "Fail", "load_universal": True}
    config = config_of(dataloader_drop_last=True, checkpoint=checkpoint)
    assert config.dataloader_drop_last
    assert config.checkpoint_tag_validation_enabled and config.checkpoint_tag_validation_fail
    idle = [note.partition(":")[0] for note in config.checked.notes if "has no effect" in note]
    assert idle == ["checkpoint.load_universal"]
    assert "dataloader_drop_last" in refused(dataloader_drop_last="each")
    said = "tag_validation: expected one of IGNORE, WARN, FAIL"
    assert said in refused(checkpoint={"tag_validation": "foo"})


def test_types_of_parameters_and_buffers() -> None:
    types = {"param_dtype": "torch.bfloat16", "buffer_dtype": "half"}
    config = config_of(bf16={"enabled": True}, data_types=types)
    assert (config.param_dtype, config.buffer_dtype, config.grad_accum_dtype) == ("bf16", "fp16", None)
    assert config.dtype_of_buffers is torch.float16
    for wrong, said in (
        ({"param_dtype": "fp16"}, 'fp16.enabled choose (torch.float32), found "fp16". Change either'),
        ({"buffer_dtype": "int4"}, 'data_types.buffer_dtype: expected one of fp32, bf16, fp16, found "int4"'),
        ({"buffer_dtyp": "bf16"}, "data_types.buffer_dtyp: unknown key"),
    ):
        assert said in refusal(config_of, data_types=wrong, kind=ValueError)


@on_ranks(1)
def test_buffers_are_cast() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    asked = {"train_batch_size": 2, "data_types": {"buffer_dtype": "bf16"}}
    said = refusal(deepspeed.initialize, model=lambda: model, config=asked, kind=AssertionError)
    assert "buffer_dtype: expected a model, found a callable that builds it" in said
    engine, *_ = deepspeed.initialize(model=model, config=asked)
    assert {str(buffer.dtype) for buffer in engine.module.buffers()} == {"torch.bfloat16", "torch.int64"}
    engine.destroy()
    unmanaged = {"train_batch_size": 1, "managed_gradient_accumulation": False, "parallel": {"pipeline": 1}}
    config = deepspeed.DeepSpeedConfig(unmanaged, world_size=2, num_stages=2)
    said = "managed_gradient_accumulation: expected true with a pipeline"
    assert said in refusal(_check_settled, config, None, None, kind=AssertionError)
    said = 'config: expected values for zero_optimization.stage, found "auto". Run `lowtide plan`'
    planned = {"train_batch_size": 2, "zero_optimization": {"stage": "auto"}}
    assert said in refusal(deepspeed.initialize, model=model, config=planned, kind=AssertionError)
    asked |= {"optimizer": {"type": "AdamW", "params": {"state_dtype": "int8"}}}
    said = "with these params needs all 4 parameters that require a gradient, without groups; found 1 groups"
    part = [{"params": model[0].parameters()}]
    given = {"model": model, "config": asked, "model_parameters": part}
    assert said in refusal(deepspeed.initialize, **given, kind=AssertionError)


def test_sections_are_objects() -> None:
    config = deepspeed.runtime.zero.config
    options: dict[str, Any] = {"offload_optimizer": {"device": "cpu", "pipeline_read": True}, "cpu_offload_param": True}
    options |= {"stage": 3, "prefetch_bucket_size": 7, "stage3_gather_fp16_weights_on_model_save": True}
    plain, full = config.DeepSpeedZeroConfig(), config.DeepSpeedZeroConfig(**options)
    assert (plain.stage, plain.overlap_comm, plain.offload_param, plain.offload_optimizer) == (0, False, None, None)
    assert (full.stage, full.overlap_comm, full.prefetch_bucket_size) == (config.ZeroStageEnum.weights, True, 7)
    assert full.gather_16bit_weights_on_model_save and not plain.gather_16bit_weights_on_model_save
    assert isinstance(full.offload_param, config.DeepSpeedZeroOffloadParamConfig)
    assert (full.offload_param.device, full.offload_param.buffer_count) == ("cpu", 5)
    assert (full.offload_optimizer.pipeline, full.offload_optimizer.ratio) == (True, 1.0)
    assert deepspeed.runtime.precision_config.DeepSpeedFP16Config(enabled=True).loss_scale_window == 1000
    said = "DeepSpeedZeroConfig has no attribute 'stages'"
    assert said in refusal(getattr, plain, "stages", kind=AttributeError)
    kind = deepspeed.DeepSpeedConfigError
    assert "zero_optimization.stage: " in refusal(config.DeepSpeedZeroConfig, stage=4, kind=kind)
    said = "offload_param.devise: unknown key"
    assert said in refusal(config.DeepSpeedZeroOffloadParamConfig, devise="cpu", kind=kind)


def test_the_elastic_batch_is_deepspeeds() -> None:
    """Batches of DeepSpeed 0.18.2; a microbatch divides the share of a data-parallel rank, as `initialize` takes it."""
    section = {"enabled": True, "max_train_batch_size": 10000, "micro_batch_sizes": [8, 12, 16, 17], "version": 0.1}
    config = {"elasticity": {**section, "min_gpus": 32, "max_gpus": 1500}}
    elasticity = deepspeed.elasticity
    batch, sizes = elasticity.compute_elastic_config(config, deepspeed.__version__)
    assert (batch, len(sizes)) == (9792, 23) and all(32 <= size <= 1500 for size in sizes)
    assert elasticity.compute_elastic_config(config, world_size=64)[2] == 17
    hosts = {"max_train_batch_size": 4000, "micro_batch_sizes": [2, 4], "num_gpus_per_node": 8}
    shared = {"elasticity": {"enabled": True, **hosts, "model_parallel_size": 4}}
    assert elasticity.compute_elastic_config(shared, world_size=16)[::2] == (3360, 4)
    for asked, ranks, error, words in (
        (config, 128, elasticity.ElasticityIncompatibleWorldSize, "found 128; the nearest are "),
        ({}, 0, elasticity.ElasticityConfigError, 'expected a section with "enabled": true, found none'),
        ({"elasticity": {"enabled": True}}, 0, elasticity.ElasticityConfigError, "max_train_batch_size: must be given"),
        (shared, 0, elasticity.ElasticityConfigError, "expected world_size, or WORLD_SIZE in the environment"),
    ):
        with pytest.raises(error, match=words):
            elasticity.compute_elastic_config(asked, world_size=ranks, return_microbatch=True)


def test_events_go_to_the_monitors(tmp_path: Path) -> None:
    """Read back as they were written; what is off writes nothing."""
    place = {"enabled": True, "output_path": str(tmp_path)}
    config = config_of(csv_monitor={**place, "job_name": "table"}, tensorboard=place)
    monitor = MonitorMaster(config.monitor_config)
    assert monitor.enabled and not monitor.wandb_monitor.enabled
    assert (monitor.csv_monitor.job_name, monitor.tb_monitor.job_name) == ("table", "DeepSpeedJobName")
    monitor.write_events([("Train/own loss", 2.0, 1), ("lr", 0.5, 1)])
    monitor.write_events([("Train/own loss", torch.tensor(1.0), 2)])
    table = (tmp_path / "table/Train_own_loss.csv").read_text().split()
    assert table == ["step,own", "loss", "1,2.0", "2,1.0"]
    assert [path.name[:6] for path in (tmp_path / "DeepSpeedJobName").iterdir()] == ["events"]
    said = "'csvMonitor' object has no attribute 'nothing'"
    assert said in refusal(getattr, monitor.csv_monitor, "nothing", kind=AttributeError)


def test_events_go_to_the_run_of_wandb(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which the process has begun already, or the monitor begins."""
    told: list[Any] = []
    run = SimpleNamespace(log=lambda data, **options: told.append((data, options)))

    def init(**options: Any) -> Any:
        told.append(options)
        return run

    package = SimpleNamespace(run=None, login=lambda **options: False, init=init)
    monkeypatch.setitem(sys.modules, "wandb", package)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    section = {"enabled": True, "project": "mine", "team": "us"}
    config = config_of(wandb=section).monitor_config
    begun: dict[str, Any] = {"project": "mine", "group": None, "entity": "us", "config": {}, "mode": "offline"}
    written = [({"Train/loss": 2.0}, {"step": 1, "commit": None}), ({"lr": 0.5}, {"step": 2, "commit": None})]
    for found in (None, run):
        package.run = found
        MonitorMaster(config).write_events([("Train/loss", 2.0, 1), ("lr", 0.5, 2)])
        assert told == [*([begun] if found is None else []), *written]
        told.clear()
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert "wandb.enabled: expected the package wandb, found that it cannot be import" in refusal(MonitorMaster, config)


def test_the_config_tells_what_is_written() -> None:
    offload = {"device": "cpu", "ratio": 0.5, "cpuadam_cores_perc": 0.25}
    zero = {"stage": 3, "stage3_model_persistence_threshold": 7, "offload_optimizer": offload}
    given: dict[str, Any] = {"zero_optimization": zero, "flops_profiler": {"top_modules": 4}, "bf16": {"enabled": True}}
    given |= {"log_level": "info", "torch_autocast": {"dtype": "bfloat16"}}
    given |= {"pipeline": {"activation_checkpoint_interval": 2}}
    plain = config_of()
    config = config_of(**given)
    asked = ("cpuadam_cores_perc", "log_level", "torch_autocast_dtype", "zero_parameter_alignment")
    assert [getattr(plain, name) for name in asked] == [0.9, None, None, False]
    assert [getattr(config, name) for name in asked[:3]] == [0.25, "info", torch.bfloat16]
    assert config.pipeline == {**plain.pipeline, "activation_checkpoint_interval": 2}
    assert plain.pipeline["partition"] == "best" and plain.flops_profiler_recompute_fwd_factor == 0.0
    assert (config.zero_model_persistence_threshold, config.flops_profiler_top_modules) == (7, 4)
    assert (config.zero_partial_offload, config.super_offload, config.bfloat16_config.enabled) == (0.5, False, True)
    with pytest.raises(NotImplementedError, match="drop layers in your model; skipped blocks work at every stage"):
        deepspeed.runtime.progressive_layer_drop.ProgressiveLayerDrop()
