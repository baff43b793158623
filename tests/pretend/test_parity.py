"""An engine on the pretended device gives the bits of one on the CPU, and leaves no memory behind.

`test_host_waits.py` asks the bits of all features, of which each two meet. Here are models and settings that are no
features, and pairs that wait more often.
"""

import gc
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.kernels.exact_sum import NUM_LIMBS, value_of
from tests.kit.models import short_gpt, tied_gpt, token_batch
from tests.kit.ranks import on_device
from tests.kit.training import Case, Outcome, train
from tests.pretend.group import register
from tests.pretend.test_host_waits import WIDTH, make_engine
from tests.zero import test_early_staging, test_unused_parameters

SHORT = Case(short_gpt, token_batch, steps=2, accumulation=2, clip=0.5)
HOST = {"device": "cpu"}
DELAYED = {"overlap": "delayed", "delay_after_steps": 1}
BF16: dict[str, Any] = {"bf16": {"enabled": True}}
IN_8_BITS: dict[str, Any] = {
    "bf16": {"enabled": True, "masters": "int8"},
    "data_types": {"grad_accum_dtype": "bf16"},
    "optimizer": {"type": "adamw", "params": {"state_dtype": "int8"}},
}


def zero(stage: int, **sections: Any) -> Case:
    return SHORT.at(stage, config={"zero_optimization": sections})


CASES = {
    "delayed update, pageable": zero(0, offload_optimizer={**HOST, **DELAYED, "pin_memory": False}),
    "update in backward, all in host memory": replace(
        zero(3, update_in_backward=True, offload_param=HOST, offload_optimizer=HOST), accumulation=1, clip=0.0
    ),
    "tied weights in host memory": replace(zero(3, offload_param=HOST, offload_optimizer=HOST), build=tied_gpt),
    "corrections, in host memory": zero(1, offload_optimizer=HOST).at(1, config=IN_8_BITS),
    "an overflow, states in host memory": replace(zero(3, offload_optimizer=HOST), accumulation=1, steps=5).at(
        3, config={"fp16": {"enabled": True, "initial_scale_power": 17, "hysteresis": 1}}
    ),
    "what some steps use, states in host memory": test_unused_parameters.case_of(
        3, 2, "adamw", torch.float32, **BF16, zero_optimization={"offload_optimizer": HOST}
    ),
    "lamb": SHORT.at(2, config={"optimizer": {"type": "lamb", "params": {"lr": 1e-2}}}),
    "odd gradients": Case(test_early_staging.Odd, test_early_staging.batch, 3, steps=2),
    "gradients that come twice": Case(test_early_staging.Twice, test_early_staging.batch, steps=2),
}


def plain(case: Case) -> Case:
    """On the CPU, with all of it in memory, at stage 0 or 2: no place changes a bit, but an update that is late does.

    On that transport the CPU sums in the order in which the device's group does.
    """
    late = {key: one for key, one in case.config.get("zero_optimization", {}).items() if "delayed" in str(one)}
    on_cpu = {"device": "cpu", "communication": {"transport": "native"}}
    return case.at(case.stage // 2 * 2, config={**on_cpu, "zero_optimization": late})


def differences(case: Case, cpu: Outcome) -> list[str]:
    """What the device's training and the CPU's do not have alike, of one rank."""
    torch.accelerator.synchronize()
    gc.collect(), gc.collect()
    value_of(torch.zeros(NUM_LIMBS, device=torch.accelerator.current_accelerator()))  # a process keeps its table
    before = torch.accelerator.memory_allocated()  # messages of a process group that other tests had
    torch.accelerator.reset_peak_memory_stats()
    device = train(case.at(case.stage, config={"device": "auto"}))
    peak = torch.accelerator.max_memory_allocated() - before
    torch.accelerator.synchronize()
    gc.collect(), gc.collect()  # an engine has cycles; with a loss scale, some go through nodes of the graph
    left, least = torch.accelerator.memory_allocated() - before, 2 * sum(one.nbytes for one in device.state.values())
    wrong = [f"{peak} bytes at most"] * (peak <= least) + [f"{left} bytes are left"] * (left != 0)
    return wrong + device.differences(cpu)


@on_device()
def test_a_device_has_the_bits_of_the_cpu() -> None:
    plain_cases: list[Case] = []
    for case in map(plain, CASES.values()):
        if case not in plain_cases:
            plain_cases.append(case)
    outcomes = [train(case) for case in plain_cases]
    found = {name: differences(case, outcomes[plain_cases.index(plain(case))]) for name, case in CASES.items()}
    assert found == {name: [] for name in CASES}


@on_device()
def test_an_engine_on_the_host_takes_a_batch_of_the_device() -> None:
    register()
    model = nn.Linear(4, 1)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    config = {"device": "cpu", "optimizer": {"type": "sgd", "params": {"lr": 0.0}}, "steps_per_print": 0}
    with lowtide.initialize(model, config, loss_fn=lambda output, batch: output.mean()) as engine:
        for is_trained in (False, True):  # the gradient of a trained input goes back to the device
            batch = torch.randn(2, 4)
            given = (batch.to("pretend") * 2).requires_grad_(is_trained)
            found = engine.train_step((given,)).loss
            expected = torch.func.functional_call(nn.Linear(4, 1), weights, batch * 2).mean()
            assert found.item() == pytest.approx(expected.item(), rel=1e-6), is_trained


def joined_as_cuda_does(gradients: Sequence[Tensor], dim: int, num_chunks: int, out: Tensor) -> None:
    """`torch._chunk_cat` of torch's TensorShape.cu takes what is dense in the order of its memory."""
    out.copy_(torch.cat([one.as_strided((one.numel(),), (1,)) for one in gradients]).view_as(out))


@on_device()
def test_a_gradient_in_another_order_of_memory_is_copied_by_its_elements() -> None:
    def turn(param: Tensor) -> None:
        param.grad = param.grad.t().contiguous().t()  # type: ignore[union-attr]  # as `torch.linalg.qr` returns it

    found = []
    for is_turned in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(WIDTH, WIDTH)
        with patch.object(torch, "_chunk_cat", joined_as_cuda_does), make_engine(model, {}) as engine:
            if is_turned:
                model.weight.register_post_accumulate_grad_hook(turn)
            engine.backward(engine(torch.randn(2, WIDTH)).square().mean())
            engine.step()
            found.append(engine.state_dict()["weight"])
    assert torch.equal(*found)
