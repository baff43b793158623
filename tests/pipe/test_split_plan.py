"""Which blocks a model has, how they are divided, and which stage has which parameters: by the order of use."""

import itertools
import pickle
import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from lowtide.pipe.split import blocks as split_blocks
from lowtide.pipe.split.blocks import find_blocks
from lowtide.pipe.split.split import SplitPlan, given_counts, partition, plan_split
from lowtide.pipe.split.usage import mentions
from tests.kit import models
from tests.kit.training import refusal
from tests.pipe.hugging_face import batch_for, builder
from tests.pipe.staged import numels
from tests.pipe.test_stage_errors import Ordered

T5 = "T5ForConditionalGeneration"
VECTORS = models.vector_batch(0, 6)


def of_vectors(model: nn.Module) -> Any:
    return model(*VECTORS)


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
    model = models.TinyGPT(width=8, layers=8)
    model.head = nn.Linear(8, 6 * sum(param.numel() for param in model.blocks[0].parameters()) // 8, bias=False)
    assert plan_split(model, 2).counts == (5, 3)  # the head weighs as six blocks, the embedding as three and a half


def test_a_plan_is_plain_data_and_what_lies_between_two_lists_is_on_the_stage_of_the_block_before() -> None:
    plan = plan_split(builder(T5)(), 4)
    assert pickle.loads(pickle.dumps(plan)) == plan == plan_split(builder(T5)(), 4)
    assert outside(plan) == [
        {"shared.weight"},
        {"shared.weight", "encoder.final_layer_norm.weight"},
        set(),
        {"shared.weight", "decoder.final_layer_norm.weight"},
    ]


# -- the order of use -------------------------------------------------------------------------------------------------


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
        return functional.mse_loss(self.last(x), y)


def of(*parts: str) -> set[str]:
    return {f"{part}.{kind}" for part in parts for kind in ("weight", "bias")}


def test_the_order_of_use_is_read_from_the_forward_or_a_sample_and_not_from_the_registration() -> None:
    plan, hidden = plan_split(FromTheEnd(), 3), FromTheEnd()
    assert outside(plan) == [of("between", "first"), of("between"), of("between", "never", "last")]
    assert plan.tied == dict.fromkeys(("between.weight", "between.bias"), (0, 1, 2))
    plain = hidden.forward
    hidden.forward = lambda *args: plain(*args)  # type: ignore[method-assign]
    assert plan_split(hidden, 3, sample=of_vectors) == plan


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "OPTForCausalLM", "BertForMaskedLM", T5])
def test_the_source_text_of_a_forward_gives_the_order_that_a_run_shows(name: str) -> None:
    batch, model = batch_for(name), builder(name)()
    assert plan_split(model, 3, sample=lambda model: model(**batch)) == plan_split(model, 3)


class TransposedEmbedding(models.TinyGPT):
    """Its head is `embedding.weight.T`: an attribute that is a view of the parameter."""

    def __init__(self) -> None:
        super().__init__()
        del self.head

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(ids) + self.position
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy((self.norm(x) @ self.embedding.weight.T).flatten(0, 1), targets.flatten())


def test_a_run_shows_the_use_of_a_transposed_weight() -> None:
    model = TransposedEmbedding()
    plan = plan_split(model, 3, sample=lambda model: model(*models.token_batch(0, 2)))
    assert plan.tied == {"embedding.weight": (0, 2)} and plan == plan_split(model, 3)


@pytest.mark.parametrize("balance", ["parameters", "time"])
def test_a_sample_takes_no_random_numbers_of_the_training(balance: str) -> None:
    """Rank 0 alone runs it, and a script may draw its batches alike on all ranks."""
    model = models.Mlp()
    model.layers = nn.Sequential(*(nn.Sequential(nn.Linear(7, 7), nn.Dropout(0.5)) for _ in range(3)))
    before = torch.get_rng_state()
    plan_split(model, 2, balance, of_vectors)
    assert torch.equal(torch.get_rng_state(), before)


def test_what_no_forward_names_is_placed_by_its_registration() -> None:
    class Hidden(models.Mlp):
        forward = nn.Module.forward  # no source text with the order

    assert outside(plan_split(Hidden(), 3)) == [of("first"), set(), of("last")]


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.between, self.last = nn.Linear(1, 1), nn.Linear(1, 1), nn.Linear(1, 1)
        self.layers: Any = nn.ModuleList(nn.Linear(1, 1) for _ in range(2))

    def finish(self, x: Tensor) -> Any:
        return self.last(x)

    def middle(self, x: Tensor) -> Any:
        return self.layers[0](x)

    def begin(self, x: Tensor) -> Any:
        return self.first(x)


def while_loop(self: Parts, x: Tensor) -> Any:
    x, index = self.first(x), 0
    while index < len(self.layers):
        x = self.layers[index](x)
        index += 1
    return self.last(x)


def methods(self: Parts, x: Tensor) -> Any:
    return self.finish(self.middle(self.begin(x)))


