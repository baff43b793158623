"""The data of the examples: which files, which split, which pieces."""

from itertools import islice
from pathlib import Path

import pytest
import torch
from text_data import Text, batches, stdlib_files


def test_stdlib_files_are_in_order_and_without_tests() -> None:
    files = stdlib_files()
    names = [path.name for path in files]
    assert files == sorted(files)
    assert "argparse.py" in names
    assert not any("test" in path.parts or "site-packages" in path.parts for path in files)


def test_a_folder_without_source_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"expected the \.py files .* found 0: use a Python that keeps"
    ) as error:
        stdlib_files(tmp_path)
    assert str(tmp_path) in str(error.value)


def test_every_file_is_either_trained_or_validated_on(tmp_path: Path) -> None:
    for number in range(21):
        (tmp_path / f"file{number:02}.py").write_bytes(bytes([number]) * 5)
    text = Text.from_files(stdlib_files(tmp_path))
    trained, validated = set(text.train.tolist()) - {10}, set(text.validation.tolist()) - {10}
    assert validated == {0, 20}
    assert trained == set(range(1, 20)) - {10}


def test_targets_are_the_next_bytes() -> None:
    text = torch.arange(100, dtype=torch.uint8)
    batch = next(batches(text, context=7, batch_size=3, rank=0, world_size=1))
    assert batch["tokens"].shape == (3, 7)
    assert batch["tokens"].dtype == torch.int64
    assert torch.equal(batch["targets"], batch["tokens"] + 1)


def test_ranks_together_read_what_one_process_reads() -> None:
    text = torch.arange(250, dtype=torch.uint8)
    whole = list(islice(batches(text, context=5, batch_size=6, rank=0, world_size=1), 3))
    parts = [list(islice(batches(text, context=5, batch_size=2, rank=rank, world_size=3), 3)) for rank in range(3)]
    for step in range(3):
        joined = torch.cat([part[step]["tokens"] for part in parts])
        assert torch.equal(joined, whole[step]["tokens"])


def test_a_text_shorter_than_the_context_is_an_error() -> None:
    text = torch.zeros(8, dtype=torch.uint8)
    with pytest.raises(ValueError, match="the text has 8 bytes, and one piece takes 9: use a smaller --context"):
        next(batches(text, context=8, batch_size=1, rank=0, world_size=1))
