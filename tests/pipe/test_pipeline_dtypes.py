"""Over a pipeline a model computes in the dtypes in which it computes as a whole: half precision, autocast."""

from typing import Any

import pytest
import torch
from torch import Tensor

import lowtide
from tests.engine.test_hugging_face import MODELS
from tests.kit import models
from tests.kit.ranks import RankPool
from tests.pipe.test_pipeline_hugging_face import MICROBATCHES, batches_of, config_of

Numbers = tuple[float, float]  # loss and norm of a step


class AutocastGPT(models.TinyGPT):
    """Asks for autocast itself, in its forward."""

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(ids, targets)


def numbers_of(name: str, config: dict[str, Any]) -> Numbers:
    torch.manual_seed(0)
    engine = lowtide.initialize(AutocastGPT(layers=5) if name == "autocast" else MODELS[name](), config)
    engine.eval()  # no dropout: a stage does not draw the random numbers of those before
    result = engine.train_step(
        models.token_batch(0, 2 * MICROBATCHES) if name == "autocast" else batches_of(name, engine, 0)
    )
    engine.close()
    return result.loss.item(), result.grad_norm.item()


def numbers_of_all(names: list[str], config: dict[str, Any]) -> dict[str, Numbers]:
    return {name: numbers_of(name, config) for name in names}


def assert_same(found: dict[str, Numbers], expected: dict[str, Numbers], tolerance: float) -> None:
    for name, numbers in expected.items():
        assert found[name] == pytest.approx(numbers, rel=tolerance), name


@pytest.mark.parametrize(
    ("precision", "schedule", "names"),  # each model with masks or tables of its own kind
    [("bf16", "1f1b", ["llama", "bert", "t5", "vit", "llama_with_checkpointing"]), ("fp16", "zb-h1", ["llama", "t5"])],
)
def test_masks_and_tables_have_the_dtype_of_the_whole_model(
    ranks: RankPool, precision: str, schedule: str, names: list[str]
) -> None:
    scaling = {"initial_scale_power": 8} if precision == "fp16" else {}
    section = {precision: {"enabled": True, **scaling}}
    alone = ranks(1, numbers_of_all, names, config_of(1, "1f1b", 0) | section)[0]
    split = ranks(2, numbers_of_all, names, config_of(2, schedule, 0) | section, timeout=120)[0]
    assert_same(split, alone, 2e-3)


def test_autocast_in_the_forward(ranks: RankPool) -> None:
    alone = ranks(1, numbers_of_all, ["autocast"], config_of(1, "1f1b", 0))[0]
    for schedule in ("1f1b", "zb-v"):
        assert_same(ranks(2, numbers_of_all, ["autocast"], config_of(2, schedule, 0))[0], alone, 1e-6)
