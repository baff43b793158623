"""state_dict, load_state_dict, load_weights: the model's own names and values; what does not fit is listed."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file, save_model
from torch import Tensor, nn

import lowtide
from lowtide.checkpoint.chunk_view import TensorInfo, TensorSource
from lowtide.checkpoint.files import CheckpointError
from lowtide.engine.archive import weights
from lowtide.engine.archive.weights import Match
from lowtide.zero.sequence import StateError
from tests.engine.plain_weights import Everything, engine_of, named_state, saved_once
from tests.kit import models
from tests.kit.ranks import RankPool, on_ranks
from tests.kit.training import Case, differences, logged, refusal, settings, share_of

BF16 = {"bf16": {"enabled": True}}


def expected() -> dict[str, Tensor]:
    """What is in the file."""
    torch.manual_seed(3)
    return dict(Everything().state_dict())


def file_of(folder: Path, changes: dict[str, Tensor | None] | None = None) -> str:
    """All that is expected, as one file, with other values for names, or without those of None."""
    state = saved_once(expected()) | (changes or {})
    path = folder / "weights.safetensors"
    save_file({name: value.contiguous() for name, value in state.items() if value is not None}, path)
    return str(path)


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


def masters_of(engine: Any) -> dict[str, Tensor]:
    """The trained values of highest precision that this rank holds, by name."""
    return {chunk_view.name: chunk_view.values.clone() for chunk_view in named_state(engine).weights()}


@on_ranks(2)
def test_what_was_exported_loads_again_with_its_master_weights(tmp_path: Path) -> None:
    """As float32, into a trained engine of another stage."""
    for first, second in ((3, 0), (2, 1)):
        with engine_of(first, BF16, steps=2) as source:
            source.export(tmp_path / str(first), dtype="fp32", shard_bytes=5000)
            state, masters = source.state_dict(), masters_of(source)
        with engine_of(second, BF16, seed=9) as target:
            target.load_weights(tmp_path / str(first))
            assert differences(target.state_dict(), state) == []
            # Shards of stages 1 and 2 lie alike.
            assert first != 2 or differences(masters_of(target), masters) == []


# -- bytes ----------------------------------------------------------------------------------------------------------


def bytes_read(build: Any, stage: int, config: dict[str, Any], path: str) -> tuple[int, int]:
    """(bytes that were read, elements of parameters that this rank holds)"""
    engine = lowtide.initialize(build(), Case(build, models.token_batch, stage=stage, config=config).as_config())
    with engine, recorded_sources() as sources:
        held = sum(chunk_view.values.numel() for chunk_view in named_state(engine).weights())
        engine.load_weights(path)
        return sources[0].bytes_read, held


def test_what_does_not_divide_is_read_once_over_all_ranks(ranks: RankPool, tmp_path: Path) -> None:
    state = saved_once(expected())
    found = ranks(4, bytes_read, Everything, 3, {}, file_of(tmp_path))
    buffers = sum(state[name].nbytes for name in ("strided", "count", "mask"))
    total = sum(value.nbytes for value in state.values())
    assert sum(count - buffers for count, _ in found) == total - buffers
    assert all(count == 4 * held + buffers for count, held in found)


# -- what does not fit ----------------------------------------------------------------------------------------------


def load(path: str, stage: int, strict: bool) -> tuple[str, list[str], list[str], list[str]]:
    """The error's text; what has changed, and what is not as in the file, on rank 0; what was logged."""
    text = ""
    with engine_of(stage, {}, seed=5, steps=0) as engine, logged() as lines:
        before = engine.state_dict()
        try:
            engine.load_weights(path, strict=strict)
        except (ValueError, CheckpointError) as error:
            text = str(error)
        state = engine.state_dict()
    said = [line for line in lines if "load_weights" in line]
    return text, differences(state, before), differences(state, expected()) if state else [], said


MISSING_UP = "missing blocks.1.up.weight: expected (66, 22) float32"
MISSING_BIAS = "missing norm.bias: expected (22,) float32"
WRONG = {
    "norm.bias": None,
    "count": None,
    "embedding.weight": None,
    "more": torch.ones(2, 3),
    "blocks.0.up.weight": torch.ones(22, 66),
    "mask": torch.ones(3),
}
LISTED = f"""expected the model's tensors, found 3 missing, 1 extra, 2 misshaped
  missing embedding.weight = head.weight: expected (301, 22) float32
  {MISSING_BIAS}
  missing count: expected () int64
  extra more: found (2, 3) float32
  misshaped blocks.0.up.weight: expected (66, 22) float32, found (22, 66) float32
  misshaped mask: expected (3,) bool, found (3,) float32
Nothing was loaded."""
LEFT_OUT = f"""expected the model's tensors, found 1 missing
  {MISSING_BIAS}
Nothing was loaded. strict=False loads what is in both."""


