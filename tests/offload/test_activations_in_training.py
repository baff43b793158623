"""Training is the same to the last bit, whether activations are offloaded or not."""

import contextlib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.offload import OffloadError
from lowtide.offload.activations import ActivationOffload, in_storages_of
from lowtide.offload.file_store import FileStore
from tests.engine.test_activation_checkpointing import AroundBlocks, Noisy, NonReentrant, Reentrant
from tests.kit import models
from tests.kit.grids import pairs
from tests.kit.ranks import RankPool
from tests.kit.training import Case, share_of
from tests.offload.activation_stores import MemoryStore

BUDGET = 17_000  # the logits have 16856 bytes, any other saved activation 1232 to 3696

GPT = Case(models.tiny_gpt, models.token_batch, steps=2)
RUNS = pairs(("shared_memory", "sockets"), (0, 3), (0, 1, 2), (1, 2))  # transport, stage, every, accumulation


class Recurrent(nn.Module):
    """A model whose weights are used many times in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(models.VOCAB, 22)
        self.cell = nn.LSTMCell(22, 22)
        self.head = nn.Linear(22, models.VOCAB)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        state = None
        outputs = []
        for x in self.embedding(ids).unbind(1):
            state = self.cell(x, state)
            outputs.append(self.head(state[0]))
        return nn.functional.cross_entropy(torch.stack(outputs, 1).flatten(0, 1), targets.flatten())


def open_store(folder: str | None) -> Any:
    return MemoryStore() if folder is None else FileStore(folder, 0)


def offload_of(engine: lowtide.Engine, store: Any) -> ActivationOffload:
    groups = [group.full for unit in engine._runner.passes.units for group in unit.groups]
    return ActivationOffload(store, 256, BUDGET, in_storages_of([*groups, *engine.module.buffers()]))


def train(case: Case, offloads: bool, folder: str | None) -> tuple[list[float], list[Tensor], dict[str, Tensor]]:
    """(losses, the gradient shards of the last step, the final state on rank 0) on every rank."""
    torch.manual_seed(0)
    engine = lowtide.initialize(case.build(), case.as_config())
    store = open_store(folder)
    offload = offload_of(engine, store)
    losses: list[float] = []
    gradients: list[Tensor] = []
    for step in range(case.steps):
        batch = share_of(case.global_batch(step, engine.world_size))
        for parts in zip(*(tensor.chunk(case.accumulation) for tensor in batch), strict=True):
            with offload if offloads else contextlib.nullcontext():
                loss = engine(*parts)
            engine.backward(loss)
            losses.append(loss.item())
        gradients = [gradient.shard.clone() for gradient in engine._steps.gradients if gradient.shard is not None]
        del loss
        engine.step()
    if offloads:
        assert offload.offloaded_bytes > 0 and 0 < offload.peak_resident_bytes <= BUDGET
    offload.close()
    assert store.bytes_held == offload.resident_bytes == 0
    store.close()
    state = engine.state_dict()
    engine.close()
    return losses, gradients, state


def differences(cases: Iterable[Case], folder: str | None) -> list[str]:
    found = []
    for case in cases:
        (losses, gradients, state), other = train(case, False, None), train(case, True, folder)
        same = losses == other[0] and len(gradients) == len(other[1]) > 0 and list(state) == list(other[2])
        same = same and all(map(torch.equal, gradients, other[1]))
        same = same and all(torch.equal(value, other[2][name]) for name, value in state.items())
        if not same:
            found.append(repr(case))
    return found


@pytest.mark.parametrize(("transport", "in_file"), [("shared_memory", True), ("sockets", False)])
def test_two_ranks_train_the_same(ranks: RankPool, transport: str, in_file: bool, tmp_path: Path) -> None:
    cases = [
        GPT.at(
            stage,
            accumulation=a,
            config={"communication": {"transport": its}, "activation_checkpointing": {"every": n}},
        )
        for its, stage, n, a in RUNS
        if its == transport
    ]
    assert ranks(2, differences, cases, str(tmp_path) if in_file else None) == [[], []]


def test_models_of_all_kinds_train_the_same(ranks: RankPool) -> None:
    kinds = [Noisy, Reentrant, NonReentrant, AroundBlocks, Recurrent, models.tied_gpt]
    sockets = {"communication": {"transport": "sockets"}}
    cases = [replace(GPT, build=build).at(3 - 3 * (n % 2), config=sockets) for n, build in enumerate(kinds)]
    assert ranks(2, differences, cases, None) == [[], []]


def test_bfloat16_trains_the_same(ranks: RankPool) -> None:
    assert ranks(2, differences, [GPT.at(3, config={"bf16": {"enabled": True}})], None) == [[], []]


def two_engines() -> list[list[float]]:
    """Two trainings, step by step in turn; first without offload and then with it."""
    results = []
    for offloads in (False, True):
        engines, losses = [], []
        for seed in (0, 1):
            torch.manual_seed(seed)
            engine = lowtide.initialize(models.tiny_gpt(), GPT.at(3).as_config())
            engines.append((engine, offload_of(engine, MemoryStore())))
        for step in range(3):
            graphs = []
            for engine, offload in engines:
                with offload if offloads else contextlib.nullcontext():
                    graphs.append(engine(*share_of(GPT.global_batch(step, engine.world_size))))
            for (engine, _), loss in zip(engines, graphs, strict=True):
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
        for engine, _ in engines:
            engine.close()
        results.append(losses)
    return results


def test_two_engines_train_the_same(ranks: RankPool) -> None:
    for without, with_offload in ranks(2, two_engines):
        assert without == with_offload


def step_after_failures() -> tuple[list[float], list[float]]:
    """The losses of three steps, and of three steps with a failure in forward and one in backward between them."""
    results = []
    for fails in (False, True):
        torch.manual_seed(0)
        engine = lowtide.initialize(models.tiny_gpt(), GPT.at(3).as_config())
        store = MemoryStore()
        offload = offload_of(engine, store)
        losses = []
        for step in range(3):
            batch = share_of(GPT.global_batch(step, engine.world_size))
            if fails and step:
                store.failing.add("save" if step == 1 else "load")
                with pytest.raises(OffloadError), offload:
                    engine.backward(engine(*batch))
                store.failing.clear()
                engine._steps.forget()
            with offload:
                loss = engine(*batch)
            engine.backward(loss)
            losses.append(loss.item())
            engine.step()
        engine.close()
        results.append(losses)
    return results[0], results[1]


def test_the_step_after_a_failed_one_is_the_same(ranks: RankPool) -> None:
    for without, with_failures in ranks(2, step_after_failures):
        assert without == with_failures
