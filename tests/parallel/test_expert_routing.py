"""Tokens of any number on any rank, to any experts: gradients of one process, and never a hang."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import lowtide
from lowtide.parallel.expert_dispatch import ExpertSelfCheck
from tests.kit.ranks import RankPool, on_ranks
from tests.kit.training import limit_waits, refusal

EXPERTS, WIDTH = 4, 3
NOBODY = EXPERTS  # the index of no expert


class Experts(nn.Module):
    """As a user writes them."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.up = nn.Parameter(torch.randn(EXPERTS, 2 * width, width))
        self.down = nn.Parameter(torch.randn(EXPERTS, width, 2 * width))
        self.shift = nn.Parameter(torch.randn(EXPERTS, width))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Any:
        out = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            token, choice = torch.where(top_k_index == expert)
            made = functional.linear(
                torch.tanh(functional.linear(hidden_states[token], self.up[expert])), self.down[expert]
            )
            weighted = (made + self.shift[expert]) * top_k_weights[token, choice, None]
            out = out.index_add(0, token, weighted)
        return out


class Routed(nn.Module):
    """Layers of experts that are told who goes where."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Experts() for _ in range(layers))
        self.router = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor, index: Tensor) -> Tensor:  # (tokens, WIDTH), (tokens, 2)
        for layer in self.layers:
            x = x + layer(x, index, top_k_weights=self.router(x).softmax(-1))
        return x.square().sum()


def config_of(expert: int, **more: Any) -> dict[str, Any]:
    optimizer = {"type": "sgd", "params": {"lr": 1e-3}}
    return {"steps_per_print": 0, "optimizer": optimizer, "parallel": {"expert": expert}, **more}


def model(layers: int = 2) -> Routed:
    torch.manual_seed(0)
    return Routed(layers).double()


def batch_of(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """By turns: all to one expert, none to others, other choices on each rank, a rank without tokens, nobody."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    tokens = int(torch.randint(0, 4, (1,), generator=generator))
    x = torch.randn(tokens, WIDTH, generator=generator).double()
    index = torch.randint(0, EXPERTS + 1, (tokens, 2), generator=generator)
    kind = step % 5
    if kind == 0:
        index[:] = step // 5 % EXPERTS
    elif kind == 1:
        index[:, 0], index[:, 1] = rank % EXPERTS, NOBODY
    elif kind == 2 and rank == step // 5 % 2:
        return x[:0], index[:0]
    elif kind == 3 and step % 10 == 3:
        index[:] = NOBODY
    return x, index


STEPS = 40  # each kind of choice eight times, each expert the only one twice


def train(steps: int, layers: int = 1, **more: Any) -> tuple[list[float], dict[str, Tensor]]:
    """Norms, and parameters in the end."""
    with lowtide.initialize(model(layers), config_of(2, **more)) as engine:
        norms = [engine.train_step(batch_of(step, engine.rank)).grad_norm.item() for step in range(steps)]
        return norms, engine.state_dict()


def test_many_steps_of_adversarial_choices(ranks: RankPool) -> None:
    norms, state = ranks(2, train, STEPS, timeout=120)[0]
    plain = model(1)
    optimizer = torch.optim.SGD(plain.parameters(), lr=1e-3)
    for step in range(STEPS):
        optimizer.zero_grad()
        (sum(plain(*batch_of(step, rank)) for rank in range(2)) / 2).backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e9).item()
        assert norms[step] == pytest.approx(norm, rel=1e-9, abs=1e-12), step
        optimizer.step()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-9)


WAYS: list[dict[str, Any]] = [
    *({"communication": {"transport": one}, "zero_optimization": {"stage": 3}} for one in ("sockets", "native")),
    {"zero_optimization": {"stage": 3}},
    {"activation_checkpointing": {"every": 1}},
]


@on_ranks(2)
def test_every_transport_and_a_recomputation_take_all_choices() -> None:
    expected, _ = train(5, 2)
    for way in WAYS:
        assert train(5, 2, **way)[0] == pytest.approx(expected, rel=1e-9), way


