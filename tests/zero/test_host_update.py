"""Parameters that are on a device and states that are not: the update on the host gives the numbers of the plain one.

There is no device here: `apart.py` says how the host is made to be one.
"""

import re
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import lowtide
from lowtide.offload import HostPool
from lowtide.zero.host_update import HostUpdate
from tests.engine.saving import Continuation, load_and_go_on, save_and_go_on
from tests.kit.grids import pairs
from tests.kit.models import mlp, short_gpt, tied_gpt, tiny_gpt, token_batch, vector_batch
from tests.kit.ranks import RankPool
from tests.kit.training import ADAMW, Case, share_of
from tests.zero.apart import LateCopies, apart, model_apart, train_both_ways

GPT = Case(short_gpt, token_batch, accumulation=2, clip=0.5, steps=2)
BLOCKS = [  # for parameters, which come and go block by block
    Case(tiny_gpt, token_batch, accumulation=2, clip=0.5, steps=2),
    Case(tied_gpt, token_batch, accumulation=3, steps=2),
    Case(mlp, vector_batch),
]
BF16 = {"bf16": {"enabled": True}}


def on_native(case: Case, **zero: Any) -> Case:
    """With the collectives that a device has: no one copy of the parameters for all ranks of a host."""
    zero = {**case.config.get("zero_optimization", {}), **zero}
    return case.at(case.stage, config={"communication": {"transport": "native"}, "zero_optimization": zero})


def pair(case: Case, folder: Path, device: str, params: bool = False, **changes: Any) -> tuple[Case, Case]:
    """(in memory, with states elsewhere). params: and the parameters."""
    place = {"device": device, **({"nvme_path": str(folder)} if device == "nvme" else {})}
    moved = {"offload_optimizer": {**place, **changes}, **({"offload_param": place} if params else {})}
    return on_native(case), on_native(case, **moved)


def assert_same(ranks: RankPool, world_size: int, cases: list[tuple[Case, Case]]) -> None:
    for index, (plain, moved) in enumerate(ranks(world_size, train_both_ways, cases)[0]):
        assert moved.differences(plain) == [], (world_size, index, cases[index][1].config)


def assert_pairs_same(ranks: RankPool, cases: list[tuple[int, tuple[Case, Case]]]) -> None:
    """cases: each with its number of ranks."""
    for size in (1, 2):
        assert_same(ranks, size, [one for its, one in cases if its == size])


def test_every_stage(ranks: RankPool, tmp_path: Path) -> None:
    grid = pairs((1, 2), range(4), ("cpu", "nvme"), ({}, BF16))
    cases = [(size, pair(GPT.at(stage, config=bf16), tmp_path, device)) for size, stage, device, bf16 in grid]
    assert_pairs_same(ranks, cases)


def test_parameters_too(ranks: RankPool, tmp_path: Path) -> None:
    grid = pairs((1, 2), BLOCKS, ("cpu", "nvme"), ({}, BF16))
    cases = [(size, pair(case.at(3, config=bf16), tmp_path, device, True)) for size, case, device, bf16 in grid]
    assert_pairs_same(ranks, cases)


def test_parameters_alone(ranks: RankPool, tmp_path: Path) -> None:
    cpu, nvme = {"device": "cpu"}, {"device": "nvme", "nvme_path": str(tmp_path)}
    recomputed = {"activation_checkpointing": {"every": 1}}
    cases = [(BLOCKS[0].at(3, config=config), place) for config, place in ((BF16, nvme), (recomputed, cpu))]
    assert_same(ranks, 2, [(on_native(case), on_native(case, offload_param=place)) for case, place in cases])


def test_a_share_of_the_shards(ranks: RankPool, tmp_path: Path) -> None:
    case = BLOCKS[0].at(3)
    cases = [
        pair(case.at(1, config=BF16), tmp_path, "cpu", ratio=0.75),
        pair(case, tmp_path, "nvme", params=True, ratio=0.3),
    ]
    assert_same(ranks, 2, cases)


