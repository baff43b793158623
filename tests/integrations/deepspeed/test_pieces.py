"""Schedulers, optimizers, topologies, layers, loaders and the rest, by themselves."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import lowtide.deepspeed as deepspeed
from lowtide.deepspeed import messages
from lowtide.deepspeed.accelerator import get_accelerator
from lowtide.deepspeed.checkpointing import (
    CudaRNGStatesTracker,
    checkpoint,
    configure,
    get_cuda_rng_tracker,
    is_configured,
    model_parallel_cuda_manual_seed,
    reset,
)
from lowtide.deepspeed.config import DeepSpeedConfig
from lowtide.deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from lowtide.deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from lowtide.deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from lowtide.deepspeed.parameters import set_leaves_of
from lowtide.deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from lowtide.deepspeed.runtime.lr_schedules import LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR
from lowtide.deepspeed.runtime.pipe.topology import PipeDataParallelTopology, PipeModelDataParallelTopology
from lowtide.deepspeed.utils import (
    RepeatingLoader,
    get_z3_leaf_modules,
    recursive_getattr,
    recursive_setattr,
    set_z3_leaf_modules,
    set_z3_leaf_modules_by_name,
    set_z3_leaf_modules_by_suffix,
    unset_z3_leaf_modules,
    z3_leaf_module,
)
from tests.kit.ranks import on_ranks
from tests.kit.training import refusal

SGD = torch.optim.SGD


def rates(make: Callable[[Any], Any], steps: int) -> list[float]:
    optimizer = SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    scheduler = make(optimizer)
    found = [optimizer.param_groups[0]["lr"]]
    for _ in range(steps):
        scheduler.step()
        found.append(optimizer.param_groups[0]["lr"])
    assert scheduler.get_last_lr() == scheduler.get_lr() == [found[-1]]
    assert scheduler.state_dict() == {"last_batch_iteration": steps - 1}
    return found


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda of: WarmupLR(of, 0.0, None, 4, "linear"), [0, 0, 0.25, 0.5, 0.75, 1, 1]),
        (lambda of: WarmupLR(of, 0.5, 1.5, 4, "linear"), [0.5, 0.5, 0.75, 1.0, 1.25, 1.5, 1.5]),
        (lambda of: WarmupDecayLR(of, 6, 0.0, 1.0, 2, "linear"), [0, 0, 0.5, 1.0, 0.75, 0.5, 0.25]),
        (lambda of: WarmupCosineLR(of, 4, 0.0, 2, 0.0, "linear"), [0, 0, 0.5, 0.5, 0, 0, 0]),
    ],
)
def test_schedulers_have_deepspeeds_rates(make: Callable[[Any], Any], expected: list[float]) -> None:
    assert rates(make, 6) == pytest.approx(expected)


def test_a_scheduler_has_a_rate_and_a_momentum_for_each_group() -> None:
    params = [nn.Parameter(torch.ones(1)) for _ in range(2)]
    optimizer: Any = SGD([{"params": [param]} for param in params], lr=1.0)
    scheduler: Any = WarmupLR(optimizer, warmup_max_lr=[1.0, 2.0], warmup_num_steps=2)
    scheduler.step(9)
    assert [group["lr"] for group in optimizer.param_groups] == [1.0, 2.0]
    said = "warmup_max_lr: expected a number for each of 2 groups, found 3"
    assert said in refusal(WarmupLR, optimizer, warmup_max_lr=[1.0, 2.0, 3.0])
    optimizer = torch.optim.Adam([{"params": [param]} for param in params])
    scheduler = OneCycle(optimizer, [0.1, 0.2], [1.0, 2.0], 0.0, 5, cycle_min_mom=[0.7, 0.8], cycle_max_mom=0.9)
    scheduler.step(4)  # the middle of the cycle
    assert [(group["lr"], group["betas"][0]) for group in optimizer.param_groups] == [(1.0, 0.7), (2.0, 0.8)]
    said = "cycle_min_mom: expected a number for each of 2 groups, found 1"
    assert said in refusal(OneCycle, optimizer, 0.1, 0.2, cycle_min_mom=[0.8])


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize(
    ("kind", "given"), [(WarmupLR, []), (LRRangeTest, []), (WarmupCosineLR, [8]), (OneCycle, [0, 1])]
)
def test_learning_rates_that_are_tensors_are_changed_in_place(kind: Any, given: list[Any], shape: Any) -> None:
    rate = torch.full(shape, 0.5, dtype=torch.float64)
    optimizer = SGD([nn.Parameter(torch.ones(1))], lr=rate)
    scheduler = kind(optimizer, *given)
    for step in range(3):
        scheduler.step(step)
        assert optimizer.param_groups[0]["lr"] is rate and rate.item() == scheduler.get_last_lr()[0]


@pytest.mark.parametrize(
    ("kind", "given", "options", "said"),
    [
        (WarmupLR, [], {"warmup_num_steps": -5}, "params.warmup_num_steps: expected at least 1, found -5"),
        (WarmupDecayLR, [10], {"warmup_type": "sine"}, 'warmup_type: expected "log" or "linear", found "sine"'),
        (OneCycle, [0.1, 0.2], {"cycle_first_step_size": 0}, "cycle_first_step_size: expected "),
        (LRRangeTest, [], {"lr_range_test_steps": 3}, "params.lr_range_test_steps: unknown key"),
    ],
)
def test_a_scheduler_names_the_value_that_is_wrong(kind: Any, given: list[Any], options: Any, said: str) -> None:
    _, fault = refusal(kind, SGD([nn.Parameter(torch.ones(1))], lr=1.0), *given, **options).splitlines()
    assert said in fault


def test_a_scheduler_takes_each_parameter_once() -> None:
    optimizer = SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    said = refusal(WarmupLR, optimizer, 0.1, warmup_min_lr=0.1, kind=TypeError)
    assert said.startswith("WarmupLR: expected each of warmup_min_lr, ") and "once, found warmup_min_lr twice" in said
    assert "once, found 6 by position" in refusal(WarmupLR, optimizer, 0, 1, 4, "log", -1, 7, kind=TypeError)
    scheduler = WarmupCosineLR(optimizer, 8, warmup_num_steps=4, warmup_type="linear")
    scheduler.step(2)
    assert (scheduler.warmup_num_steps, scheduler.get_lr_ratio()) == (4, 0.5)
    said = "WarmupCosineLR has no attribute 'warmup_steps'"
    assert said in refusal(getattr, scheduler, "warmup_steps", kind=AttributeError)


def stepped(make: Callable[[Any], Any]) -> torch.Tensor:
    param = nn.Parameter(torch.linspace(-1, 1, 7))
    optimizer = make([param])
    for step in range(3):
        param.grad = torch.linspace(1, -2, 7) * (step + 1)
        optimizer.step()
    return param.detach()


@pytest.mark.parametrize(
    ("theirs", "options", "torchs", "of_torch"),
    [
        (FusedAdam, {}, torch.optim.AdamW, {"weight_decay": 0.0}),
        (FusedAdam, {"weight_decay": 0.1}, torch.optim.AdamW, {"weight_decay": 0.1}),
        (FusedAdam, {"weight_decay": 0.1, "adam_w_mode": False}, torch.optim.Adam, {"weight_decay": 0.1}),
        (DeepSpeedCPUAdam, {"lr": 0.1}, torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.0}),
        (DeepSpeedCPUAdagrad, {}, torch.optim.Adagrad, {}),
        (DeepSpeedCPULion, {}, FusedLion, {}),
    ],
)
def test_optimizers_do_what_torchs_do(theirs: Any, options: Any, torchs: Any, of_torch: Any) -> None:
    assert torch.equal(stepped(partial(theirs, **options)), stepped(partial(torchs, **of_torch)))


def test_a_topology_has_the_last_axis_fastest() -> None:
    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=2)
    assert topology.get_rank(pipe=1, data=0, model=1) == 5
    assert topology.get_coord(6)._asdict() == {"pipe": 1, "data": 1, "model": 0}
    assert topology.get_axis_comm_lists("pipe") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert topology.filter_match(pipe=0, model=1) == topology.filter_match(model=1, pipe=0) == [1, 3]
    assert topology.get_rank_repr(5) == "model_01"
    assert PipeDataParallelTopology(2, 3).get_axis_list("data", 1) == [1, 4]
    assert (topology.get_dim("expert"), topology.world_size()) == (0, 8)
    said = "expected a number for each of ['pipe', 'data', 'model'], found ['pipe']"
    assert said in refusal(topology.get_rank, pipe=0)
    said = "expected a coordinate below [2, 2, 2], found {'pipe': 0, 'data': 2, 'model': 0}"
    assert said in refusal(topology.get_rank, pipe=0, data=2, model=0)


class Embedding(nn.Embedding):
    """As Megatron's, which gives the tied weight by a property."""

    @property
    def table(self) -> torch.Tensor:
        return self.weight


