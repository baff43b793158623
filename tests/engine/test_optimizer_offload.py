"""Optimizer states that rest in a file give the numbers of those in memory, to the last bit."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from tests.engine.saving import load_and_go_on, save_and_go_on
from tests.kit.models import TinyGPT, short_gpt, token_batch, vector_batch
from tests.kit.ranks import RankPool
from tests.kit.training import ADAMW, Case, Outcome, share_of, train_all

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": ADAMW,
    "sgd": {"type": "sgd", "params": {"lr": 0.1, "momentum": 0.9}},
    "lion": {"type": "lion", "params": {"lr": 1e-3}},
    "adagrad": {"type": "adagrad", "params": {"lr": 1e-2, "initial_accumulator_value": 0.5}},
}


def offloaded(case: Case, folder: Path, **changes: Any) -> Case:
    section = {"device": "nvme", "nvme_path": str(folder), **changes}
    zero = {**case.config.get("zero_optimization", {}), "offload_optimizer": section}
    return case.at(case.stage, config={"zero_optimization": zero})


def pairs(case: Case, folder: Path, stages: tuple[int, ...], **changes: Any) -> list[Case]:
    return [one for stage in stages for one in (case.at(stage), offloaded(case.at(stage), folder, **changes))]


def assert_pairs_agree(outcomes: list[Outcome], what: object) -> None:
    for plain, moved in zip(outcomes[::2], outcomes[1::2], strict=True):
        assert moved.differences(plain) == [], what


@pytest.mark.parametrize(("world_size", "precision"), [(1, "bf16"), (2, "fp32")])
def test_every_stage_is_bitwise_the_run_in_memory(
    ranks: RankPool, tmp_path: Path, world_size: int, precision: str
) -> None:
    """Of which two stages have the same bits."""
    config = {"bf16": {"enabled": precision == "bf16"}}
    case = Case(partial(TinyGPT, layers=2), token_batch, accumulation=2, clip=0.5, steps=2, config=config)
    plain, moved = [case.at(0), case.at(2)], [offloaded(case.at(stage), tmp_path) for stage in range(4)]
    outcomes = ranks(world_size, train_all, [*plain, *moved])[0]
    for stage, outcome in enumerate(outcomes[2:]):
        assert outcome.differences(outcomes[stage // 2]) == [], stage


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_every_optimizer(ranks: RankPool, tmp_path: Path, name: str) -> None:
    config = {"bf16": {"enabled": True}, "optimizer": OPTIMIZERS[name]}
    cases = pairs(Case(short_gpt, token_batch, config=config), tmp_path, stages=(3,))
    assert_pairs_agree(ranks(2, train_all, cases)[0], name)


class Wide(nn.Module):
    """Layers of a width that no block of a disk divides."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.first, self.last = nn.Linear(5, width), nn.Linear(width, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return nn.functional.mse_loss(self.last(x), y)


def wide_384() -> nn.Module:
    return Wide(384)


def test_widths_that_blocks_of_a_disk_do_not_divide(ranks: RankPool, tmp_path: Path) -> None:
    case = Case(wide_384, vector_batch, config={"bf16": {"enabled": True}, "aio": {"block_size": 4096}})
    assert_pairs_agree(ranks(2, train_all, pairs(case, tmp_path, stages=(3,)))[0], "wide")


@pytest.mark.parametrize("ratio", [0.3])
def test_a_part_may_stay_in_memory(ranks: RankPool, tmp_path: Path, ratio: float) -> None:
    case = Case(wide_384, vector_batch, config={"bf16": {"enabled": True}})
    assert_pairs_agree(ranks(2, train_all, pairs(case, tmp_path, stages=(1,), ratio=ratio))[0], ratio)


def test_update_in_backward_works_with_it(ranks: RankPool, tmp_path: Path) -> None:
    case = Case(partial(TinyGPT, layers=2), token_batch, config={"zero_optimization": {"update_in_backward": True}})
    assert_pairs_agree(ranks(2, train_all, pairs(case, tmp_path, stages=(1, 3)))[0], "update in backward")


def bytes_by_place(config: dict[str, Any]) -> tuple[int, int, list[str]]:
    """(bytes in memory, bytes in the file, what the folder shows) after a step of a model of 2 x 384 x 384 weights."""
    engine = lowtide.initialize(Wide(384), config)
    engine.train_step(share_of(vector_batch(0, 2 * engine.world_size)))
    folder = Path(config["zero_optimization"]["offload_optimizer"]["nvme_path"])
    found = engine.memory().optimizer_bytes, engine.optimizer.offloaded_bytes, sorted(map(str, folder.iterdir()))
    engine.close()
    return found


@pytest.mark.parametrize(("precision", "bytes_per_element"), [("fp32", 8), ("bf16", 12)])
def test_bytes_are_where_the_config_says(
    ranks: RankPool, tmp_path: Path, precision: str, bytes_per_element: int
) -> None:
    # Of 2 ranks, 1024 elements a block: two units of 384 x 384 + 384 = 147,840, 73 blocks a shard, and the rest of
    # 5 x 384 + 384 + 3 x 384 + 3 = 3459, 2 blocks a shard. What stays in memory is rounded down to blocks.
    num_blocks = 73 + 73 + 2
    for ratio, blocks_in_file in ((1.0, num_blocks), (0.5, 37 + 37 + 1), (0.0, 0)):
        section = {"device": "nvme", "nvme_path": str(tmp_path), "ratio": ratio}
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "steps_per_print": 0,
            "optimizer": ADAMW,
            "bf16": {"enabled": precision == "bf16"},
            "zero_optimization": {"stage": 3, "offload_optimizer": section},
        }
        for in_memory, in_file, shown in ranks(2, bytes_by_place, config):
            assert in_memory + in_file == bytes_per_element * num_blocks * 1024, (ratio, in_memory, in_file)
            assert in_file == bytes_per_element * blocks_in_file * 1024
            assert shown == []  # the file has no name: it is gone with the process, however that ends


def test_a_caller_s_own_optimizer_stays_in_memory(tmp_path: Path) -> None:
    zero = {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}
    with pytest.raises(ValueError, match=r"needs an optimizer of the config .*set \"cpu\" or \"none\""):
        lowtide.initialize(TinyGPT(), {"zero_optimization": zero}, optimizer=torch.optim.RMSprop)


def test_checkpoints_go_from_a_file_to_memory_and_back(ranks: RankPool, tmp_path: Path) -> None:
    case = Case(short_gpt, token_batch, stage=3, config={"bf16": {"enabled": True}})
    moved = offloaded(case, tmp_path / "nvme", ratio=0.7)
    outcomes = {}
    for name, one in (("memory", case), ("file", moved)):
        outcomes[name] = ranks(2, save_and_go_on, one, tmp_path / name, 2)[0]
    assert outcomes["file"].losses == outcomes["memory"].losses
    for saved, world_size, one in (("memory", 2, moved), ("file", 2, case), ("file", 4, moved.at(1))):
        loaded = ranks(world_size, load_and_go_on, one, tmp_path / saved, world_size)[0]
        for name, value in outcomes["memory"].restored.items():
            assert torch.equal(loaded.restored[name], value), (saved, world_size, name)
        if world_size == 2:
            assert loaded.losses == outcomes["memory"].losses, saved
