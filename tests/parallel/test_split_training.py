"""Split over tensor, expert and pipeline axes, a model trains as one process does: losses, norms and parameters."""

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

import lowtide
from lowtide.kernels.linear_layers import weight_gradient
from tests.kit import models
from tests.kit.hugging_face import small
from tests.kit.ranks import RankPool, on_ranks
from tests.kit.training import Case, assert_close, refusal, settings, train_all, train_plainly
from tests.parallel import models_of_others as others
from tests.parallel.adapters import LAYERS, adapted
from tests.parallel.test_sequence import batch_of
from tests.parallel.test_tiles import config_of
from tests.parallel.trainings import (
    AGAIN,
    EXPERT,
    PARTS,
    SGD,
    SOCKETS,
    TENSOR,
    TOLERANCE,
    Row,
    apart,
    case_of,
    check,
    penalized,
    split_config,
    values_after,
    vectors,
)

HOST = {"device": "cpu"}
OVER_STAGES: dict[str, Any] = {"parallel": {**PARTS["parallel"], "pipeline": 2}}  # between stages tokens are whole
LLAMA, MIXTRAL = (case_of(build, 3) for build in (others.llama, others.mixtral))
VIT = case_of(others.vit, 0, others.pictures)
TILES = {"mlp": 4, "modules": ["model.layers.*.mlp"]}
IN_TILES: dict[str, Any] = {"tiles": {"mlp": 4, "loss": 5}}  # of 18 tokens
ROWS: dict[tuple[str, int], list[Row]] = {  # what is split, and the number of ranks
    ("layers", 2): [
        (LLAMA.at(0, accumulation=2), 1, TENSOR),
        (case_of(others.gpt2, 1), 1, TENSOR | IN_TILES),
        (case_of(penalized, 2, vectors), 1, TENSOR),
    ],
    ("layers", 4): [
        # Heads of keys that two ranks have are counted once.
        (case_of(others.grouped_llama, 3), 1, {"parallel": {"tensor": 4}, **SOCKETS}),
    ],
    ("layers, and tokens between them", 2): [
        (case_of(others.gpt2, 0), 1, PARTS),
        (case_of(others.bert, 1), 1, PARTS),
        (VIT, 1, PARTS),
        # Attentions of which no rank has columns.
        (case_of(others.olmo2, 3), 1, PARTS | AGAIN | SOCKETS),
        (case_of(others.phi3, 1), 1, PARTS),
        (case_of(others.bloom, 3), 1, PARTS | AGAIN | SOCKETS),
        (case_of(others.deepseek, 2), 1, PARTS),
        (LLAMA, 1, PARTS | AGAIN | SOCKETS | IN_TILES),
    ],
    ("layers, and tokens between them", 4): [
        (LLAMA, 1, {"parallel": {"tensor": 4, "tensor_sequence": True}, **SOCKETS, **AGAIN}),
        (
            case_of(others.one_head_of_keys, 3, accumulation=2),
            1,
            OVER_STAGES | AGAIN | SOCKETS | {"pipeline": {"schedule": "zb-h1"}},
        ),
        (
            case_of(others.t5, 1, accumulation=2),
            1,
            OVER_STAGES | {"pipeline": {"schedule": "interleaved", "chunks": 2}},
        ),
    ],
    ("experts", 2): [
        (case_of(others.deepseek, 3), 2, EXPERT | AGAIN | {"zero_optimization": {"offload_param": HOST}}),
        (case_of(others.gpt_oss, 3), 2, EXPERT),
        # Their columns.
        (case_of(others.qwen_moe, 0), 1, PARTS),
        (MIXTRAL, 1, TENSOR | {"tiles": TILES}),
    ],
    ("experts", 4): [
        (case_of(others.qwen_moe, 3), 4, {"parallel": {"expert": 4}}),
        (MIXTRAL, 4, EXPERT | SOCKETS | {"zero_optimization": {"zero_hpz_partition_size": 2}}),
        (MIXTRAL.at(3, accumulation=2), 2, {"parallel": {"expert": 2, "pipeline": 2}}),
        (
            case_of(others.gpt_oss, 3),
            2,
            {"parallel": {**PARTS["parallel"], "expert": 2}, "communication": {"transport": "native"}},
        ),
    ],
}


@pytest.mark.parametrize(("what", "num_ranks"), ROWS)
def test_models_of_others_train_as_in_one_process(ranks: RankPool, what: str, num_ranks: int) -> None:
    check(ranks, num_ranks, ROWS[what, num_ranks])


Pair = tuple[Callable[[], nn.Module], int, dict[str, Any]]  # of what trains whole too; its stage and config
PAIRS: list[Pair] = [
    (others.grouped_mixtral, 3, EXPERT),
    (others.batched_mixtral, 0, EXPERT),
    (others.mixtral_with_balance, 3, EXPERT),
]
COLUMNS: list[Pair] = [(build, 0, TENSOR) for build in (others.grouped_mixtral, others.grouped_gpt_oss)]
COLUMNS.append((others.batched_mixtral, 3, TENSOR))


