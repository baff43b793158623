"""Checkpoints without the frozen parameters: 0 bytes of these, and a resume finds the base that it was trained on."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from lowtide.checkpoint.files import CheckpointError
from lowtide.checkpoint.folder import CheckpointFolder
from lowtide.engine.archive.frozen import digest_of
from tests.engine.adapted import engine_of, lora, run
from tests.kit.ranks import RankPool

pytest.importorskip("peft")

LEFT_OUT = {"checkpoint": {"exclude_frozen_parameters": True}, "communication": {"transport": "sockets"}}
WRITTEN = {"communication": {"transport": "sockets"}}


def save(folder: str, stage: int, config: dict[str, Any]) -> list[float]:
    with engine_of(lora, stage, **config) as engine:
        run(engine, 0, 2)
        engine.save_checkpoint(folder)
        return run(engine, 2, 2)


def load(folder: str, stage: int, config: dict[str, Any]) -> list[float]:
    with engine_of(lora, stage, **config) as engine:
        engine.load_checkpoint(folder)
        return run(engine, 2, 2)


def names_in(folder: Path) -> list[str]:
    return [name for name in CheckpointFolder(folder).open().weights.tensors if "rotary" not in name]


def test_a_resume_takes_the_base_from_the_model(ranks: RankPool, tmp_path: Path) -> None:
    losses = ranks(2, save, str(tmp_path), 3, LEFT_OUT)[0]
    checkpoint = CheckpointFolder(tmp_path).open()
    assert names_in(tmp_path) and all("lora_" in name for name in names_in(tmp_path))  # of the base: 0 bytes
    assert len(checkpoint.left_out) == sum("lora_" not in name for name, _ in lora().named_parameters())
    assert ranks(2, load, str(tmp_path), 3, LEFT_OUT)[0] == losses
    assert load(str(tmp_path), 0, WRITTEN) == pytest.approx(losses, abs=1e-6)  # one rank, in this process


def test_without_the_key_all_is_written(ranks: RankPool, tmp_path: Path) -> None:
    ranks(2, save, str(tmp_path), 3, WRITTEN)
    assert len(names_in(tmp_path)) == len(list(lora().named_parameters()))


def change_and_load(folder: str, seed: int) -> str:
    torch.manual_seed(seed)
    with engine_of(lora, 0, **LEFT_OUT) as engine:
        weight = engine.module.base_model.model.lm_head.weight
        with engine.gathered(weight, modify=True), torch.no_grad():
            weight[0, 0] += 1
        before = engine.state_dict()
        with pytest.raises(CheckpointError) as error:
            engine.load_checkpoint(folder)
        assert all(torch.equal(value, before[name]) for name, value in engine.state_dict().items())
    return str(error.value)


def test_another_base_is_an_error(tmp_path: Path) -> None:
    save(str(tmp_path), 0, LEFT_OUT)
    text = change_and_load(str(tmp_path), 0)
    assert "The checkpoint has no frozen parameters (checkpoint.exclude_frozen_parameters): load the base" in text
    assert "frozen parameter 'base_model.model.lm_head.weight' differs from the checkpoint's base model" in text
    assert "Nothing was changed." in text


def test_a_base_is_compared_in_the_type_that_was_saved(tmp_path: Path) -> None:
    half, single = LEFT_OUT | {"bf16": {"enabled": True}}, LEFT_OUT
    save(str(tmp_path / "half"), 0, half)
    load(str(tmp_path / "half"), 0, single)  # its values round to what was saved
    save(str(tmp_path / "single"), 0, single)
    with pytest.raises(CheckpointError, match=r"base model: torch.bfloat16 here, torch.float32 there. The"):
        load(str(tmp_path / "single"), 0, half)


def test_what_was_changed_by_hand_is_written(ranks: RankPool, tmp_path: Path) -> None:
    names = ranks(2, change_and_save, str(tmp_path))[0]
    assert names == ["base_model.model.lm_head.weight"]
    assert [name for name in names_in(tmp_path) if "lora_" not in name] == names
    assert ranks(2, load_and_save, str(tmp_path))[0]
    assert [name for name in names_in(tmp_path) if "lora_" not in name] == names


def change_and_save(folder: str) -> list[str]:
    with engine_of(lora, 3, **LEFT_OUT) as engine:
        with engine.gathered(modify=True), torch.no_grad():  # all are shown, one is changed
            engine.module.base_model.model.lm_head.weight.mul_(1.5)
        run(engine, 0, 1)
        engine.save_checkpoint(folder)
        return sorted(engine._archive.frozen.by_hand)


def load_and_save(folder: str) -> bool:
    """What only a checkpoint has is in the next one too."""
    with engine_of(lora, 3, **LEFT_OUT) as engine:
        engine.load_checkpoint(folder)
        run(engine, 1, 1)
        engine.save_checkpoint(folder)
        return True


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8])
def test_a_digest_is_a_sum_of_its_parts(dtype: torch.dtype) -> None:
    values = (torch.randn(300_000, generator=torch.Generator().manual_seed(1)) * 50).to(dtype)
    whole = digest_of(values, 0, dtype)
    cuts = [0, 3, 4096, 4099, 9000, 290_000, 300_000]
    parts = [digest_of(values[low:high], low, dtype) for low, high in pairwise(cuts)]
    assert sum(parts) % (1 << 64) == whole
    swapped = values.clone()
    swapped[[5000, 5001]] = swapped[[5001, 5000]] + 1
    assert digest_of(swapped, 0, dtype) != whole
