"""Stages whose ranks share sequences train as one process does."""

from typing import Any

import torch
from torch import Tensor, nn

import lowtide
from tests.kit.ranks import RankPool
from tests.parallel.test_ring import RING, capped
from tests.parallel.test_sequence import Attends, Plain, batch_of
from tests.parallel.test_sequence_forwards import Shifting
from tests.parallel.test_tiles import ROWS, SIZES, VOCAB, transformers

DEEP = {**SIZES, "num_hidden_layers": 4}


def llama() -> nn.Module:
    config = transformers.LlamaConfig(vocab_size=VOCAB, num_key_value_heads=2, use_cache=False, **DEEP)
    return transformers.LlamaForCausalLM(config)


def gpt2() -> nn.Module:
    dropouts = {f"{part}_pdrop": 0.0 for part in ("resid", "attn", "embd")}
    sizes = {"n_positions": 64, "n_embd": 32, "n_layer": 4, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=VOCAB, use_cache=False, **sizes, **dropouts))


def plain(block: type[nn.Module] = Attends) -> nn.Module:
    model = Plain()
    model.blocks = nn.ModuleList(block() for _ in range(4))
    return model


MODELS: dict[str, Any] = {"llama": llama, "gpt2": gpt2, "plain": plain}


def config_of(schedule: str, stage: int, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": 4,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "sgd", "params": {"lr": 0.05, "momentum": 0.9}},
        "gradient_clipping": 0.5,
        "pipeline": {"schedule": schedule},
        **more,
    }


def train(name: str, kind: str, config: dict[str, Any], group: int = 0) -> dict[str, Tensor]:
    torch.manual_seed(0)
    engine = lowtide.initialize(MODELS[name](), config)
    two = [batch_of(10 * group + half, kind) for half in range(2)]
    done = engine.train_step({key: torch.cat([one[key] for one in two]) for key in two[0]})
    found = {"loss": done.loss, "norm": done.grad_norm, "evaluated": engine.eval_step(batch_of(10 * group + 4, kind))}
    state = engine.state_dict()
    engine.close()
    return {key: value.detach().clone() for key, value in (found | state).items()}


RECOMPUTED = {"activation_checkpointing": {"every": 1}}
CASES: list[tuple[str, str, str, int, dict[str, Any]]] = [
    ("plain", "plain", "zb-h1", 3, {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}),
    ("llama", "packed", "zb-v", 1, {"communication": {"transport": "sockets"}, **RECOMPUTED}),
]


def train_all(parallel: dict[str, int]) -> list[dict[str, Tensor]]:
    return [
        train(name, kind, config_of(schedule, stage, parallel=parallel, **more))
        for name, kind, schedule, stage, more in CASES
    ]


def apart(found: dict[str, Tensor], right: dict[str, Tensor]) -> list[str]:
    return [
        f"{key}: {(found[key] - right[key]).norm() / right[key].norm():.1e}"
        for key in found
        if (found[key] - right[key]).norm() > 1e-6 * right[key].norm() + 2e-7
    ]


def test_stages_that_share_sequences_train_as_one_process_does(ranks: RankPool) -> None:
    alone = ranks(1, train_all, {"pipeline": 1})[0]
    for rank, of_rank in enumerate(ranks(4, train_all, {"pipeline": 2, "sequence": 2})):
        for case, found, right in zip(CASES, of_rank, alone, strict=True):
            assert rank or found.keys() == right.keys()
            assert apart(found, right) == [], (rank, case)


def beside_data(sequence: int, pipeline: int) -> dict[str, Tensor]:
    """Two groups with data of their own."""
    group = torch.distributed.get_rank() // sequence % 2
    config = config_of("1f1b", 3, parallel={"sequence": sequence, "pipeline": pipeline})
    return train("plain", "plain", config, group)


def test_shards_beside_stages_and_sequences(ranks: RankPool) -> None:
    found, right = ranks(8, beside_data, 2, 2, timeout=150)[0], ranks(2, beside_data, 1, 1)[0]
    assert apart(found, right) == []


class Counts(Attends):
    """Keeps which elements it has dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.masks: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        kept = nn.functional.dropout(torch.ones_like(x), 0.5, self.training)
        self.masks.append(kept != 0)
        return super().forward(x * kept)


def dropped() -> tuple[list[Tensor], Tensor]:
    torch.manual_seed(0)
    model: Any = plain(Counts)
    engine = lowtide.initialize(model, config_of("1f1b", 1, parallel={"pipeline": 2, "sequence": 2}))
    two = [batch_of(half, "plain") for half in range(2)]
    engine.train_step({key: torch.cat([one[key] for one in two]) for key in two[0]})
    masks = [mask.clone() for block in model.blocks for mask in block.masks[6:]]  # 6: of the trial
    engine.close()
    return masks, torch.rand(4)


def test_stages_drop_elements_of_each_part(ranks: RankPool) -> None:
    found = ranks(4, dropped)
    for one, other in ((found[0], found[1]), (found[2], found[3])):
        assert len(one[0]) == 8  # two blocks, four microbatches
        assert not any(torch.equal(*pair) for pair in zip(one[0], other[0], strict=True))
        assert torch.equal(one[1], other[1])  # what a script draws is the same on both


def of_attention() -> str:
    """What attention itself cannot share."""
    engine = lowtide.initialize(capped(), config_of("1f1b", 1, parallel={"pipeline": 2, "sequence": 2}) | RING)
    two = [batch_of(half, "odd") for half in range(2)]
    try:
        engine.train_step({key: torch.cat([one[key] for one in two]) for key in two[0]})
    except ValueError as error:
        return str(error)
    finally:
        engine.close()
    return ""


def test_all_stages_hear_of_attention_that_no_ring_computes(ranks: RankPool) -> None:
    for error in ranks(4, of_attention):
        assert "ring attention computes scaled scores only" in error


def refusals() -> dict[str, str]:
    found = {}
    for name, block in (("meets", Shifting), ("fits", Attends)):
        engine = lowtide.initialize(plain(block), config_of("1f1b", 1, parallel={"pipeline": 2, "sequence": 2}))
        two = [batch_of(half, "plain") for half in range(2)]
        batch = {key: torch.cat([one[key] for one in two]) for key in two[0]}
        rank = torch.distributed.get_rank()
        try:
            engine.train_step(batch if name == "meets" else batch | {"input_ids": batch["input_ids"] + rank % 2})
        except ValueError as error:
            found[name] = str(error)
        engine.close()
    return found


def test_all_stages_hear_of_tokens_that_meet_and_of_other_batches(ranks: RankPool) -> None:
    for found in ranks(4, refusals):
        assert "expected tokens of Plain to mix only in attention" in found["meets"]
        assert "batch: expected the same batch on the 4 ranks of pipe x sequence" in found["fits"]
