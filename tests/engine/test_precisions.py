"""Narrow optimizer states, and buffers that keep their types whatever the parameters are computed in."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from tests.engine.saving import load_and_go_on, save_and_go_on
from tests.engine.test_optimizer_offload import offloaded
from tests.kit.models import mlp_float64, short_gpt, token_batch
from tests.kit.ranks import RankPool
from tests.kit.training import ADAMW, Case, differences, refusal, settings


def case_of(state_dtype: str, **config: Any) -> Case:
    optimizer = {"type": "adamw", "params": {**ADAMW["params"], "state_dtype": state_dtype}}
    return Case(short_gpt, token_batch, clip=0.5, config={"optimizer": optimizer, **config})


@pytest.mark.parametrize(
    ("written", "read", "place"),
    [("bf16", "bf16", "memory"), ("int8", "int8", "file"), ("bf16", "int8", "memory")],
)
def test_a_checkpoint_goes_on(ranks: RankPool, tmp_path: Path, written: str, read: str, place: str) -> None:
    config: Any = {"bf16": {"enabled": True}} if written == read else {}
    before = ranks(2, save_and_go_on, case_of(written, **config).at(1), tmp_path / "saved", 2)[0]
    target = case_of(read, **config).at(3)
    target = target if place == "memory" else offloaded(target, tmp_path)
    after = ranks(2, load_and_go_on, target, tmp_path / "saved", 2)[0]
    if written == read == "bf16":
        assert after.differences(before) == []
    elif written == read:  # a block whose largest value was rounded up to its scale gets the next scale: it loses a bit
        for name, value in before.restored.items():
            torch.testing.assert_close(after.restored[name], value, rtol=0, atol=float(value.abs().max()) * 2.0**-13)
    torch.testing.assert_close(after.losses, before.losses, rtol=1e-3 if written == read else 2e-2, atol=0.0)


def test_float64_parameters_have_wide_states() -> None:
    config = settings(optimizer={"type": "adamw", "params": {"state_dtype": "int8"}})
    text = refusal(lowtide.initialize, mlp_float64(), config)
    assert 'state_dtype: "int8" needs parameters of at most float32, found float64 in' in text


PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}
STAGES = (0, 3)


def at_stages(precision: str, build: Any, act: Callable[[Any], Any]) -> list[Any]:
    """What `act` gives of an engine of the model at each stage."""
    more: dict[str, Any] = {precision: {"enabled": True}, "train_micro_batch_size_per_gpu": None}
    found = []
    for stage in STAGES:
        torch.manual_seed(0)
        with lowtide.initialize(build(), settings(stage, **more)) as engine:
            found.append(act(engine))
    return found


class Normalized(nn.Module):
    """Batch norms between layers, and buffers of many types."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5)) for _ in range(2))
        self.last = nn.Linear(5, 1)
        for name, dtype in BUFFERS.items():
            self.register_buffer(name, torch.arange(5).to(dtype))
        self.register_buffer("angles", ANGLES.clone(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.last(x.where(self.get_buffer("flags"), -x)).float().square().mean()


ANGLES = 1 / torch.arange(1, 6.0)  # as models have them for positions: with more digits than 16 bits have
BUFFERS = {
    "wide": torch.float64,
    "single": torch.float32,
    "short": torch.float16,
    "brain": torch.bfloat16,
    "integers": torch.int64,
    "bytes": torch.uint8,
    "flags": torch.bool,
    "pairs": torch.complex64,
}


def buffers_after_training(engine: Any) -> dict[str, Tensor]:
    for step in range(3):
        x = torch.randn(8, 5, generator=torch.Generator().manual_seed(step))
        engine.train_step((3 + x / 100,))
    assert engine.eval_step((x,)).isfinite()
    return dict(engine.module.named_buffers())


@pytest.mark.parametrize("precision", PRECISIONS)
def test_running_statistics_and_buffers_of_all_types_keep_them(precision: str) -> None:
    first, *others = at_stages(precision, Normalized, buffers_after_training)
    for name, dtype in BUFFERS.items():
        assert first[name].dtype == dtype and torch.equal(first[name], torch.arange(5).to(dtype))
    assert torch.equal(first["angles"], ANGLES)
    for name in ("layers.0.1.running_mean", "layers.1.1.running_var"):
        rounded = first[name].to(PRECISIONS[precision]).float()
        assert first[name].dtype == torch.float32 and not torch.equal(first[name], rounded)  # it has more digits
    for buffers in others:
        assert differences(buffers, first) == []


class Positioned(nn.Module):
    """Adds a buffer to what its blocks get, as many models do with positions."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.register_buffer("positions", torch.linspace(0, 1, 8))
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) + self.positions
        for block in self.blocks:
            x = block(x.to(block.get_parameter("0.weight").dtype) if self.casts_itself else x)
        return x.float().square().mean()

    casts_itself = False


def losses(engine: Any) -> list[float]:
    return [engine.train_step((torch.ones(2, 5),)).loss.item() for _ in range(3)]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_blocks_get_their_inputs_in_the_type_of_their_parameters(precision: str) -> None:
    found = at_stages(precision, Positioned, losses)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Positioned, "casts_itself", True)
        assert found == at_stages(precision, Positioned, losses)[:1] * len(STAGES)
