"""Hugging Face models, unchanged, train over a pipeline to the numbers of one rank; built, given, and from files."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lowtide
from tests.engine.test_hugging_face import MODELS, NUM_TOKENS, Outcome, batch_of
from tests.kit.ranks import RankPool

NAMES = ["gpt2", "mixtral", "bert", "t5", "vit", "llama_with_checkpointing"]
MICROBATCHES = 2
WITH_DROPOUT = {"gpt2", "bert", "t5"}  # eval mode: a stage does not draw the random numbers of those before


def config_of(pipeline: int, schedule: str, stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": MICROBATCHES,
        "gradient_clipping": 1.0,
        "steps_per_print": 0,
        "optimizer": {"type": "adamw", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage},
        "parallel": {"pipeline": pipeline},
        "pipeline": {"schedule": schedule},
    }


def batches_of(name: str, engine: lowtide.Engine, step: int) -> Any:
    generator = torch.Generator().manual_seed(100 * step + engine.data_rank)
    return iter([batch_of(name, generator) for _ in range(MICROBATCHES)])


def train(name: str, config: dict[str, Any], deferred: bool = False, weights: Path | None = None) -> Outcome:
    torch.manual_seed(0)
    engine = lowtide.initialize(MODELS[name] if deferred else MODELS[name](), config)
    if weights is not None:
        engine.load_weights(weights)
    engine.train(name not in WITH_DROPOUT)
    outcome = Outcome()
    for step in range(2):
        result = engine.train_step(batches_of(name, engine, step))
        outcome.losses.append(result.loss.item())
        outcome.norms.append(result.grad_norm.item())
    outcome.losses.append(engine.eval_step(next(batches_of(name, engine, 9))).item())
    outcome.state = engine.state_dict()
    engine.close()
    return outcome


def train_all(names: list[str], config: dict[str, Any]) -> dict[str, Outcome]:
    return {name: train(name, config) for name in names}


def test_they_train_like_one_rank(ranks: RankPool) -> None:
    alone = ranks(1, train_all, NAMES, config_of(1, "1f1b", 0))[0]
    by_rank = ranks(2, train_all, NAMES, config_of(2, "zb-h1", 1), timeout=120)
    for name in NAMES:
        first, expected = by_rank[0][name], alone[name]
        assert first.losses == pytest.approx(expected.losses, rel=1e-5), name
        assert first.norms == pytest.approx(expected.norms, rel=1e-4), name
        assert list(first.state) == list(expected.state), name
        for key, value in expected.state.items():
            # Adam's first steps are as large where a gradient is all but 0 as where it is not.
            torch.testing.assert_close(first.state[key], value, rtol=1e-3, atol=2e-3, msg=f"{key}: {{}}".format)
        assert all(result[name].losses == first.losses for result in by_rank), name


def from_builder_and_files(folder: Path) -> tuple[Outcome, Outcome, Outcome]:
    config = config_of(2, "1f1b", 3)
    return train("llama", config), train("llama", config, deferred=True), train("llama", config, True, folder)


def test_a_builder_and_files_give_the_same_bits(ranks: RankPool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model: Any = MODELS["llama"]()
    model.save_pretrained(tmp_path)
    given, built, read = ranks(2, from_builder_and_files, tmp_path)[0]
    assert given.differences(built) == [] and given.differences(read) == []


def export_from_pipeline(folder: Path) -> dict[str, Tensor]:
    torch.manual_seed(0)
    engine = lowtide.initialize(MODELS["llama"](), config_of(2, "zb-h1", 1))
    engine.train_step(batches_of("llama", engine, 0))
    engine.export(folder)
    state = engine.state_dict()
    engine.close()
    return state


def test_an_export_is_what_from_pretrained_loads(ranks: RankPool, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    state = ranks(2, export_from_pipeline, tmp_path / "weights")[0]
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "weights")
    assert model.config.vocab_size == NUM_TOKENS
    found = model.state_dict()
    assert found.keys() == state.keys() and all(torch.equal(found[name], value) for name, value in state.items())