@pytest.mark.parametrize(("size", "pairs"), [(2, PAIRS), (1, COLUMNS)])
def test_each_implementation_of_experts_trains_as_whole_experts_do(
    ranks: RankPool, size: int, pairs: list[Pair]
) -> None:
    whole = ranks(size, train_all, [case_of(build, 1) for build, _, _ in pairs])[0]
    split = ranks(2, train_all, [case_of(build, stage).at(stage, config=more) for build, stage, more in pairs])[0]
    for expected, found in zip(whole, split, strict=True):
        assert found.losses == pytest.approx(expected.losses, rel=TOLERANCE)
        assert found.norms == pytest.approx(expected.norms, rel=TOLERANCE)


def of_sequences(parallel: dict[str, int]) -> dict[str, Tensor]:
    torch.manual_seed(0)
    engine = lowtide.initialize(others.plain_mixtral(), {"train_batch_size": 4, "optimizer": SGD, "parallel": parallel})
    parts = [one.chunk(engine.data_size)[engine.data_rank] for one in others.tokens(0, 4)]
    return values_after(engine, dict(zip(("input_ids", "labels"), parts, strict=True)))


def test_ranks_that_share_sequences_share_experts_too(ranks: RankPool) -> None:
    assert apart(ranks(4, of_sequences, {"sequence": 2, "expert": 2})[0], ranks(2, of_sequences, {})[0]) == []


# -- models of one's own ----------------------------------------------------------------------------------------------

PLAN = {"blocks.*.up": "column", "blocks.*.down": "row", "embedding": "vocabulary", "head": "vocabulary"}


