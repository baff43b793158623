"""engine.export: the model's own names and values as safetensors, written by every rank from its shards."""

import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.checkpoint.files import CheckpointError
from lowtide.checkpoint.safetensors_files import CHUNK_BYTES
from lowtide.engine.archive.weights import model_files
from tests.engine.plain_weights import LARGE_CONFIG, Everything, Large, differences, engine_of, export, saved_once
from tests.engine.test_hugging_face import MODELS, batch_of, config_of
from tests.kit import models
from tests.kit.ranks import RankPool
from tests.kit.resident import peak_growth
from tests.kit.training import Case

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers")
huggingface_hub = pytest.importorskip("huggingface_hub")
safetensors_torch = pytest.importorskip("safetensors.torch")

BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True}}
SOCKETS = {"communication": {"transport": "sockets"}}
HYBRID = {"zero_optimization": {"shard_size": 2}}


def loaded(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= safetensors_torch.load_file(file)
    return found


def export_at(stages: list[int], config: dict[str, Any], folder: str, **options: Any) -> list[dict[str, Tensor]]:
    """Exports to folder/STAGE after a step of training; returns the engine's state_dict by stage."""
    states = []
    for stage in stages:
        engine = engine_of(stage, config)
        export(engine, Path(folder) / str(stage), **options)
        states.append(engine.state_dict())
        engine.close()
    return states


# -- values ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world_size", "config", "stages"),
    [(1, SOCKETS, [0, 3]), (2, BF16, [0, 2, 3]), (4, {}, [1, 3]), (4, HYBRID | SOCKETS | BF16, [2, 3])],
    ids=["1-sockets", "2-bf16", "4-shared memory", "4-replicas of shards"],
)
def test_the_file_is_the_state_dict(
    ranks: RankPool, tmp_path: Path, world_size: int, config: dict[str, Any], stages: list[int]
) -> None:
    states = ranks(world_size, export_at, stages, config, str(tmp_path))[0]
    for stage, state in zip(stages, states, strict=True):
        assert differences(loaded(tmp_path / str(stage)), saved_once(state)) == []
        assert {path.name for path in (tmp_path / str(stage)).iterdir()} == {"model.safetensors"}


@pytest.mark.parametrize("shard_bytes", [3000, "20KB"])
def test_several_files_and_their_index(ranks: RankPool, tmp_path: Path, shard_bytes: int | str) -> None:
    state = ranks(2, export_at, [3], {}, str(tmp_path), shard_bytes=shard_bytes)[0][0]
    folder = tmp_path / "3"
    assert differences(loaded(folder), saved_once(state)) == []
    assert len(list(folder.glob("*.safetensors"))) > 2
    model = Everything()
    huggingface_hub.load_torch_model(model, folder, strict=False)
    assert differences(saved_once(dict(model.state_dict())), saved_once(state)) == []


def untrained(config: dict[str, Any], folder: str) -> None:
    for stage in (0, 3):
        engine = engine_of(stage, config, steps=0)
        export(engine, Path(folder) / str(stage), dtype="fp32")
        engine.close()


@pytest.mark.parametrize("config", [BF16, FP16])
def test_fp32_gives_the_master_weights(ranks: RankPool, tmp_path: Path, config: dict[str, Any]) -> None:
    ranks(2, untrained, config, str(tmp_path))
    torch.manual_seed(0)
    original = Everything()
    # What is frozen has no master weight, and buffers follow the dtype that is computed in.
    kept = {name for name, param in original.named_parameters() if param.requires_grad} | {"count", "mask"}
    half = torch.bfloat16 if config is BF16 else torch.float16
    expected = {
        name: value if name in kept else value.to(half).float() for name, value in original.state_dict().items()
    }
    for stage in ("0", "3"):
        assert differences(loaded(tmp_path / stage), saved_once(expected)) == []


def test_a_dtype_casts_what_is_floating_point(ranks: RankPool, tmp_path: Path) -> None:
    state = ranks(2, export_at, [2], {}, str(tmp_path), dtype=torch.bfloat16)[0][0]
    expected = {name: value.bfloat16() if value.is_floating_point() else value for name, value in state.items()}
    assert differences(loaded(tmp_path / "2"), saved_once(expected)) == []


def test_tensors_come_in_the_order_of_the_model(ranks: RankPool, tmp_path: Path) -> None:
    state = ranks(2, export_at, [3], {}, str(tmp_path))[0][0]
    with safetensors_torch.safe_open(tmp_path / "3/model.safetensors", "pt") as file:
        found = list(file.offset_keys())
    aligned = sorted(saved_once(state), key=lambda name: -state[name].itemsize)
    assert [name for name in found if state[name].numel()] == [name for name in aligned if state[name].numel()]


# -- Hugging Face ---------------------------------------------------------------------------------------------------


def export_hugging_face(name: str, stage: int, config: dict[str, Any], folder: str, **options: Any) -> Any:
    """The engine's state_dict, and the configuration of the module afterwards."""
    torch.manual_seed(0)
    engine = lowtide.initialize(MODELS[name](), config_of(stage, "auto") | config)
    engine.train_step(batch_of(name, torch.Generator().manual_seed(engine.rank)))
    export(engine, folder, **options)
    state, module = engine.state_dict(), engine.module
    engine.close()
    return state, module.config.to_dict()  # type: ignore[union-attr, operator]


