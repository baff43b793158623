"""Values are shown to all ranks of a pipeline, set on the stages that have them, and saved for any other pipeline."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import lowtide
from tests.engine.saving import load_and_go_on, save_and_go_on
from tests.kit import models
from tests.kit.ranks import RankPool, on_ranks
from tests.kit.training import Case, differences, take_step
from tests.pipe.pipelines import deep_tied_gpt, deep_tied_gpt_64, pipelined

CASE = Case(deep_tied_gpt_64, models.token_batch, accumulation=2)
NAMES = ("embedding.weight", "head.weight", "blocks.4.up.bias")


def train_and_look(case: Case, folder: Path | None = None) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Two steps, with values set between them; averages in the end, which are saved. The ends share the embedding."""
    torch.manual_seed(0)
    seen = []
    with lowtide.initialize(case.build(), case.as_config()) as engine:
        engine.ema(0.8)
        for step in range(2):
            take_step(engine, case, step)
            seen += [engine.full(name, state) for name in NAMES for state in (None, "exp_avg")]
            if step == 0:
                engine.set_full("head.weight", torch.full((models.VOCAB, 22), 0.125))
                engine.set_full("blocks.0.up.bias", torch.full((66,), 0.5), "exp_avg")
                engine.set_local("blocks.4.up.bias", engine.local("blocks.4.up.bias") * 0 + 0.25)
        if folder is not None:
            engine.save_checkpoint(folder)
        with engine.ema_weights():
            return seen + [engine.full(name) for name in NAMES], engine.state_dict()


def test_each_rank_sees_what_one_rank_would_and_averages_load_without_a_pipeline(
    ranks: RankPool, tmp_path: Path
) -> None:
    ((expected, _),) = ranks(1, train_and_look, CASE)
    for stage, num_ranks in ((1, 2), (3, 4)):
        found = ranks(num_ranks, train_and_look, pipelined(CASE.at(stage), 2, "1f1b"), tmp_path / str(stage))
        for values, _ in found:
            if num_ranks == 2:
                torch.testing.assert_close(values, expected, rtol=1e-9, atol=1e-9)
            assert torch.equal(values[0], values[2]) and len({value.shape for value in values[::2]}) == 2
        with lowtide.initialize(CASE.build(), CASE.as_config()) as engine:
            engine.ema(0.8)
            engine.load_checkpoint(tmp_path / str(stage))
            with engine.ema_weights():
                averages = engine.state_dict()
            assert not torch.equal(averages["head.weight"], engine.state_dict()["head.weight"])
        saved = found[0][1]
        assert list(averages) == list(saved)
        assert all(torch.equal(value, averages[name]) for name, value in saved.items())


class HalfUsed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def engine_of(loss_fn: Any, **config: Any) -> lowtide.Engine:
    torch.manual_seed(0)
    given = {"parallel": {"pipeline": 2}, "gradient_accumulation_steps": 2, "optimizer": {"type": "adamw"}, **config}
    return lowtide.initialize(nn.Sequential(HalfUsed(), HalfUsed()), given, loss_fn=loss_fn)


@on_ranks(2)
def test_what_a_stage_has_not_used_is_known_on_all_after_a_load(tmp_path: Path) -> None:
    """Saved once after a step, and once after a load of that."""
    for tag in ("first", "second"):
        with engine_of(lambda output, batch: output.square().mean()) as engine:
            if tag == "first":
                engine.train_step(torch.ones(2, 4))
            else:
                engine.load_checkpoint(tmp_path)
            engine.save_checkpoint(tmp_path, tag)
    plain = tmp_path / f"plain{torch.distributed.get_rank()}.pt"
    dcp_to_torch_save(tmp_path / "second", plain)
    states = torch.load(plain, weights_only=True)["optim"]["state"]
    assert {name: int(state["step"]) for name, state in states.items()} == {
        f"{stage}.{name}.{kind}": name == "used"
        for stage in "01"
        for name in ("used", "idle")
        for kind in ("weight", "bias")
    }


FACTORS: list[dict[str, Any]] = [
    {},
    {"gradient_predivide_factor": 4.0},
    {"fp16": {"enabled": True, "initial_scale_power": 8}},
    {"gradient_predivide_factor": 4.0, "pipeline": {"schedule": "zb-h1"}},
]


@on_ranks(2)
def test_a_weight_of_a_loss_has_the_gradient_of_the_loss() -> None:
    """After a step, on the last rank."""
    found: list[Tensor | None] = []
    for factor in FACTORS:
        weight = nn.Parameter(torch.ones(4))

        def weighted(output: Tensor, batch: Tensor, weight: nn.Parameter = weight) -> Tensor:
            return (output.float().square() @ weight).mean() + weight.square().sum()

        with engine_of(weighted, **factor) as engine:
            engine.train_step(torch.arange(8.0).view(2, 4) / 8)
        found.append(weight.grad)
        tolerance = 2e-3 if "fp16" in factor else 1e-6
        torch.testing.assert_close(found[-1], found[0], rtol=tolerance, atol=tolerance)
    assert engine.rank == 0 or found[0] is not None


# -- checkpoints -----------------------------------------------------------------------------------------------------

TIED = Case(deep_tied_gpt, models.token_batch, clip=0.5, accumulation=2)
V = pipelined(TIED.at(1), 2, "zb-v")
SHARDED = pipelined(TIED.at(3), 2, "interleaved")
TRIPS: list[tuple[int, Case, list[tuple[int, Case]]]] = [  # what saves on so many ranks, and what loads
    (1, TIED, [(2, V)]),
    (2, V, [(1, TIED), (4, SHARDED)]),
]


@pytest.mark.parametrize(("num_ranks", "case", "others"), TRIPS)
def test_every_checkpoint_loads_everywhere(
    ranks: RankPool, tmp_path: Path, num_ranks: int, case: Case, others: list[tuple[int, Case]]
) -> None:
    before = ranks(num_ranks, save_and_go_on, case, tmp_path, num_ranks, "one", steps=1, after=1)[0]
    for size, other in others:
        found = ranks(size, load_and_go_on, other, tmp_path, size, "one", steps=1, after=1)[0]
        found.restored = dict(sorted(found.restored.items()))
        before.restored = dict(sorted(before.restored.items()))
        assert found.state_differences(before) == [], (size, other)
        assert found.losses == pytest.approx(before.losses, rel=1e-5)


def keep_a_copy(param: nn.Parameter) -> None:
    assert param.grad is not None
    param.grad = param.grad.clone()


@on_ranks(2)
def test_a_gradient_that_a_hook_has_replaced_counts() -> None:
    states = []
    for replaces in (True, False):
        with engine_of(lambda output, batch: output.square().mean()) as engine:
            for param in engine.parameters() if replaces else ():
                param.register_post_accumulate_grad_hook(keep_a_copy)
            engine.train_step(torch.ones(2, 4))
            states.append(engine.state_dict())
    assert differences(*states) == []