def local_function(self: Parts, x: Tensor) -> Any:
    def run(x: Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        return self.last(x)

    return checkpoint(run, self.first(x), use_reentrant=False)


def a_lambda(self: Parts, x: Tensor) -> Any:
    return checkpoint(lambda x: self.last(self.layers[0](x)), self.first(x), use_reentrant=False)


def metadata(self: Parts, x: Tensor) -> Any:
    x = x.to(self.last.weight.dtype) if len(self.layers) and hasattr(self, "last") else x
    return self.last(self.layers[0](self.first(x)))


def wrapped(self: Parts, x: Tensor) -> Any:
    def run(scale: float, x: Tensor) -> Any:
        return self.last(self.layers[0](x)) * scale

    return partial(run, 2.0)(self.first(x))


def in_loop(self: Parts, x: Tensor) -> Any:
    x = self.first(x)
    for layer in self.layers[:2]:
        x = self.between(layer(x))
    return self.last(x)


def asks(self: Parts, x: Tensor) -> Any:
    self.layers.extend([])
    return self.layers[0](x)


def made(forward: Callable[..., Any]) -> nn.Module:
    return type("Made", (Parts,), {"forward": forward})()


def order(forward: Callable[..., Any]) -> list[str]:
    found = [mention.name for mention in mentions(made(forward)) if mention.name in ("first", "layers", "last")]
    return list(dict.fromkeys(found))


@pytest.mark.parametrize("forward", [while_loop, methods, local_function, a_lambda, metadata])
def test_the_order_is_that_of_execution(forward: Callable[..., Any]) -> None:
    assert order(forward) == ["first", "layers", "last"]


def test_a_function_that_is_wrapped_counts_where_it_is_wrapped() -> None:
    assert set(order(wrapped)) == {"first", "layers", "last"}
    assert mentions(made(eval("lambda self, x: self.first(x)"))) == []  # there is no source text


def test_what_stands_in_the_loop_over_the_layers_is_marked_with_it() -> None:
    found = {mention.name: mention for mention in mentions(made(in_loop))}
    assert found["layers"].strong and found["layers"].loops == found["between"].loops != frozenset()
    assert found["first"].loops == found["last"].loops == frozenset()


def test_a_method_of_a_part_is_no_call_of_the_part() -> None:
    assert [mention.strong for mention in mentions(made(asks))] == [False, True]


# -- by time ----------------------------------------------------------------------------------------------------------


class Clock:
    """Goes on when it is told to: how fast the machine is does not matter."""

    seconds = 0.0

    def perf_counter(self) -> float:
        return self.seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(split_blocks, "time", clock)
    return clock


class Slow(nn.Linear):
    """Takes as long as its number says."""

    count: Tensor

    def __init__(self, clock: Clock, seconds: float) -> None:
        super().__init__(7, 7)
        self.register_buffer("count", torch.zeros(()))
        self.clock, self.seconds = clock, seconds

    def forward(self, x: Tensor) -> Tensor:
        self.clock.seconds += self.seconds
        self.count += 1
        return super().forward(x)


def test_measured_time_decides_where_it_is_asked_for(clock: Clock) -> None:
    model = nn.Sequential(*(Slow(clock, seconds) for seconds in (4.0, 1.0, 1.0, 1.0, 1.0)))
    calls: list[bool] = []

    def sample(model: nn.Module) -> Any:
        calls.append(torch.is_grad_enabled())
        return model(torch.zeros(1, 7))

    assert plan_split(model, 2).counts in ((2, 3), (3, 2))
    plan = plan_split(model, 2, "time", sample)
    assert plan.counts == (1, 4) and plan.costs == (4.0, 4.0)
    assert not any(calls) and not any(model.buffers())


def test_time_before_and_behind_the_blocks_counts(clock: Clock) -> None:
    class Around(models.Mlp):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            clock.seconds += 3.0
            return super().forward(x, y)

    model = Around(layers=6)
    model.layers = nn.Sequential(*(Slow(clock, 1.0) for _ in range(6)))
    assert plan_split(model.layers, 2, "time", lambda model: model(torch.zeros(1, 7))).counts == (3, 3)
    assert plan_split(model, 2, "time", of_vectors).counts in ((1, 5), (2, 4))


# -- what is refused --------------------------------------------------------------------------------------------------


ORDER = (
    "expected a forward that calls each of 3 blocks once, in the order of registration, found the calls: "
    "layers.2, layers.1, layers.0"
)


STAGES = "expected 1 to 3 stages, because the model has 3 blocks and each stage needs a block, found"
SUM = "the numbers of blocks per stage must add up to the model's blocks, found"
REFUSED: list[tuple[str, Callable[..., object], tuple[Any, ...]]] = [
    (f"{SUM} 1 + 1 = 2 != 3", plan_split, (models.Mlp(), 2, [1, 1])),
    (
        'expected balance "parameters", "time" or a list of numbers of blocks, found "params"',
        plan_split,
        (models.Mlp(), 2, "params"),
    ),
    ('balance "time" needs a sample batch to measure with; found none', plan_split, (models.Mlp(), 2, "time")),
    (
        'balance "time" needs a model with memory to measure on, found parameters on the meta device',
        plan_split,
        (models.Mlp().to("meta"), 2, "time", lambda model: model(*(one.to("meta") for one in VECTORS))),
    ),
    (ORDER, plan_split, (Ordered(2, 1, 0), 2, "parameters", of_vectors)),
    (ORDER, plan_split, (Ordered(2, 1, 0), 2, "time", of_vectors)),
    (f"{STAGES} 0; use fewer stages (ranks x chunks), or a model with more blocks", partition, ([1.0] * 3, 0)),
    (f"{STAGES} 4; use fewer stages", partition, ([1.0] * 3, 4)),
    (f"{SUM} 1 + 3 + 3 = 7 != 6", given_counts, ([1, 3, 3], 6, 3)),
    ("expected a number of blocks for each of 3 stages, found 2: [3, 3]", given_counts, ([3, 3], 6, 3)),
    ("expected at least one block for each stage, found [0, 3, 3]", given_counts, ([0, 3, 3], 6, 3)),
    ("expected at least one block for each stage, found [1.5, 1.5, 3]", given_counts, ([1.5, 1.5, 3], 6, 3)),
]


@pytest.mark.parametrize(("text", "act", "arguments"), REFUSED)
def test_what_cannot_be_done_is_an_error(text: str, act: Callable[..., object], arguments: tuple[Any, ...]) -> None:
    assert f"pipeline: {text}" in refusal(act, *arguments)


@pytest.mark.parametrize(
    ("model", "found"),
    [
        (nn.Bilinear(3, 3, 3), "no ModuleList and no Sequential"),
        (
            nn.ModuleDict({"only": nn.Sequential(nn.Linear(3, 3), nn.Tanh()), "rest": nn.Linear(3, 9)}),
            "'only' (Sequential of 1 x Linear, 25% of the parameters)",
        ),
        (
            nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Bilinear(3, 3, 1)),
            "'(the model)' (Sequential of 1 x Linear, 1 x LayerNorm, 1 x Bilinear, 100% of the parameters)",
        ),
        (nn.ModuleList([nn.ReLU()]), "'(the model)' (ModuleList of nothing with parameters, 0% of the parameters)"),
    ],
)
def test_a_model_without_repeated_blocks_is_an_error_that_says_what_was_found(model: nn.Module, found: str) -> None:
    total = sum(param.numel() for param in model.parameters())
    assert refusal(find_blocks, model) == (
        f"pipeline: {type(model).__name__} has no repeated blocks to split between: expected a ModuleList or "
        "Sequential with repeated elements of the same class, which hold at least 5% of the model's "
        f"{total} parameters, found {found}; keep the repeated parts of the model in a single nn.ModuleList or "
        "nn.Sequential"
    )


