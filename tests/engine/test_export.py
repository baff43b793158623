"""engine.export: the model's own names and values as safetensors, written by every rank from its shards."""

import os
import resource
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.checkpoint.export import ExportFolder
from lowtide.checkpoint.files import CheckpointError
from lowtide.engine.archive.weights import model_files
from tests.checkpoint.making import read_by_library
from tests.engine.plain_weights import Everything, engine_of, saved_once
from tests.engine.test_hugging_face import MODELS, batch_of, config_of
from tests.kit import models
from tests.kit.ranks import RankPool, on_ranks
from tests.kit.training import Case, differences, refusal

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers")
huggingface_hub = pytest.importorskip("huggingface_hub")
safetensors_torch = pytest.importorskip("safetensors.torch")

BF16 = {"bf16": {"enabled": True}}
SOCKETS = {"communication": {"transport": "sockets"}}
HYBRID = {"zero_optimization": {"shard_size": 2}}


def export_at(
    stages: list[int], config: dict[str, Any], folder: str, steps: int = 1, **options: Any
) -> list[dict[str, Tensor]]:
    """Exports to folder/STAGE after some steps of training; returns the engine's state_dict by stage."""
    states = []
    for stage in stages:
        with engine_of(stage, config, steps=steps) as engine:
            engine.export(Path(folder) / str(stage), **options)
            states.append(engine.state_dict())
    return states


# -- values ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world_size", "config", "stages", "options"),
    [
        (2, BF16, [0, 2], {}),
        (4, {}, [3], {"shard_bytes": "20KB"}),
        (4, HYBRID | SOCKETS | BF16, [3], {}),
    ],
    ids=["2-bf16", "4-several files", "4-replicas of shards"],
)
def test_the_files_are_the_state_dict(
    ranks: RankPool,
    tmp_path: Path,
    world_size: int,
    config: dict[str, Any],
    stages: list[int],
    options: dict[str, Any],
) -> None:
    states = ranks(world_size, export_at, stages, config, str(tmp_path), **options)[0]
    for stage, state in zip(stages, states, strict=True):
        folder, expected = tmp_path / str(stage), saved_once(state)
        assert differences(read_by_library(folder), expected) == []
        if "shard_bytes" in options:
            assert len(list(folder.glob("*.safetensors"))) > 2
            model = Everything()
            huggingface_hub.load_torch_model(model, folder, strict=False)
            assert differences(saved_once(dict(model.state_dict())), expected) == []
        else:
            assert {path.name for path in folder.iterdir()} == {"model.safetensors"}
            with safetensors_torch.safe_open(folder / "model.safetensors", "pt") as file:
                found = [name for name in file.offset_keys() if expected[name].numel()]
            aligned = sorted(expected, key=lambda name: -expected[name].itemsize)  # else in the order of the model
            assert found == [name for name in aligned if expected[name].numel()]


# -- Hugging Face ---------------------------------------------------------------------------------------------------


def export_hugging_face(name: str, stage: int, config: dict[str, Any], folder: str, **options: Any) -> Any:
    """The engine's state_dict, and the configuration of the module afterwards."""
    torch.manual_seed(0)
    with lowtide.initialize(MODELS[name](), config_of(stage, "auto") | config) as engine:
        engine.train_step(batch_of(name, torch.Generator().manual_seed(engine.rank)))
        engine.export(folder, **options)
        return engine.state_dict(), engine.module.config.to_dict()  # type: ignore[union-attr, operator]


def test_the_configuration_names_the_dtype_that_was_written(ranks: RankPool, tmp_path: Path) -> None:
    _, config = ranks(2, export_hugging_face, "llama", 3, BF16, str(tmp_path), dtype="fp16")[0]
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert found.dtype == torch.float16
    assert found.config.architectures == ["LlamaForCausalLM"]
    assert config["dtype"] != "float16"  # that of the model itself has not changed
    files = {"model.safetensors", "config.json", "generation_config.json"}
    assert {path.name for path in tmp_path.iterdir()} == files


def test_a_module_with_another_kind_of_configuration_has_no_files() -> None:
    module = nn.Linear(2, 2)
    module.config = {"width": 2}  # type: ignore[assignment]
    assert model_files(module, torch.float32) == {}


# -- errors ---------------------------------------------------------------------------------------------------------


def failing(*args: object) -> None:
    raise OSError("full")


class BrokenConfig:
    def save_pretrained(self, folder: str) -> None:
        raise KeyError("rope")


class WithBrokenConfig(models.Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.config = BrokenConfig()


@on_ranks(2)
def test_an_error_of_one_rank_is_an_error_of_all_and_leaves_what_was_there(tmp_path: Path) -> None:
    """Of files that cannot grow beyond 10000 bytes on a rank; of a folder; of settings; of a model."""
    export_at([3], {}, str(tmp_path))
    (tmp_path / "file").touch()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with engine_of(3, {}, steps=0) as engine:
        for limited in (0, 1):
            if engine.rank == limited:
                resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
            text = refusal(engine.export, tmp_path / "3", kind=CheckpointError)
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            assert text.startswith(
                f"export to {tmp_path}/3 failed on rank {limited}: File too large: {tmp_path}/3/.unfinished-export/"
                f"model.safetensors. Nothing else in {tmp_path}/3 has changed."
            )
        path = f"{tmp_path}/file/out"
        text = refusal(engine.export, path, kind=CheckpointError)
        assert text.startswith(f"export to {path} failed on rank 0: Not a directory: {path}")
        bad: list[tuple[dict[str, Any], str, str]] = [
            ({"dtype": "int8"}, 'dtype: expected one of "fp32"', "found 'int8'"),
            ({"shard_bytes": "many"}, "shard_bytes: expected", "found 'many'"),
        ]
        for options, words, end in bad:
            text = refusal(engine.export, tmp_path / "out", **options)
            assert text.startswith(words) and text.endswith(end)
        with mock.patch.object(ExportFolder, "write", failing), mock.patch.object(Path, "rmdir", failing):
            assert "failed on ranks 0, 1: full" in refusal(engine.export, tmp_path / "new", kind=CheckpointError)
    case = Case(WithBrokenConfig, models.vector_batch, 3)
    with lowtide.initialize(case.build(), case.as_config()) as engine:
        text = refusal(engine.export, tmp_path / "out", kind=CheckpointError)
    assert "failed on rank 0: the model's configuration (BrokenConfig) could not be saved: 'rope'" in text
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert not (tmp_path / "out").exists()