@on_ranks(1)
def test_layers_run_one_after_the_other() -> None:
    def head(module: Any, x: torch.Tensor) -> Any:
        return x @ module.table.T

    tied = partial(TiedLayerSpec, "embedding", Embedding, 10, 6, tied_weight_attr="table")
    layers = [tied(), LayerSpec(nn.Linear, 6, 6), torch.tanh, tied(forward_fn=head)]
    model = PipelineModule(layers, num_stages=1, activation_checkpoint_interval=2)
    first: Any = model[0].module
    last: Any = model[2].module
    assert first.weight is last.weight and len(list(model.parameters())) == 3
    ids = torch.arange(4)
    assert torch.equal(model(ids), torch.tanh(model[1](first(ids))) @ first.weight.T)
    said = "expected microbatches of (inputs, labels), found a tuple of 3"
    assert said in refusal(PipelineModule.batch_of, (1, 2, 3))
    refused = partial(refusal, kind=RuntimeError)
    assert "expected num_stages or a topology, found neither" in refused(PipelineModule, [nn.Linear(2, 2)])
    said = "expected modules, LayerSpecs and functions, found a str as layer 1"
    assert said in refusal(PipelineModule, [nn.Linear(2, 2), "tanh"], 1, kind=TypeError)
    said = "num_stages(2) x data(?) = world size(1) does not hold"
    assert said in refused(PipelineModule, [nn.Linear(2, 2)], num_stages=2)
    assert "expected a class of nn.Module" in refused(LayerSpec, torch.tanh)
    odd = [tied(tied_weight_attr="num_embeddings")] * 2
    assert "a parameter as tied_weight_attr 'num_embeddings', found 10" in refusal(PipelineModule, odd, num_stages=1)


