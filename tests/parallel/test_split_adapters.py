"""LoRA of PEFT on layers that ranks share trains as in one process: both matrices, at each style."""

import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import LlamaConfig

import lowtide
from tests.kit.ranks import RankError, RankPool
from tests.kit.training import assert_close, train_all
from tests.parallel import models_of_others as others
from tests.parallel.test_tensor_training import TOLERANCE, case_of, plainly, split

LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def adapted(model: nn.Module, layers: list[str], **more: Any) -> nn.Module:
    """Both matrices with values: at the start one of them is zero, and the other has no gradient."""
    torch.manual_seed(1)
    config: Any = peft.LoraConfig(r=3, target_modules=layers, **more)
    with warnings.catch_warnings():  # peft's own
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        made: Any = peft.get_peft_model(model, config)
    for name, param in made.named_parameters():
        if "lora_" in name:
            param.data = torch.randn(param.shape, dtype=torch.float64) / 4
    return made


def llama() -> nn.Module:
    return adapted(others.grouped_llama(), LAYERS)


def gpt2() -> nn.Module:
    return adapted(others.gpt2(), ["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True)


def bert() -> nn.Module:
    return adapted(others.bert(), ["query", "value", "dense"], use_rslora=True)


def some_of_llama() -> nn.Module:
    """Layers with an adapter beside some without."""
    return adapted(others.llama(), ["q_proj", "v_proj", "down_proj"])


def of_shared_keys() -> nn.Module:
    """One head of keys on two ranks: columns of its B, and parts of its gradient, are on both."""
    return adapted(others.OwnLlamaForCausalLM(LlamaConfig(**others.COMMON, num_key_value_heads=1)).double(), LAYERS)


STAGES = {llama: 0, gpt2: 3, bert: 0, some_of_llama: 3, of_shared_keys: 1}


def test_adapters_train_as_in_one_process(ranks: RankPool) -> None:
    cases = [split(case_of(build, accumulation=1), stage, tensor=2) for build, stage in STAGES.items()]
    for build, outcome in zip(STAGES, ranks(2, train_all, cases)[0], strict=True):
        assert_close(outcome, plainly(case_of(build, accumulation=1), 1), TOLERANCE, TOLERANCE, build.__name__)


def config_of(**more: Any) -> dict[str, Any]:
    optimizer = {"type": "sgd", "params": {"lr": 0.1}}
    return {"train_micro_batch_size_per_gpu": 2, "optimizer": optimizer, "parallel": {"tensor": 2}, **more}


def with_dropout() -> list[list[float]]:
    """Losses without and with a recomputation."""
    found = []
    for every in (0, 1):
        torch.manual_seed(0)
        config = config_of(activation_checkpointing={"every": every})
        with lowtide.initialize(adapted(others.llama(), LAYERS, lora_dropout=0.4), config) as engine:
            found.append([engine.train_step(others.tokens(step, 2)).loss.item() for step in range(2)])
    return found


def test_dropout_of_what_all_have_is_the_same_on_all_and_in_a_recomputation(ranks: RankPool) -> None:
    """Else the first backward finds other gradients of a matrix that ranks have alike."""
    (first, again), others_have = ranks(2, with_dropout)
    assert others_have == [first, again] and first == pytest.approx(again, rel=1e-9)


def refused(layers: list[str], use_dora: bool) -> None:
    lowtide.initialize(adapted(others.llama(), layers, use_dora=use_dora), config_of())


@pytest.mark.parametrize(
    ("layers", "use_dora", "found"),
    [(LAYERS, True, "a Linear on '.*q_proj'"), (["embed_tokens"], False, r"a Embedding on .*\(target_modules\)")],
)
def test_adapters_that_need_whole_layers_are_refused(
    ranks: RankPool, layers: list[str], use_dora: bool, found: str
) -> None:
    with pytest.raises(RankError, match=rf"expected PEFT's LoRA without DoRA on split linear layers, found {found}"):
        ranks(2, refused, layers, use_dora)


def beside_parts() -> None:
    lowtide.initialize(llama(), config_of(parallel={"tensor": 2, "tensor_sequence": True}))


def test_parts_of_the_tokens_beside_them_are_refused(ranks: RankPool) -> None:
    with pytest.raises(
        RankError, match=r"tensor_sequence: expected split layers without adapters, found an adapter at '.*q_"
    ):
        ranks(2, beside_parts)


def merge(folder: str) -> None:
    config = config_of(zero_optimization={"stage": 3})
    torch.manual_seed(0)
    with lowtide.initialize(llama(), config) as engine:
        engine.train_step(others.tokens(0, 2))
        engine.export(f"{folder}/merged", merged=True)
        engine.export(f"{folder}/adapters", adapters_only=True)


def test_each_rank_merges_its_part(ranks: RankPool, tmp_path: Path) -> None:
    ranks(2, merge, str(tmp_path))
    torch.manual_seed(0)
    plain: Any = llama()
    adapters = load_file(tmp_path / "adapters" / "adapter_model.safetensors")
    peft.set_peft_model_state_dict(plain, adapters)
    right = plain.merge_and_unload().state_dict()
    found = load_file(tmp_path / "merged" / "model.safetensors")
    assert found.keys() == right.keys()
    for name, value in right.items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-7)
