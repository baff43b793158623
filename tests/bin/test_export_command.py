"""`lowtide export`: what engine.export would have written, from a checkpoint and without its ranks."""

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lowtide
from lowtide.bin.main import main
from lowtide.checkpoint.files import data_name, index_name
from lowtide.checkpoint.index import RankIndex
from tests.checkpoint.making import resign, write
from tests.engine.plain_weights import differences, engine_of, export, load_weights, saved_once
from tests.engine.test_hugging_face import MODELS, batch_of, config_of
from tests.kit.ranks import RankPool

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers")
safetensors_torch = pytest.importorskip("safetensors.torch")

BF16 = {"bf16": {"enabled": True}}


def save(folder: str, config: dict[str, Any]) -> dict[str, Tensor]:
    """Two checkpoints, one, two, and exports of the second, own and fp32; the engine's state_dict at the first."""
    engine = engine_of(3, config)
    engine.save_checkpoint(folder, tag="one")
    state: dict[str, Tensor] = engine.state_dict()
    engine.train_step(batch_for(engine.rank))
    engine.save_checkpoint(folder, tag="two")
    export(engine, Path(folder) / "own", shard_bytes="20KB")
    export(engine, Path(folder) / "fp32", dtype="fp32", shard_bytes="20KB")
    engine.close()
    return state


def add_model_file(name: str, content: dict[str, Any]) -> None:
    content["model_files"][name] = {}


def batch_for(rank: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(301, (2, 8), generator=torch.Generator().manual_seed(rank))
    return ids[:, :-1], ids[:, 1:]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def loaded(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= safetensors_torch.load_file(file)
    return found


@pytest.mark.parametrize(("world_size", "config"), [(1, {}), (2, BF16)], ids=["fp32-1", "bf16-2"])
def test_the_values_are_those_of_the_engine(
    ranks: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str], world_size: int, config: dict[str, Any]
) -> None:
    ranks(world_size, save, str(tmp_path), config)
    out = tmp_path / "out"
    assert main(["export", str(tmp_path), str(out), "--shard-bytes", "20KB"]) == 0
    assert differences(loaded(out), loaded(tmp_path / "own")) == []
    number = len(list(out.glob("*.safetensors")))
    size = "34.9 KB" if config else "69.8 KB"
    last_line = capsys.readouterr().out.splitlines()[-1]
    assert number > 1 and last_line == f"{out}: 35 tensors of checkpoint two, {size} in {number} files"
    assert main(["export", str(tmp_path), str(out), "--dtype", "fp32"]) == 0
    assert differences(loaded(out), loaded(tmp_path / "fp32")) == []
    assert list(contents(out)) == ["model.safetensors"]
    assert capsys.readouterr().out.endswith(", 69.8 KB in 1 file\n")


def test_an_older_checkpoint_goes_by_its_tag_or_its_path(ranks: RankPool, tmp_path: Path) -> None:
    state = ranks(2, save, str(tmp_path), {})[0]
    assert main(["export", str(tmp_path), str(tmp_path / "a"), "--tag", "one"]) == 0
    assert main(["export", str(tmp_path / "one"), str(tmp_path / "b")]) == 0
    assert differences(loaded(tmp_path / "a"), saved_once(state)) == []
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def load(path: str) -> dict[str, Tensor]:
    engine = engine_of(2, {}, seed=9)
    load_weights(engine, path)
    state: dict[str, Tensor] = engine.state_dict()
    engine.close()
    return state


@pytest.mark.parametrize("name", ["one", "."])
def test_load_weights_takes_a_checkpoint_too(ranks: RankPool, tmp_path: Path, name: str) -> None:
    first = ranks(2, save, str(tmp_path), {})[0]
    expected = loaded(tmp_path / "own") if name == "." else saved_once(first)
    assert differences(saved_once(ranks(3, load, str(tmp_path / name))[0]), expected) == []


def save_llama(folder: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    engine = lowtide.initialize(MODELS["llama"](), config_of(3, "auto"))
    engine.train_step(batch_of("llama", torch.Generator().manual_seed(engine.rank)))
    engine.save_checkpoint(folder)
    state: dict[str, Tensor] = engine.state_dict()
    engine.close()
    return state


def test_from_pretrained_loads_it(ranks: RankPool, tmp_path: Path) -> None:
    state = ranks(2, save_llama, str(tmp_path))[0]
    assert main(["export", str(tmp_path), str(tmp_path / "out"), "--dtype", "fp16"]) == 0
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(found) is type(MODELS["llama"]()) and found.generation_config is not None
    assert differences(dict(found.state_dict()), {name: value.half() for name, value in state.items()}) == []


# -- errors ---------------------------------------------------------------------------------------------------------


def test_no_checkpoint_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(tmp_path / "absent"), str(tmp_path / "out")]) == 1
    assert capsys.readouterr().err.startswith(f"lowtide export: {tmp_path}/absent: expected a folder with")