@pytest.mark.parametrize(
    ("changes", "strict", "listed"),
    [(WRONG, True, LISTED), (WRONG, False, LISTED), ({"norm.bias": None}, True, LEFT_OUT)],
)
def test_all_that_does_not_fit_is_listed_and_nothing_changes(
    ranks: RankPool, tmp_path: Path, changes: dict[str, Tensor | None], strict: bool, listed: str
) -> None:
    path = file_of(tmp_path, changes)
    for text, changed, _, _ in ranks(2, load, path, 3, strict):
        assert text == f"load_weights from {path}: {listed}"
        assert changed == []


def test_without_strict_what_is_in_both_is_loaded_and_the_rest_is_logged(ranks: RankPool, tmp_path: Path) -> None:
    path = file_of(tmp_path, {"norm2": torch.ones(2), "blocks.1.up.weight": None})
    (_, _, names, lines), (_, _, _, others) = ranks(2, load, path, 3, False)
    assert names == ["blocks.1.up.weight"]
    found = f"found 1 missing, 1 extra\n  {MISSING_UP}\n  extra norm2: found (2,) float32"
    assert lines == [f"load_weights from {path}: {found}"]
    assert others == []


TIED = ["embedding.weight", "head.weight"]
WIDTHS = {"norm.bias": torch.zeros(22).double(), "count": torch.tensor(7, dtype=torch.int32)}


@pytest.mark.parametrize("names", [TIED[:1], TIED[1:], TIED])
def test_any_name_of_a_tied_parameter_will_do_and_values_of_another_width(
    ranks: RankPool, tmp_path: Path, names: list[str]
) -> None:
    value = expected()["embedding.weight"]
    changes = dict.fromkeys(TIED) | {name: value.clone() for name in names} | WIDTHS
    assert [found[::2] for found in ranks(2, load, file_of(tmp_path, changes), 3, True)] == [("", [])] * 2


def test_kinds_of_values_are_not_mixed() -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool)
    infos = {dtype: {"x": TensorInfo((2,), dtype)} for dtype in dtypes}
    fits = {(a, b) for a in dtypes for b in dtypes if not Match.of(infos[a], {}, infos[b]).misshaped}
    pairs = {(torch.float32, torch.bfloat16), (torch.int64, torch.uint8)}
    assert fits == pairs | {(b, a) for a, b in pairs} | {(dtype, dtype) for dtype in dtypes}


# -- files that cannot be read --------------------------------------------------------------------------------------


def test_a_path_without_weights_is_an_error_of_all(ranks: RankPool, tmp_path: Path) -> None:
    for text, changed, _, _ in ranks(2, load, str(tmp_path / "absent"), 3, True):
        assert text.startswith(f"load_weights from {tmp_path}/absent failed on ranks 0, 1: expected a safetensors file")
        assert text.endswith("Nothing was loaded.") and changed == []


def read_a_file_that_shrinks(path: str) -> str:
    with engine_of(3, {}, seed=5, steps=0) as engine:

        def shrink() -> None:
            engine._mesh.world.barrier()
            if engine.rank == 0:
                os.truncate(path, os.path.getsize(path) - 1000)

        with recorded_sources(after=shrink), pytest.raises(CheckpointError) as caught:
            engine.load_weights(path)
    return str(caught.value)


def test_an_error_while_reading_says_that_the_weights_are_mixed(ranks: RankPool, tmp_path: Path) -> None:
    text, other = ranks(2, read_a_file_that_shrinks, file_of(tmp_path))
    assert text == other and "was truncated" in text
    assert text.endswith("The weights are in part those of before: load again.")


STAGES = (0, 1, 2, 3)


def batch_of(engine: lowtide.Engine) -> tuple[Tensor, ...]:
    return share_of(models.token_batch(1, 2 * engine.world_size))


@on_ranks(2)
def test_names_and_values_are_those_of_the_model() -> None:
    """On rank 0 alone. A second call gives the same, and a step changes nothing of what was given."""
    torch.manual_seed(0)
    expected = Everything().state_dict()
    for stage in STAGES:
        with engine_of(stage, {"communication": {"transport": "sockets"}}, steps=0) as engine:
            state, again = engine.state_dict(), engine.state_dict()
            engine.train_step(batch_of(engine))
        if engine.rank:
            assert state == {}
            continue
        assert list(state) == list(expected) and differences(state, expected) == differences(again, expected) == []
        assert state["head.weight"].data_ptr() == state["embedding.weight"].data_ptr()