class Together(nn.Module):
    """Attention, with two heads of keys for four of queries, and an MLP of one module."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.num_heads, self.num_kv_heads = nn.LayerNorm(32), 4, 2
        self.q_proj, self.k_proj, self.v_proj = nn.Linear(32, 32), nn.Linear(32, 16), nn.Linear(32, 16)
        self.o_proj, self.up_proj, self.down_proj = nn.Linear(32, 32), nn.Linear(32, 44), nn.Linear(44, 32)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q = self.q_proj(y).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        k, v = (layer(y).unflatten(-1, (self.num_kv_heads, -1)).transpose(1, 2) for layer in (self.k_proj, self.v_proj))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return x + self.o_proj(mixed.transpose(1, 2).flatten(2)) + self.down_proj(self.up_proj(y).relu())


def of_one_module() -> nn.Module:
    """Whose heads stay whole."""
    model = models.TinyGPT(width=32)
    model.blocks = nn.ModuleList(Together() for _ in range(2))
    return model.double()


def own(build: Callable[[], nn.Module], stage: int, tensor: int, plan: dict[str, str] | None, **more: Any) -> Case:
    config: dict[str, Any] = {"parallel": {"tensor": tensor}, **({"tensor_parallel": {"plan": plan}} if plan else {})}
    return Case(build, models.token_batch, stage, clip=0.3, steps=2, config=config | more)


OWN: dict[int, list[Case]] = {  # by number of ranks
    2: [
        own(models.tied_gpt_float64, 3, 2, PLAN),
        # Of a head of 31 rows, which two ranks do not divide.
        own(models.tiny_gpt_float64, 3, 2, PLAN, tiles={"loss": 3}),
    ],
    4: [
        own(models.tiny_gpt_float64, 0, 4, {"head": "column_gathered"}),  # of which no rank has as many columns
        own(of_one_module, 3, 4, None),
    ],
}


@pytest.mark.parametrize("num_ranks", OWN)
def test_a_plan_splits_any_model(ranks: RankPool, num_ranks: int) -> None:
    for case, outcome in zip(OWN[num_ranks], ranks(num_ranks, train_all, OWN[num_ranks])[0], strict=True):
        assert_close(outcome, train_plainly(case, 1), 1e-10, 1e-10, str(case))


class Logits(nn.Module):
    """Whose head is large enough for its gradient to be written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(1024, 256), nn.Linear(256, 1024, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return functional.cross_entropy(self.head(self.embedding(ids)).flatten(0, 1), ids.flatten())


@on_ranks(2)
def test_the_gradient_of_a_split_head_is_written_in_place() -> None:
    found = []  # of products: the sizes of what they are of, and whether there was a place for them

    def seen(dy: Tensor, x: Tensor, is_transposed: bool, out: Tensor | None = None) -> Tensor:
        found.append((tuple(dy.shape), out is not None))
        return weight_gradient(dy, x, is_transposed, out)

    plan = {"plan": {"embedding": "vocabulary", "head": "vocabulary"}}
    with (
        pytest.MonkeyPatch.context() as patch,
        lowtide.initialize(Logits(), settings(optimizer=SGD, tensor_parallel=plan, **TENSOR)) as engine,
    ):
        patch.setattr("lowtide.zero.hooks.weight_gradient", seen)
        engine.train_step((torch.arange(8).view(2, 4),))
    assert found == [((2, 4, 512), True)]


class Naming(nn.Module):
    """Calls a layer with a named argument, which hooks do not see."""

    def __init__(self, named: str) -> None:
        super().__init__()
        self.named = named
        self.up, self.down, self.head = nn.Linear(4, 8), nn.Linear(8, 4, bias=False), nn.Linear(4, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for name in ("up", "down", "head"):
            layer = self.get_submodule(name)
            x = layer(input=x) if name == self.named else layer(x)
        return functional.cross_entropy(x, torch.zeros(len(x), dtype=torch.int64))


@pytest.mark.parametrize("named", ["up", "down", "head"])
@on_ranks(2)
def test_a_named_input_of_a_split_layer_is_an_error_with_its_name(named: str) -> None:
    plan = {"plan": {"up": "column", "down": "row", "head": "vocabulary"}}
    with lowtide.initialize(Naming(named), settings(optimizer=SGD, tensor_parallel=plan, **TENSOR)) as engine:
        text = refusal(engine.train_step, torch.ones(2, 4))
    assert f"'{named}': a split layer expects its input as a positional argument, found none; call it as " in text


llama = partial(adapted, others.grouped_llama, LAYERS)
ADAPTED: list[tuple[Callable[[], nn.Module], int]] = [  # and a stage
    (llama, 0),
    (partial(adapted, others.gpt2, ["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True), 3),
    # Layers with an adapter beside some without.
    (partial(adapted, others.bert, ["query", "value", "dense"], use_rslora=True), 0),
    # One head of keys on two ranks: columns of its B, and parts of its gradient, are on both.
    (partial(adapted, others.one_head_of_keys, LAYERS), 1),
]


def test_adapters_train_as_in_one_process(ranks: RankPool) -> None:
    check(ranks, 2, [(case_of(build, stage), 1, TENSOR) for build, stage in ADAPTED])


WHOLE = "expected PEFT's LoRA without DoRA on split linear layers, found"
EMBEDDING = TENSOR | {"tensor_parallel": {"plan": {"embed_tokens.base_layer": "vocabulary"}}}
OF_EXPERTS = {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
DORA = f"{WHOLE} lora.Linear with a variant such as DoRA on '"
ADAPTER = "tensor_sequence: expected split layers without adapters, found an adapter at '"
MOE = "ParamWrapper on 'base_model.model.model.layers.0.mlp.experts'; put"
# A model, layers, more of LoRA, the config, and parts of the text.
REFUSED: list[tuple[Any, list[str], dict[str, Any], dict[str, Any], tuple[str, ...]]] = [
    (others.llama, LAYERS, {"use_dora": True}, TENSOR, (DORA, "q_proj'")),
    (others.llama, ["embed_tokens"], {}, EMBEDDING, (f"{WHOLE} lora.Embedding on ", "target_modules)")),
    (others.llama, LAYERS, {}, PARTS, (ADAPTER, "q_")),
    (others.mixtral, [], OF_EXPERTS, TENSOR, (f"{WHOLE} lora.{MOE} plain LoRA on",)),
    (others.mixtral, [], OF_EXPERTS, EXPERT, (f"found a {MOE} LoRA on linear layers",)),
]


@on_ranks(2)
def test_adapters_that_need_whole_layers_tokens_or_experts_are_refused() -> None:
    for build, layers, more, config, parts in REFUSED:
        text = refusal(lowtide.initialize, adapted(build, layers, **more), split_config(**config))
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


def trained(axis: str) -> list[list[float]]:
    """Losses and norms of two steps, with each block as it is, and compiled."""
    warnings.simplefilter("ignore")  # of torch's compiler, about itself
    found = []
    for compiled in ({}, {"compile": {"blocks": True, "backend": "eager"}}):
        torch.manual_seed(0)
        model: Any = others.mixtral(num_hidden_layers=1)
        if axis == "sequence":
            model = small("LlamaForCausalLM", num_hidden_layers=1, num_key_value_heads=4, use_cache=False)
        config = config_of(3, parallel={axis: 2}, gradient_accumulation_steps=1, train_micro_batch_size_per_gpu=4)
        with lowtide.initialize(model, config | compiled) as engine:
            batches: list[Any] = [batch_of(at, "odd") if axis == "sequence" else others.tokens(at, 4) for at in (0, 1)]
            results = [engine.train_step(batch) for batch in batches]
        found.append([number.item() for result in results for number in (result.loss, result.grad_norm)])
    return found


@pytest.mark.parametrize("axis", ["sequence", "expert"])
def test_they_train_as_they_do_uncompiled(ranks: RankPool, axis: str) -> None:
    plain, compiled = ranks(2, trained, axis, timeout=120)[0]
    assert compiled == pytest.approx(plain, rel=1e-6)
