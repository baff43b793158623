"""Parameters that are on a device and states that are not: the update on the host gives the numbers of the plain one.

There is no device here: `apart.py` says how the host is made to be one.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import lowtide
from lowtide.offload import HostPool, OffloadError
from lowtide.zero.host_update import MAX_LEAVING, HostSum, HostUpdate
from lowtide.zero.optimizer import ShardedOptimizer
from tests.engine.saving import Continuation, load_and_go_on, save_and_go_on
from tests.kit.models import mlp, short_gpt, tied_gpt, tiny_gpt, token_batch, vector_batch
from tests.kit.ranks import RankPool
from tests.kit.training import Case, refusal, settings, trained
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


def assert_same(ranks: RankPool, cases: Sequence[tuple[int, Case, Case]]) -> None:
    """cases: numbers of ranks, and pairs."""
    for size in {size for size, *_ in cases}:
        some = [(plain, moved) for its_size, plain, moved in cases if its_size == size]
        for (_, case), (plain, moved) in zip(some, ranks(size, train_both_ways, some)[0], strict=True):
            assert list(map(str, moved.norms)) == list(map(str, plain.norms))  # nan where a step was skipped
            assert [name for name in moved.differences(plain) if name != "norms"] == [], (size, case)
            assert ("fp16" in case.config) == (True in plain.skipped) and False in plain.skipped


IN_BACKWARD = {"zero_optimization": {"update_in_backward": True}}
FORMS: list[tuple[Case, bool, dict[str, Any]]] = [  # whether parameters move too; changes of the offload section
    *((GPT.at(stage), False, {}) for stage in range(4)),
    *((case.at(3), True, {}) for case in BLOCKS),
    (BLOCKS[0].at(1), False, {"ratio": 0.75}),
    (BLOCKS[0].at(3), True, {"ratio": 0.3}),
    (Case(short_gpt, token_batch, 3, steps=2, config=IN_BACKWARD), True, {}),
    (Case(short_gpt, token_batch, 3, clip=0.05), True, {"overlap": "speculative"}),
]


def test_the_host_gives_the_numbers_of_the_device(ranks: RankPool, tmp_path: Path) -> None:
    """Each form in both places and precisions, on one rank or two."""
    cases = []
    for number, (case, params, changes) in enumerate(FORMS):
        for turn, place in enumerate(("cpu", "nvme")):
            dtype = BF16 if (number + turn) % 2 else {}
            moved = pair(case.at(case.stage, config=dtype), tmp_path, place, params, **changes)
            cases.append((1 + turn, *moved))
    assert_same(ranks, cases)


def test_parameters_alone_and_delayed_updates(ranks: RankPool, tmp_path: Path) -> None:
    """A delayed update is the same as one beside which nothing is on a device."""
    nvme = {"device": "nvme", "nvme_path": str(tmp_path)}
    alone = [(BLOCKS[0].at(3, config=BF16), nvme)]
    alone += [(BLOCKS[0].at(3, config={"activation_checkpointing": {"every": 1}}), {"device": "cpu"})]
    late: dict[str, Any] = {"overlap": "delayed", "delay_after_steps": 1}
    delayed = [pair(GPT.at(0, steps=3), tmp_path, "nvme", **late)]
    delayed += [pair(GPT.at(3, steps=3, config=BF16), tmp_path, "cpu", **late)]
    cases = [(2, on_native(case), on_native(case, offload_param=place)) for case, place in alone]
    assert_same(ranks, [*cases, *((2, moved, moved) for _, moved in delayed)])


def test_float16_hybrid_shards_and_a_pipeline_with_tied_weights(ranks: RankPool, tmp_path: Path) -> None:
    fp16 = {"fp16": {"enabled": True, "initial_scale_power": 17, "hysteresis": 1}}
    overflowing = Case(short_gpt, token_batch, 1, config=fp16, steps=5)
    hybrid = GPT.at(3, config={"zero_optimization": {"shard_size": 2}, **BF16})
    small = {"bf16": {"enabled": True, "masters": "int8"}, "data_types": {"grad_accum_dtype": "bf16"}}
    small |= {"optimizer": {"type": "adamw", "params": {"state_dtype": "int8"}}}
    piped = {"parallel": {"pipeline": 2}, "pipeline": {"schedule": "1f1b", "microbatches": 2}}
    cases = [
        (2, *pair(overflowing, tmp_path, "cpu")),
        (2, *pair(overflowing.at(3), tmp_path, "cpu")),
        (4, *pair(hybrid, tmp_path, "cpu", True)),
        *((1, *pair(GPT.at(stage, config=small), tmp_path, "cpu")) for stage in (1, 3)),
        (2, *pair(GPT.at(3, config=small), tmp_path, "cpu", overlap="speculative")),
        (4, *pair(GPT.at(3, build=tied_gpt, config=piped), tmp_path, "cpu")),
    ]
    assert_same(ranks, cases)


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


def bytes_by_place(case: Case) -> tuple[int, int, int]:
    """After a step: optimizer bytes on the device, those on the host, and bytes of gradients anywhere."""
    with trained(case, 1) as engine:
        memory = engine.memory()
        return memory.optimizer_bytes, engine.optimizer.offloaded_bytes, memory.gradient_bytes


@pytest.mark.parametrize(("ratio", "low", "high"), [(1.0, 1.0, 1.0), (0.5, 0.3, 0.7)])
def test_bytes_are_where_the_config_says(
    ranks: RankPool, tmp_path: Path, ratio: float, low: float, high: float
) -> None:
    case = pair(Case(tiny_gpt, token_batch, 2, config=BF16), tmp_path, "cpu", ratio=ratio)[1]
    for on_device, on_host, gradients in ranks(2, apart, bytes_by_place, case):
        assert low <= on_host / (on_device + on_host) <= high
        assert ratio < 1 or gradients == 0  # the host's buffers are there for the next step, none on the device


def test_sums_come_back_in_order_and_at_most_two_gradients_are_on_their_way() -> None:
    pool = HostPool(pinned=False)
    host = HostUpdate(LateCopies(), pool)
    sums = [HostSum(host, partial(torch.empty, 1024)) for _ in range(5)]
    for backward in range(3):
        for index, one in enumerate(sums):
            memory = one.open()
            assert list(host._gradients._coming) == [each._resident for each in sums[index + 1 : index + 2] if backward]
            memory.fill_(float(index)) if not backward else memory.add_(1.0)
            one.leave()
            assert len(host._gradients._leaving) <= MAX_LEAVING
    for index, one in enumerate(sums):
        assert one.total is not None
        one.arrived.wait()
        assert bool((one.total == index + 2).all())
        one.drop()
    assert pool.bytes_in_use == 0
    host.close()


def test_an_update_that_failed_is_told_where_its_parameters_are_used() -> None:
    config = settings(3, zero_optimization={"offload_optimizer": {"device": "cpu"}})
    told = r"update 1 of '.*' on the host failed: the disk. .* continue from a checkpoint \(engine.load_checkpoint\)"
    with model_apart(), lowtide.initialize(mlp(), config) as engine:
        with patch.object(ShardedOptimizer, "_change", side_effect=RuntimeError("the disk")):
            engine.train_step(vector_batch(0, 2))
            assert engine.optimizer.thread.wait() is not None
        for action in (lambda: engine.train_step(vector_batch(1, 2)), engine.state_dict):
            with pytest.raises(OffloadError, match=told):
                action()


def test_a_caller_s_own_optimizer_stays_on_the_device() -> None:
    config = settings(optimizer=None, zero_optimization={"offload_optimizer": {"device": "cpu"}})
    with model_apart():
        text = refusal(lowtide.initialize, mlp(), config, optimizer=torch.optim.RMSprop)
    assert 'offload_optimizer.device: "cpu" needs an optimizer of the config' in text and text.endswith('set "none"')


@pytest.mark.parametrize("overlap", ["none", "delayed"])
def test_two_backwards_before_a_step_add_up(overlap: str) -> None:
    """Each of two losses has its own backward, at the boundary."""
    offload = {"device": "cpu", "overlap": overlap, **({"delay_after_steps": 0} if overlap == "delayed" else {})}
    for stage in (0, 2, 3):
        config = settings(stage, train_micro_batch_size_per_gpu=1, zero_optimization={"offload_optimizer": offload})
        with model_apart(), lowtide.initialize(torch.nn.Linear(3, 1, bias=False), config) as engine:
            for inputs in torch.tensor([[[1.0, 0, 0]], [[0, 10.0, 0]]]):
                engine.backward(engine(inputs).sum())
            assert engine.step().grad_norm.item() == pytest.approx(101**0.5)
