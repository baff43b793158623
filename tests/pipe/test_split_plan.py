"""Which stage has which parameters."""

import pickle
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowtide.pipe.split import blocks as split_blocks
from lowtide.pipe.split.split import SplitPlan, plan_split
from tests.kit import models
from tests.pipe.staged import numels
from tests.pipe.test_stage_hugging_face import batch_for, builder

VECTORS = models.vector_batch(0, 6)


def outside(plan: SplitPlan) -> list[set[str]]:
    """By stage, the parameters outside the blocks."""
    inside = tuple(f"{block}." for block in plan.blocks)
    return [{name for name in names if not name.startswith(inside)} for names in plan.parameters]


def test_blocks_are_contiguous_and_the_rest_is_at_the_ends() -> None:
    plan = plan_split(models.TinyGPT(layers=5), 2, [2, 3])
    assert plan.counts == (2, 3) and [list(plan.blocks_of(stage)) for stage in (0, 1)] == [[0, 1], [2, 3, 4]]
    assert [plan.stage_of_block(block) for block in range(5)] == [0, 0, 1, 1, 1]
    assert outside(plan) == [{"embedding.weight", "position"}, {"norm.weight", "norm.bias", "head.weight"}]
    assert plan.tied == {}


def test_a_head_that_is_the_embedding_is_on_both_ends_and_named() -> None:
    plan = plan_split(models.TinyGPT(tied=True), 3)
    assert plan.tied == {"embedding.weight": (0, 2)}
    assert [("embedding.weight" in names) for names in plan.parameters] == [True, False, True]


def test_costs_are_the_parameters_of_each_stage_with_embedding_and_head() -> None:
    for model in (models.TinyGPT(layers=6), models.TinyGPT(layers=6, tied=True), builder("OPTForCausalLM")()):
        plan = plan_split(model, 3)
        assert list(plan.costs) == numels(plan, model)


def test_a_large_head_takes_blocks_from_the_last_stage() -> None:
    model = models.TinyGPT(width=8, layers=8)
    model.head = nn.Linear(8, 6 * sum(param.numel() for param in model.blocks[0].parameters()) // 8, bias=False)
    assert plan_split(model, 2).counts == (5, 3)  # the head weighs as six blocks, the embedding as three and a half


def test_a_plan_is_plain_data() -> None:
    plan = plan_split(builder("T5ForConditionalGeneration")(), 3)
    assert pickle.loads(pickle.dumps(plan)) == plan == plan_split(builder("T5ForConditionalGeneration")(), 3)


class FromTheEnd(models.Mlp):
    """The head is registered first and used last; what is used in the loop is needed everywhere."""

    layers: Any  # of another class than the parent's

    def __init__(self) -> None:
        super().__init__()
        nn.Module.__init__(self)
        self.last = nn.Linear(7, 3)
        self.between = nn.Linear(7, 7)
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(3))
        self.first = nn.Linear(models.FEATURES, 7)
        self.never = nn.Linear(1, 1)

    def start(self, x: Tensor) -> Tensor:
        return torch.tanh(self.first(x))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        assert len(self.layers) == 3 and self.last.weight.dtype == torch.float32
        x = self.start(x)
        for layer in self.layers:
            x = self.between(layer(x))
        return nn.functional.mse_loss(self.last(x), y)


EVERYWHERE = {"between.weight", "between.bias"}
NEVER = {"never.weight", "never.bias"}


def test_the_order_of_use_is_read_from_the_forward_and_not_from_the_registration() -> None:
    plan = plan_split(FromTheEnd(), 3)
    expected = [EVERYWHERE | {"first.weight", "first.bias"}, EVERYWHERE]
    assert outside(plan) == [*expected, EVERYWHERE | NEVER | {"last.weight", "last.bias"}]
    assert plan.tied == dict.fromkeys(("between.weight", "between.bias"), (0, 1, 2))


def test_a_sample_shows_the_order_of_use() -> None:
    hidden = FromTheEnd()
    plain = hidden.forward
    hidden.forward = lambda *args: plain(*args)  # type: ignore[method-assign]
    plan = plan_split(hidden, 3, sample=lambda model: model(*VECTORS))
    assert plan == plan_split(FromTheEnd(), 3)


def test_the_source_text_of_a_forward_gives_the_order_that_a_run_shows() -> None:
    for name in ("LlamaForCausalLM", "OPTForCausalLM", "BertForMaskedLM", "T5ForConditionalGeneration"):
        batch, model = batch_for(name), builder(name)()

        def sample(model: nn.Module, batch: Any = batch) -> Any:
            return model(**batch)

        observed = plan_split(model, 3, sample=sample)
        assert observed == plan_split(model, 3), name