def test_names_out_of_a_checkpoint_lead_nowhere_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "in", {"w": torch.ones(3)}, "a", compute_dtypes={"w": torch.float32})
    for number, name in enumerate(("../../x.json", f"{tmp_path}/x.json", "model.safetensors.index.json")):
        write(tmp_path / "in", {"w": torch.ones(3)}, f"a{number}", compute_dtypes={"w": torch.float32})
        resign(tmp_path / "in" / f"a{number}", partial(add_model_file, name))
        assert main(["export", str(tmp_path / "in"), str(tmp_path / "out" / "deep")]) == 1
        assert "expected a file name that ends in .json, without slashes and" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"in"}
    assert main(["export", str(tmp_path / "in"), str(tmp_path / "out"), "--tag", "a"]) == 0


@pytest.mark.parametrize("content", [3, [], {"dtype": {"dtype": 3}}])
def test_a_model_configuration_may_be_odd(tmp_path: Path, content: Any) -> None:
    write(
        tmp_path / "in", {"w": torch.ones(3)}, compute_dtypes={"w": torch.float32}, model_files={"config.json": content}
    )
    assert main(["export", str(tmp_path / "in"), str(tmp_path / "out")]) == 0


@pytest.mark.parametrize("paths", [("", "out"), ("in", "")])
def test_no_path_is_not_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], paths: tuple[str, str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "in", {"w": torch.ones(3)})
    assert main(["export", *paths]) == 1
    expected = "lowtide export: expected the path of a folder (\".\" for the working directory), found ''\n"
    assert capsys.readouterr().err == expected
    assert {path.name for path in tmp_path.iterdir()} == {"in"}


def test_what_cannot_be_written_is_said(ranks: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ranks(1, save, str(tmp_path), {})
    (tmp_path / "file").touch()
    assert main(["export", str(tmp_path), str(tmp_path / "file/out")]) == 1
    assert capsys.readouterr().err.startswith("lowtide export: [Errno 20] Not a directory: ")


def test_a_damaged_checkpoint_leaves_the_earlier_export(
    ranks: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks(1, save, str(tmp_path), {})
    assert main(["export", str(tmp_path), str(tmp_path / "out")]) == 0
    before = contents(tmp_path / "out")
    data = tmp_path / "two" / data_name(0)
    damaged = bytearray(data.read_bytes())
    damaged[RankIndex.parse((tmp_path / "two" / index_name(0)).read_bytes()).rows[0].place.values_offset] ^= 1
    data.write_bytes(damaged)
    assert main(["export", str(tmp_path), str(tmp_path / "out")]) == 1
    assert "the file is altered" in capsys.readouterr().err
    assert contents(tmp_path / "out") == before


@pytest.mark.parametrize(
    ("option", "text"),
    [(["--dtype", "int8"], 'dtype: expected one of "fp32"'), (["--shard-bytes", "many"], "expected a positive number")],
)
def test_options_that_are_none_are_refused(option: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["export", "in", "out", *option])
    assert text in capsys.readouterr().err


def test_export_of_a_checkpoint_without_its_base_is_refused(tmp_path: Path, capsys: Any) -> None:
    pytest.importorskip("peft")
    from tests.engine.test_adapter_checkpoints import LEFT_OUT, save  # skips this module where it is imported above

    save(str(tmp_path), 0, LEFT_OUT)
    assert main(["export", str(tmp_path), str(tmp_path / "out")]) == 1
    assert "frozen parameters (checkpoint.exclude_frozen_parameters)" in capsys.readouterr().err


def test_averages_that_a_checkpoint_does_not_have_are_refused(tmp_path: Path, capsys: Any) -> None:
    write(tmp_path / "in", {"w": torch.ones(3)}, compute_dtypes={"w": torch.float32})
    assert main(["export", str(tmp_path / "in"), str(tmp_path / "out"), "--ema"]) == 1
    assert "expected moving averages, found none: the run has not called engine.ema()" in capsys.readouterr().err