def test_updates_in_backward(ranks: RankPool, tmp_path: Path) -> None:
    """Of parameters that are elsewhere in float32, and of those that are there in bfloat16."""
    forms = [(Case(short_gpt, token_batch, 3), True), (Case(short_gpt, token_batch, 3, config=BF16), False)]
    cases = []
    for (case, params), place in zip(forms, ("cpu", "nvme"), strict=True):
        in_backward = case.at(3, steps=2, config={"zero_optimization": {"update_in_backward": True}})
        cases.append(pair(in_backward, tmp_path, place, params))
    for number, (clip, place) in enumerate(((0.05, "nvme"), (0.05, "cpu"))):
        case, params = forms[number % 2]
        cases.append(pair(case.at(3, clip=clip), tmp_path, place, params, overlap="speculative"))
    assert_same(ranks, 2, cases)


def test_float16_with_steps_that_overflow(ranks: RankPool, tmp_path: Path) -> None:
    config = {"fp16": {"enabled": True, "initial_scale_power": 17, "hysteresis": 1}}
    cases = [pair(Case(short_gpt, token_batch, stage, config=config, steps=5), tmp_path, "cpu") for stage in (1, 3)]
    for plain, moved in ranks(2, train_both_ways, cases)[0]:
        assert True in plain.skipped and False in plain.skipped
        assert list(map(str, moved.norms)) == list(map(str, plain.norms))  # nan where a step was skipped
        assert [name for name in moved.differences(plain) if name != "norms"] == []


def test_delayed_updates(ranks: RankPool, tmp_path: Path) -> None:
    """The same as those beside which nothing is on a device."""
    cases = []
    for stage, config, device in ((0, {}, "nvme"), (3, BF16, "cpu")):
        _, moved = pair(GPT.at(stage, config=config), tmp_path, device, overlap="delayed", delay_after_steps=1)
        cases.append((moved.at(stage, steps=3),) * 2)
    assert_same(ranks, 2, cases)


def test_hybrid_sharding(ranks: RankPool, tmp_path: Path) -> None:
    config = {"zero_optimization": {"shard_size": 2}, **BF16}
    assert_same(ranks, 4, [pair(GPT.at(3, config=config), tmp_path, "cpu", True)])


def test_a_pipeline_with_tied_weights(ranks: RankPool, tmp_path: Path) -> None:
    config = {"parallel": {"pipeline": 2}, "pipeline": {"schedule": "1f1b", "microbatches": 2}}
    case = Case(tied_gpt, token_batch, accumulation=2, clip=0.5, steps=2, config=config)
    assert_same(ranks, 4, [pair(case.at(3), tmp_path, "cpu")])


def there_and_back(plain: Case, moved: Case, folder: Path) -> list[Continuation]:
    """Saved by each of them, and then by each of them what the other one has saved."""
    return [
        save_and_go_on(plain, folder / "plain", 2, "a"),
        apart(save_and_go_on, moved, folder / "apart", 2, "a"),
        load_and_go_on(plain, folder / "apart", 2, "a"),
        apart(load_and_go_on, moved, folder / "plain", 2, "a"),
    ]


def test_checkpoints_go_to_the_host_and_back(ranks: RankPool, tmp_path: Path) -> None:
    plain, moved = pair(GPT.at(3, config=BF16), tmp_path / "nvme", "nvme", params=True)
    saved, *others = ranks(2, there_and_back, plain, moved, tmp_path)[0]
    assert [other.differences(saved) for other in others] == [[]] * 3


def bytes_by_place(config: dict[str, Any]) -> tuple[int, int, int]:
    """After a step: optimizer bytes on the device, those on the host, and bytes of gradients anywhere."""
    engine = lowtide.initialize(tiny_gpt(), config)
    engine.train_step(share_of(token_batch(0, 2 * engine.world_size)))
    memory = engine.memory()
    found = memory.optimizer_bytes, engine.optimizer.offloaded_bytes, memory.gradient_bytes
    engine.close()
    return found