@on_ranks(2)
def test_bytes_on_the_wire_are_those_of_the_formula_and_an_evaluation_exchanges_too() -> None:
    """In a step this rank's three tokens have four choices on the other rank."""
    with lowtide.initialize(model(), config_of(2)) as engine:
        exchange = engine._mesh.exchange(("expert",))
        other = (engine.rank + 1) % 2 * EXPERTS // 2
        index = torch.tensor([[other, other + 1], [other, EXPERTS // 2 * engine.rank], [other, NOBODY]])
        batch = torch.ones(3, WIDTH, dtype=torch.float64, requires_grad=True), index
        trained, sent = engine.train_step(batch).loss.item(), exchange.bytes_sent
    with lowtide.initialize(model(), config_of(2)) as engine:
        assert engine.eval_step(batch).item() == trained
    counts, rows = 2 * 2 * 8, 3 * WIDTH * 8  # of two slots for two ranks; a token goes once, whatever it has chosen
    numbers, weights = 4 * 4, 4 * 8
    forward = counts + numbers + weights + 2 * rows  # there, and as many of the other rank's back
    backward = weights + 2 * rows
    assert sent == 2 * (forward + backward)


def alone(has_trained: bool) -> str:
    """What rank 0 is told when it computes a forward that rank 1 does not."""
    engine = lowtide.initialize(model(), config_of(2, communication={"timeout_seconds": 60.0}))
    try:
        if has_trained:
            engine.train_step(batch_of(0, 0))
        limit_waits(engine, 1.0)
        if engine.rank == 0:
            engine(*batch_of(0, 0))
        engine.agree(False)
    except lowtide.CollectiveError as error:
        return str(error)
    finally:
        engine.close()
    return "no error"


@pytest.mark.parametrize(
    ("has_trained", "where"), [(True, "the counts of layers.0"), (False, "room in shared memory")], ids=str
)
def test_a_forward_of_one_rank_alone_ends(ranks: RankPool, has_trained: bool, where: str) -> None:
    assert f"rank 0 in {where}" in ranks(2, alone, has_trained)[0]


# -- what experts compute of the first rows tells whether they can be split -------------------------------------------


class Changed(Experts):
    """change: of the forward, tokens, choices and weights."""

    def __init__(self, change: Callable[..., Any]) -> None:
        super().__init__()
        self.change = change

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Any:
        return self.change(super().forward, hidden_states, top_k_index, top_k_weights)


def widened(run: Any, x: Tensor, index: Tensor, weights: Tensor) -> Any:
    return run(x, index, weights).repeat(1, 2)


def unweighted(run: Any, x: Tensor, index: Tensor, weights: Tensor) -> Any:
    return run(x, index, torch.ones_like(weights))


def dropping() -> Experts:
    """Draws, so that two calls are not alike: it is not tried."""
    return Changed(lambda *given: functional.dropout(unweighted(*given)))


def tried(module: Experts, dtype: torch.dtype = torch.float32) -> Tensor:
    """The second output. An error comes again in the call after it."""
    torch.manual_seed(0)
    experts = ExpertSelfCheck("layers.0", module.to(dtype), module.forward)
    given = torch.randn(7, WIDTH).to(dtype), torch.arange(7) % 4
    try:
        experts(*given)
    except ValueError as error:
        assert refusal(experts, *given) == str(error)
        raise
    return experts(*given)


OFF = "expected an output that depends on its row "
SHAPE = "expected an output of the shape of its input, (7, 3), found"
WRONG: list[tuple[Callable[..., Any], str]] = [
    (unweighted, OFF),
    (lambda run, x, index, weights: x + run(x, index, weights), OFF),
    (lambda run, x, index, weights: run(x - x.mean(0), index, weights), OFF),  # what becomes of a row is of all rows
    (lambda run, x, index, weights: (run(x, index, weights), index), f"{SHAPE} a tuple"),
    (widened, SHAPE),
]


@pytest.mark.parametrize(("change", "text"), WRONG)
def test_experts_that_would_give_other_numbers_are_an_error(change: Callable[..., Any], text: str) -> None:
    found = refusal(tried, Changed(change))
    assert f"'layers.0': {text}" in found and ("found it off by" in found) == (text == OFF)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("build", [Experts, dropping])
def test_others_are_taken(build: Callable[[], Experts], dtype: torch.dtype) -> None:
    assert tried(build(), dtype).shape == (7, WIDTH)


@on_ranks(2)
def test_what_is_refused_when_ranks_train() -> None:
    """A training on an output of another shape, and ranks without data."""
    made = Routed()
    made.layers = nn.ModuleList([Changed(widened)])
    with lowtide.initialize(made, config_of(2)) as engine:
        text = refusal(engine.train_step, (torch.ones(1, WIDTH), torch.tensor([[0, 3]])))
        assert "'layers.0': expected an output of the shape of its input, (2, 3), found" in text
    with lowtide.initialize(model(), config_of(2)) as engine:
        assert "expected a config without parallel.expert, found it" in refusal(engine.join().__enter__)
