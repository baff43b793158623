"""Ranks that share sequences: dropout, masks of forwards in flight, and tokens that meet past shared attention."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import lowtide
from tests.kit.ranks import RankPool
from tests.parallel.test_sequence import MODELS, Attends, Plain, batch_of
from tests.parallel.test_tiles import WIDTH, config_of

PARALLEL = {"parallel": {"sequence": 2}}


class Dropping(Attends):
    """Keeps which elements it has dropped, each time that it is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.masks: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        kept = functional.dropout(torch.ones_like(x), 0.5, self.training)
        self.masks.append(kept != 0)
        return super().forward(x * kept)


def dropped() -> list[Tensor]:
    """Masks of two blocks in a forward, of the second one recomputed, and a number drawn after the step."""
    torch.manual_seed(0)
    blocks = [Dropping() for _ in range(2)]
    model = Plain()
    model.blocks = nn.ModuleList(blocks)
    engine = lowtide.initialize(
        model, config_of(3, **PARALLEL, activation_checkpointing={"every": 1}, gradient_accumulation_steps=1)
    )
    engine.train_step({key: value[:2] for key, value in batch_of(0, "plain").items()})
    first, second = ([mask.clone() for mask in block.masks[-2:]] for block in blocks)  # not those of trials
    engine.close()
    return [first[0], second[0], second[1], torch.rand(4)]


def test_each_part_of_a_sequence_drops_elements_of_its_own(ranks: RankPool) -> None:
    one, other = ranks(2, dropped)
    assert not torch.equal(one[0], other[0]) and not torch.equal(one[1], other[1])
    assert all(torch.equal(found[1], found[2]) for found in (one, other))
    assert torch.equal(one[3], other[3])  # what a script draws is the same on both


def recompute(name: str, model: Any) -> None:
    """By checkpoints of a user's own."""

    def again(forward: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(partial(forward, **kwargs), *args, use_reentrant="reentrant" in name)

    if name.startswith("user"):
        model.enable_input_require_grads()  # which a reentrant checkpoint wants
        for layer in model.model.layers:
            layer.forward = partial(again, layer.forward)


WAYS = ["engine", "user", "user, reentrant"]


def in_flight(size: int) -> list[dict[str, Tensor]]:
    """Three forwards with unlike masks, then the backward of all: with blocks that are recomputed."""
    found = []
    for name in WAYS if size > 1 else WAYS[:1]:
        torch.manual_seed(0)
        model = MODELS["llama"]()
        model.config.use_cache = False
        recompute(name, model)
        more = {"activation_checkpointing": {"every": 1}} if name == "engine" else {}
        engine = lowtide.initialize(model, config_of(1, parallel={"sequence": size}, **more))
        for _ in range(2):
            outputs = [engine(**batch_of(step, kind)) for step, kind in enumerate(("padded", "packed"))]
            engine.eval_step(batch_of(3, "divides"))
            for output in outputs:
                engine.backward(output.loss)
                engine.step()
        found.append({key: value.detach().clone() for key, value in engine.state_dict().items()})
        engine.close()
    return found


def test_a_recomputed_block_has_the_mask_of_its_own_forward(ranks: RankPool) -> None:
    (alone,) = ranks(1, in_flight, 1)[0]
    for way, shared in zip(WAYS, ranks(2, in_flight, 2)[0], strict=True):
        for key, value in alone.items():
            assert (shared[key] - value).norm() <= 1e-6 * value.norm() + 2e-7, (way, key)


class Written(Attends):
    """Has torch's attention, and does not use it."""

    def forward(self, x: Tensor) -> Tensor:
        return x + (x @ x.transpose(1, 2)).softmax(-1) @ x if x.shape[0] else super().forward(x)


class Shifting(Attends):
    """Beside attention each token sees the one before it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + functional.pad(x, (0, 0, 1, 0))[:, :-1] / WIDTH)


def with_block(block: type[nn.Module]) -> nn.Module:
    model = Plain()
    model.blocks = nn.ModuleList(block() for _ in range(2))
    return model


def refusals() -> dict[str, str]:
    batch, found = batch_of(0, "plain"), {}

    def call(name: str, model: nn.Module) -> None:
        engine = lowtide.initialize(model, config_of(3, **PARALLEL))
        try:
            engine.module(**batch) if name == "past" else engine.train_step(batch)
        except ValueError as error:
            found[name] = str(error)
        engine.close()

    call("written", with_block(Written))
    call("shifting", with_block(Shifting))
    call("past", Plain())
    return found


REFUSED = {
    "written": "expected split attention in a forward of Plain, found no call of it",
    "shifting": "expected tokens of Plain to mix only in attention, found that a token's loss depends",
    "past": "expected engine(**batch), engine.train_step or engine.eval_step, found a direct call of the Plain",
}


def test_tokens_that_meet_past_shared_attention_are_an_error(ranks: RankPool) -> None:
    for found in ranks(2, refusals):
        for name, text in REFUSED.items():
            assert text in found.get(name, ""), name
