"""LoRA of PEFT on layers that ranks share trains as in one process: both matrices, at each style."""

from pathlib import Path
from typing import Any

import peft
import torch
from safetensors.torch import load_file
from torch import nn

import lowtide
from tests.kit.ranks import RankPool
from tests.kit.training import refusal
from tests.parallel import models_of_others as others
from tests.parallel.adapters import LAYERS, adapted
from tests.parallel.trainings import PARTS, TENSOR, case_of, check, split_config


def llama() -> nn.Module:
    return adapted(others.grouped_llama(), LAYERS)


def gpt2() -> nn.Module:
    return adapted(others.gpt2(), ["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True)


def some_of_bert() -> nn.Module:
    """Layers with an adapter beside some without."""
    return adapted(others.bert(), ["query", "value", "dense"], use_rslora=True)


def of_shared_keys() -> nn.Module:
    """One head of keys on two ranks: columns of its B, and parts of its gradient, are on both."""
    return adapted(others.one_head_of_keys(), LAYERS)


STAGES = {llama: 0, gpt2: 3, some_of_bert: 0, of_shared_keys: 1}


def test_adapters_train_as_in_one_process(ranks: RankPool) -> None:
    check(ranks, 2, [(case_of(build, stage), 1, TENSOR) for build, stage in STAGES.items()])


WHOLE = "expected PEFT's LoRA without DoRA on split linear layers, found a"
REFUSED: list[tuple[list[str], dict[str, Any], dict[str, Any], tuple[str, ...]]] = [  # layers, of LoRA, config, text
    (LAYERS, {"use_dora": True}, TENSOR, (f"{WHOLE} Linear on '", "q_proj'")),
    (["embed_tokens"], {}, TENSOR, (f"{WHOLE} Embedding on ", "(target_modules)")),
    (LAYERS, {}, PARTS, ("tensor_sequence: expected split layers without adapters, found an adapter at '", "q_")),
]


def refusals() -> list[str]:
    return [
        refusal(lowtide.initialize, adapted(others.llama(), layers, **more), split_config(**config))
        for layers, more, config, _ in REFUSED
    ]


def test_adapters_that_need_whole_layers_or_tokens_are_refused(ranks: RankPool) -> None:
    for text, (*_, parts) in zip(ranks(2, refusals)[0], REFUSED, strict=True):
        assert all(part in text for part in parts)


def merge(folder: Path) -> None:
    torch.manual_seed(0)
    with lowtide.initialize(llama(), split_config(zero_optimization={"stage": 3})) as engine:
        engine.train_step(others.tokens(0, 2))
        engine.export(folder / "merged", merged=True)
        engine.export(folder / "adapters", adapters_only=True)


def test_each_rank_merges_its_part(ranks: RankPool, tmp_path: Path) -> None:
    ranks(2, merge, tmp_path)
    torch.manual_seed(0)
    plain: Any = llama()
    peft.set_peft_model_state_dict(plain, load_file(tmp_path / "adapters" / "adapter_model.safetensors"))
    right = plain.merge_and_unload().state_dict()
    found = load_file(tmp_path / "merged" / "model.safetensors")
    assert found.keys() == right.keys()
    for name, value in right.items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-7)
