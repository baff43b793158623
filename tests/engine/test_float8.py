"""fp8: float8 products change losses a little, and nothing else: not the stages, the checkpoints or the module."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import lowtide
from lowtide.model import float8
from lowtide.model.patches import ModelPatches
from lowtide.parallel.expert_dispatch import ExpertSelfCheck
from lowtide.parallel.tiled_mlp import put_in_tiles
from tests.kit.compiling import ignore_warning_of_compiler
from tests.kit.models import TinyGPT, token_batch
from tests.kit.ranks import RankPool, on_ranks
from tests.kit.training import Case, Outcome, assert_alike, refusal, settings, train_all

pytest.importorskip("torchao")

BF16 = {"bf16": {"enabled": True}}


def wide() -> nn.Module:
    return TinyGPT(width=32, layers=2)


def fp8(**more: Any) -> dict[str, Any]:
    return BF16 | {"fp8": {"enabled": True, "min_features": 32, **more}}


PLAIN = Case(wide, token_batch, steps=2, config=BF16)
COMPILED = {"compile": {"blocks": True, "backend": "eager"}}
CASES = [
    *(PLAIN.at(stage, config=fp8(recipe="tensorwise")) for stage in (0, 3)),
    PLAIN.at(0, config=fp8(recipe="rowwise")),
    PLAIN.at(3, config=fp8(recipe="rowwise") | {"activation_checkpointing": {"every": 1}}),
    PLAIN.at(3, config=fp8(recipe="rowwise") | COMPILED),
    PLAIN.at(3, config=fp8(exclude=["blocks.*.up", "*.down"])),
]


def trained(cases: list[Case]) -> list[Outcome]:
    ignore_warning_of_compiler()
    return train_all(cases)


@on_ranks(2, timeout=240)
def test_every_stage_has_the_same_bits_and_losses_near_bf16() -> None:
    plain, tensorwise, tensorwise_3, rowwise, recomputed, compiled, excluded = trained([PLAIN, *CASES])
    assert_alike([tensorwise, tensorwise_3])
    assert_alike([rowwise, recomputed, compiled])
    different = [plain, tensorwise, rowwise, excluded]
    assert len({tuple(outcome.norms) for outcome in different}) == len(different)  # bf16 losses may be equal
    for outcome in different[1:]:
        torch.testing.assert_close(outcome.losses, plain.losses, rtol=1e-2, atol=0.0)


def test_a_checkpoint_goes_on_without_float8_and_the_model_is_as_it_was(tmp_path: Path) -> None:
    model = wide()
    with lowtide.initialize(model, settings(1, **fp8())) as engine:
        assert type(model.blocks[0].up) is not nn.Linear  # type: ignore[index, union-attr]
        engine.train_step(token_batch(0, 2))
        engine.save_checkpoint(tmp_path)
        saved = {name: value.clone() for name, value in engine.state_dict().items()}
    assert type(model.blocks[0].up) is nn.Linear and "config" not in vars(model.blocks[0].up)  # type: ignore[index, union-attr]
    with lowtide.initialize(wide(), settings(3, **BF16)) as engine:
        engine.load_checkpoint(tmp_path)
        loaded = engine.state_dict()
        assert list(loaded) == list(saved) == list(model.state_dict())
        assert all(
            torch.equal(loaded[name], value) and loaded[name].dtype == value.dtype for name, value in saved.items()
        )


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "pattern": (
        fp8(exclude=["*.down", "*.dwon"]),
        'fp8.exclude: "*.dwon" excludes no layer that fp8 would compute; leave it out, or correct the pattern',
    ),
    "small": (
        {"fp8": {"enabled": True}},
        "fp8.min_features: 1024: expected linear layers in repeated blocks with so many input and output features, "
        "both multiples of 16, found none outside of fp8.exclude; lower it, or leave fp8 out",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    more, text = REFUSED[name]
    assert text in refusal(lowtide.initialize, wide(), settings(**fp8() | more))


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    old = "needs a GPU of compute capability 8.9 or more, found 8.0 (A100)"
    assert float8.why_impossible(torch.device("cuda")) == old
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert float8.why_impossible(torch.device("cuda")) == float8.why_impossible(torch.device("cpu")) == ""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    missing = 'fp8.enabled: needs the package torchao, which is not installed: pip install "lowtide[fp8]"'
    assert missing in refusal(lowtide.initialize, wide(), settings(**fp8()))


def test_stages_of_a_pipeline_have_the_bits_of_one_process(ranks: RankPool) -> None:
    alone = PLAIN.at(0, accumulation=4, config=fp8())
    staged = alone.at(1, config={"parallel": {"pipeline": 2}})
    (expected,) = ranks(1, trained, [alone])[0]
    (found,) = ranks(2, trained, [staged])[0]
    assert found.losses == expected.losses


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(functional.silu(self.up(x)))
        return out

    def weighted(self, x: Tensor, choices: Tensor, weights: Tensor) -> Tensor:
        """As experts do it, if there is a single expert."""
        return self(x) * weights


def mlp_in_float8(recipe: str) -> Mlp:
    torch.manual_seed(0)
    mlp = Mlp().bfloat16()
    float8.use_float8([mlp.up, mlp.down], recipe, emulates=True, patches=ModelPatches())
    return mlp


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_an_expert_without_tokens_has_gradients_of_zeros(recipe: str) -> None:
    mlp = mlp_in_float8(recipe)
    x = torch.empty(2, 0, 32, dtype=torch.bfloat16, requires_grad=True)
    out = mlp(x)
    out.sum().backward()
    assert out.shape == x.shape and x.grad is not None
    assert all(torch.equal(param.grad, torch.zeros_like(param)) for param in mlp.parameters())  # type: ignore[arg-type]


def test_checks_that_compare_tokens_do_not_see_the_scale_of_all_tokens() -> None:
    mlp = mlp_in_float8("tensorwise")
    x = torch.randn(64, 32, dtype=torch.bfloat16)
    experts = ExpertSelfCheck("experts", mlp, mlp.weighted)
    assert torch.equal(experts(x, torch.zeros(64, dtype=torch.int64)), mlp(x))  # still in float8
    put_in_tiles([("mlp", mlp)], 16, ModelPatches())
    whole = mlp_in_float8("tensorwise")
    assert torch.equal(mlp(x), torch.cat([whole(tile) for tile in x.split(16)]))
