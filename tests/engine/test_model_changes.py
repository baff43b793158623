"""What is changed on the model behind the engine's back is an error that names the parameter."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from tests.kit import models
from tests.kit.ranks import RankPool
from tests.kit.training import Case, refusal, share_of


def add(model: Any) -> None:
    model.extra = nn.Parameter(torch.zeros(3))


def replace(model: Any) -> None:
    model.head.weight = nn.Parameter(torch.zeros(models.VOCAB, 22))


def unfreeze(model: Any) -> None:
    model.position.requires_grad_(True)


def change_in_place(model: Any) -> None:
    with torch.no_grad():
        model.norm.bias.add_(1.0)


def tie(model: Any) -> None:
    model.head.weight = model.embedding.weight


def tie_a_bias(model: Any) -> None:
    model.blocks[0].norm.bias = model.blocks[1].norm.bias


def take_out(model: Any) -> None:
    model.norm = nn.Identity()


def assign_data(model: Any) -> None:
    model.norm.bias.data = torch.ones_like(model.norm.bias)


def move(model: Any) -> None:
    model.double()


def change_through_data(model: Any) -> None:
    model.norm.bias.data.add_(1.0)


def change_first_row_through_data(model: Any) -> None:
    model.embedding.weight.data[0] = 0.0


def wrap(model: Any) -> None:
    """Another name and another module, and the same parameters."""
    model.blocks[1] = Wrapped(model.blocks[1])


class Wrapped(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


CHANGES: dict[Callable[[Any], None], str] = {
    add: "parameter 'extra' was added or replaced after lowtide.initialize, .* then call initialize again",
    replace: "parameter 'head.weight' was added or replaced after lowtide.initialize",
    tie: "parameter 'head.weight' was tied to 'embedding.weight' after lowtide.initialize, .*; tie them first",
    tie_a_bias: "parameter 'blocks.0.norm.bias' was tied to 'blocks.1.norm.bias' after lowtide.initialize",
    take_out: "parameter 'norm.weight' was removed from the model after lowtide.initialize, .*; change the model first",
    unfreeze: "parameter 'position': expected requires_grad=False as at lowtide.initialize, found True; it is in",
}


def change_and_step(change: Callable[[Any], None], stage: int, config: dict[str, Any], is_classic: bool) -> None:
    case = Case(models.tiny_gpt, models.token_batch, stage, config=config)
    model: Any = case.build()
    model.position.requires_grad_(False)
    engine = lowtide.initialize(model, case.as_config())
    batch = share_of(case.global_batch(0, engine.world_size))
    engine.train_step(batch)
    change(model)
    engine(*batch) if is_classic else engine.train_step(batch)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("stage", [0, 3])
def test_a_parameter_that_is_added_replaced_tied_or_unfrozen_is_named(
    change: Callable[[Any], None], stage: int
) -> None:
    for is_classic in (False, True):
        with pytest.raises(ValueError, match=CHANGES[change]):
            change_and_step(change, stage, {}, is_classic)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_block_may_be_wrapped(stage: int) -> None:
    change_and_step(wrap, stage, {}, True)


@pytest.mark.parametrize(("change", "name"), [(assign_data, "norm.bias"), (move, "position")])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_other_memory_for_a_parameter_is_named(change: Callable[[Any], None], name: str, stage: int) -> None:
    words = f"parameter '{name}' got new memory (an assignment to its .data, or .to(), .half(), ...), but the engine"
    assert words in refusal(change_and_step, change, stage, {}, False)


BF16 = {"bf16": {"enabled": True}}
IN_PLACE = "parameter 'norm.bias' was changed in place"


@pytest.mark.parametrize(
    ("change", "stage", "config", "text"),
    [
        *((change_through_data, s, BF16, "parameter 'norm.bias' was changed through .data, but") for s in range(3)),
        (change_first_row_through_data, 1, BF16, "parameter 'embedding.weight' was changed through .data, but"),
        (change_in_place, 1, {}, IN_PLACE),
        (change_in_place, 2, {}, IN_PLACE),
        (change_in_place, 3, {"communication": {"transport": "shared_memory"}}, "parameter 'norm.bias' is released"),
        (change_in_place, 3, {"communication": {"transport": "sockets"}}, "parameter 'norm.bias' is released"),
    ],
)
def test_a_change_that_other_ranks_would_not_see_is_named(
    ranks: RankPool, change: Callable[[Any], None], stage: int, config: dict[str, Any], text: str
) -> None:
    for failure in ranks.fails(2, change_and_step, change, stage, config, False):
        assert failure.kind == ("ReleasedParameterError" if stage == 3 else "ValueError") and text in failure.text


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_change_of_bf16_weights_is_named_on_one_rank_too(stage: int) -> None:
    assert refusal(change_and_step, change_in_place, stage, BF16, False) == (
        "parameter 'norm.bias' was changed in place, but its master weights and other ranks do not see it; change "
        "it inside `with engine.gathered(parameter, modify=True):` (zero.GatheredParameters(parameter, "
        "modifier_rank=0) in lowtide.deepspeed)"
    )
    for change in (change_through_data, change_first_row_through_data):
        assert "was changed through .data, but" in refusal(change_and_step, change, stage, BF16, False)
