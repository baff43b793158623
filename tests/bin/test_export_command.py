"""`lowtide export`: what engine.export would have written, from a checkpoint and without its ranks."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lowtide.bin.main import main
from tests.checkpoint.making import write
from tests.engine import test_adapters as adapters
from tests.engine.plain_weights import differences, engine_of, export, load_weights, saved_once
from tests.kit.models import token_batch
from tests.kit.ranks import RankPool

safetensors_torch = pytest.importorskip("safetensors.torch")

Capture = pytest.CaptureFixture[str]
BF16 = {"bf16": {"enabled": True}}
FLOAT32 = {"w": torch.float32}


def save(folder: Path, config: dict[str, Any]) -> dict[str, Tensor]:
    """Two checkpoints, one, two, and exports of the second, own and fp32; the engine's state_dict at the first."""
    engine = engine_of(3, config)
    engine.save_checkpoint(folder, tag="one")
    state: dict[str, Tensor] = engine.state_dict()
    engine.train_step(token_batch(engine.rank, 2))
    engine.save_checkpoint(folder, tag="two")
    export(engine, folder / "own", shard_bytes="20KB")
    export(engine, folder / "fp32", dtype="fp32", shard_bytes="20KB")
    engine.close()
    return state


Saved = tuple[Path, dict[str, Tensor]]


@pytest.fixture(scope="module")
def saved(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """What two ranks have saved, and the state of the first checkpoint."""
    folder = tmp_path_factory.mktemp("saved")
    return folder, saved_once(ranks(2, save, folder, {})[0])


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def loaded(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= safetensors_torch.load_file(file)
    return found


def refused(capsys: Capture, *arguments: object) -> str:
    """What is said where nothing is exported."""
    capsys.readouterr()
    assert main(["export", *map(str, arguments)]) == 1
    return capsys.readouterr().err


def check_values(folder: Path, out: Path, size: str, capsys: Capture) -> None:
    assert main(["export", str(folder), str(out), "--shard-bytes", "20KB"]) == 0
    assert differences(loaded(out), loaded(folder / "own")) == []
    number = len(list(out.glob("*.safetensors")))
    last_line = capsys.readouterr().out.splitlines()[-1]
    assert number > 1 and last_line == f"{out}: 35 tensors of checkpoint two, {size} in {number} files"
    assert main(["export", str(folder), str(out), "--dtype", "fp32"]) == 0
    assert differences(loaded(out), loaded(folder / "fp32")) == []
    assert list(contents(out)) == ["model.safetensors"]
    assert capsys.readouterr().out.endswith(", 69.8 KB in 1 file\n")


def test_the_values_are_those_of_the_engine(ranks: RankPool, saved: Saved, tmp_path: Path, capsys: Capture) -> None:
    check_values(saved[0], tmp_path / "out", "69.8 KB", capsys)
    ranks(1, save, tmp_path / "bf16", BF16)
    check_values(tmp_path / "bf16", tmp_path / "out", "34.9 KB", capsys)


def test_an_older_checkpoint_goes_by_its_tag_or_its_path(saved: Saved, tmp_path: Path) -> None:
    folder, state = saved
    assert main(["export", str(folder), str(tmp_path / "a"), "--tag", "one"]) == 0
    assert main(["export", str(folder / "one"), str(tmp_path / "b")]) == 0
    assert differences(loaded(tmp_path / "a"), state) == []
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def load(paths: list[str]) -> list[dict[str, Tensor]]:
    found = []
    for path in paths:
        engine = engine_of(2, {}, seed=9)
        load_weights(engine, path)
        found.append(engine.state_dict())
        engine.close()
    return found


def test_load_weights_takes_a_checkpoint_too(ranks: RankPool, saved: Saved) -> None:
    folder, state = saved
    one, newest = ranks(3, load, [str(folder / "one"), str(folder)])[0]
    assert differences(saved_once(one), state) == []
    assert differences(saved_once(newest), loaded(folder / "own")) == []


def test_a_configuration_names_the_dtype_that_is_written(tmp_path: Path) -> None:
    config = {"dtype": "float32", "text_config": {"torch_dtype": "float32"}, "width": 3}
    files = {"config.json": config}
    write(tmp_path / "in", {"w": torch.ones(3)}, compute_dtypes=FLOAT32, model_files=files)
    assert main(["export", str(tmp_path / "in"), str(tmp_path / "out"), "--dtype", "fp16"]) == 0
    expected = {"dtype": "float16", "text_config": {"torch_dtype": "float16"}, "width": 3}
    assert json.loads((tmp_path / "out/config.json").read_text()) == expected


# -- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [3, [], {"dtype": {"dtype": 3}}])
def test_a_model_configuration_may_be_odd(tmp_path: Path, content: Any, capsys: Capture) -> None:
    files = {"config.json": content}
    write(tmp_path / "in", {"w": torch.ones(3)}, compute_dtypes=FLOAT32, model_files=files)
    assert main(["export", str(tmp_path / "in"), str(tmp_path / "out")]) == 0
    text = refused(capsys, tmp_path / "in", tmp_path / "out", "--ema")
    assert "expected moving averages, found none: the run has not called engine.ema()" in text


def test_paths_that_are_none_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "in", {"w": torch.ones(3)})
    (tmp_path / "file").touch()
    no_path = "lowtide export: expected the path of a folder (\".\" for the working directory), found ''\n"
    assert refused(capsys, "", "out") == refused(capsys, "in", "") == no_path
    absent = refused(capsys, tmp_path / "absent", "out")
    assert absent.startswith(f"lowtide export: {tmp_path}/absent: expected a folder with")
    found = "expected a folder, or a new name, found a file"
    assert refused(capsys, "in", "file") == f"lowtide export: file: {found}\n"
    assert refused(capsys, "in", "file/out") == f"lowtide export: file/out: {found} in its path\n"
    assert {path.name for path in tmp_path.iterdir()} == {"in", "file"}


def test_export_of_a_checkpoint_without_its_base_is_refused(tmp_path: Path, capsys: Capture) -> None:
    adapters.save(str(tmp_path), 0, adapters.LEFT_OUT)
    text = refused(capsys, tmp_path, tmp_path / "out")
    assert "frozen parameters (checkpoint.exclude_frozen_parameters)" in text
