"""Ranges of tensors out of files that others have cut elsewhere; what is damaged is found and named."""

import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lowtide.checkpoint import data_file, reader, writer
from lowtide.checkpoint.archive import MAX_VALUES_BYTES, ArchivePlace
from lowtide.checkpoint.checkpoint import Checkpoint
from lowtide.checkpoint.chunk_view import ChunkView, TensorInfo
from lowtide.checkpoint.data_file import Blocks, DataFile
from lowtide.checkpoint.files import CheckpointError
from lowtide.checkpoint.index import Row
from lowtide.checkpoint.reader import _batches_of, _Common, _Read
from lowtide.offload import StoredRange
from lowtide.offload.tensor_chunk import TensorChunk
from tests.checkpoint.making import read_whole, write

BIG = 3 << 20  # elements of float32: several boxes


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "cube": torch.randn(5, 7, 3, generator=generator),
        "flat": torch.arange(1000, dtype=torch.int64),
        "half": torch.randn(33, 3, generator=generator).bfloat16(),
        "flags": torch.arange(9) % 2 == 0,
        "one": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.zeros(4, 0),
    }


def random_pieces(values: dict[str, Tensor], world_size: int, seed: int) -> list[dict[str, tuple[int, int]]]:
    """Uneven parts; some ranks have none of a tensor."""
    draw = random.Random(seed)
    pieces: list[dict[str, tuple[int, int]]] = [{} for _ in range(world_size)]
    for name, value in values.items():
        cuts = sorted(draw.randint(0, value.numel()) for _ in range(world_size - 1))
        for rank, (low, high) in enumerate(zip([0, *cuts], [*cuts, value.numel()], strict=True)):
            if low < high:
                pieces[rank][name] = (low, high)
    return pieces


