"""Logits of which each rank has some give the losses of all of them, with the gradients of each rank's part."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from lowtide.parallel.splits import ranges_of
from lowtide.parallel.vocabulary import LogitParts
from tests.parallel.test_collectives import exchange_on
from tests.ranks import RankPool

TOKENS, NUMEL = 6, 7  # two ranks have three and four


def logits() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    target = torch.randint(0, NUMEL, (2, TOKENS // 2), generator=generator)
    target[0, 0] = -100
    return torch.randn(2, TOKENS // 2, NUMEL, generator=generator).double(), target


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
    "another shape, of all": lambda x, t: x.flatten().logsumexp(0),
}


def used_in_parts() -> list[tuple[Tensor, Tensor]]:
    exchange = exchange_on(2, "shared_memory")
    low, high = ranges_of(NUMEL, 2)[exchange.place]
    found = []
    for use in USES.values():
        x, target = logits()
        own = x[..., low:high].clone().requires_grad_()
        loss = use(LogitParts(own, NUMEL, low, exchange), target)
        loss.backward()
        assert own.grad is not None
        found.append((loss.detach(), own.grad))
    return found


def target_outside() -> str:
    x, target = logits()
    try:
        LogitParts(x[0], NUMEL, 0, exchange_on(1, "auto")).cross_entropy(target[0] + NUMEL, -100)
    except IndexError as error:
        return str(error)
    return "no error"


def test_a_target_that_is_no_token_is_an_error(ranks: RankPool) -> None:
    assert ranks(1, target_outside)[0].startswith("Target ") and "out of bounds" in ranks(1, target_outside)[0]


def test_logits_in_parts_are_used_as_all_of_them(ranks: RankPool) -> None:
    for place, found in enumerate(ranks(2, used_in_parts)):
        low, high = ranges_of(NUMEL, 2)[place]
        for (name, use), (loss, gradient) in zip(USES.items(), found, strict=True):
            x, target = logits()
            x.requires_grad_()
            expected = use(x, target)
            expected.backward()
            assert x.grad is not None
            torch.testing.assert_close(loss, expected.detach(), msg=f"{name}: {{}}".format)
            torch.testing.assert_close(gradient, x.grad[..., low:high], msg=f"{name}: {{}}".format)
