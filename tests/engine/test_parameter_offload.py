"""Stage 3 with shards that rest in a file gives the numbers of stage 3 in memory, with little of the model there."""

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lowtide
from lowtide.zero.group import ShardedGroup
from tests.engine.saving import load_and_go_on, save_and_go_on
from tests.kit.models import TinyGPT, mlp, tied_gpt, tiny_gpt, token_batch, vector_batch
from tests.kit.ranks import RankPool
from tests.kit.training import ADAMW, Case, share_of, train_all

TWO_BLOCKS = partial(TinyGPT, layers=2)
CASES = {
    "tiny_gpt": Case(tiny_gpt, token_batch, stage=3, steps=2, accumulation=2, clip=0.5),
    "tied_gpt": Case(tied_gpt, token_batch, stage=3, steps=2),
    "mlp": Case(mlp, vector_batch, stage=3),
    "bf16": Case(TWO_BLOCKS, token_batch, stage=3, steps=2, config={"bf16": {"enabled": True}}),
    "checkpointing": Case(TWO_BLOCKS, token_batch, stage=3, steps=2, config={"activation_checkpointing": {"every": 1}}),
    "no prefetch": Case(
        TWO_BLOCKS, token_batch, stage=3, steps=2, config={"zero_optimization": {"stage3_prefetch_bucket_size": 0}}
    ),
    "update in backward": Case(
        TWO_BLOCKS, token_batch, stage=3, steps=2, config={"zero_optimization": {"update_in_backward": True}}
    ),
    "hybrid": Case(TWO_BLOCKS, token_batch, stage=3, steps=2, config={"zero_optimization": {"shard_size": 2}}),
}


AS_FIRST = ("checkpointing", "no prefetch", "update in backward")


def offloaded(case: Case, folder: Path, states_too: bool = False, **changes: Any) -> Case:
    place = {"device": "nvme", "nvme_path": str(folder)}
    zero = {**case.config.get("zero_optimization", {}), "offload_param": place, **changes}
    if states_too:
        zero["offload_optimizer"] = place
    return case.at(3, config={"zero_optimization": zero, "communication": {"transport": "auto"}})


def on_sockets(case: Case) -> Case:
    return case.at(3, config={"communication": {"transport": "sockets"}})


@pytest.mark.parametrize(
    ("world_size", "names"), [(1, ["tiny_gpt"]), (2, [name for name in CASES if name != "hybrid"]), (4, ["hybrid"])]
)
def test_it_is_bitwise_the_run_in_memory(ranks: RankPool, tmp_path: Path, world_size: int, names: list[str]) -> None:
    """Every other one with its states. Of those that differ in what changes no bit, the first one's are all's."""
    moved = [offloaded(CASES[name], tmp_path, states_too=number % 2 == 0) for number, name in enumerate(names)]
    in_memory = [name for name in names if name not in AS_FIRST[1:]]
    outcomes = ranks(world_size, train_all, [*(on_sockets(CASES[name]) for name in in_memory), *moved])[0]
    plain = dict(zip(in_memory, outcomes, strict=False))
    for name, other in zip(names, outcomes[len(in_memory) :], strict=True):
        assert other.differences(plain[AS_FIRST[0] if name in AS_FIRST else name]) == [], name


def live_elements(config: dict[str, Any], steps: int) -> tuple[int, int, list[float]]:
    """(elements of the model, the most of them that were in memory at once, losses); looked at at every gather."""
    torch.manual_seed(0)
    engine = lowtide.initialize(tiny_gpt(), config)
    groups = [group for unit in engine._runner.passes.units for group in unit.groups]
    total = sum(group.layout.padded_numel for group in groups)
    highest = 0

    gather = ShardedGroup.gather

    def gather_and_look(self: ShardedGroup) -> None:
        nonlocal highest
        gather(self)
        highest = max(highest, sum(group.full_bytes for group in groups) // 4)

    ShardedGroup.gather = gather_and_look  # type: ignore[method-assign]
    try:
        batches = [share_of(token_batch(step, 2 * engine.world_size)) for step in range(steps)]
        losses = [engine.train_step(batch).loss.item() for batch in batches]
    finally:
        ShardedGroup.gather = gather  # type: ignore[method-assign]
    engine.close()
    return total, highest, losses


def test_a_model_several_times_its_budget_trains(ranks: RankPool, tmp_path: Path) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "steps_per_print": 0,
        "optimizer": ADAMW,
        "zero_optimization": {
            "stage": 3,
            "units": ["blocks.?", "embedding", "head"],
            "stage3_max_live_parameters": 0,
            "offload_param": {"device": "nvme", "nvme_path": str(tmp_path)},
        },
    }
    losses = []
    for budget in (0, None):
        config["zero_optimization"]["stage3_max_live_parameters"] = budget  # type: ignore[index]
        total, highest, found = ranks(2, live_elements, config, 3)[0]
        losses.append(found)
        if budget == 0:  # the unit in use, and the rest: the table of positions and the last norm
            assert highest * 3 < total, (highest, total)
    assert losses[0] == losses[1]


