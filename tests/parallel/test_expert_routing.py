"""Tokens of any number on any rank, to any experts: gradients of one process, and never a hang."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import lowtide
from lowtide.comm import CollectiveError
from tests.kit.ranks import RankError, RankPool

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

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
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
    return {
        "steps_per_print": 0,
        "optimizer": {"type": "sgd", "params": {"lr": 1e-3}},
        "parallel": {"expert": expert},
        **more,
    }


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


STEPS = 100  # each kind of choice twenty times, each expert the only one five times


def train_adversarially(expert: int) -> tuple[list[float], dict[str, Tensor]]:
    """Norms, and parameters in the end."""
    engine = lowtide.initialize(model(1), config_of(expert))
    norms = [engine.train_step(batch_of(step, engine.rank)).grad_norm.item() for step in range(STEPS)]
    state = engine.state_dict()
    engine.close()
    return norms, state


def test_a_hundred_steps_of_adversarial_choices(ranks: RankPool) -> None:
    norms, state = ranks(2, train_adversarially, 2, timeout=120)[0]
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


def of_few_steps(transport: str, stage: int) -> list[float]:
    more = {"communication": {"transport": transport}, "zero_optimization": {"stage": stage}}
    engine = lowtide.initialize(model(), config_of(2, **more))
    norms = [engine.train_step(batch_of(step, engine.rank)).grad_norm.item() for step in range(10)]
    engine.close()
    return norms


def test_every_route_takes_all_choices(ranks: RankPool) -> None:
    expected = ranks(2, of_few_steps, "shared_memory", 0)[0]
    for transport in ("shared_memory", "sockets", "native"):
        assert ranks(2, of_few_steps, transport, 3)[0] == pytest.approx(expected, rel=1e-9)


def bytes_on_the_wire() -> tuple[int, int]:
    """(counted, by the formula) of a step in which this rank's three tokens have four choices on the other rank."""
    engine = lowtide.initialize(model(), config_of(2))
    exchange = engine._mesh.exchange(("expert",))
    other = (engine.rank + 1) % 2 * EXPERTS // 2
    index = torch.tensor([[other, other + 1], [other, EXPERTS // 2 * engine.rank], [other, NOBODY]])
    x = torch.ones(3, WIDTH, dtype=torch.float64, requires_grad=True)
    engine.train_step((x, index))
    engine.close()
    counts, rows = 2 * 2 * 8, 3 * WIDTH * 8  # of two slots for two ranks; a token goes once, whatever it has chosen
    numbers, weights = 4 * 4, 4 * 8
    forward = counts + numbers + weights + 2 * rows  # there, and as many of the other rank's back
    backward = weights + 2 * rows
    return exchange.bytes_sent, 2 * (forward + backward)


def test_bytes_on_the_wire_are_those_of_the_formula(ranks: RankPool) -> None:
    for counted, expected in ranks(2, bytes_on_the_wire):
        assert counted == expected


def evaluates_and_recomputes() -> tuple[float, float, list[float], list[float]]:
    """A loss with and without gradients; norms with and without recomputation."""
    engine = lowtide.initialize(model(), config_of(2))
    evaluated = float(engine.eval_step(batch_of(1, engine.rank)))
    trained = float(engine.train_step(batch_of(1, engine.rank)).loss)
    engine.close()
    norms = []
    for every in (0, 1):
        engine = lowtide.initialize(model(), config_of(2, activation_checkpointing={"every": every}))
        norms.append([engine.train_step(batch_of(step, engine.rank)).grad_norm.item() for step in range(6)])
        engine.close()
    return evaluated, trained, norms[0], norms[1]


def test_evaluation_and_recomputation_exchange_too(ranks: RankPool) -> None:
    evaluated, trained, kept, recomputed = ranks(2, evaluates_and_recomputes)[0]
    assert evaluated == trained and kept == recomputed


def alone(has_trained: bool) -> str:
    """What rank 0 is told when it computes a forward that rank 1 does not."""
    engine = lowtide.initialize(model(), config_of(2, communication={"timeout_seconds": 1.0}))
    try:
        if has_trained:
            engine.train_step(batch_of(0, 0))
        if engine.rank == 0:
            engine(*batch_of(0, 0))
        engine.agree(False)
    except CollectiveError as error:
        return str(error)
    finally:
        engine.close()
    return "no error"


def compiled_losses(is_compiled: bool) -> list[float]:
    made = model()
    if is_compiled:
        for layer in made.layers:
            layer.compile(backend="eager")
    engine = lowtide.initialize(made, config_of(2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the compiler, when it is loaded
        losses = [engine.train_step(batch_of(step, engine.rank)).loss.item() for step in range(3)]
    engine.close()
    return losses


def test_a_compiler_leaves_the_exchange_alone(ranks: RankPool) -> None:
    assert ranks(2, compiled_losses, True) == ranks(2, compiled_losses, False)


def joined() -> None:
    engine = lowtide.initialize(model(), config_of(2))
    try:
        with engine.join():
            pass
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("has_trained", "where"), [(True, "the counts of layers.0"), (False, "room in shared memory")], ids=str
)
def test_a_forward_of_one_rank_alone_ends(ranks: RankPool, has_trained: bool, where: str) -> None:
    assert f"rank 0 in {where}" in ranks(2, alone, has_trained)[0]


def test_ranks_without_data_are_refused(ranks: RankPool) -> None:
    with pytest.raises(RankError, match=r"expected a config without parallel.expert, found it"):
        ranks(2, joined)


class Widening(Experts):
    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return super().forward(hidden_states, top_k_index, top_k_weights).repeat(1, 2)


def train_widening() -> None:
    made = Routed()
    made.layers = nn.ModuleList([Widening()])
    engine = lowtide.initialize(made, config_of(2))
    try:
        engine.train_step((torch.ones(1, WIDTH), torch.tensor([[0, 3]])))
    finally:
        engine.close()


def test_an_output_of_another_shape_is_an_error(ranks: RankPool) -> None:
    with pytest.raises(RankError, match=r"'layers.0': expected an output of the shape of its input, \(2, 3\), found"):
        ranks(2, train_widening)
