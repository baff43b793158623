"""Hugging Face models, unchanged, train over a pipeline to the numbers of one rank; built, given, and from files."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from tests.kit import models
from tests.kit.hugging_face import transformers
from tests.kit.ranks import RankPool, on_ranks
from tests.kit.training import Outcome, assert_alike, differences, settings
from tests.pipe.hugging_face import batch_for, builder

LLAMA, T5 = "LlamaForCausalLM", "T5ForConditionalGeneration"


class AutocastGPT(models.TinyGPT):
    """Asks for autocast itself, in its forward."""

    def forward(self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor) -> Tensor:  # type: ignore[override]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(input_ids[:, : models.LENGTH], labels[:, : models.LENGTH].clamp(min=0))


def recomputing_llama() -> nn.Module:
    made: nn.Module = models.recomputing(builder(LLAMA)(), use_reentrant=False)
    return made


OWN: dict[str, Any] = {"autocast": partial(AutocastGPT, layers=5), "recomputing": recomputing_llama}


def train(
    name: str,
    stage: int,
    deferred: bool = False,
    weights: Path | None = None,
    exported: Path | None = None,
    **config: Any,
) -> Outcome:
    """weights: files to begin with. exported: a folder for those of the end."""
    torch.manual_seed(0)
    build = OWN.get(name) or builder(name)
    given = settings(stage, gradient_accumulation_steps=2, gradient_clipping=1.0, **config)
    outcome = Outcome()
    with lowtide.initialize(build if deferred else build(), given) as engine:
        if weights is not None:
            engine.load_weights(weights)
        for step in range(2):
            result = engine.train_step(iter([batch_for(name, 10 * step + half) for half in range(2)]))
            outcome.losses.append(result.loss.item())
            outcome.norms.append(result.grad_norm.item())
        outcome.losses.append(engine.eval_step(batch_for(name, 99)).item())
        outcome.state = engine.state_dict()
        if exported is not None:
            engine.export(exported)
    return outcome


Row = tuple[list[str], str, dict[str, Any], float, float]
PRECISIONS: dict[str, Row] = {  # models, schedule, config, tolerances of losses and norms
    "fp32": (["recomputing"], "zb-h1", {}, 1e-5, 1e-4),  # others in one process: test_stage_parameters.py
    "fp16": ([T5], "zb-h1", {"fp16": {"enabled": True, "initial_scale_power": 8}}, 2e-3, 2e-3),
    "autocast": (["autocast"], "zb-v", {}, 1e-6, 1e-6),
}


def train_all(names: list[str], stage: int, config: dict[str, Any]) -> list[Outcome]:
    return [train(name, stage, **config) for name in names]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_they_train_like_one_rank(ranks: RankPool, precision: str) -> None:
    names, schedule, config, of_losses, of_norms = PRECISIONS[precision]
    alone = ranks(1, train_all, names, 0, config)[0]
    split = {**config, "parallel": {"pipeline": 2}, "pipeline": {"schedule": schedule}}
    first, other = ranks(2, train_all, names, int(precision == "fp32"), split, timeout=120)
    for name, found, second, expected in zip(names, first, other, alone, strict=True):
        assert found.losses == second.losses, name
        assert found.losses == pytest.approx(expected.losses, rel=of_losses), name
        assert found.norms == pytest.approx(expected.norms, rel=of_norms), name
        assert list(found.state) == list(expected.state), name
        for key, value in expected.state.items() if precision == "fp32" else ():
            # Adam's first steps are as large where a gradient is all but 0 as where it is not.
            torch.testing.assert_close(found.state[key], value, rtol=1e-3, atol=2e-3, msg=f"{key}: {{}}".format)


@on_ranks(2)
def test_a_builder_and_files_give_the_same_bits_and_from_pretrained_loads_an_export(tmp_path: Path) -> None:
    over_two: dict[str, Any] = {"parallel": {"pipeline": 2}, "pipeline": {"schedule": "1f1b"}}
    model: Any = builder(LLAMA)()
    model.save_pretrained(tmp_path / str(torch.distributed.get_rank()))
    first = train(LLAMA, 3, exported=tmp_path / "exported", **over_two)
    built, loaded = (train(LLAMA, 3, True, weights, **over_two) for weights in (None, tmp_path / "0"))
    assert_alike([first, built, loaded])
    if first.state:  # rank 0 has it
        again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "exported")
        assert differences(again.state_dict(), first.state) == []
