"""The model of the examples, its text, and its data: which files, which split, which pieces."""

import math
from itertools import islice
from pathlib import Path

import pytest
import torch
from gpt_model import GPT, GPTShape, generate
from text_data import Text, batches, stdlib_files

from tests.kit.training import refusal

TINY = GPTShape(num_layers=2, num_heads=3, width=12, context=9)


def test_num_parameters_counts_the_parameters() -> None:
    assert TINY.num_parameters == sum(parameter.numel() for parameter in GPT(TINY).parameters())


def test_logits_depend_on_earlier_bytes_only() -> None:
    model, tokens = GPT(TINY), torch.randint(256, (1, 9))
    changed = tokens.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 256
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])


def test_first_loss_is_that_of_a_guess_among_256_bytes() -> None:
    tokens = torch.randint(256, (4, 9))
    assert GPT(TINY)(tokens, tokens.roll(-1, 1)).item() == pytest.approx(math.log(256), abs=0.4)


def test_generate_continues_past_the_context_and_repeats_itself() -> None:
    model = GPT(TINY).eval()
    first, second = (generate(model, b"def", 15, TINY.context, torch.device("cpu")) for _ in range(2))
    assert first == second and len(first) == 18 and first.startswith(b"def")


def test_stdlib_files_are_in_order_and_without_tests() -> None:
    files = stdlib_files()
    assert files == sorted(files) and "argparse.py" in [path.name for path in files]
    assert not any("test" in path.parts or "site-packages" in path.parts for path in files)


def test_every_file_is_either_trained_or_validated_on(tmp_path: Path) -> None:
    for number in range(21):
        (tmp_path / f"file{number:02}.py").write_bytes(bytes([number]) * 5)
    text = Text.from_files(stdlib_files(tmp_path))
    trained, validated = set(text.train.tolist()) - {10}, set(text.validation.tolist()) - {10}
    assert validated == {0, 20} and trained == set(range(1, 20)) - {10}


def test_targets_are_the_next_bytes() -> None:
    batch = next(batches(torch.arange(100, dtype=torch.uint8), context=7, batch_size=3, rank=0, world_size=1))
    assert batch["tokens"].shape == (3, 7) and batch["tokens"].dtype == torch.int64
    assert torch.equal(batch["targets"], batch["tokens"] + 1)


def test_ranks_together_read_what_one_process_reads() -> None:
    text = torch.arange(250, dtype=torch.uint8)
    whole = islice(batches(text, context=5, batch_size=6, rank=0, world_size=1), 3)
    parts = [islice(batches(text, context=5, batch_size=2, rank=rank, world_size=3), 3) for rank in range(3)]
    for expected, *of_ranks in zip(whole, *parts, strict=True):
        assert torch.equal(torch.cat([part["tokens"] for part in of_ranks]), expected["tokens"])


def test_what_cannot_be_read_is_told(tmp_path: Path) -> None:
    said = refusal(stdlib_files, tmp_path, kind=FileNotFoundError)
    assert str(tmp_path) in said and "expected the .py files " in said and "found 0: use a Python that keeps" in said
    pieces = batches(torch.zeros(8, dtype=torch.uint8), context=8, batch_size=1, rank=0, world_size=1)
    said = refusal(next, pieces)
    assert "the text has 8 bytes, and one piece takes 9: use a smaller --context" in said
    said = refusal(GPTShape, num_heads=4, width=10)
    assert "--width 10 is not divisible by --heads 4: " in said and "try --width 12" in said
