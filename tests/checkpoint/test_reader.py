"""Ranges of tensors out of files that others have cut elsewhere; what is damaged is found and named."""

import os
import random
import resource
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lowtide.checkpoint import data_file, writer
from lowtide.checkpoint.archive import MAX_VALUES_BYTES
from lowtide.checkpoint.checkpoint import Checkpoint
from lowtide.checkpoint.chunk_view import ChunkView
from lowtide.checkpoint.data_file import Blocks, DataFile
from lowtide.checkpoint.files import CheckpointError
from lowtide.offload import StoredRange
from tests.checkpoint.making import read_all, write
from tests.kit.training import differences, refusal

BIG = 3 << 20  # elements of float32: several chunks


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


def random_pieces(values: dict[str, Tensor], world_size: int) -> list[dict[str, tuple[int, int]]]:
    """Uneven parts; some ranks have none of a tensor."""
    draw = random.Random(1)
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


BOTH_WAYS = pytest.mark.parametrize("shared", [True, False])


@pytest.mark.usefixtures("cold")
@BOTH_WAYS
@pytest.mark.parametrize("world_size", [1, 5])
def test_any_range_comes_back_whoever_wrote_its_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world_size: int, shared: bool
) -> None:
    monkeypatch.setattr(writer, "MAX_VALUES_BYTES", 64)  # many chunks in small tensors
    draw = random.Random(world_size)
    values = tensors()
    source = write(tmp_path, values, "a", random_pieces(values, world_size)).open().weights
    assert differences(read_all(source), values) == []
    for name, value in values.items():
        chunk_views = []
        for _ in range(10):
            low, high = sorted(draw.randint(0, value.numel()) for _ in range(2))
            memory = torch.empty(high - low, dtype=value.dtype)
            chunk_views.append(ChunkView(name, tuple(value.shape), low, memory))
        source.read(chunk_views, shared)
        for one in chunk_views:
            assert torch.equal(one.values, value.reshape(-1)[one.start : one.end])