@pytest.fixture
def cold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is in the page cache, as far as a reader sees."""
    monkeypatch.setattr(data_file, "_is_cached", lambda pages, low, high: False)


@pytest.mark.usefixtures("cold")
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_any_range_comes_back_whoever_wrote_its_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world_size: int, shared: bool
) -> None:
    monkeypatch.setattr(writer, "MAX_VALUES_BYTES", 64)  # many boxes in small tensors
    draw = random.Random(world_size)
    for seed in range(2):
        values = tensors()
        target = write(tmp_path, values, f"{seed}", random_pieces(values, world_size, seed))
        source = target.open().weights
        assert {name: (info.shape, info.dtype) for name, info in source.tensors.items()} == {
            name: (tuple(value.shape), value.dtype) for name, value in values.items()
        }
        for name, value in values.items():
            assert torch.equal(read_whole(target, name), value)
            flat = value.reshape(-1)
            chunk_views = []
            for _ in range(10):
                low, high = sorted(draw.randint(0, value.numel()) for _ in range(2))
                memory = torch.empty(high - low, dtype=value.dtype)
                chunk_views.append(ChunkView(name, tuple(value.shape), low, memory))
            source.read(chunk_views, shared)
            for chunk_view in chunk_views:
                assert torch.equal(chunk_view.values, flat[chunk_view.start : chunk_view.end])


def test_values_are_cast_to_what_they_are_for(tmp_path: Path) -> None:
    value = torch.randn(10, 10)
    source = write(tmp_path, {"w": value}).open().weights
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        memory = torch.empty(60, dtype=dtype)
        source.read([ChunkView("w", (10, 10), 25, memory)])
        assert torch.equal(memory, value.reshape(-1)[25:85].to(dtype))


def test_only_the_boxes_of_a_range_are_read(tmp_path: Path) -> None:
    value = torch.randn(BIG)
    source = write(tmp_path, {"w": value}).open().weights
    memory = torch.empty(100)
    source.read([ChunkView("w", (BIG,), BIG // 2 + 5, memory)])
    assert torch.equal(memory, value[BIG // 2 + 5 : BIG // 2 + 105])
    assert source.bytes_read == MAX_VALUES_BYTES < value.nbytes


@pytest.mark.usefixtures("cold")
@pytest.mark.parametrize("shared", [True, False])
def test_values_in_a_store_are_filled_in_the_order_in_which_they_are_asked_for(tmp_path: Path, shared: bool) -> None:
    values = {"a": torch.randn(40), "b": torch.randn(40), "c": torch.randn(40)}
    stored = {name: torch.zeros(40) for name in "ac"}
    opened: list[str] = []

    def opener(name: str) -> Callable[[], Tensor]:
        def open_values() -> Tensor:
            opened.append(name)
            return stored[name]

        return open_values

    chunk_views = [ChunkView(name, (40,), 0, StoredRange(40, torch.float32, opener(name))) for name in "ca"]
    memory = torch.zeros(40)
    source = write(tmp_path, values, pieces=[dict.fromkeys(values, (0, 40))]).open().weights
    source.read([chunk_views[0], ChunkView("b", (40,), 0, memory), chunk_views[1]], shared)
    assert torch.equal(memory, values["b"]) and all(torch.equal(stored[name], values[name]) for name in "ac")
    assert opened == ["c", "a"]
    assert source.bytes_read == 3 * 40 * 4


@pytest.mark.usefixtures("cold")
@pytest.mark.parametrize("shared", [True, False])
def test_a_box_may_be_for_several_fragments_of_several_dtypes(tmp_path: Path, shared: bool) -> None:
    value = torch.randn(BIG)
    source = write(tmp_path, {"w": value}).open().weights
    memories = [torch.empty(BIG, dtype=dtype) for dtype in (torch.float32, torch.bfloat16, torch.float64)]
    source.read([ChunkView("w", (BIG,), 0, memory) for memory in memories], shared)
    assert all(torch.equal(memory, value.to(memory.dtype)) for memory in memories)


@pytest.mark.usefixtures("cold")
def test_small_boxes_are_read_together_past_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {f"w{index}": torch.randn(100 + index) for index in range(300)}
    source = write(tmp_path, values, pieces=[{name: (0, len(value)) for name, value in values.items()}]).open().weights
    memories = {name: torch.empty(len(value)) for name, value in values.items()}
    reads: list[int] = []
    preadv = os.preadv

    def counting(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        reads.append(offset)
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", counting)
    refused = DataFile(tmp_path / "a" / "__0_0.distcp", Blocks(1))._direct < 0
    source.read([ChunkView(name, (len(memory),), 0, memory) for name, memory in memories.items()], shared=False)
    assert all(torch.equal(memories[name], value) for name, value in values.items())
    if refused:
        pytest.skip("the file system refuses O_DIRECT")
    assert len(reads) == 1, "300 archives of about 1.5 KB are less than a block"


def reads(*places: tuple[int, int, int], dtype: torch.dtype = torch.float32) -> list[_Read]:
    """places: rank, offset, numel of boxes of float32, which are wanted as dtype."""
    found = []
    for rank, offset, numel in places:
        row = Row("w", TensorChunk((0,), (numel,)), ArchivePlace(offset, numel * 4, offset, 0))
        info = TensorInfo((numel,), torch.float32)
        memory = torch.empty(numel, dtype=dtype)
        common = [_Common(row.chunk, row.chunk, 0)]
        found.append(_Read(rank, row, info, ChunkView("w", (numel,), 0, memory), common))
    return found


def test_reads_are_cut_where_they_are_far_from_each_other_or_many() -> None:
    def cut(*places: tuple[int, int, int]) -> list[list[int]]:
        return [[read.offset for read in batch] for batch in _batches_of(reads(*places), 4 << 20)]

    million = 1 << 20
    assert cut() == []
    assert cut((0, 100, 10), (0, 150, 10), (1, 100, 10)) == [[100, 150], [100]]
    assert cut((0, 0, 100), (0, 400 + 65536, 1), (0, 405 + 2 * 65536, 1)) == [[0, 65936], [131477]]
    assert cut((0, 0, million), (0, 4 * million, 1), (0, 5 * million, million)) == [[0], [4194304], [5242880]]
    assert cut((0, 0, million // 2), (0, 2 * million, million // 2), (0, 4 * million, 1)) == [[0, 2097152], [4194304]]


def test_reads_past_the_cache_are_long_and_what_is_cast_takes_no_more_memory_there() -> None:
    million = 1 << 20
    places = [(0, 4 * million * index, million) for index in range(9)]
    whole = _batches_of(reads(*places), reader._BATCH_BYTES_PAST_CACHE)
    assert [len(batch) for batch in whole] == [4, 4, 1]
    cast = _batches_of(reads(*places, dtype=torch.bfloat16), reader._BATCH_BYTES_PAST_CACHE)
    assert [len(batch) for batch in cast] == [1] * 9


def test_the_state_of_each_rank_comes_back(tmp_path: Path) -> None:
    checkpoint = write(tmp_path, tensors()).open()
    assert [checkpoint.own_state(rank) for rank in range(2)] == [{"rank": 0}, {"rank": 1}]


def test_a_whole_checkpoint_is_verified(tmp_path: Path) -> None:
    write(tmp_path, tensors()).open().verify()


# -- damage ----------------------------------------------------------------------------------------------------------


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def append(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def flip_middle(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def remove(path: Path) -> None:
    path.unlink()


FILES = ["__0_0.distcp", "__1_0.distcp", "rank0.json", "rank1.json", "lowtide.json", ".metadata"]
DAMAGES = [truncate, empty, append, flip_middle, remove]


def all_of(path: Path) -> None:
    """Opens a checkpoint, and reads all that it has."""
    checkpoint = Checkpoint(path)
    checkpoint.verify()


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize(
    "name", ["__0_0.distcp", "__1_0.distcp", "rank0.json", "rank1.json", "lowtide.json", ".metadata"]
)
def test_every_damage_to_every_file_is_found_and_the_file_is_named(
    tmp_path: Path, name: str, damage: Callable[[Path], None]
) -> None:
    folder = write(tmp_path, {"w": torch.randn(3000)}).path / "a"
    damage(folder / name)
    with pytest.raises(CheckpointError) as caught:
        all_of(folder)
    assert str(caught.value).startswith(f"{folder / name}: expected ")


def test_every_single_byte_of_the_description_counts(tmp_path: Path) -> None:
    """Flipped, it is found, or it changes nothing of what is read."""
    folder = write(tmp_path, {"w": torch.randn(3)}).path / "a"
    intact = (folder / "lowtide.json").read_bytes()
    expected = Checkpoint(folder).manifest
    found = 0
    for place in range(len(intact)):
        for bit in (1, 32):
            content = bytearray(intact)
            content[place] ^= bit
            (folder / "lowtide.json").write_bytes(content)
            try:
                assert Checkpoint(folder).manifest == expected
            except CheckpointError:
                found += 1
    assert found > 1.9 * len(intact)


@pytest.mark.usefixtures("cold")
@pytest.mark.parametrize("shared", [True, False])
def test_every_byte_of_a_tensors_values_counts(tmp_path: Path, shared: bool) -> None:
    values = torch.randn(8)
    target = write(tmp_path, {"w": values})
    checkpoint = target.open()
    source = checkpoint.weights
    for rank in range(2):
        path = target.path / "a" / f"__{rank}_0.distcp"
        intact = path.read_bytes()
        (row,) = [row for row in checkpoint._contents[0][rank].rows if row.name == "model.w"]
        assert row.chunk.numel == 4
        for place in range(row.place.values_offset, row.place.values_offset + 16):
            content = bytearray(intact)
            content[place] ^= 1 << (place % 8)
            path.write_bytes(content)
            with pytest.raises(CheckpointError) as caught:
                source.read([ChunkView("w", (8,), 0, torch.empty(8))], shared)
            assert str(caught.value) == (
                f"{path}: expected the values of 'model.w' at offset {row.place.values_offset} as written, found "
                "different values (the checksum differs): the file is altered"
            )
        path.write_bytes(intact)
    assert torch.equal(read_whole(target, "w"), values)


def test_the_texts_say_what_is_wrong_with_a_file(tmp_path: Path) -> None:
    folder = write(tmp_path, {"w": torch.randn(3000)}).path / "a"
    data, nbytes = folder / "__1_0.distcp", (folder / "__1_0.distcp").stat().st_size
    data.write_bytes(data.read_bytes()[:-1])
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(folder)
    assert str(caught.value) == f"{data}: expected {nbytes} bytes, found {nbytes - 1}: the file is truncated"
    data.write_bytes(bytes(nbytes + 1))
    with pytest.raises(CheckpointError, match=f"expected {nbytes} bytes, found {nbytes + 1}: the file is altered"):
        Checkpoint(folder)
    data.unlink()
    with pytest.raises(CheckpointError, match=f"expected a file of {nbytes} bytes, found: No such file or directory"):
        Checkpoint(folder)
    (folder / "lowtide.json").unlink()
    with pytest.raises(
        CheckpointError, match=r"lowtide.json: expected the description of a checkpoint, found no such file"
    ):
        Checkpoint(folder)


@pytest.mark.usefixtures("cold")
@pytest.mark.parametrize("shared", [True, False])
def test_a_file_that_shrinks_while_it_is_read_is_found(tmp_path: Path, shared: bool) -> None:
    target = write(tmp_path, {"w": torch.randn(3000)})
    source = target.open().weights
    path = target.path / "a" / "__1_0.distcp"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(CheckpointError) as caught:
        source.read([ChunkView("w", (3000,), 0, torch.empty(3000))], shared)
    (offset,) = [row.place.values_offset for rank, row in source._rows["w"] if rank == 1]
    assert str(caught.value) == (
        f"{path}: expected 6000 bytes of 'model.w' at offset {offset}, found the end of the file: the file is truncated"
    )
    path.unlink()
    with pytest.raises(
        CheckpointError, match="_0.distcp: expected a file of the checkpoint, found: No such file".replace(".", "[.]")
    ):
        source.read([ChunkView("w", (3000,), 0, torch.empty(3000))], shared)


def test_a_later_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowtide.checkpoint.index.FORMAT", 99)
    folder = write(tmp_path, {"w": torch.randn(3)}).path / "a"
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="expected a format of at most 1, found a format of a later version"):
        Checkpoint(folder)
