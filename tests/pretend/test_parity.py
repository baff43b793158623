"""An engine on the pretended device gives the bits of one on the CPU."""

import gc
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lowtide.kernels.exact_sum import NUM_LIMBS, value_of
from tests.models import TinyGPT, tied_gpt, tiny_gpt_float64, token_batch
from tests.pretend.group import register
from tests.ranks import RankPool
from tests.zero.training import Case, train

GPT = Case(TinyGPT, token_batch, steps=3, accumulation=2, clip=0.5)
DTYPES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}},
}
HOST = {"device": "cpu"}
FILE = {"device": "nvme", "nvme_path": "."}


def zero(stage: int, **sections: Any) -> Case:
    return GPT.at(stage, config={"zero_optimization": sections})


def optimizer(name: str, **params: Any) -> Case:
    return GPT.at(2, config={"optimizer": {"type": name, "params": {"lr": 1e-2, **params}}})


CASES = {
    **{f"stage {stage}, {name}": GPT.at(stage, config=dtype) for stage in range(4) for name, dtype in DTYPES.items()},
    "states in host memory": zero(2, offload_optimizer=HOST),
    "half of the states in host memory": zero(3, offload_optimizer={**HOST, "ratio": 0.5}),
    "states in a file": zero(1, offload_optimizer=FILE),
    "speculative update": zero(2, offload_optimizer={**HOST, "overlap": "speculative"}),
    "delayed update": zero(3, offload_optimizer={**HOST, "overlap": "delayed", "delay_after_steps": 1}),
    "delayed update, pageable": zero(
        0, offload_optimizer={**HOST, "overlap": "delayed", "delay_after_steps": 1, "pin_memory": False}
    ),
    "update in backward": replace(zero(3, update_in_backward=True), accumulation=1, clip=0.0),
    "parameters in host memory": zero(3, offload_param=HOST),
    "parameters in a file": zero(3, offload_param=FILE),
    "all in files": zero(3, offload_param=FILE, offload_optimizer=FILE),
    "activations in host memory": GPT.at(2, config={"activation_checkpointing": {"offload": {**HOST, "min_bytes": 1}}}),
    "activations in a file": GPT.at(3, config={"activation_checkpointing": {"offload": {**FILE, "min_bytes": 1}}}),
    "recomputed activations": GPT.at(3, config={"activation_checkpointing": {"every": 2}}),
    "states in int8": optimizer("adamw", state_dtype="int8"),
    "states in bf16": optimizer("lion", state_dtype="bf16"),
    "no masters": GPT.at(3, config={"bf16": {"enabled": True, "masters": False}}),
    "remainders, in host memory": zero(2, offload_optimizer=HOST).at(
        2, config={"bf16": {"enabled": True, "masters": "kahan"}}
    ),
    "lamb": optimizer("lamb"),
    "muon": optimizer("muon"),
    "sgd": optimizer("sgd", momentum=0.9),
    "fused kernels": GPT.at(3, config={"kernels": {"fuse_modules": True}}),
    "tied weights": replace(GPT, build=tied_gpt, stage=3),
    "float64": replace(GPT, build=tiny_gpt_float64, stage=2),
}


def differences(case: Case) -> list[str]:
    """What the device's training and the CPU's do not have alike, of one rank."""
    # On that route the CPU sums in the order in which the device's group does, unless parameters rest in a file.
    sections = {**case.config.get("zero_optimization", {}), "offload_param": None}
    on_cpu = {"device": "cpu", "communication": {"route": "native"}, "zero_optimization": sections}
    cpu = train(case.at(case.stage, config=on_cpu))
    torch.accelerator.synchronize()
    gc.collect(), gc.collect()
    value_of(torch.zeros(NUM_LIMBS, device=torch.accelerator.current_accelerator()))  # a process keeps its table
    before = torch.accelerator.memory_allocated()  # messages of a process group that other tests had
    torch.accelerator.reset_peak_memory_stats()
    device = train(case.at(case.stage, config={"device": "auto"}))
    assert torch.accelerator.max_memory_allocated() - before > 2 * sum(value.nbytes for value in device.state.values())
    torch.accelerator.synchronize()
    gc.collect(), gc.collect()  # an engine has cycles; with a loss scale, some go through nodes of the graph
    assert torch.accelerator.memory_allocated() == before, (before, torch.accelerator.memory_allocated())
    return device.differences(cpu)


@pytest.mark.parametrize("name", CASES)
def test_a_rank_alone(pretend_ranks: RankPool, tmp_path: Path, name: str) -> None:
    case = CASES[name]
    assert pretend_ranks(1, in_folder, str(tmp_path), case, process_group=False) == [[]]


def in_folder(folder: str, case: Case) -> list[str]:
    os.chdir(folder)
    return differences(case)


def in_folder_on_ranks(folder: str, case: Case) -> list[str]:
    register()
    return in_folder(folder, case)


ON_TWO_RANKS = (
    *(f"stage {stage}, fp32" for stage in range(4)),
    *("stage 2, bf16", "stage 3, fp16", "states in host memory", "speculative update", "delayed update"),
    *("update in backward", "parameters in host memory", "all in files", "activations in host memory", "tied weights"),
)


@pytest.mark.parametrize("name", ON_TWO_RANKS)
def test_two_ranks(pretend_ranks: RankPool, tmp_path: Path, name: str) -> None:
    results = pretend_ranks(2, in_folder_on_ranks, str(tmp_path), CASES[name], process_group=False)
    assert results == [[], []]
