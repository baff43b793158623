"""What a rank has of a tensor is any box of it: columns, rows, experts. Whoever wrote it, every box comes back."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.checkpoint import writer
from lowtide.checkpoint.chunk_view import ChunkView, TensorInfo, flat_ranges_of
from lowtide.checkpoint.dcp import STEP
from lowtide.checkpoint.export import ExportFolder
from lowtide.checkpoint.folder import CheckpointFolder
from lowtide.checkpoint.safetensors_files import SafetensorsSource, WeightsPlan
from lowtide.checkpoint.writer import write_part
from lowtide.offload.tensor_chunk import TensorChunk, TensorShard
from tests.checkpoint.making import NO_OPTIMIZER, manifest_of
from tests.engine.plain_weights import named_state

SHAPE = (4, 6, 5)
CUTS: dict[str, tuple[Sequence[int], ...]] = {  # where each dimension is cut
    "whole": ((), (), ()),
    "experts": ((1, 2, 3), (), ()),
    "rows": ((), (2,), ()),
    "columns": ((), (), (2, 3)),
    "uneven": ((3,), (1, 4), (4,)),
}


def boxes_at(cuts: Sequence[Sequence[int]]) -> list[TensorChunk]:
    """The boxes that the cuts divide a tensor of SHAPE into."""
    sides = []
    for size, places in zip(SHAPE, cuts, strict=True):
        edges = (0, *places, size)
        sides.append([(low, high - low) for low, high in itertools.pairwise(edges)])
    return [TensorChunk(*map(tuple, zip(*sides_of_box, strict=True))) for sides_of_box in itertools.product(*sides)]


def shards(chunk: TensorChunk, value: Tensor, count: int) -> Iterator[ChunkView]:
    """Ranges of a box, as ranks that share it have them: copies of its values."""
    flat = value[chunk.index].flatten().contiguous()
    for part in range(count):
        low, high = (flat.numel() * place // count for place in (part, part + 1))
        yield ChunkView("model.w", SHAPE, low, flat[low:high].clone(), chunk)


@pytest.mark.parametrize("written", CUTS)
def test_every_split_reads_every_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: str) -> None:
    monkeypatch.setattr(writer, "MAX_VALUES_BYTES", 32)  # many boxes in a small tensor
    value = torch.randn(SHAPE)
    target = CheckpointFolder(tmp_path)
    saving = target.begin("a")
    chunk_views = [one for chunk in boxes_at(CUTS[written]) for one in shards(chunk, value, 3)]
    chunk_views.append(ChunkView(STEP, (), 0, torch.ones(1)))
    for rank, one in enumerate(chunk_views):
        write_part(saving, rank, [one], [], {})
    target.commit(manifest_of({"w": value}, "a", len(chunk_views)), NO_OPTIMIZER, None)
    source = target.open().weights
    for cuts, count, dtype in itertools.product(CUTS.values(), (1, 2, 7), (torch.float32, torch.float64)):
        found = [one for chunk in boxes_at(cuts) for one in shards(chunk, value, count)]
        wanted = [
            dataclasses.replace(one, name="w", memory=torch.full_like(one.values, torch.nan, dtype=dtype))
            for one in found
        ]
        source.read(wanted)
        for one, expected in zip(wanted, found, strict=True):
            assert torch.equal(one.values, expected.values.to(dtype)), (written, one.chunk, one.start)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_splits_are_written_to_and_read_from_safetensors(tmp_path: Path, dtype: torch.dtype) -> None:
    value = torch.randn(SHAPE)
    for name, cuts in CUTS.items():
        plan = WeightsPlan.of({"model.w": TensorInfo(SHAPE, dtype)}, 1 << 20)
        folder = ExportFolder(tmp_path / name, plan)
        folder.create({})
        written: list[int] = []
        folder.write((one for chunk in boxes_at(cuts) for one in shards(chunk, value, 2)), written.append)
        folder.publish()
        assert sum(written) == value.numel() * dtype.itemsize
        source = SafetensorsSource(tmp_path / name)
        for other in CUTS.values():
            for one in (one for chunk in boxes_at(other) for one in shards(chunk, value.to(dtype), 3)):
                found = dataclasses.replace(one, memory=torch.full_like(one.values, torch.nan))
                source.read([found])
                assert torch.equal(found.values, one.values), (name, one.chunk)


def test_stretches_are_the_elements_of_a_box() -> None:
    numbered = torch.arange(4 * 6 * 5).view(SHAPE)
    for chunk in (chunk for cuts in CUTS.values() for chunk in boxes_at(cuts)):
        found = list(flat_ranges_of(chunk, SHAPE))
        assert [number for low, high in found for number in range(low, high)] == numbered[chunk.index].reshape(
            -1
        ).tolist()
        assert all(high < low for (_, high), (low, _) in itertools.pairwise(found)), "as few as can be"
    assert list(flat_ranges_of(TensorChunk((), ()), ())) == [(0, 1)]


class Columns(nn.Module):
    """Some columns of a layer."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.clone())


def test_the_slot_of_a_parameter_says_which_box_it_is() -> None:
    """As a layer that is split over ranks has it: the checkpoint knows the whole."""
    whole = torch.randn(6, 8)
    chunk = TensorChunk((0, 3), (6, 5))
    config = {"optimizer": {"type": "adamw"}, "train_micro_batch_size_per_gpu": 1, "steps_per_print": 0}
    engine = lowtide.initialize(Columns(whole[chunk.index]), config)
    try:
        (group,) = (group for unit in engine._runner.passes.units for group in unit.groups)
        (param_view,) = group.layout.param_views
        assert param_view.tensor_shard == TensorShard.all_of((6, 5))
        param_views = (
            dataclasses.replace(
                param_view, tensor_shard=TensorShard((6, 8), (6, 5), ((chunk, TensorChunk.whole((6, 5))),))
            ),
        )
        group.layout = dataclasses.replace(group.layout, param_views=param_views)
        state = named_state(engine)
        assert state.catalog.parameters == {"weight": TensorInfo((6, 8), torch.float32)}
        found = torch.zeros(6, 8)
        for one in state.weights(saves=True):
            assert one.shape == (6, 8) and len(one.chunks()) == 1
            found[one.chunks()[0].index] = one.values.view(one.chunks()[0].sizes)
        assert torch.equal(found[chunk.index], whole[chunk.index]) and not found[:, :3].any()
    finally:
        engine.close()