def test_checkpointed_functions_have_the_same_gradients() -> None:
    layer, x = nn.Linear(3, 3), torch.randn(2, 3, requires_grad=True)
    configure(None, checkpoint_in_cpu=True)
    assert is_configured()
    checkpoint(layer, x).square().sum().backward()
    found = x.grad
    x.grad = None
    reset()
    layer(x).square().sum().backward()
    assert torch.equal(found, x.grad)  # type: ignore[arg-type]  # both are there


def test_a_compiler_traces_a_checkpointed_function() -> None:
    x = torch.randn(2, 3, requires_grad=True)
    compiled = torch.compile(lambda x: checkpoint(torch.tanh, x).sum(), backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), torch.tanh(x).sum())


def test_a_recomputation_draws_the_numbers_of_its_forward() -> None:
    tracker, drawn = CudaRNGStatesTracker(), []

    def drop(x: torch.Tensor) -> torch.Tensor:
        with get_cuda_rng_tracker().fork():
            drawn.append(torch.rand_like(x))
        return (x * drawn[-1]).square().sum()

    model_parallel_cuda_manual_seed(3)
    tracker.add("model-parallel-rng", 3 + 2718)
    checkpoint(drop, torch.ones(5, requires_grad=True)).backward()
    with tracker.fork():
        expected, following = torch.rand(5), torch.rand(5)
    assert [torch.equal(one, expected) for one in drawn] == [True, True]
    with get_cuda_rng_tracker().fork():
        assert torch.equal(torch.rand(5), following)


def config_of(world_size: int = 1, **more: Any) -> Any:
    return DeepSpeedConfig({"train_batch_size": 8, **more}, world_size=world_size)


def test_the_config_has_deepspeeds_defaults() -> None:
    found = config_of(2, optimizer={"type": "AdamW"})
    assert (found.train_micro_batch_size_per_gpu, found.gradient_accumulation_steps) == (4, 1)
    assert found.gradient_clipping == 1.0 and found.checked.optimizer.options["weight_decay"] == 0.0
    assert found.section("optimizer", "type") == "AdamW" and found.section("fp16", "enabled") is None
    lion = config_of(optimizer={"type": "Lion", "params": {"lr": 0.5}})
    assert lion.checked.optimizer.options == {"lr": 0.5, "betas": (0.9, 0.999), "weight_decay": 0.0}
    assert lion.optimizer_params == {"lr": 0.5} and found.optimizer_params is None  # as they are written
    monitors = config_of(csv_monitor={}, wandb={"project": "own"})
    assert monitors.checked.csv_monitor.job_name == "DeepSpeedJobName" and monitors.checked.wandb.project == "own"
    halves = config_of(fp16={"enabled": True}), config_of(bf16={"enabled": True})
    assert not halves[0].checked.fp16.auto_cast and not halves[1].checked.bf16.auto_cast and not found.fp16_auto_cast
    assert config_of(fp16={"enabled": True, "auto_cast": True}).fp16_auto_cast
    assert (found.dynamic_loss_scale, found.zero_overlap_comm, found.zero_offload_param) == (True, False, None)
    assert found.get_data_types == (torch.float32, torch.float32)
    said = "DeepSpeedConfig has no attribute 'nothing'"
    assert said in refusal(getattr, found, "nothing", kind=AttributeError)


