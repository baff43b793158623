"""The model of the examples: its size, its causality, its first loss, its text."""

import math

import pytest
import torch
from gpt_model import GPT, GPTShape, generate

TINY = GPTShape(num_layers=2, num_heads=3, width=12, context=9)


def test_num_parameters_counts_the_parameters() -> None:
    assert TINY.num_parameters == sum(parameter.numel() for parameter in GPT(TINY).parameters())


def test_a_width_that_heads_do_not_divide_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"--width 10 is not divisible by --heads 4: .* try --width 12"):
        GPTShape(num_heads=4, width=10)


def test_logits_depend_on_earlier_bytes_only() -> None:
    model = GPT(TINY)
    tokens = torch.randint(256, (1, 9))
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
    assert len(first) == 18
    assert first.startswith(b"def")
    assert first == second
