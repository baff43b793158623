"""engine.load_weights: every rank reads the ranges of its own shards, and what does not fit is listed completely."""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lowtide
from lowtide.checkpoint.chunk_view import TensorInfo, TensorSource
from lowtide.checkpoint.files import CheckpointError
from lowtide.checkpoint.safetensors_files import CHUNK_BYTES
from lowtide.engine.archive import weights
from lowtide.engine.archive.weights import Match
from tests.engine.plain_weights import (
    LARGE_CONFIG,
    Everything,
    Large,
    differences,
    engine_of,
    export,
    load_weights,
    named_state,
    saved_once,
)
from tests.kit import models
from tests.kit.ranks import RankPool
from tests.kit.resident import peak_growth
from tests.kit.training import Case, share_of

safetensors_torch = pytest.importorskip("safetensors.torch")

BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 4}}
SOCKETS = {"communication": {"transport": "sockets"}}
HYBRID = {"zero_optimization": {"shard_size": 2}}


def file_of(folder: Path, seed: int, **changes: Tensor | None) -> Path:
    """Everything, built with that seed, as one file; names map to other values, or None to leave them out."""
    torch.manual_seed(seed)
    state = saved_once(dict(Everything().state_dict())) | {name.replace("__", "."): v for name, v in changes.items()}
    path = folder / "weights.safetensors"
    safetensors_torch.save_file({k: v.contiguous() for k, v in state.items() if v is not None}, path)
    return path


@contextmanager
def recorded_sources(after: Callable[[], None] = lambda: None) -> Iterator[list[TensorSource]]:
    """The sources that load_weights opens; `after` is called after each."""
    found: list[TensorSource] = []
    real = weights.open_source

    def record(path: Any) -> TensorSource:
        found.append(real(path))
        after()
        return found[-1]

    weights.open_source = record
    try:
        yield found
    finally:
        weights.open_source = real


# -- values ---------------------------------------------------------------------------------------------------------


def load_at(stages: list[int], config: dict[str, Any], path: str) -> list[dict[str, Tensor]]:
    """By stage: the state after weights were loaded into a model that had trained; further steps are possible."""
    states = []
    for stage in stages:
        engine = engine_of(stage, config, seed=5)
        batch = share_of(models.token_batch(1, 2 * engine.world_size))
        before = engine.eval_step(batch).item()
        load_weights(engine, path)
        states.append(engine.state_dict())
        assert engine.eval_step(batch).item() != before
        assert engine.train_step(batch).loss.isfinite()
        engine.close()
    return states


@pytest.mark.parametrize(
    ("world_size", "config", "stages"),
    [(1, {}, [3]), (2, {}, [0, 1]), (4, SOCKETS, [3]), (4, HYBRID, [2, 3])],
)
def test_the_state_is_that_of_the_file(
    ranks: RankPool, tmp_path: Path, world_size: int, config: dict[str, Any], stages: list[int]
) -> None:
    path = file_of(tmp_path, 3)
    torch.manual_seed(3)
    expected = dict(Everything().state_dict())
    for state in ranks(world_size, load_at, stages, config, str(path))[0]:
        assert differences(state, expected) == []


def exported_and_loaded(config: dict[str, Any], folder: str) -> list[list[str]]:
    """What differs after an export as float32 of one stage was loaded into another, trained engine."""
    found = []
    for first, second in ((0, 3), (3, 0), (2, 1)):
        path = Path(folder) / str(first)
        source = engine_of(first, config, steps=2)
        export(source, path, dtype="fp32", shard_bytes=5000)
        expected, masters = source.state_dict(), masters_of(source)
        source.close()
        target = engine_of(second, config, seed=9)
        load_weights(target, path)
        found.append(differences(target.state_dict(), expected))
        if target.world_size == 1 or first == 2:  # shards of stages 1 and 2 lie alike
            found.append(differences(masters_of(target), masters))
        target.close()
    return found


def masters_of(engine: Any) -> dict[str, Tensor]:
    """The trained values of highest precision that this rank holds, by name."""
    return {chunk_view.name: chunk_view.values.clone() for chunk_view in named_state(engine).weights()}


@pytest.mark.parametrize(("world_size", "config"), [(1, {}), (2, BF16)], ids=["fp32", "bf16"])
def test_what_was_exported_loads_again_with_its_master_weights(
    ranks: RankPool, tmp_path: Path, world_size: int, config: dict[str, Any]
) -> None:
    for found in ranks(world_size, exported_and_loaded, config, str(tmp_path)):
        assert all(names == [] for names in found)


def losses_of_two_steps(config: dict[str, Any], path: str) -> list[float]:
    """Of an engine that has begun with the values, then of those that have loaded them from the file, by stage."""
    losses = []
    for stage, loads in ((0, False), (0, True), (3, True)):
        engine = engine_of(stage, config, seed=5 if loads else 3, steps=0)
        if loads:
            load_weights(engine, path)
        for step in range(2):
            batch = share_of(models.token_batch(step, 2 * engine.world_size))
            losses.append(engine.train_step(batch).loss.item())
        engine.close()
    return losses


