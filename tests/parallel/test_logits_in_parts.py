"""Logits of which each rank has some give the losses of all of them, with the gradients of each rank's part."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from lowtide.parallel.splits import ranges_of
from lowtide.parallel.vocab_parallel import VocabParallelLogits
from tests.kit.ranks import RankPool
from tests.kit.training import refusal
from tests.parallel.test_collectives import alone_at, exchange_on

TOKENS, NUMEL = 6, 7  # two ranks have three and four


def logits() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    target = torch.randint(0, NUMEL, (2, TOKENS // 2), generator=generator)
    target[0, 0] = -100
    return torch.randn(2, TOKENS // 2, NUMEL, generator=generator).double(), target


def trained(value: float) -> Tensor:
    """Its gradient is of all logits, and has to be that on each rank."""
    scale = torch.tensor(value, dtype=torch.float64, requires_grad=True)
    scale.register_hook(SCALES.append)
    return scale


SCALES: list[Tensor] = []  # gradients of scales
USES: dict[str, Callable[..., Tensor]] = {
    "mean": lambda x, t: functional.cross_entropy(x.view(-1, NUMEL), t.view(-1)),
    "module": lambda x, t: torch.nn.CrossEntropyLoss(reduction="sum")(x.flatten(0, 1), t.flatten()),
    "each token": lambda x, t: (
        functional.cross_entropy(x.reshape(-1, 7) * 0.5, t.flatten(), reduction="none").square().sum()
    ),
    "ignored": lambda x, t: functional.cross_entropy(x[:, 1:].flatten(0, 1), t[:, 1:].flatten(), ignore_index=2),
    "by place": lambda x, t: functional.cross_entropy(x.view(-1, 7), t.relu().view(-1), None, None, 3, None, "sum"),
    "smoothed, of all": lambda x, t: functional.cross_entropy(x.view(-1, 7), t.view(-1), label_smoothing=0.1),
    "softmax, of all": lambda x, t: torch.softmax(x, dim=-1)[..., 0].square().sum(),
    "an index before the rest": lambda x, t: x[:, :, 3, ...].square().sum() + x[0, ..., :].sum(),
    "in a list, of all": lambda x, t: torch.cat([x, 2 * x]).square().sum(),
    "compared, of all": lambda x, t: ((x < 0.5) * (x != 1) * (1 - x) ** 2).sum(),
    "negative": lambda x, t: functional.cross_entropy((-x).reshape(shape=(-1, 7)), t.view(-1)),
    "a scale that is trained, of all": lambda x, t: (trained(2.0) * x * trained(3.0)).square().sum(),
    "one behind them, of all": lambda x, t: (x * trained(2.0)).square().sum(),
    "another shape, of all": lambda x, t: x.flatten().logsumexp(0),
}


def used_in_parts() -> list[tuple[Tensor, Tensor, Tensor]]:
    exchange = exchange_on(2, "shared_memory")
    low, high = ranges_of(NUMEL, 2)[exchange.place]
    found = []
    for use in USES.values():
        x, target = logits()
        own = x[..., low:high].clone().requires_grad_()
        SCALES.clear()
        loss = use(VocabParallelLogits(own, NUMEL, low, exchange), target)
        loss.backward()
        assert own.grad is not None
        found.append((loss.detach(), own.grad, torch.stack([*SCALES, loss.detach()])))
    return found


CHANGES: dict[str, Callable[[Any], object]] = {
    "masked_fill_": lambda x: x.masked_fill_(x > 0, 0.0),
    "relu_": lambda x: torch.relu_(x),
    "[...] =": lambda x: x.__setitem__(0, 0.0),
}


def test_a_change_in_place_and_a_target_that_is_no_token_are_refused() -> None:
    for name, change in CHANGES.items():
        parts = VocabParallelLogits(torch.ones(2, NUMEL), NUMEL, 0, alone_at(1, 0))
        text = refusal(change, parts, kind=TypeError)
        assert f"cannot be changed in place, found {name}; use a function" in text
    x, target = logits()
    parts = VocabParallelLogits(x[0], NUMEL, 0, alone_at(1, 0))
    text = refusal(parts.cross_entropy, target[0] + NUMEL, -100, kind=IndexError)
    assert text.startswith("Target ") and "out of bounds" in text


def test_logits_in_parts_are_used_as_all_of_them(ranks: RankPool) -> None:
    for place, found in enumerate(ranks(2, used_in_parts)):
        low, high = ranges_of(NUMEL, 2)[place]
        for (name, use), (loss, gradient, scales) in zip(USES.items(), found, strict=True):
            x, target = logits()
            x.requires_grad_()
            SCALES.clear()
            expected = use(x, target)
            expected.backward()
            assert x.grad is not None
            torch.testing.assert_close(loss, expected.detach(), msg=f"{name}: {{}}".format)
            torch.testing.assert_close(scales, torch.stack([*SCALES, loss]), msg=f"{name}: {{}}".format)
            torch.testing.assert_close(gradient, x.grad[..., low:high], msg=f"{name}: {{}}".format)