PEAK_NOTE = (
    "scheduler.params.warmup_max_lr: missing, so DeepSpeed's default 0.001 is used instead of the optimizer's lr. "
    'Write a value, or "auto" for that lr'
)


@pytest.mark.parametrize(
    ("said", "peak"), [({}, 0.001), ({"warmup_max_lr": "auto"}, None), ({"warmup_max_lr": 0.5}, 0.5)]
)
def test_a_decaying_schedule_has_deepspeeds_peak_with_a_note(
    said: dict[str, Any], peak: float | None, caplog: pytest.LogCaptureFixture
) -> None:
    messages._log_once.cache_clear()
    section = {"type": "WarmupDecayLR", "params": {"total_num_steps": 9, **said}}
    assert config_of(scheduler=section).resolved.scheduler.params.warmup_max_lr == peak
    assert [one.getMessage().partition("] ")[2] for one in caplog.records] == [PEAK_NOTE] * (not said)


def test_leaf_modules_are_remembered() -> None:
    model: Any = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    assert set_z3_leaf_modules(model, ["Linear"]) == get_z3_leaf_modules(model) == [model[0], model[1][0]]
    assert z3_leaf_module(model[0]) and not z3_leaf_module(model)
    unset_z3_leaf_modules(model, [nn.Linear])
    assert get_z3_leaf_modules(model) == []
    assert "found none in the model" in refusal(set_z3_leaf_modules, model, [nn.Conv1d])
    assert set_z3_leaf_modules_by_name(model, ["1", "2"], raise_if_not_found=False) == ([model[1]], ["2"])
    assert set_z3_leaf_modules_by_suffix(model, ["0", "1.0"]) == ([model[0], model[1][0]], [])
    set_z3_leaf_modules_by_suffix(model, ["1", "0"], flag=False)
    said = "expected modules named ['2'], found none in the model"
    assert said in refusal(set_z3_leaf_modules_by_name, model, ["0", "2"])
    set_leaves_of(model, {"classes": "Sequential", "name_suffixes": ["1.0"], "names": ["none"]})
    assert get_z3_leaf_modules(model) == [model, model[1], model[1][0]]


def test_the_accelerator_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    device = get_accelerator()
    assert device.device_name() == device.current_device_name() == "cpu"
    assert (device.communication_backend_name(), device.memory_allocated(), device.device_count()) == ("gloo", 0, 1)
    assert torch.equal(device.LongTensor([1]), torch.tensor([1]))
    assert device.random() is torch.random
    assert "get_accelerator(): no 'nothing' here" in refusal(getattr, device, "nothing", kind=AttributeError)
    if not torch.accelerator.is_available():
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
        assert device.device_count() == 3


def test_small_helpers() -> None:
    looped = RepeatingLoader([1, 2])
    assert [next(looped) for _ in range(5)] == [1, 2, 1, 2, 1] and len(looped) == 2
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)))
    recursive_setattr(model, "0.0.bias", None)
    assert recursive_getattr(model, "0.0.bias") is None
    whole = torch.arange(6)
    copied = deepspeed.checkpoint.utils.clone_tensors_for_torch_save({"a": whole[:2], "b": [(whole[2:3],), 7]})
    assert copied["a"].tolist() == [0, 1] and copied["a"].untyped_storage().nbytes() == 16
    assert copied["b"] == [(torch.tensor(2),), 7]
    tracker = CudaRNGStatesTracker()
    tracker.add("a", 5)
    torch.manual_seed(5)
    expected, before = torch.randn(3), torch.get_rng_state()
    with tracker.fork("a"):
        assert torch.equal(torch.randn(3), expected)
    assert torch.equal(torch.get_rng_state(), before)
    assert "random state 'b': expected one of ['a']" in refusal(tracker.fork("b").__enter__)
