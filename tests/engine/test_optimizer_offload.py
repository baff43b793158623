"""Optimizer states and parameters that rest in files give the numbers of those in memory, to the last bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.zero.group import ShardedGroup
from tests.kit import models
from tests.kit.models import mlp, short_gpt, tiny_gpt, token_batch, vector_batch
from tests.kit.ranks import on_ranks
from tests.kit.training import Case, assert_alike, differences, refusal, start, take_step, train_all

BF16 = {"bf16": {"enabled": True}}
SOCKETS = {"communication": {"transport": "sockets"}}


def placed(case: Case, **changes: Any) -> Case:
    """The case with these keys in its section of ZeRO, and by the transport that all placements have."""
    zero = {**case.config.get("zero_optimization", {}), **changes}
    return case.at(case.stage, config={"zero_optimization": zero, "communication": {"transport": "auto"}})


def in_files(folder: Path, **changes: Any) -> dict[str, Any]:
    return {"device": "nvme", "nvme_path": str(folder), **changes}


def offloaded(case: Case, folder: Path, **changes: Any) -> Case:
    """With its states in a file."""
    zero = {**case.config.get("zero_optimization", {}), "offload_optimizer": in_files(folder, **changes)}
    return case.at(case.stage, config={"zero_optimization": zero})


def all_in_files(case: Case, folder: Path) -> Case:
    return placed(case, offload_param=in_files(folder), offload_optimizer=in_files(folder))


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


@on_ranks(2)
def test_what_rests_in_files_gives_the_bits_of_memory(tmp_path: Path) -> None:
    """What tests/laws lacks: widths that blocks of a disk do not divide, ties, empty shards."""
    wide = Case(wide_384, vector_batch, stage=3, steps=2, config={**BF16, "aio": {"block_size": 4096}})
    tied, tiny = Case(models.tied_gpt, token_batch, stage=3, steps=2), Case(mlp, vector_batch, stage=3)
    rows = [
        (wide, offloaded(wide, tmp_path)),
        (wide.at(1), offloaded(wide.at(1), tmp_path, ratio=0.3)),
        (tied, all_in_files(tied, tmp_path)),
        (tiny, placed(tiny, offload_param=in_files(tmp_path))),
    ]
    for plain, moved in rows:
        assert_alike(train_all([plain.at(plain.stage, config=SOCKETS), moved]), moved)


@on_ranks(2)
def test_weights_go_out_and_come_back(tmp_path: Path) -> None:
    with start(all_in_files(Case(short_gpt, token_batch, stage=3, config=BF16), tmp_path)) as engine:
        before = engine.state_dict()
        engine.export(tmp_path / "weights")
        with torch.no_grad(), engine.gathered(modify=True):
            for param in engine.module.parameters():
                param.fill_(3.0)
        assert all(bool((value == 3.0).all()) for value in engine.state_dict().values())
        engine.load_weights(tmp_path / "weights")
        assert differences(before, engine.state_dict()) == []


@pytest.mark.parametrize(("precision", "bytes_per_element"), [({}, 8), (BF16, 12)], ids=["fp32", "bf16"])
@on_ranks(2)
def test_bytes_are_where_the_config_says(tmp_path: Path, precision: dict[str, Any], bytes_per_element: int) -> None:
    # Of 2 ranks, 1024 elements a block: two units of 384 x 384 + 384 = 147,840, 73 blocks a shard, and the rest of
    # 5 x 384 + 384 + 3 x 384 + 3 = 3459, 2 blocks a shard. What stays in memory is rounded down to blocks.
    num_blocks = 73 + 73 + 2
    case = Case(wide_384, vector_batch, stage=3, config=precision)
    for ratio, blocks in ((1.0, num_blocks), (0.5, 37 + 37 + 1), (0.0, 0)):
        with start(offloaded(case, tmp_path, ratio=ratio)) as engine:
            take_step(engine, case, 0)
            in_file, in_memory = engine.optimizer.offloaded_bytes, engine.memory().optimizer_bytes
            assert in_file == bytes_per_element * 1024 * blocks
            assert in_file + in_memory == bytes_per_element * 1024 * num_blocks
            assert not list(tmp_path.iterdir())  # the file has no name: it is gone with the process, however that ends


def live_elements(case: Case) -> tuple[int, int, list[float]]:
    """(elements of the model, the most of them that were in memory at once, losses); looked at at every gather."""
    with start(case) as engine, pytest.MonkeyPatch.context() as patch:
        groups = [group for unit in engine._runner.passes.units for group in unit.groups]
        total, seen = sum(group.layout.padded_numel for group in groups), [0]
        gather = ShardedGroup.gather

        def gather_and_look(self: ShardedGroup) -> None:
            gather(self)
            seen.append(sum(group.full_bytes for group in groups) // 4)

        patch.setattr(ShardedGroup, "gather", gather_and_look)
        losses = [take_step(engine, case, step).loss.item() for step in range(3)]
        return total, max(seen), losses


def test_a_model_several_times_its_budget_trains(tmp_path: Path) -> None:
    units = ["blocks.?", "embedding", "head"]
    case = placed(Case(tiny_gpt, token_batch, stage=3), units=units, offload_param=in_files(tmp_path))
    total, highest, losses = live_elements(placed(case, stage3_max_live_parameters=0))
    assert highest * 3 < total, (highest, total)  # the unit in use, and the rest: the table of positions and a norm
    assert losses == live_elements(case)[2]


@on_ranks(2)
def test_a_unit_is_gathered_while_the_one_before_it_computes(tmp_path: Path) -> None:
    found: list[str] = []  # what begins in a forward, one after the other: blocks, and the messages of gathers
    with start(placed(Case(tiny_gpt, token_batch, stage=3), offload_param=in_files(tmp_path))) as engine:
        for index, block in enumerate(engine.module.get_submodule("blocks").children()):
            block.register_forward_pre_hook(lambda module, args, index=index: found.append(f"forward {index}"))
        transport = engine._mesh.axes["shard"].transport
        plain = transport.gather

        def gather(full: Tensor, part: Tensor, what: str) -> Any:
            found.append(what)
            return plain(full, part, what)

        transport.gather = gather  # type: ignore[method-assign]  # to see its messages
        engine.eval_step(token_batch(0, 2))
    for index in (1, 2):
        (gathered,) = [at for at, what in enumerate(found) if f"blocks.{index} " in what]
        assert gathered < found.index(f"forward {index - 1}"), found


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"device": "nvme", "nvme_path": "."}, 'offload_optimizer.device: "nvme" needs an optimizer of the config'),
        (
            {"device": "cpu", "overlap": "speculative"},
            '"speculative" needs an optimizer of the config, whose updates can be undone',
        ),
    ],
)
def test_a_caller_s_own_optimizer_stays_in_memory_and_is_not_taken_back(section: dict[str, Any], words: str) -> None:
    config = {"zero_optimization": {"offload_optimizer": section}}
    assert words in refusal(lowtide.initialize, mlp(), config, optimizer=torch.optim.RMSprop)


@on_ranks(2)
def test_shared_memory_and_offload_contradict_each_other(tmp_path: Path) -> None:
    case = placed(Case(mlp, vector_batch, stage=3), offload_param=in_files(tmp_path))
    text = refusal(start, case.at(3, config={"communication": {"transport": "shared_memory"}}))
    assert 'found "shared_memory", with a copy of all parameters' in text
