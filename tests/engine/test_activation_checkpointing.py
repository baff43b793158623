"""Recomputing activations changes no bit, whether the config asks for it or the model does it itself."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide.zero import plan
from tests.kit import models
from tests.kit.ranks import RankPool
from tests.kit.training import Case, settings, train_all


class NoisyBlock(models.Block):
    """Its dropout must draw the same numbers again."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(x), 0.1, self.training)


class Noisy(models.TinyGPT):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(NoisyBlock(22) for _ in range(3))


class Reentrant(models.TinyGPT):
    """Checkpoints its own blocks, as many models do."""

    use_reentrant = True

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            forward = block.forward
            block.forward = lambda x, forward=forward: checkpoint(forward, x, use_reentrant=self.use_reentrant)


class NonReentrant(Reentrant):
    use_reentrant = False


class AroundBlocks(models.TinyGPT):
    """Checkpoints the call of each block: hooks on the block run in the recomputation too."""

    use_reentrant = True

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(ids) + self.position
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


class AroundBlocksNonReentrant(AroundBlocks):
    use_reentrant = False


class AroundTwo(AroundBlocks):
    """Checkpoints all blocks and the rest behind them as one piece."""

    use_reentrant = False

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        def run(x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())

        loss: Tensor = checkpoint(run, self.embedding(ids) + self.position, use_reentrant=self.use_reentrant)
        return loss


OWN = [Reentrant, NonReentrant, AroundBlocks, AroundBlocksNonReentrant, AroundTwo]


def test_dropout_draws_the_same_in_blocks_that_are_recomputed(ranks: RankPool) -> None:
    """Every block at one stage, every second one at the other."""
    case = Case(Noisy, models.token_batch, accumulation=2, steps=2)
    pairs = [(3, 0), (3, 1), (0, 0), (0, 2)]
    cases = [case.at(stage, config={"activation_checkpointing": {"every": every}}) for stage, every in pairs]
    outcomes = ranks(2, train_all, cases)[0]
    for plain, ours in zip(outcomes[::2], outcomes[1::2], strict=True):
        assert ours.differences(plain) == []


@pytest.mark.parametrize(("transport", "stages"), [("shared_memory", (3,)), ("sockets", (0, 2))])
def test_checkpointing_by_the_model_is_bitwise_the_same(
    ranks: RankPool, transport: str, stages: tuple[int, ...]
) -> None:
    config = {"communication": {"transport": transport}}
    plain = Case(models.TinyGPT, models.token_batch, steps=2, clip=0.3, config=config)
    cases = [replace(plain, build=build, stage=stages[at % len(stages)]) for at, build in enumerate(OWN)]
    expected, *outcomes = ranks(2, train_all, [plain, *cases])[0]
    for case, outcome in zip(cases, outcomes, strict=True):
        assert outcome.differences(expected) == [], f"{case.build}, stage {case.stage}"


class Counting(nn.Module):
    """Changes its buffers in each forward: in place, by another one, through `.data`, and as only BatchNorm does."""

    count: Tensor
    mean: Tensor
    codes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(7, 7))
        self.norm = nn.BatchNorm1d(7)
        for name in ("count", "mean", "codes"):
            self.register_buffer(name, torch.ones(7))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.mean = 0.5 * self.mean + x.detach().mean(0)
        self.codes.data.mul_(0.9).add_(x.detach()[0])
        return torch.tanh(self.norm(self.linear(x)) * self.mean + self.codes * self.count)


def test_recomputed_blocks_change_their_buffers_once() -> None:
    """Also where a graph is kept, and its blocks are recomputed twice."""
    states = []
    for every in (0, 1, 2):
        torch.manual_seed(0)
        model = nn.Sequential(*(Counting() for _ in range(3)))
        with lowtide.initialize(model, settings(activation_checkpointing={"every": every})) as engine:
            for _ in range(2):
                loss = engine(torch.randn(5, 7)).square().mean()
                loss.backward(retain_graph=True)
                loss.backward()
                engine.step()
            states.append(engine.state_dict())
    assert states[0]["2.count"].tolist() == [3.0] * 7
    for state in states[1:]:
        assert [name for name, value in states[0].items() if not torch.equal(value, state[name])] == []


def engine_with(every: int) -> lowtide.Engine:
    torch.manual_seed(0)
    return lowtide.initialize(models.tiny_gpt(), settings(activation_checkpointing={"every": every}))


def saved_numel(every: int) -> int:
    """Elements of activations that one forward saves for its backward."""
    numels: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        numels.append(tensor.numel() if not isinstance(tensor, nn.Parameter) else 0)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), engine_with(every) as engine:
        engine(*models.token_batch(0, 2))
    return sum(numels)


def test_checkpointing_saves_less_for_backward() -> None:
    none, all_blocks, every_second = saved_numel(0), saved_numel(1), saved_numel(2)
    assert all_blocks < every_second < none
    assert none - all_blocks == pytest.approx(3 * (none - every_second) / 2, rel=0.01)  # blocks 0, 1, 2 against 0, 2


def test_large_ends_are_not_recomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "_MIN_END_NUMEL", 1)
    calls = Counter[str]()
    names = ("embedding", "blocks.0.norm", "blocks.1.norm", "blocks.2.norm", "head")
    with engine_with(2) as engine:
        for name in names:
            engine.module.get_submodule(name).register_forward_pre_hook(lambda *_, name=name: calls.update([name]))
        engine.train_step(models.token_batch(0, 2))
    assert [calls[name] for name in names] == [1, 2, 1, 2, 1]
