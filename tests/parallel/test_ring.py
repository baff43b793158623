"""Where ranks do not divide heads, keys go round a ring: with the numbers of one process and the bytes of a formula."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import lowtide
from lowtide.parallel import block_attention
from lowtide.parallel.block_attention import Kind, Scores, Seen
from lowtide.parallel.ring_attention import Ring, _pairs, ring_attention
from lowtide.parallel.sequence_attention import heads_fault, way_line
from lowtide.parallel.sequence_data import AttentionContext
from tests.kit.ranks import on_ranks
from tests.kit.training import logged, refusal
from tests.parallel.test_collectives import alone_at, exchange_on
from tests.parallel.test_sequence import RING, TWO, batch_of, built
from tests.parallel.test_tiles import config_of
from tests.parallel.trainings import Largest

ROWS, SIZE, SCALE = 2, 8, 0.4
PACKED = torch.stack([torch.arange(24) // 5, torch.arange(24) // 7])
PADDING = torch.arange(24)[None] < torch.tensor([[17], [24]])
# heads, heads of keys, tokens, size of values, is_causal, window, keys, packed
CASES: dict[str, tuple[int, int, int, int, bool, int | None, Tensor | None, Tensor | None]] = {
    "halves": (3, 3, 24, 8, True, None, None, None),
    "odd parts": (2, 1, 12, 8, True, None, None, None),
    "all": (6, 2, 24, 5, False, None, None, None),
    "window": (3, 3, 24, 8, True, 4, None, None),
    "narrow": (3, 1, 24, 8, True, 1, None, None),
    "padding": (6, 2, 24, 8, True, None, PADDING, None),
    "left padding": (3, 3, 24, 8, True, None, PADDING.flip(1), None),
    "packed": (3, 1, 24, 8, True, None, None, PACKED),
    "packed, all": (3, 3, 24, 5, False, None, None, PACKED),
}


def tensors_of(case: str, stream: int = 0) -> list[Tensor]:
    """Query, key, value and the gradient of the output, of all tokens."""
    heads, of_keys, tokens, width, *_ = CASES[case]
    generator = torch.Generator().manual_seed(stream)
    shapes = [(heads, SIZE), (of_keys, SIZE), (of_keys, width), (heads, width)]
    return [torch.randn(ROWS, count, tokens, size, generator=generator, dtype=torch.float64) for count, size in shapes]


def seen_of(case: str) -> Seen:
    _, _, tokens, _, is_causal, window, keys, packed = CASES[case]
    return Seen(AttentionContext(tokens - 1, keys, packed), is_causal, window)  # a token was added


def whole_of(case: str, stream: int = 0) -> list[Tensor]:
    """Output and gradients, by the definition."""
    query, key, value, grad = tensors_of(case, stream)
    inputs = [one.requires_grad_() for one in (query, key, value)]
    groups, tokens = query.shape[1] // key.shape[1], query.shape[2]
    keys, values = (one.repeat_interleave(groups, 1) for one in (key, value))
    mask = seen_of(case).mask(range(tokens), range(tokens), query.device)[:, None]
    scores = (query @ keys.transpose(-1, -2) * SCALE).masked_fill(~mask, -1e300)
    out = (scores.softmax(-1) * mask) @ values  # nothing, where nothing is seen
    return [out.detach(), *torch.autograd.grad(out, inputs, grad)]


def bytes_of(case: str, place: int, size: int) -> tuple[int, int]:
    """What a rank sends: keys and values once a hop, their gradients once a hop and home, halves where they trade."""
    heads, of_keys, tokens, width, is_causal, window, *_ = CASES[case]
    part = tokens // size
    queries, keys, outputs = (8 * ROWS * part * n for n in (heads * SIZE, of_keys * (SIZE + width), heads * width))
    hops = size - 1 if window is None else min(size - 1, math.ceil((window - 1) / part))
    forward, backward = hops * keys, hops * keys + (hops + 1 if hops else 0) * keys
    if is_causal and hops == size - 1 and part % 2 == 0:
        halves = {place, 2 * size - 1 - place}
        moved = len(halves - {2 * place, 2 * place + 1}) * (queries + keys + outputs) // 2
        forward, backward = forward + moved, backward + moved
    return forward, backward


@pytest.mark.parametrize(
    ("transport", "size", "stride"),
    [("shared_memory", 4, 1), ("shared_memory", 4, 2), ("sockets", 3, 1), ("native", 2, 1)],
)
@on_ranks("size")
def test_a_ring_attends_as_one_process_does_with_the_bytes_of_the_formula(
    transport: str, size: int, stride: int
) -> None:
    exchange, rings = exchange_on(size, transport), size // stride
    place, beside = divmod(exchange.place, stride)
    for case in CASES:
        parts = [one.chunk(rings, 2)[place].clone() for one in tensors_of(case, beside)]
        inputs = [one.requires_grad_() for one in parts[:3]]
        ring = Ring(exchange, stride, inputs[0].shape[2], seen_of(case))
        before = exchange.bytes_sent
        out = ring_attention(inputs[0], inputs[1], inputs[2], ring, Scores(ring.seen, SCALE))
        middle = exchange.bytes_sent
        found = [out.detach(), *torch.autograd.grad(out, inputs, parts[3])]
        sent = middle - before, exchange.bytes_sent - middle
        for value, whole in zip(found, whole_of(case, beside), strict=True):
            torch.testing.assert_close(value, whole.chunk(rings, 2)[place], msg=f"{case}: {{}}".format)
        assert sent == bytes_of(case, place, rings), case


def kinds_of(size: int, tokens: int, place: int, hop: int) -> list[Kind]:
    seen = Seen(AttentionContext(), True, None)
    exchange = alone_at(size, place)
    return [seen.kind(queries, keys) for _, queries, _, keys in _pairs(Ring(exchange, 1, tokens, seen), hop)]


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_each_rank_has_as_much_to_compute_at_each_hop(size: int) -> None:
    for hop in range(size):
        kinds = [kinds_of(size, 4, place, hop) for place in range(size)]
        counts = [[found.count(kind) for kind in (Kind.FULL, Kind.DIAGONAL, Kind.EMPTY)] for found in kinds]
        assert counts == [[2, 0, 2] if hop else [1, 2, 1]] * size
    computed = [sum(kinds_of(size, 3, place, hop) != [Kind.EMPTY] for hop in range(size)) for place in range(size)]
    assert computed == list(range(1, size + 1))  # parts of an odd number of tokens stay as they are


TOKENS = 512


@on_ranks(4)
def test_a_rank_holds_its_part_and_that_on_its_way() -> None:
    """Without and with a mask: elements that are kept for the backward, and those of the largest tensor."""
    exchange, part = exchange_on(4, "sockets"), TOKENS // 4
    block_attention._MOST_SCORES["cpu"] = 4 * TOKENS
    for keys in (None, torch.rand(1, TOKENS) < 0.5):
        query, key, value = (torch.randn(1, 2, part, SIZE).requires_grad_() for _ in range(3))
        seen = Seen(AttentionContext(TOKENS, keys), True, None)
        kept: dict[int, int] = {}

        def pack(one: Tensor, kept: dict[int, int] = kept) -> Tensor:
            kept[one.data_ptr()] = one.numel()
            return one

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one), Largest() as largest:
            out = ring_attention(query, key, value, Ring(exchange, 1, part, seen), Scores(seen, SCALE))
            out.sum().backward()
        # Queries, keys, values, outputs, and a number for each query.
        assert sum(kept.values()) == 4 * query.numel() + query.numel() // SIZE
        # Halves of three that trade places; whole scores would be 8 times a part and more.
        assert largest.numel <= 3 * query.numel()


def test_dropout_drops_the_same_in_the_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(block_attention._MOST_SCORES, "cpu", 8)  # in several chunks
    seen = Seen(AttentionContext(), True, None)
    ring = Ring(alone_at(1, 0), 1, 4, seen)
    inputs: Any = [torch.randn(1, 1, 4, 3, dtype=torch.float64) for _ in range(3)]

    def attend(query: Any, key: Any, value: Any, dropout: Any = 0.4) -> Tensor:
        return ring_attention(query, key, value, ring, Scores(seen, SCALE, dropout, 7))

    assert torch.autograd.gradcheck(attend, tuple(one.requires_grad_() for one in inputs))
    with torch.no_grad():
        mean = attend(*(one.expand(500, -1, -1, -1) for one in inputs)).mean(0, keepdim=True)  # each row draws its own
        assert (mean - attend(inputs[0], inputs[1], inputs[2], 0.0)).abs().max() < 0.15


@on_ranks(2)
def test_rank_0_logs_the_way() -> None:
    with logged() as lines, lowtide.initialize(built("llama"), config_of(1) | TWO | RING) as engine:
        engine.train_step(batch_of(0, "odd"))
    assert (way_line(2, 4, 1, "ring") in lines) == (engine.rank == 0)


LINES = {
    (4, 8, 4, "auto"): "each has 2 heads of all tokens (all-to-all)",
    (4, 6, 2, "auto"): (
        "by heads over 2 neighbours (all-to-all), and a ring of 2, since sequence(4) does not divide heads(6)"
    ),
    (4, 3, 1, "auto"): "keys and values go round a ring, since sequence(4) does not divide heads(3)",
    (4, 8, 1, "ring"): "keys and values go round a ring, as the config asks",
}


def test_the_log_says_which_way_and_why() -> None:
    for (size, heads, width, way), line in LINES.items():
        assert way_line(size, heads, width, way) == f"sequence: attention of {heads} heads over {size} ranks: {line}"


def test_the_way_is_checked() -> None:
    text = refusal(lowtide.Config.load, {"sequence_parallel": {"attention": "rings"}})
    assert "sequence_parallel.attention: expected " in text and '"ring"' in text and 'found "rings"' in text
    assert heads_fault(2, 6) is None
    assert "sequence(2) x tensor(2) x heads of a rank(?) = attention heads(6)" in str(heads_fault(2, 6, 2))


def test_a_device_gets_blocks_of_bfloat16_in_flash_attention() -> None:
    """Nothing is computed: that its operators take what they are given."""
    with FakeTensorMode(), torch.no_grad():
        query, key = (torch.empty(2, n, 16, 64, device="cuda", dtype=torch.bfloat16) for n in (6, 2))
        at = range(16)
        for is_causal in (True, False):
            scores = Scores(Seen(AttentionContext(), is_causal, None), SCALE)
            assert scores._is_fast(scores.seen.kind(at, at), query, key)
            found = scores.forward(query, key, key, at, at)
            assert found is not None and found[1].dtype == torch.float32
            grads = scores.backward(query, query, key, key, *found, at, at)
            assert grads is not None and [one.shape for one in grads] == [query.shape, key.shape, key.shape]