@pytest.mark.parametrize(("name", "config"), [("llama", BF16), ("gpt2", BF16), ("mixtral", {})])
def test_from_pretrained_loads_it(ranks: RankPool, tmp_path: Path, name: str, config: dict[str, Any]) -> None:
    state, _ = ranks(2, export_hugging_face, name, 3, config, str(tmp_path), shard_bytes="20KB")[0]
    dtype = torch.bfloat16 if config else torch.float32
    # Not `.to(dtype)`, which would also round the tables of rotary embeddings.
    expected = transformers.AutoModelForCausalLM.from_config(MODELS[name]().config, dtype=dtype)
    expected.load_state_dict(state)
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(found) is type(expected)
    assert found.dtype == dtype
    assert differences(dict(found.state_dict()), dict(expected.state_dict())) == []
    tokens = torch.arange(12).view(2, 6)
    with torch.no_grad():
        assert torch.equal(found(tokens).logits, expected.eval()(tokens).logits)


def test_the_configuration_names_the_dtype_that_was_written(ranks: RankPool, tmp_path: Path) -> None:
    _, config = ranks(2, export_hugging_face, "llama", 3, BF16, str(tmp_path), dtype="fp16")[0]
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert found.dtype == torch.float16
    assert found.config.architectures == ["LlamaForCausalLM"]
    assert config["dtype"] != "float16"  # that of the model itself has not changed
    assert {path.name for path in tmp_path.iterdir()} == {
        "model.safetensors",
        "config.json",
        "generation_config.json",
    }


def test_a_module_without_such_a_configuration_has_no_files() -> None:
    module = nn.Linear(2, 2)
    assert model_files(module, torch.float32) == {}
    module.config = {"width": 2}  # type: ignore[assignment]
    assert model_files(module, torch.float32) == {}


class BrokenConfig:
    def save_pretrained(self, folder: str) -> None:
        raise KeyError("rope")


class WithBrokenConfig(models.Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.config = BrokenConfig()


# -- errors ---------------------------------------------------------------------------------------------------------


def error_of_export(folder: str, limited_rank: int | None, broken: bool = False) -> str:
    """What export says on this rank. limited_rank: the one whose files cannot grow beyond 10000 bytes."""
    build = WithBrokenConfig if broken else Everything
    engine = lowtide.initialize(build(), Case(build, models.token_batch, stage=3).as_config())
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if engine.rank == limited_rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        export(engine, folder)
    except CheckpointError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        engine.close()
    return ""


@pytest.mark.parametrize("limited_rank", [0, 1])
def test_a_full_disk_of_one_rank_is_an_error_of_all(ranks: RankPool, tmp_path: Path, limited_rank: int) -> None:
    ranks(2, export_at, [3], {}, str(tmp_path))
    folder = tmp_path / "3"
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    texts = ranks(2, error_of_export, str(folder), limited_rank)
    assert len(set(texts)) == 1
    assert texts[0].startswith(
        f"export to {folder} failed on rank {limited_rank}: File too large: {folder}/.unfinished-export/"
        f"model.safetensors. Nothing else in {folder} has changed."
    )
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_folder_that_cannot_be_made_is_an_error_of_all(ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    texts = ranks(2, error_of_export, str(tmp_path / "file/out"), None)
    expected = f"export to {tmp_path}/file/out failed on rank 0: Not a directory: {tmp_path}/file/out"
    assert all(text.startswith(expected) for text in texts)


def test_a_configuration_that_cannot_be_saved_is_an_error_of_all(ranks: RankPool, tmp_path: Path) -> None:
    texts = ranks(2, error_of_export, str(tmp_path / "out"), None, True)
    expected = "failed on rank 0: the model's configuration (BrokenConfig) could not be saved: 'rope'"
    assert all(expected in text for text in texts)
    assert not (tmp_path / "out").exists()


def wrong_settings(folder: str) -> list[str]:
    engine = engine_of(0, {}, steps=0)
    texts = []
    for options in ({"dtype": "int8"}, {"shard_bytes": "many"}):
        with pytest.raises(ValueError) as caught:
            export(engine, folder, **options)
        texts.append(str(caught.value))
    engine.close()
    return texts


def test_wrong_settings_are_refused_before_anything_is_written(ranks: RankPool, tmp_path: Path) -> None:
    for dtype, shard_bytes in ranks(2, wrong_settings, str(tmp_path / "out")):
        assert dtype.startswith('dtype: expected one of "fp32"') and dtype.endswith("found 'int8'")
        assert shard_bytes.startswith("shard_bytes: expected") and shard_bytes.endswith("found 'many'")
    assert not (tmp_path / "out").exists()


# -- memory ---------------------------------------------------------------------------------------------------------


def peak_of_export(folder: str, dtype: str) -> int:
    engine = lowtide.initialize(Large(), LARGE_CONFIG)
    peak = peak_growth(lambda: export(engine, folder, dtype=dtype))
    engine.close()
    return peak


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_memory_is_that_of_a_chunk(ranks: RankPool, tmp_path: Path, dtype: str) -> None:
    for peak in ranks(2, peak_of_export, str(tmp_path / dtype), dtype):
        assert peak <= CHUNK_BYTES + (2 << 20)  # and what the rest of Python takes