@pytest.mark.parametrize("config", [{}, SOCKETS | BF16, FP16])
def test_training_goes_on_as_if_the_model_had_begun_so(ranks: RankPool, tmp_path: Path, config: dict[str, Any]) -> None:
    losses = ranks(2, losses_of_two_steps, config, str(file_of(tmp_path, 3)))[0]
    assert losses == losses[:2] * 3


# -- names ----------------------------------------------------------------------------------------------------------


def load_and_compare(path: str, stage: int, strict: bool = True) -> list[str]:
    engine = engine_of(stage, {}, seed=5, steps=0)
    load_weights(engine, path, strict=strict)
    torch.manual_seed(3)
    expected = dict(Everything().state_dict()) if engine.rank == 0 else {}
    state = engine.state_dict()
    engine.close()
    return differences(state, expected)


@pytest.mark.parametrize("names", [["embedding.weight"], ["head.weight"], ["embedding.weight", "head.weight"]])
def test_any_name_of_a_tied_parameter_will_do(ranks: RankPool, tmp_path: Path, names: list[str]) -> None:
    torch.manual_seed(3)
    value = Everything().embedding.weight.detach()
    changes = dict.fromkeys(["embedding__weight", "head__weight"]) | {
        name.replace(".", "__"): value.clone() for name in names
    }
    assert ranks(2, load_and_compare, str(file_of(tmp_path, 3, **changes)), 3) == [[], []]


def test_values_of_another_width_are_cast(ranks: RankPool, tmp_path: Path) -> None:
    torch.manual_seed(3)
    path = file_of(tmp_path, 3, norm__bias=torch.zeros(22).double(), count=torch.tensor(7, dtype=torch.int32))
    assert ranks(2, load_and_compare, str(path), 3) == [[], []]


# -- bytes ----------------------------------------------------------------------------------------------------------


class Even(torch.nn.Module):
    """Two layers of 128 x 64, whose flat buffers divide into four shards without padding; a buffer of 3 elements."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(64, 128, bias=False) for _ in range(2)))
        self.register_buffer("table", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](x).sum() + self.layers[1](x).sum()


def bytes_read(build: Any, stage: int, config: dict[str, Any], path: str) -> tuple[int, int]:
    """(bytes that were read, elements of parameters that this rank holds)"""
    engine = lowtide.initialize(build(), Case(build, models.token_batch, stage=stage, config=config).as_config())
    held = sum(chunk_view.values.numel() for chunk_view in named_state(engine).weights())
    with recorded_sources() as sources:
        load_weights(engine, path)
    engine.close()
    return sources[0].bytes_read, held


@pytest.mark.parametrize(("stage", "shards"), [(0, 1), (1, 4), (3, 4)])
def test_each_rank_reads_its_own_part_and_no_more(ranks: RankPool, tmp_path: Path, stage: int, shards: int) -> None:
    model = Even()
    safetensors_torch.save_file(dict(model.state_dict()), tmp_path / "x.safetensors")
    found = ranks(4, bytes_read, Even, stage, {}, str(tmp_path / "x.safetensors"))
    parameters, buffers = 4 * 2 * 128 * 64, 4 * 3
    assert [count for count, _ in found] == [parameters // shards + buffers] * 4


def test_shards_in_groups_of_two_read_a_half_each(ranks: RankPool, tmp_path: Path) -> None:
    safetensors_torch.save_file(dict(Even().state_dict()), tmp_path / "x.safetensors")
    found = ranks(4, bytes_read, Even, 3, HYBRID, str(tmp_path / "x.safetensors"))
    assert [count for count, _ in found] == [4 * 128 * 64 + 12] * 4


def test_what_does_not_divide_is_read_once_over_all_ranks(ranks: RankPool, tmp_path: Path) -> None:
    state = saved_once(dict(Everything().state_dict()))
    found = ranks(4, bytes_read, Everything, 3, {}, str(file_of(tmp_path, 3)))
    buffers = sum(state[name].nbytes for name in ("strided", "count", "mask"))
    total = sum(value.nbytes for value in state.values())
    assert sum(count - buffers for count, _ in found) == total - buffers
    assert all(count == 4 * held + buffers for count, held in found)


def test_half_precision_files_are_read_in_their_own_size(ranks: RankPool, tmp_path: Path) -> None:
    state = {name: value.bfloat16() for name, value in Even().state_dict().items()}
    safetensors_torch.save_file(state, tmp_path / "x.safetensors")
    found = ranks(4, bytes_read, Even, 3, {}, str(tmp_path / "x.safetensors"))
    assert [count for count, _ in found] == [2 * 2 * 128 * 64 // 4 + 2 * 3] * 4


# -- memory ---------------------------------------------------------------------------------------------------------


def peak_of_loading(path: str) -> int:
    engine = lowtide.initialize(Large(), LARGE_CONFIG)
    peak = peak_growth(lambda: load_weights(engine, path))
    engine.close()
    return peak


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_is_that_of_a_chunk(ranks: RankPool, tmp_path: Path, dtype: torch.dtype) -> None:
    state = {f"layers.{index}.weight": torch.ones(2048, 4096, dtype=dtype) for index in range(2)}
    safetensors_torch.save_file(state, tmp_path / "x.safetensors")
    for peak in ranks(2, peak_of_loading, str(tmp_path / "x.safetensors")):
        assert peak <= CHUNK_BYTES + (2 << 20)  # and what the rest of Python takes


# -- what does not fit ----------------------------------------------------------------------------------------------


def faults_of(path: str, stage: int, strict: bool) -> tuple[str, bool]:
    """The error's text, and whether the engine's state is what it was before."""
    engine = engine_of(stage, {}, seed=5, steps=0)
    before = engine.state_dict()
    text = ""
    try:
        load_weights(engine, path, strict=strict)
    except (ValueError, CheckpointError) as error:
        text = str(error)
    is_same = differences(engine.state_dict(), before) == []
    engine.close()
    return text, is_same


WRONG = {
    "norm__bias": None,
    "count": None,
    "embedding__weight": None,
    "more": torch.ones(2, 3),
    "blocks__0__up__weight": torch.ones(22, 66),
    "mask": torch.ones(3),
}
LISTED = """expected the model's tensors, found 3 missing, 1 extra, 2 misshaped
  missing embedding.weight = head.weight: expected (301, 22) float32
  missing norm.bias: expected (22,) float32
  missing count: expected () int64
  extra more: found (2, 3) float32
  misshaped blocks.0.up.weight: expected (66, 22) float32, found (22, 66) float32
  misshaped mask: expected (3,) bool, found (3,) float32