def test_what_no_forward_names_is_placed_by_its_registration() -> None:
    class Hidden(models.Mlp):
        forward = nn.Module.forward  # no source text with the order

    assert outside(plan_split(Hidden(), 3)) == [{"first.weight", "first.bias"}, set(), {"last.weight", "last.bias"}]


def test_what_lies_between_two_lists_is_on_the_stage_of_the_block_before() -> None:
    plan = plan_split(builder("T5ForConditionalGeneration")(), 4)
    assert outside(plan) == [
        {"shared.weight"},
        {"shared.weight", "encoder.final_layer_norm.weight"},
        set(),
        {"shared.weight", "decoder.final_layer_norm.weight"},
    ]


class Clock:
    """Goes on when it is told to: how fast the machine is does not matter."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def perf_counter(self) -> float:
        return self.seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(split_blocks, "time", clock)
    return clock


class Slow(nn.Module):
    """Takes as long as its number says."""

    count: Tensor

    def __init__(self, clock: Clock, seconds: float) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 7)
        self.register_buffer("count", torch.zeros(()))
        self.clock, self.seconds = clock, seconds

    def forward(self, x: Tensor) -> Tensor:
        self.clock.seconds += self.seconds
        self.count += 1
        y: Tensor = self.linear(x)
        return y


def test_measured_time_decides_where_it_is_asked_for(clock: Clock) -> None:
    model = nn.Sequential(*(Slow(clock, seconds) for seconds in (4.0, 1.0, 1.0, 1.0, 1.0)))
    calls: list[bool] = []

    def sample(model: nn.Module) -> Any:
        calls.append(torch.is_grad_enabled())
        return model(torch.zeros(1, 7))

    assert plan_split(model, 2).counts in ((2, 3), (3, 2))
    torch.manual_seed(0)
    plan = plan_split(model, 2, "time", sample)
    assert plan.counts == (1, 4) and plan.costs == (4.0, 4.0)
    assert not any(calls) and not any(model.buffers())


def test_time_before_and_behind_the_blocks_counts(clock: Clock) -> None:
    class Around(models.Mlp):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            clock.seconds += 3.0
            return super().forward(x, y)

    blocks = [Slow(clock, 1.0) for _ in range(6)]
    assert plan_split(nn.Sequential(*blocks), 2, "time", lambda model: model(torch.zeros(1, 7))).counts == (3, 3)
    model = Around(layers=6)
    model.layers = nn.Sequential(*(Slow(clock, 1.0) for _ in range(6)))
    counts = plan_split(model, 2, "time", lambda model: model(*VECTORS)).counts
    assert counts in ((1, 5), (2, 4))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"num_stages": 4}, "expected 1 to 3 stages, because the model has 3 blocks and each stage needs a block, found 4"),
    (
        {"num_stages": 2, "balance": [1, 1]},
        "the numbers of blocks per stage must add up to the model's blocks, found 1 + 1 = 2 != 3",
    ),
    (
        {"num_stages": 2, "balance": "params"},
        'expected balance "parameters", "time" or a list of numbers of blocks, found "params"',
    ),
    ({"num_stages": 2, "balance": "time"}, 'balance "time" needs a sample batch to measure with; found none'),
]


@pytest.mark.parametrize(("arguments", "text"), REFUSED)
def test_what_cannot_be_done_is_an_error(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"pipeline: {text}")):
        plan_split(models.Mlp(), **arguments)


def test_time_cannot_be_measured_without_memory() -> None:
    text = 'pipeline: balance "time" needs a model with memory to measure on, found parameters on the meta device'
    with torch.device("meta"):
        model = models.Mlp()
    x, y = (tensor.to("meta") for tensor in VECTORS)
    with pytest.raises(ValueError, match=text):
        plan_split(model, 2, "time", lambda model: model(x, y))


def test_blocks_that_a_forward_calls_in_another_order_are_an_error_where_a_sample_shows_it() -> None:
    class Backwards(models.Mlp):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            x = self.first(x)
            for layer in reversed(self.layers):
                x = layer(x)
            return nn.functional.mse_loss(self.last(x), y)

    text = (
        "pipeline: expected a forward that calls each of 3 blocks once, in the order of registration, found the calls: "
        "layers.2, layers.1, layers.0"
    )
    for balance in ("parameters", "time"):
        with pytest.raises(ValueError, match=re.escape(text)):
            plan_split(Backwards(), 2, balance, lambda model: model(*VECTORS))