def test_only_the_chunks_of_a_range_are_read(tmp_path: Path) -> None:
    value = torch.randn(BIG)
    source = write(tmp_path, {"w": value}).open().weights
    memory = torch.empty(100)
    source.read([ChunkView("w", (BIG,), BIG // 2 + 5, memory)])
    assert torch.equal(memory, value[BIG // 2 + 5 : BIG // 2 + 105])
    assert source.bytes_read == MAX_VALUES_BYTES < value.nbytes


@pytest.mark.usefixtures("cold")
@BOTH_WAYS
def test_values_in_a_store_are_filled_in_the_order_in_which_they_are_asked_for(tmp_path: Path, shared: bool) -> None:
    values = {name: torch.randn(40) for name in "abc"}
    stored = {name: torch.zeros(40) for name in "ac"}
    opened: list[str] = []

    def stored_range(name: str) -> ChunkView:
        def open_values() -> Tensor:
            opened.append(name)
            return stored[name]

        return ChunkView(name, (40,), 0, StoredRange(40, torch.float32, open_values))

    memory = torch.zeros(40)
    source = write(tmp_path, values, world_size=1).open().weights
    source.read([stored_range("c"), ChunkView("b", (40,), 0, memory), stored_range("a")], shared)
    assert differences({**stored, "b": memory}, values) == []
    assert opened == ["c", "a"]
    assert source.bytes_read == 3 * 40 * 4


@pytest.mark.usefixtures("cold")
@BOTH_WAYS
def test_a_checkpoint_of_more_ranks_than_files_may_be_open_is_read(tmp_path: Path, shared: bool) -> None:
    values = {"w": torch.randn(100)}
    source, before = write(tmp_path, values, world_size=40).open().weights, resource.getrlimit(resource.RLIMIT_NOFILE)
    memory, used = torch.empty(100), {int(name) for name in os.listdir("/proc/self/fd")}
    free = [number for number in range(before[0]) if number not in used]
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[35 if shared else 70], before[1]))
    try:
        source.read([ChunkView("w", (100,), 0, memory)], shared)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert torch.equal(memory, values["w"])


@pytest.mark.usefixtures("cold")
@BOTH_WAYS
def test_a_chunk_may_be_for_several_views_of_several_dtypes(tmp_path: Path, shared: bool) -> None:
    value = torch.randn(BIG)
    source = write(tmp_path, {"w": value}).open().weights
    dtypes = (torch.float32, torch.bfloat16, torch.float64, torch.float16)
    memories = [torch.empty(BIG - 7, dtype=dtype) for dtype in dtypes]
    source.read([ChunkView("w", (BIG,), 5, memory) for memory in memories], shared)
    assert all(torch.equal(memory, value[5:-2].to(memory.dtype)) for memory in memories)


@pytest.mark.usefixtures("cold")
def test_small_chunks_are_read_together_past_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {f"w{index}": torch.randn(100 + index) for index in range(300)}
    source = write(tmp_path, values, world_size=1).open().weights
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


def test_a_whole_checkpoint_is_verified_and_has_the_state_of_each_rank(tmp_path: Path) -> None:
    checkpoint = write(tmp_path, tensors()).open()
    checkpoint.verify()
    assert [checkpoint.own_state(rank) for rank in range(2)] == [{"rank": 0}, {"rank": 1}]


# -- damage ----------------------------------------------------------------------------------------------------------


def flip(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


FILES = ["__0_0.distcp", "__1_0.distcp", "rank0.json", "rank1.json", "lowtide.json", ".metadata"]
DAMAGES: dict[str, Callable[[bytes], bytes | None]] = {
    "truncated": lambda content: content[:-5],
    "empty": lambda content: b"",
    "longer": lambda content: content + b"\0",
    "flipped": flip,
    "removed": lambda content: None,
}


def test_every_damage_to_every_file_is_found_and_the_file_is_named(tmp_path: Path) -> None:
    folder = write(tmp_path, {"w": torch.randn(3000)}).path / "a"
    for name, damage in product(FILES, DAMAGES):
        path = folder / name
        intact = path.read_bytes()
        content = DAMAGES[damage](intact)
        path.unlink() if content is None else path.write_bytes(content)
        text = refusal(lambda: Checkpoint(folder).verify(), kind=CheckpointError)
        assert text.startswith(f"{path}: expected "), (name, damage)
        path.write_bytes(intact)


@pytest.mark.usefixtures("cold")
@BOTH_WAYS
def test_every_byte_of_a_tensors_values_counts(tmp_path: Path, shared: bool) -> None:
    values = torch.randn(8)
    target = write(tmp_path, {"w": values})
    checkpoint = target.open()
    wanted = [ChunkView("w", (8,), 0, torch.empty(8))]
    for rank in range(2):
        path = target.path / "a" / f"__{rank}_0.distcp"
        intact = path.read_bytes()
        (row,) = [row for row in checkpoint._contents[0][rank].rows if row.name == "model.w"]
        assert row.chunk.numel == 4
        for place in range(row.values_offset, row.values_offset + 16):
            content = bytearray(intact)
            content[place] ^= 1 << (place % 8)
            path.write_bytes(content)
            assert refusal(checkpoint.weights.read, wanted, shared, kind=CheckpointError) == (
                f"{path}: expected the values of 'model.w' at offset {row.values_offset} as written, found "
                "different values (the checksum differs): the file is altered"
            )
        path.write_bytes(intact)
    checkpoint.weights.read(wanted, shared)
    assert torch.equal(wanted[0].values, values)


def test_the_texts_say_what_is_wrong_with_a_file(tmp_path: Path) -> None:
    folder = write(tmp_path, {"w": torch.randn(3000)}).path / "a"
    data, nbytes = folder / "__1_0.distcp", (folder / "__1_0.distcp").stat().st_size
    for found, words in (
        (nbytes - 1, f"expected {nbytes} bytes, found {nbytes - 1}: the file is truncated"),
        (nbytes + 1, f"expected {nbytes} bytes, found {nbytes + 1}: the file is altered"),
        (None, f"expected a file of {nbytes} bytes, found: No such file or directory"),
    ):
        data.unlink() if found is None else os.truncate(data, found)
        assert refusal(Checkpoint, folder, kind=CheckpointError) == f"{data}: {words}"
    (folder / "lowtide.json").unlink()
    text = refusal(Checkpoint, folder, kind=CheckpointError)
    assert text.startswith(f"{folder / 'lowtide.json'}: expected the description of a checkpoint, found no such file")


@pytest.mark.usefixtures("cold")
@BOTH_WAYS
def test_a_file_that_shrinks_while_it_is_read_is_found(tmp_path: Path, shared: bool) -> None:
    target = write(tmp_path, {"w": torch.randn(3000)})
    source, wanted = target.open().weights, [ChunkView("w", (3000,), 0, torch.empty(3000))]
    path = target.path / "a" / "__1_0.distcp"
    os.truncate(path, 100)
    (offset,) = [row.values_offset for rank, row in source._rows["w"] if rank == 1]
    assert refusal(source.read, wanted, shared, kind=CheckpointError) == (
        f"{path}: expected 6000 bytes of 'model.w' at offset {offset}, found the end of the file: the file is truncated"
    )
    path.unlink()
    text = refusal(source.read, wanted, shared, kind=CheckpointError)
    assert text.startswith(f"{path}: expected a file of the checkpoint, found: No such file")


def test_a_later_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowtide.checkpoint.index.FORMAT", 99)
    folder = write(tmp_path, {"w": torch.randn(3)}).path / "a"
    monkeypatch.undo()
    text = refusal(Checkpoint, folder, kind=CheckpointError)
    assert "expected a format of at most 1, found a format of a later version" in text