@pytest.mark.parametrize(("ratio", "low", "high"), [(1.0, 1.0, 1.0), (0.5, 0.3, 0.7)])
def test_bytes_are_where_the_config_says(ranks: RankPool, ratio: float, low: float, high: float) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "steps_per_print": 0,
        "optimizer": ADAMW,
        "bf16": {"enabled": True},
        "communication": {"transport": "native"},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": ratio}},
    }
    for on_device, on_host, gradients in ranks(2, apart, bytes_by_place, config):
        assert low <= on_host / (on_device + on_host) <= high
        if ratio == 1.0:
            assert gradients == 0  # the host's buffers are there for the next step, and nothing on the device


def test_at_most_two_gradients_are_on_their_way() -> None:
    pool = HostPool(pinned=False)
    host = HostUpdate(LateCopies(), pool)
    arrived: list[int] = []
    shards = [torch.full((1024,), float(index)) for index in range(5)]
    totals = [host.take(shard, None, partial(arrived.append, index)) for index, shard in enumerate(shards)]
    assert arrived == [0, 1, 2]
    again = host.take(torch.ones(1024), totals[0], None)
    assert again is totals[0] and arrived == [0, 1, 2, 3]
    host.arrive(4)  # there already: what left later is not waited for
    assert arrived == [0, 1, 2, 3]
    host.arrive()
    assert arrived == [0, 1, 2, 3, 4] and [float(total[-1]) for total in totals] == [1, 1, 2, 3, 4]
    for total in totals:
        host.give(total)
    assert pool.bytes_in_use == 0


def test_a_caller_s_own_optimizer_stays_on_the_device() -> None:
    expected = 'offload_optimizer.device: "cpu" needs an optimizer of the config'
    with model_apart(), pytest.raises(ValueError, match=re.escape(expected)) as caught:
        zero = {"offload_optimizer": {"device": "cpu"}}
        lowtide.initialize(mlp(), {"zero_optimization": zero}, optimizer=torch.optim.RMSprop)
    assert str(caught.value).endswith('set "none"')


@pytest.mark.parametrize("is_pinned", [False, True])
def test_memory_is_pinned_as_the_config_says(monkeypatch: pytest.MonkeyPatch, is_pinned: bool) -> None:
    pin = Mock()
    monkeypatch.setattr("lowtide.engine.blueprint.offload.host_is_pinned", lambda device: True)
    monkeypatch.setattr("lowtide.offload.host_memory._has_driver", lambda: True)
    monkeypatch.setattr("lowtide.offload.host_memory._pin", pin)
    monkeypatch.setattr("lowtide.offload.host_memory._unpin", Mock())
    with model_apart():
        place = {"device": "cpu", "pin_memory": is_pinned}
        zero = {"stage": 3, "offload_optimizer": place, "offload_param": place}
        engine = lowtide.initialize(mlp(), {"optimizer": ADAMW, "steps_per_print": 0, "zero_optimization": zero})
        engine.train_step(vector_batch(0, 1))
        engine.close()
    assert pin.called == is_pinned


@pytest.mark.parametrize("overlap", ["none", "delayed"])
def test_two_backwards_before_a_step_add_up(overlap: str) -> None:
    """Each of two losses has its own backward, at the boundary."""
    offload = {"device": "cpu", "overlap": overlap, **({"delay_after_steps": 0} if overlap == "delayed" else {})}
    for stage in (0, 2, 3):
        with model_apart():
            config = {
                "train_micro_batch_size_per_gpu": 1,
                "optimizer": {"type": "sgd", "params": {"lr": 1.0}},
                "zero_optimization": {"stage": stage, "offload_optimizer": offload},
            }
            with lowtide.initialize(torch.nn.Linear(3, 1, bias=False), config) as engine:
                for place in range(2):
                    inputs = torch.zeros(1, 3)
                    inputs[0, place] = 10.0**place
                    engine.backward(engine(inputs).sum())
                assert engine.step().grad_norm.item() == pytest.approx(101**0.5)