def order_of_gathers(config: dict[str, Any]) -> list[str]:
    """What begins in a forward, one after the other: blocks, and the messages of gathers."""
    torch.manual_seed(0)
    model = tiny_gpt()
    engine = lowtide.initialize(model, config)
    found: list[str] = []
    for index, block in enumerate(model.get_submodule("blocks").children()):
        block.register_forward_pre_hook(lambda module, args, index=index: found.append(f"forward {index}"))
    transport = engine._mesh.axes["shard"].transport
    plain = transport.gather

    def gather(full: Tensor, part: Tensor, what: str) -> Any:
        found.append(what)
        return plain(full, part, what)

    transport.gather = gather  # type: ignore[method-assign]  # to see its messages
    with torch.no_grad():
        engine.eval_step(token_batch(0, 2))
    engine.close()
    return found


def test_a_unit_is_gathered_while_the_one_before_it_computes(ranks: RankPool, tmp_path: Path) -> None:
    config = offloaded(CASES["tiny_gpt"], tmp_path).as_config()
    for found in ranks(2, order_of_gathers, config):
        for index in (1, 2):
            (gather,) = [at for at, what in enumerate(found) if f"blocks.{index} " in what]
            assert gather < found.index(f"forward {index - 1}"), found


def test_checkpoints_and_exports_reach_what_rests(ranks: RankPool, tmp_path: Path) -> None:
    case = CASES["bf16"]
    moved = offloaded(case, tmp_path / "nvme", states_too=True)
    outcomes = {
        name: ranks(2, save_and_go_on, one, tmp_path / name, 2)[0]
        for name, one in (("memory", on_sockets(case)), ("file", moved))
    }
    assert outcomes["file"].losses == outcomes["memory"].losses
    for saved, world_size, one in (("memory", 2, moved), ("file", 2, on_sockets(case)), ("file", 1, moved)):
        loaded = ranks(world_size, load_and_go_on, one, tmp_path / saved, world_size)[0]
        for name, value in outcomes["memory"].restored.items():
            assert torch.equal(loaded.restored[name], value), (saved, world_size, name)
        if world_size == 2:
            assert loaded.losses == outcomes["memory"].losses, saved


def exported_and_loaded(config: dict[str, Any], folder: Path) -> list[str]:
    """Names that an export, and weights loaded from it, do not give back to the last bit."""
    torch.manual_seed(0)
    engine = lowtide.initialize(tiny_gpt(), config)
    before = engine.state_dict()
    engine.export(folder)
    with torch.no_grad(), engine.gathered(modify=True):
        for param in engine.module.parameters():
            param.fill_(3.0)
    changed = engine.state_dict()
    engine.load_weights(folder)
    after = engine.state_dict()
    engine.close()
    assert all(bool((value == 3.0).all()) for value in changed.values())
    return [name for name, value in before.items() if not torch.equal(value, after[name])]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_weights_go_out_and_come_back(ranks: RankPool, tmp_path: Path, precision: str) -> None:
    place = {"device": "nvme", "nvme_path": str(tmp_path / "nvme")}
    config = {
        "steps_per_print": 0,
        "optimizer": ADAMW,
        "bf16": {"enabled": precision == "bf16"},
        "zero_optimization": {"stage": 3, "offload_param": place, "offload_optimizer": place},
    }
    assert ranks(2, exported_and_loaded, config, tmp_path / "weights") == [[], []]


def test_shared_memory_and_offload_contradict_each_other(ranks: RankPool, tmp_path: Path) -> None:
    case = offloaded(CASES["mlp"], tmp_path).at(3, config={"communication": {"transport": "shared_memory"}})
    errors = ranks.fails(2, train_all, [case])
    assert all('found "shared_memory", with a copy of all parameters' in str(e) for e in errors)


def test_a_folder_that_cannot_be_made_names_rank_and_cause(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    case = offloaded(CASES["mlp"], tmp_path / "file" / "below")
    with pytest.raises(lowtide.OffloadError, match=r"below: rank 0 expected a writable folder, .* Not a directory"):
        lowtide.initialize(case.build(), case.as_config())


def test_no_room_on_the_disk_is_told_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        f_bavail, f_frsize = 1, 4096

    monkeypatch.setattr(os, "fstatvfs", lambda descriptor: Full)
    case = offloaded(CASES["tiny_gpt"], tmp_path)
    with pytest.raises(lowtide.OffloadError, match=r"rank 0 needs [\d,]+ bytes for .*\. Free [\d,]+ bytes, choose"):
        lowtide.initialize(case.build(), case.as_config())
