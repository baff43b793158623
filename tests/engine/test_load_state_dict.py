"""`engine.load_state_dict` takes what `engine.state_dict` gives, at every stage and precision, or a plain module's."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.zero.sequence import StateError
from tests.kit import models
from tests.kit.ranks import RankPool
from tests.kit.training import Case, share_of

CASE = Case(models.tied_gpt, models.token_batch, steps=1)
BF16 = {"bf16": {"enabled": True}}


def other_state() -> dict[str, Tensor]:
    torch.manual_seed(7)
    return {name: value.clone() for name, value in models.tied_gpt().state_dict().items()}


def load_and_train(cases: list[Case]) -> list[tuple[dict[str, Tensor], float]]:
    """What is there after loading on rank 0 alone, in float32, and the loss of a step with it."""
    found = []
    for case in cases:
        torch.manual_seed(0)
        with lowtide.initialize(case.build(), case.as_config()) as engine:
            engine.load_state_dict(other_state() if engine.rank == 0 else {})
            values = {name: engine.full(name) for name in ("head.weight", "blocks.1.qkv.weight", "norm.bias")}
            loss = engine.train_step(share_of(case.global_batch(0, engine.data_size))).loss.item()
            found.append((values, loss))
    return found


@pytest.mark.parametrize(("transport", "precision"), [("shared_memory", {}), ("sockets", BF16)])
def test_every_stage_takes_the_values_of_rank_0(ranks: RankPool, transport: str, precision: dict[str, Any]) -> None:
    expected = other_state()
    module = models.tied_gpt()
    module.load_state_dict(expected)
    loss = module(*CASE.global_batch(0, 2)).item()
    cases = [CASE.at(stage, config={"communication": {"transport": transport}, **precision}) for stage in (0, 1, 3)]
    for values, found_loss in ranks(2, load_and_train, cases)[1]:
        assert all(torch.equal(value, expected[name]) for name, value in values.items())
        assert found_loss == pytest.approx(loss, rel=2e-2 if precision else 1e-5)


class WithBuffer(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 3)
        self.register_buffer("count", torch.zeros(2, dtype=torch.int64))


def test_buffers_come_too_and_what_does_not_fit_is_told() -> None:
    config: dict[str, Any] = {"optimizer": {"type": "sgd"}, "zero_optimization": {"stage": 3}, "steps_per_print": 0}
    with lowtide.initialize(WithBuffer(), config) as engine:
        state = {**engine.state_dict(), "count": torch.tensor([3, 4])}
        engine.load_state_dict(state)
        assert engine.state_dict()["count"].tolist() == [3, 4]
        words = (
            r"load_state_dict\(\): expected the model's tensors on rank 0, found 1 missing, 1 extra\n  missing bias: "
        )
        with pytest.raises(ValueError, match=words):
            engine.load_state_dict({"weight": state["weight"], "count": state["count"], "scale": torch.ones(1)})
        with pytest.raises(ValueError, match="found 1 misshaped"):
            engine.load_state_dict({**state, "bias": torch.ones(4)})
        engine.load_state_dict({"bias": torch.ones(3)}, strict=False)
        assert engine.full("bias").tolist() == [1, 1, 1] and torch.equal(engine.full("weight"), state["weight"])


def test_the_optimizer_does_not_give_a_part_of_its_states_for_the_whole() -> None:
    with lowtide.initialize(models.mlp(), Case(models.mlp, models.vector_batch).as_config()) as engine:
        options = engine.optimizer.state_dict()
        assert options["param_groups"][0]["lr"] == 1e-2 and not options["state"]
        groups = list(map(id, engine.optimizer.param_groups))
        engine.optimizer.load_state_dict({**options, "param_groups": [{**options["param_groups"][0], "lr": 0.5}]})
        assert engine.lr == 0.5 and list(map(id, engine.optimizer.param_groups)) == groups
        with pytest.raises(ValueError, match="expected 1 parameter groups, found 0"):
            engine.optimizer.load_state_dict({"state": {}, "param_groups": []})
        engine.train_step(models.vector_batch(0, 2))
        words = r"engine.optimizer.{}\(\): expected engine.save_checkpoint and engine.load_checkpoint, which save and l"
        with pytest.raises(StateError, match=words.format("state_dict")):
            engine.optimizer.state_dict()
        with pytest.raises(StateError, match=words.format("load_state_dict")):
            engine.optimizer.load_state_dict({**options, "state": {0: {}}})
        assert engine.train_step(models.vector_batch(0, 2)).loss.isfinite()
