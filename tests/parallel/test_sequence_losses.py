"""Ranks that share sequences: losses beside the model, dropout, recomputation, loops by hand, checkpoints."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import lowtide
from tests.kit.ranks import RankPool, on_ranks
from tests.kit.training import differences
from tests.parallel.test_sequence import RING, TWO, Attends, Batch, Plain, batch_of, built, train
from tests.parallel.test_tiles import config_of
from tests.parallel.trainings import AGAIN, apart, values_after


class WithLogits(Plain):
    """Gives its logits."""

    def forward(self, input_ids: Tensor, position_ids: Tensor, shift_labels: Tensor | None = None) -> Tensor:
        x = self.embedding(input_ids) + self.positions(position_ids)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


def cross_entropy(output: Any, labels: Tensor, reduction: str = "mean") -> Tensor:
    logits = output if isinstance(output, Tensor) else output.logits
    return functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction=reduction)


def mean(output: Any, batch: Batch) -> Tensor:
    return cross_entropy(output, batch["shift_labels"])


def divided(output: Any, batch: Batch) -> Tensor:
    """Not a number where there are no labels."""
    return cross_entropy(output, batch["shift_labels"], "sum") / (batch["shift_labels"] != -100).sum()


def given(output: Any, batch: Batch) -> Any:
    return output


def shift_batch(step: int, kind: str) -> Batch:
    batch = batch_of(step, kind)
    if "labels" in batch:
        labels = batch.pop("labels")
        batch["shift_labels"] = functional.pad(labels, (0, 1), value=-100)[:, 1:].contiguous()
    return batch


def make(name: str) -> nn.Module:
    torch.manual_seed(0)
    return WithLogits() if name == "plain" else built(name)


def check(found: list[Batch], right: list[Batch]) -> None:
    for number, (values, whole) in enumerate(zip(found, right, strict=False)):
        assert apart(whole, values) == [], number


def with_loss_fn(parallel: dict[str, int]) -> list[Batch]:
    cases: list[tuple[str, str, Any, dict[str, Any]]]
    cases = [("plain", "plain", divided, {})]
    if "pipeline" not in parallel:
        cases += [("gpt2", "padded", mean, {}), ("llama", "odd", divided, {"tiles": "auto"})]
    return [
        values_after(
            lowtide.initialize(make(name), config_of(3, parallel=parallel, **more), loss_fn=loss_fn),
            *(shift_batch(step, kind) for step in (0, 2)),
        )
        for name, kind, loss_fn, more in cases
    ]


def test_a_loss_fn_gets_a_part_and_gives_the_mean_over_its_labels(ranks: RankPool) -> None:
    alone = ranks(1, with_loss_fn, {})[0]
    check(ranks(2, with_loss_fn, {"sequence": 2})[0], alone)
    check(ranks(4, with_loss_fn, {"sequence": 2, "pipeline": 2})[0], alone)


def beside_tensor(parallel: dict[str, int]) -> list[Batch]:
    """Labels that one part alone has, of logits in parts: for the loss_fn, and for a loss without one."""
    found = []
    for loss_fn in (mean, None):
        batch = shift_batch(0, "odd")
        batch["shift_labels"][:, 12:] = -100
        if loss_fn is None:
            batch["labels"] = batch["shift_labels"]
        engine = lowtide.initialize(make("llama"), config_of(1, parallel=parallel), loss_fn=loss_fn)
        found.append(values_after(engine, batch))
    return found


def test_a_part_without_labels_of_logits_in_parts(ranks: RankPool) -> None:
    check(ranks(4, beside_tensor, {"sequence": 2, "tensor": 2})[0], ranks(1, beside_tensor, {})[0])


def by_hand(size: int) -> list[Batch]:
    """Weights of tokens, which no mean over labels has; and a model's own loss, which a loss_fn hands on."""
    found = []
    for name, kind in (("llama", "padded"), ("plain", "plain")):
        config = config_of(3, parallel={"sequence": size}, gradient_accumulation_steps=1)
        with lowtide.initialize(make(name), config) as engine:
            for step in range(2):
                batch = shift_batch(step, kind)
                labels = batch.pop("shift_labels")
                weights = torch.linspace(1, 2, labels.numel()).view_as(labels)
                own = engine.sequence_part(labels, fill=-100)
                terms = cross_entropy(engine(**batch), own, "none")
                total = weights[labels != -100].sum()
                engine.backward((terms * engine.sequence_part(weights).flatten()).sum() / total)
                result = engine.step()
            found.append(engine.state_dict() | {"loss": result.loss, "norm": result.grad_norm})
    torch.manual_seed(0)
    with lowtide.initialize(Plain(), config_of(1, parallel={"sequence": size}), loss_fn=given) as engine:
        for half in range(2):
            engine.backward(engine(**{key: value.chunk(2)[half] for key, value in batch_of(0, "plain").items()}))
            engine.step()
        found.append(engine.state_dict())
    return [{key: value.detach().clone() for key, value in values.items()} for values in found]