def saved_by_safetensors(folder: str) -> list[list[str]]:
    """By stage: what is wrong with what `save_model` writes, or what it raises."""
    found = []
    for stage in STAGES:
        path = f"{folder}/{stage}"
        model = models.tied_gpt()
        model.register_parameter("empty", nn.Parameter(torch.empty(0, 3)))
        engine = lowtide.initialize(model, settings(stage))
        engine.train_step(batch_of(engine))
        if stage == 3:
            found.append([refusal(save_model, engine.module, path, kind=lowtide.ReleasedParameterError)])
            engine.close()
            break
        path = f"{path}-{engine.rank}"
        save_model(engine.module, path)
        shown = engine.module.state_dict()
        wrong = differences(load_file(path), {name: value for name, value in shown.items() if name != "head.weight"})
        params = dict(engine.module.named_parameters())
        wrong += [f"copied {name}" for name, param in params.items() if param.data_ptr() != shown[name].data_ptr()]
        head, embedding = (shown[name].untyped_storage()._cdata for name in ("head.weight", "embedding.weight"))
        wrong += ["untied"] * (head != embedding)
        engine.train_step(batch_of(engine))
        wrong += [f"stale {name}" for name, param in params.items() if not torch.equal(param, shown[name])]
        module = engine.module
        engine.close()
        found.append([*wrong, *["hook"] * len(module._state_dict_hooks)])
    return found


def test_safetensors_saves_the_module_where_parameters_are_whole(ranks: RankPool, tmp_path: Path) -> None:
    """The tensors of its state_dict are no parts of a larger storage, which that library refuses; no copies either."""
    for world_size in (1, 2):
        for *whole, (released,) in ranks(world_size, saved_by_safetensors, str(tmp_path)):
            assert whole == [[]] * 3
            assert "is released" in released and "engine.export(folder) on all ranks" in released


# -- loading ---------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_every_stage_takes_the_values_of_rank_0() -> None:
    torch.manual_seed(7)
    module = Everything()
    module.get_buffer("count").fill_(3)
    expected = {name: value.clone() for name, value in module.state_dict().items()}
    loss = module(*models.token_batch(1, 4)).item()
    for stage, transport in ((0, "sockets"), (1, "shared_memory"), (3, "sockets")):
        with engine_of(stage, {"communication": {"transport": transport}, **BF16}, steps=0) as engine:
            engine.load_state_dict(expected if engine.rank == 0 else {})
            values = {name: engine.full(name) for name in ("head.weight", "blocks.1.up.weight", "norm.bias")}
            values["count"] = engine.module.get_buffer("count")
            assert differences(values, {name: expected[name] for name in values}) == []
            assert engine.train_step(batch_of(engine)).loss.item() == pytest.approx(loss, rel=2e-2)


def test_what_does_not_fit_is_told() -> None:
    with lowtide.initialize(torch.nn.Linear(3, 3), settings(3)) as engine:
        weight = engine.state_dict()["weight"]
        text = refusal(engine.load_state_dict, {"weight": weight, "scale": torch.ones(1)})
        words = "engine.load_state_dict(): expected the model's tensors on rank 0, found 1 missing, 1 extra"
        assert text.startswith(f"{words}\n  missing bias: ")
        assert "found 1 misshaped" in refusal(engine.load_state_dict, {"weight": weight, "bias": torch.ones(4)})
        engine.load_state_dict({"bias": torch.ones(3)}, strict=False)
        assert engine.full("bias").tolist() == [1, 1, 1] and torch.equal(engine.full("weight"), weight)


def test_the_optimizer_does_not_give_a_part_of_its_states_for_the_whole() -> None:
    with lowtide.initialize(models.mlp(), settings()) as engine:
        options = engine.optimizer.state_dict()
        assert options["param_groups"][0]["lr"] == 1e-2 and not options["state"]
        groups = list(map(id, engine.optimizer.param_groups))
        engine.optimizer.load_state_dict({**options, "param_groups": [{**options["param_groups"][0], "lr": 0.5}]})
        assert engine.lr == 0.5 and list(map(id, engine.optimizer.param_groups)) == groups
        text = refusal(engine.optimizer.load_state_dict, {"state": {}, "param_groups": []})
        assert "expected 1 parameter groups, found 0" in text
        engine.train_step(models.vector_batch(0, 2))
        instead = "expected engine.save_checkpoint and engine.load_checkpoint, which save and l"
        text = refusal(engine.optimizer.state_dict, kind=StateError)
        assert text.startswith(f"engine.optimizer.state_dict(): {instead}")
        text = refusal(engine.optimizer.load_state_dict, {**options, "state": {0: {}}}, kind=StateError)
        assert text.startswith(f"engine.optimizer.load_state_dict(): {instead}")
        assert engine.train_step(models.vector_batch(0, 2)).loss.isfinite()
