"""Ranks that share sequences: dropout, masks of forwards in flight, loops by hand, and checkpoints."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import lowtide
from tests.kit.ranks import RankPool
from tests.parallel.test_sequence import RING, TWO, Attends, Plain, batch_of, built, train
from tests.parallel.test_tiles import config_of
from tests.parallel.trainings import AGAIN, apart


class Dropping(Attends):
    """Keeps which elements it has dropped, each time that it is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.masks: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        kept = functional.dropout(torch.ones_like(x), 0.5, self.training)
        self.masks.append(kept != 0)
        return super().forward(x * kept)


def dropped(config: dict[str, Any], num_masks: int) -> tuple[list[list[Tensor]], Tensor]:
    """By block of this rank its last masks, and not those of trials; and a number drawn after the step."""
    torch.manual_seed(0)
    blocks = [Dropping() for _ in range(4)]
    model = Plain()
    model.blocks = nn.ModuleList(blocks)
    with lowtide.initialize(model, config_of(1) | config) as engine:
        engine.train_step(batch_of(0, "plain"))
    return [[mask.clone() for mask in block.masks[-num_masks:]] for block in blocks if block.masks], torch.rand(4)


@pytest.mark.parametrize("pipeline", [1, 2])
def test_each_part_of_a_sequence_drops_elements_of_its_own(ranks: RankPool, pipeline: int) -> None:
    """Two microbatches, of which each block has a mask; without a pipeline a block's mask is drawn again."""
    again = {"activation_checkpointing": {"every": 1}, "gradient_accumulation_steps": 1} if pipeline == 1 else {}
    more = {"train_micro_batch_size_per_gpu": 4} if again else {}
    config = {"parallel": {"sequence": 2, "pipeline": pipeline}, **again, **more}
    found = ranks(2 * pipeline, dropped, config, 2)
    for one, other in zip(found[::2], found[1::2], strict=True):
        assert torch.equal(one[1], other[1])  # what a script draws is the same on both
        for masks, of_other in zip(one[0][-2:], other[0][-2:], strict=True):
            assert not any(torch.equal(*pair) for pair in zip(masks, of_other, strict=True))
        if again:
            assert torch.equal(*one[0][-1]) and torch.equal(*other[0][-1])


def recomputed_ring() -> list[dict[str, Tensor]]:
    return [train("dropping", "odd", config_of(1) | TWO | RING | more) for more in ({}, AGAIN)]


def test_a_recomputed_block_round_a_ring_drops_what_it_has_dropped(ranks: RankPool) -> None:
    kept, again = ranks(2, recomputed_ring)[0]
    assert all(torch.equal(kept[key], again[key]) for key in kept)


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
    """Two forwards with unlike masks and an evaluation, then the backward of all: with blocks that are recomputed."""
    found = []
    for name in WAYS if size > 1 else WAYS[:1]:
        model = built("llama")
        recompute(name, model)
        more = AGAIN if name == "engine" else {}
        with lowtide.initialize(model, config_of(1, parallel={"sequence": size}, **more)) as engine:
            outputs = [engine(**batch_of(step, kind)) for step, kind in enumerate(("padded", "packed"))]
            engine.eval_step(batch_of(3, "divides"))
            for output in outputs:
                engine.backward(output.loss)
                engine.step()
            found.append({key: value.detach().clone() for key, value in engine.state_dict().items()})
    return found


def test_a_recomputed_block_has_the_mask_of_its_own_forward(ranks: RankPool) -> None:
    (alone,) = ranks(1, in_flight, 1)[0]
    for way, shared in zip(WAYS, ranks(2, in_flight, 2)[0], strict=True):
        assert apart(alone, shared) == [], way


def by_train_step_and_by_hand(folder: Path) -> list[dict[str, Tensor]]:
    """Values after a step; the first engine saves its own."""
    found = []
    for is_by_hand in (False, True):
        with lowtide.initialize(built("llama"), config_of(3, parallel={"sequence": 2})) as engine:
            batch = batch_of(0, "odd")
            if is_by_hand:
                for half in range(2):
                    engine.backward(engine(**{key: value.chunk(2)[half] for key, value in batch.items()}).loss)
                    engine.step()
            else:
                engine.train_step(batch)
                engine.save_checkpoint(folder)
            found.append(engine.state_dict() | {"evaluated": engine.eval_step(batch_of(2, "odd"))})
    return found


def test_a_loop_of_ones_own_trains_as_train_step_does_and_a_checkpoint_knows_of_no_sequences(
    ranks: RankPool, tmp_path: Path
) -> None:
    stepped, looped = ranks(2, by_train_step_and_by_hand, tmp_path)[0]
    assert all(torch.equal(looped[key], stepped[key]) for key in looped)
    with lowtide.initialize(built("llama"), config_of(0)) as engine:
        engine.load_checkpoint(tmp_path)
        assert apart(stepped, engine.state_dict() | {"evaluated": engine.eval_step(batch_of(2, "odd"))}, 1e-5) == []
