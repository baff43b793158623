"""What DeepSpeed has saved goes on here."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import lowtide.deepspeed as deepspeed
from lowtide.bin.checkpoint import main
from lowtide.checkpoint.files import CheckpointError, NoCheckpointError
from lowtide.deepspeed.checkpoint_files import load_pickle, read_deepspeed
from lowtide.deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from tests.integrations.deepspeed.scripts import DATA, batches, engine_of, layers
from tests.kit.ranks import RankPool


@pytest.fixture
def imported(tmp_path: Path) -> Any:
    def run(name: str) -> Path:
        assert main(["import", str(DATA / name), str(tmp_path / name)]) == 0
        return tmp_path / name

    return run


def gone_on(folder: Path, stage: int, others: dict[str, Any]) -> dict[str, Any]:
    engine = engine_of(stage, **others)
    path, client_state = engine.load_checkpoint(folder)
    param = engine.module.b[1].weight
    found = {
        "path": path,
        "client_state": client_state,
        "weight": safe_get_full_fp32_param(param),
        "exp_avg": safe_get_full_optimizer_state(param, "exp_avg"),
        "exp_avg_sq": safe_get_full_optimizer_state(param, "exp_avg_sq"),
        "counters": (engine.global_steps, engine.micro_steps, engine.global_samples),
        "schedule": engine.lr_scheduler.state_dict(),
    }
    for x, y in batches(7, 2):
        engine.backward(engine(x, y))
        engine.step()
    found["after"] = safe_get_full_fp32_param(param)
    engine.destroy()
    return found


@pytest.mark.parametrize(("name", "stage", "others"), [("stage0", 3, {}), ("stage3", 1, {}), ("stage3", 2, {})])
def test_masters_moments_and_counters_are_taken_over(
    ranks: RankPool, imported: Any, name: str, stage: int, others: dict[str, Any]
) -> None:
    saved = read_deepspeed(DATA / name)
    for found in ranks(2, gone_on, imported(name), stage, others):
        assert found["path"].endswith("global_step12")
        assert found["client_state"] == {"epoch": 3}
        assert found["counters"] == (12, 24, 192)
        assert found["schedule"] == {"last_batch_iteration": 11}
        assert torch.equal(found["weight"], saved.weights["b.1.weight"])
        for state in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(found[state], saved.states["b.1.weight"][state])
        # The 13th update is Adam's with these moments, clipped to a norm of 1: no element moves by more than the rate.
        moved = (found["after"] - found["weight"]).abs().max()
        assert 0 < moved < 0.02


def test_stages_have_the_same_values() -> None:
    """Of one training, saved by DeepSpeed at two stages."""
    first, second = (read_deepspeed(DATA / name) for name in ("stage0", "stage3"))
    assert first.weights.keys() == second.weights.keys()
    for name, value in first.weights.items():
        torch.testing.assert_close(value, second.weights[name], atol=1e-6, rtol=0)
        for state, values in first.states[name].items():
            torch.testing.assert_close(values, second.states[name][state], atol=1e-6, rtol=0)


def test_masters_of_bf16_are_float32() -> None:
    found = read_deepspeed(DATA / "stage2_bf16", "global_step12")
    assert set(found.compute_dtypes.values()) == {torch.bfloat16}
    assert {value.dtype for value in found.weights.values()} == {torch.float32}
    assert not torch.equal(found.weights["a.weight"], found.weights["a.weight"].bfloat16().float())
    assert found.num_updates == 12


def weights_of_layers(folder: Path) -> Any:
    model = layers()
    config = {"train_batch_size": 2, "optimizer": {"type": "Adam", "params": {"lr": 1e-3}}}
    engine, *_ = deepspeed.initialize(model=model, config={**config, "gradient_accumulation_steps": 2})
    path, _ = engine.load_checkpoint(folder, load_module_only=True)
    found = engine.module_state_dict()
    engine.destroy()
    return found if path is not None else None


def test_layers_of_a_pipeline_are_taken_over(
    ranks: RankPool, imported: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = read_deepspeed(DATA / "pipeline")
    found = ranks(2, weights_of_layers, imported("pipeline"))[0]
    assert "no optimizer states: load only the weights" in capsys.readouterr().out
    assert found.keys() == saved.weights.keys()
    assert all(torch.equal(found[name], value) for name, value in saved.weights.items())


def test_what_zero_to_fp32_has_written_becomes_safetensors(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    values = {"a.weight": torch.randn(3, 5), "a.bias": torch.randn(7)}
    (tmp_path / "theirs").mkdir()
    torch.save(values, tmp_path / "theirs" / "pytorch_model.bin")
    assert main(["import", str(tmp_path / "theirs"), str(tmp_path / "ours")]) == 0
    found = load_file(tmp_path / "ours" / "model.safetensors")
    assert all(torch.equal(found[name], value) for name, value in values.items())


class _Harmful:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("/tmp/lowtide-was-called"),))


def test_nothing_in_a_file_is_called(tmp_path: Path) -> None:
    torch.save({"x": _Harmful(), "y": torch.ones(2)}, tmp_path / "file.pt", pickle_module=pickle)
    Path("/tmp/lowtide-was-called").unlink(missing_ok=True)
    assert torch.equal(load_pickle(tmp_path / "file.pt")["y"], torch.ones(2))
    assert not Path("/tmp/lowtide-was-called").exists()


def test_what_is_no_checkpoint_is_told(tmp_path: Path) -> None:
    with pytest.raises(NoCheckpointError, match=r"expected a DeepSpeed checkpoint, found none. Choose one by --tag"):
        read_deepspeed(tmp_path)
    with pytest.raises(NoCheckpointError, match=r"with the tag 'x', found global_step12. Choose one by --tag"):
        read_deepspeed(DATA / "stage0", "x")
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "mp_rank_00_model_states.pt").write_text(json.dumps({}))
    with pytest.raises(CheckpointError, match=r"expected a file written by torch.save"):
        read_deepspeed(tmp_path, "t")