# -- how they are divided ---------------------------------------------------------------------------------------------


def all_partitions(num_blocks: int, num_stages: int) -> Iterator[tuple[int, ...]]:
    for cuts in itertools.combinations(range(1, num_blocks), num_stages - 1):
        yield tuple(end - begin for begin, end in itertools.pairwise((0, *cuts, num_blocks)))


def quality(counts: tuple[int, ...], costs: list[float], first: float, last: float) -> tuple[float, float]:
    """The costliest stage, and how far the stages are from even."""
    remaining = iter(costs)
    found = [sum(itertools.islice(remaining, count)) for count in counts]
    found[0] += first
    found[-1] += last
    return max(found), sum(cost**2 for cost in found)


def test_no_other_partition_is_better() -> None:
    chance = random.Random(0)
    for _ in range(1000):
        num_blocks = chance.randint(1, 8)
        num_stages = chance.randint(1, num_blocks)
        costs: list[float] = [chance.randint(0, 9) for _ in range(num_blocks)]
        first, last = chance.choice([0, 3, 20]), chance.choice([0, 5, 11])
        counts = partition([*costs[:-1], costs[-1] + last], num_stages, first)
        assert len(counts) == num_stages and sum(counts) == num_blocks and min(counts) >= 1
        best = min(quality(other, costs, first, last) for other in all_partitions(num_blocks, num_stages))
        assert quality(counts, costs, first, last) == best, (costs, num_stages, first, last)


def test_costs_whose_sums_round_find_a_partition() -> None:
    assert sum(partition([0.1] * 30 + [0.8], 7, first=0.3)) == 31


def test_two_hundred_blocks_on_sixty_four_stages_take_no_time() -> None:
    chance = random.Random(0)
    begin = time.process_time()
    assert sum(partition([chance.random() for _ in range(200)], 64)) == 200
    assert time.process_time() - begin < 20


def test_an_explicit_list_is_taken() -> None:
    assert given_counts([1, 3, 2], 6, 3) == (1, 3, 2)
