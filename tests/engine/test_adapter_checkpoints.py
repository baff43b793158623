"""Checkpoints without the frozen parameters: 0 bytes of these, and a resume finds the base that it was trained on."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from lowtide.checkpoint.files import CheckpointError
from lowtide.checkpoint.folder import CheckpointFolder
from lowtide.engine.archive.frozen import digest_of
from tests.engine.adapted import ByHand, engine_of, run
from tests.kit.ranks import RankPool
from tests.kit.training import differences, refusal

LEFT_OUT = {"checkpoint": {"exclude_frozen_parameters": True}, "communication": {"transport": "sockets"}}
WRITTEN = {"communication": {"transport": "sockets"}}


def save(folder: str, stage: int, config: dict[str, Any]) -> list[float]:
    with engine_of(ByHand, stage, **config) as engine:
        run(engine, 0, 2)
        engine.save_checkpoint(folder)
        return run(engine, 2, 2)


def load(folder: str, stage: int, config: dict[str, Any]) -> list[float]:
    with engine_of(ByHand, stage, **config) as engine:
        engine.load_checkpoint(folder)
        return run(engine, 2, 2)


def names_in(folder: Path) -> set[str]:
    return set(CheckpointFolder(folder).open().weights.tensors)


def test_a_resume_takes_the_base_from_the_model(ranks: RankPool, tmp_path: Path) -> None:
    names = {name for name, _ in ByHand().named_parameters()}
    adapters = {name for name in names if "lora_" in name}
    losses = ranks(2, save, str(tmp_path / "part"), 3, LEFT_OUT)[0]
    assert names_in(tmp_path / "part") == adapters  # of the base: 0 bytes
    assert set(CheckpointFolder(tmp_path / "part").open().manifest.left_out) == names - adapters
    assert ranks(2, load, str(tmp_path / "part"), 3, LEFT_OUT)[0] == losses
    assert load(str(tmp_path / "part"), 0, WRITTEN) == pytest.approx(losses, rel=1e-6)  # one rank, in this process
    ranks(2, save, str(tmp_path / "all"), 3, WRITTEN)
    assert names_in(tmp_path / "all") == names


def test_another_base_is_an_error(tmp_path: Path) -> None:
    save(str(tmp_path), 0, LEFT_OUT)
    with engine_of(ByHand, 0, **LEFT_OUT) as engine:
        weight = engine.module.head.weight
        with engine.gathered(weight, modify=True), torch.no_grad():
            weight[0, 0] += 1
        before = engine.state_dict()
        text = refusal(engine.load_checkpoint, tmp_path, kind=CheckpointError)
        assert differences(engine.state_dict(), before) == []
    assert "The checkpoint has no frozen parameters (checkpoint.exclude_frozen_parameters): load the base" in text
    assert "frozen parameter 'head.weight' differs from the checkpoint's base model" in text
    assert "Nothing was changed." in text


def test_a_base_is_compared_in_the_type_that_was_saved(tmp_path: Path) -> None:
    half, single = LEFT_OUT | {"bf16": {"enabled": True}}, LEFT_OUT
    save(str(tmp_path / "half"), 0, half)
    load(str(tmp_path / "half"), 0, single)  # its values round to what was saved
    save(str(tmp_path / "single"), 0, single)
    text = refusal(load, str(tmp_path / "single"), 0, half, kind=CheckpointError)
    assert "base model: torch.bfloat16 here, torch.float32 there. The" in text


def change_or_load_and_save(folder: str, loads: bool) -> list[str]:
    """What only a checkpoint has is in the next one too."""
    with engine_of(ByHand, 3, **LEFT_OUT) as engine:
        if loads:
            engine.load_checkpoint(folder)
        else:
            with engine.gathered(modify=True), torch.no_grad():  # all are shown, one is changed
                engine.module.head.weight.mul_(1.5)
        run(engine, int(loads), 1)
        engine.save_checkpoint(folder)
        return sorted(engine._archive.frozen.by_hand)


def test_what_was_changed_by_hand_is_written(ranks: RankPool, tmp_path: Path) -> None:
    for loads in (False, True):
        assert ranks(2, change_or_load_and_save, str(tmp_path), loads)[0] == ["head.weight"]
        assert [name for name in names_in(tmp_path) if "lora_" not in name] == ["head.weight"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8])
def test_a_digest_is_a_sum_of_its_parts(dtype: torch.dtype) -> None:
    values = (torch.randn(300_000, generator=torch.Generator().manual_seed(1)) * 50).to(dtype)
    whole = digest_of(values, 0, dtype)
    cuts = [0, 3, 4096, 4099, 9000, 290_000, 300_000]
    assert sum(digest_of(values[low:high], low, dtype) for low, high in pairwise(cuts)) % (1 << 64) == whole
    swapped = values.clone()
    swapped[[5000, 5001]] = swapped[[5001, 5000]] + 1
    assert digest_of(swapped, 0, dtype) != whole