Nothing was loaded."""


@pytest.mark.parametrize("strict", [True, False])
def test_all_that_does_not_fit_is_listed_and_nothing_changes(ranks: RankPool, tmp_path: Path, strict: bool) -> None:
    path = file_of(tmp_path, 3, **WRONG)
    for text, is_same in ranks(2, faults_of, str(path), 3, strict):
        assert text == f"load_weights from {path}: {LISTED}"
        assert is_same


def test_what_could_be_left_out_is_said(ranks: RankPool, tmp_path: Path) -> None:
    path = file_of(tmp_path, 3, norm__bias=None)
    for text, is_same in ranks(2, faults_of, str(path), 0, True):
        assert text.endswith("expected (22,) float32\nNothing was loaded. strict=False loads what is in both.")
        assert is_same


def load_in_part(path: str) -> tuple[list[str], list[str]]:
    """(names that do not have the file's values, what was logged)"""
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    keep = Keep()
    logging.getLogger("lowtide").addHandler(keep)
    names = load_and_compare(path, 3, strict=False)
    logging.getLogger("lowtide").removeHandler(keep)
    return names, [line for line in lines if "load_weights" in line]


def test_without_strict_what_is_in_both_is_loaded_and_the_rest_is_logged(ranks: RankPool, tmp_path: Path) -> None:
    path = file_of(tmp_path, 3, norm2=torch.ones(2), blocks__1__up__weight=None)
    (names, lines), (_, others) = ranks(2, load_in_part, str(path))
    assert names == ["blocks.1.up.weight"]
    assert lines == [
        f"load_weights from {path}: found 1 missing, 1 extra\n"
        "  missing blocks.1.up.weight: expected (66, 22) float32\n"
        "  extra norm2: found (2,) float32"
    ]
    assert others == []


def test_kinds_of_values_are_not_mixed() -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool)
    expected = {str(dtype): TensorInfo((2,), dtype) for dtype in dtypes}
    fits = {
        (str(ours), str(theirs))
        for ours in dtypes
        for theirs in dtypes
        if not Match.of({"x": expected[str(ours)]}, {}, {"x": expected[str(theirs)]}).misshaped
    }
    pairs = {("torch.float32", "torch.bfloat16"), ("torch.int64", "torch.uint8")}
    assert fits == pairs | {(b, a) for a, b in pairs} | {(str(dtype), str(dtype)) for dtype in dtypes}


# -- files that cannot be read --------------------------------------------------------------------------------------


def test_a_path_without_weights_is_an_error_of_all(ranks: RankPool, tmp_path: Path) -> None:
    for text, is_same in ranks(2, faults_of, str(tmp_path / "absent"), 3, True):
        assert text.startswith(f"load_weights from {tmp_path}/absent failed on ranks 0, 1: expected a safetensors file")
        assert text.endswith("Nothing was loaded.") and is_same


def read_a_file_that_shrinks(path: str) -> str:
    engine = engine_of(3, {}, seed=5, steps=0)

    def shrink() -> None:
        engine._mesh.world.barrier()
        if engine.rank == 0:
            os.truncate(path, os.path.getsize(path) - 1000)

    try:
        with recorded_sources(after=shrink):
            load_weights(engine, path)
    except CheckpointError as error:
        return str(error)
    finally:
        engine.close()
    return ""


def test_an_error_while_reading_says_that_the_weights_are_mixed(ranks: RankPool, tmp_path: Path) -> None:
    texts = ranks(2, read_a_file_that_shrinks, str(file_of(tmp_path, 3)))
    assert len(set(texts)) == 1
    assert "was truncated" in texts[0]
    assert texts[0].endswith("The weights are in part those of before: load again.")