def test_a_loop_computes_a_loss_of_its_own_of_its_part(ranks: RankPool) -> None:
    check(ranks(2, by_hand, 2)[0], ranks(1, by_hand, 1)[0])


class Module(WithLogits):
    """Its loss is a module that ignores the label 0."""

    def __init__(self) -> None:
        super().__init__()
        self.loss = nn.CrossEntropyLoss(ignore_index=0)

    def forward(self, input_ids: Tensor, position_ids: Tensor, shift_labels: Tensor) -> Tensor:  # type: ignore[override]
        logits = super().forward(input_ids, position_ids)
        loss: Tensor = self.loss(logits.flatten(0, 1), shift_labels.flatten())
        return loss


def ignoring_zero(output: Any, batch: Batch) -> Tensor:
    labels = batch["shift_labels"].flatten()
    return functional.cross_entropy(output.logits.flatten(0, 1), labels, ignore_index=0)


IGNORING: dict[str, tuple[Any, Any]] = {  # what builds the model, and its loss_fn
    "kwarg": (lambda: make("llama"), None),
    "module": (Module, None),
    "loss_fn": (lambda: make("gpt2"), ignoring_zero),
}


def ignoring(config: dict[str, Any], names: list[str]) -> list[Batch]:
    found = []
    for name in names:
        build, loss_fn = IGNORING[name]
        torch.manual_seed(0)
        batch: dict[str, Any] = batch_of(0, "plain" if name == "module" else "odd")
        key = "labels" if name == "kwarg" else "shift_labels"
        if name == "loss_fn":  # the model has a loss beside it, of -100
            batch["shift_labels"] = functional.pad(batch["labels"], (0, 1))[:, 1:].contiguous()
        if name == "kwarg":
            batch["ignore_index"] = 0
        batch[key] = batch[key].masked_fill(batch[key] % 3 == 0, 0).clamp(min=0)
        found.append(values_after(lowtide.initialize(build(), config_of(1, **config), loss_fn=loss_fn), batch, batch))
    return found


HEAD = {"tensor_parallel": {"plan": {"*head": "vocabulary"}}}
SPLITS: list[tuple[list[str], dict[str, Any]]] = [
    (["loss_fn"], {"parallel": {"sequence": 2, "pipeline": 2}}),
    (["kwarg", "module", "loss_fn"], {"parallel": {"tensor": 2}, **HEAD, "tiles": {"loss": 7}}),
]


def test_labels_that_a_loss_ignores_count_nowhere(ranks: RankPool) -> None:
    alone = dict(zip(IGNORING, ranks(1, ignoring, {}, list(IGNORING))[0], strict=True))
    for names, config in SPLITS:
        found = ranks(math.prod(config["parallel"].values()), ignoring, config, names)[0]
        check(found, [alone[name] for name in names])


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


@on_ranks(2)
def test_a_recomputed_block_round_a_ring_drops_what_it_has_dropped() -> None:
    kept, again = (train("dropping", "odd", config_of(1) | TWO | RING | more) for more in ({}, AGAIN))
    assert differences(again, kept) == []


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
