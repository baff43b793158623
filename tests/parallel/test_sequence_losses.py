"""A loss beside the model, of ranks that share sequences: a loss_fn, and a loop that asks for its part of labels."""

import contextlib
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import lowtide
from tests.kit.ranks import RankPool
from tests.parallel.test_sequence import MODELS, Attends, batch_of
from tests.parallel.test_sequence import Plain as WithLoss
from tests.parallel.test_tiles import config_of

Batch = dict[str, Tensor]


class Plain(WithLoss):
    """Gives its logits."""

    def forward(self, input_ids: Tensor, position_ids: Tensor, shift_labels: Tensor | None = None) -> Tensor:
        x = self.embedding(input_ids) + self.positions(position_ids)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


class Summing(WithLoss):
    """Its loss is a sum."""

    def forward(self, input_ids: Tensor, position_ids: Tensor, shift_labels: Tensor) -> Tensor:
        return super().forward(input_ids, position_ids, shift_labels) * (shift_labels != -100).sum()


def cross_entropy(output: Any, labels: Tensor, reduction: str = "mean") -> Tensor:
    logits = output if isinstance(output, Tensor) else output.logits
    return functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction=reduction)


def mean(output: Any, batch: Batch) -> Tensor:
    return cross_entropy(output, batch["shift_labels"])


def divided(output: Any, batch: Batch) -> Tensor:
    """Not a number where there are no labels."""
    return cross_entropy(output, batch["shift_labels"], "sum") / (batch["shift_labels"] != -100).sum()


def summed(output: Any, batch: Batch) -> Tensor:
    return cross_entropy(output, batch["shift_labels"], "sum")


def shifted_again(output: Any, batch: Batch) -> Tensor:
    return cross_entropy(output.logits[:, :-1], batch["labels"][:, 1:])


def of_classes(output: Any, batch: Batch) -> Tensor:
    """Some count more."""
    labels, logits = batch["shift_labels"], output.logits
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), torch.linspace(1, 2, logits.shape[2]))


def of_rows(output: Any, batch: Batch) -> Tensor:
    """Rows count alike, however many labels they have."""
    labels = batch["shift_labels"]
    terms = functional.cross_entropy(output.logits.transpose(1, 2), labels, reduction="none")
    return (terms.sum(1) / (labels != -100).sum(1).clamp(min=1)).mean()


def shift_batch(step: int, kind: str) -> Batch:
    batch = batch_of(step, kind)
    if "labels" in batch:
        labels = batch.pop("labels")
        batch["shift_labels"] = functional.pad(labels, (0, 1), value=-100)[:, 1:].contiguous()
    return batch


def make(name: str) -> nn.Module:
    torch.manual_seed(0)
    model: Any = Plain() if name == "plain" else MODELS[name]()
    if hasattr(model, "config"):
        model.config.use_cache = False
    return model


def with_loss_fn(parallel: dict[str, int]) -> list[Batch]:
    cases: list[tuple[str, str, Any, dict[str, Any]]]
    cases = [("gpt2", "padded", mean, {}), ("plain", "plain", divided, {})]
    if "pipeline" not in parallel:
        cases.append(("llama", "odd", divided, {"tiles": "auto"}))
    found = []
    for name, kind, loss_fn, more in cases:
        engine = lowtide.initialize(make(name), config_of(3, parallel=parallel, **more), loss_fn=loss_fn)
        result = engine.train_step(shift_batch(0, kind))
        values = {"loss": result.loss, "norm": result.grad_norm}
        values["evaluated"] = engine.eval_step(shift_batch(2, kind))
        values |= engine.state_dict()
        engine.close()
        found.append({key: value.detach().clone() for key, value in values.items()})
    return found


def check(found: list[Batch], right: list[Batch]) -> None:
    for number, (values, whole) in enumerate(zip(found, right, strict=False)):
        for key, value in whole.items():
            assert (values[key] - value).norm() <= 1e-6 * value.norm() + 2e-7, (number, key)


def test_a_loss_fn_gets_a_part_and_gives_the_mean_over_its_labels(ranks: RankPool) -> None:
    alone = ranks(1, with_loss_fn, {"sequence": 1})[0]
    check(ranks(2, with_loss_fn, {"sequence": 2})[0], alone)
    check(ranks(4, with_loss_fn, {"sequence": 2, "pipeline": 2})[0], alone)


def beside_tensor(tensor: int) -> list[Batch]:
    """Labels that one part alone has, of logits in parts: for the loss_fn, and for a loss without one."""
    found = []
    for loss_fn in (mean, None):
        parallel = {"sequence": 2, "tensor": tensor} if tensor > 1 else {}
        engine = lowtide.initialize(make("llama"), config_of(1, parallel=parallel), loss_fn=loss_fn)
        batch = shift_batch(0, "odd")
        batch["shift_labels"][:, 12:] = -100
        if loss_fn is None:
            batch["labels"] = batch["shift_labels"]
        result = engine.train_step(batch)
        values = engine.state_dict() | {"loss": result.loss, "norm": result.grad_norm}
        engine.close()
        found.append({key: value.detach().clone() for key, value in values.items()})
    return found


def test_a_part_without_labels_of_logits_in_parts(ranks: RankPool) -> None:
    check(ranks(4, beside_tensor, 2)[0], ranks(1, beside_tensor, 1)[0])


def by_hand(size: int) -> list[Batch]:
    """With weights of tokens, which no mean over labels has."""
    found = []
    for name, kind in (("llama", "padded"), ("plain", "plain")):
        engine = lowtide.initialize(
            make(name), config_of(3, parallel={"sequence": size}, gradient_accumulation_steps=1)
        )
        for step in range(2):
            batch = shift_batch(step, kind)
            labels = batch.pop("shift_labels")
            weights = torch.linspace(1, 2, labels.numel()).view_as(labels)
            own = engine.sequence_part(labels, fill=-100)
            logits: Any = engine(**batch)
            logits = logits if isinstance(logits, Tensor) else logits.logits
            terms = functional.cross_entropy(logits.flatten(0, 1), own.flatten(), reduction="none")
            total = weights[labels != -100].sum()
            engine.backward((terms * engine.sequence_part(weights).flatten()).sum() / total)
            result = engine.step()
        values = engine.state_dict() | {"loss": result.loss, "norm": result.grad_norm}
        engine.close()
        found.append({key: value.detach().clone() for key, value in values.items()})
    return found


def test_a_loop_computes_a_loss_of_its_own_of_its_part(ranks: RankPool) -> None:
    check(ranks(2, by_hand, 2)[0], ranks(1, by_hand, 1)[0])


def with_itself(size: int) -> Batch:
    """A model that gives its loss, a loss_fn that hands it on, and a loop that calls the model."""
    torch.manual_seed(0)
    config = config_of(1, parallel={"sequence": size})
    with lowtide.initialize(WithLoss(), config, loss_fn=lambda output, _: output) as engine:
        for half in range(2):
            batch = {key: value.chunk(2)[half] for key, value in batch_of(0, "plain").items()}
            engine.backward(engine(**batch))
            engine.step()
        return {key: value.detach().clone() for key, value in engine.state_dict().items()}


def test_a_call_weighs_the_loss_of_a_model_beside_a_loss_fn(ranks: RankPool) -> None:
    check([ranks(2, with_itself, 2)[0]], [ranks(1, with_itself, 1)[0]])


class Mixing(Attends):
    """Beside attention each token sees the one before it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + functional.pad(x, (0, 0, 1, 0))[:, :-1])


def refusals() -> dict[str, str]:
    def trained(model: nn.Module, batch: Batch, loss_fn: Any = None) -> None:
        with lowtide.initialize(model, config_of(1, parallel={"sequence": 2}), loss_fn=loss_fn) as engine:
            with contextlib.suppress(ValueError):
                engine.train_step(batch)
            engine.train_step(batch)  # the second time too

    def called(model: nn.Module, batch: Batch) -> None:
        with lowtide.initialize(model, config_of(1, parallel={"sequence": 2})) as engine:
            engine.sequence_part(batch.pop("shift_labels"), fill=-100)
            engine(**batch)

    mixing = Plain()
    mixing.blocks = nn.ModuleList(Mixing() for _ in range(2))
    odd, plain = batch_of(0, "odd"), batch_of(0, "plain")
    calls: dict[str, Any] = {
        "sum": lambda: trained(make("llama"), odd, summed),
        "all tokens": lambda: trained(make("plain"), plain, lambda output, _: output.square().mean()),
        "classes": lambda: trained(make("llama"), odd, of_classes),
        "rows": lambda: trained(make("llama"), odd, of_rows),
        "shifted": lambda: trained(make("llama"), odd, shifted_again),
        "no labels": lambda: trained(make("llama"), {"input_ids": odd["input_ids"]}, mean),
        "its own": lambda: trained(Summing(), plain),
        "two labels": lambda: trained(TwoLosses(), plain),
        "mixing": lambda: called(mixing, dict(plain)),
    }
    found = {}
    for name, call in calls.items():
        try:
            call()
        except ValueError as error:
            found[name] = str(error)
    return found


NO_SUM = "expected the mean over the labels of its part"
REFUSED = {
    "sum": f"loss_fn: {NO_SUM}",
    "classes": f"loss_fn: {NO_SUM}",
    "rows": f"loss_fn: {NO_SUM}",
    "all tokens": "; a loss_fn must ignore tokens without a label",
    "shifted": "a loss_fn must ignore tokens without a label, and must not shift labels",
    "no labels": "batch: expected labels or shift_labels for the loss_fn",
    "its own": f"the loss of Summing: {NO_SUM}",
    "two labels": "loss: expected the same ignore_index in all losses, since it pads the parts, found -100 and 1",
    "mixing": "expected tokens of Plain to mix only in attention",
}


def test_losses_that_are_no_mean_over_labels_are_errors(ranks: RankPool) -> None:
    for found in ranks(2, refusals):
        for name, text in REFUSED.items():
            assert text in found.get(name, ""), (name, found.get(name))


class TwoLosses(Plain):
    def forward(self, input_ids: Tensor, position_ids: Tensor, shift_labels: Tensor) -> Tensor:  # type: ignore[override]
        logits, labels = super().forward(input_ids, position_ids).flatten(0, 1), shift_labels.flatten()
        return functional.cross_entropy(logits, labels) + functional.cross_entropy(logits, labels, ignore_index=1)


class Module(WithLoss):
    """Its loss is a module that ignores the label 0."""

    def __init__(self) -> None:
        super().__init__()
        self.loss = nn.CrossEntropyLoss(ignore_index=0)

    def forward(self, input_ids: Tensor, position_ids: Tensor, shift_labels: Tensor) -> Tensor:
        logits = Plain.forward(self, input_ids, position_ids)  # type: ignore[arg-type]  # of the same parts
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


def ignoring(config: dict[str, Any], names: Sequence[str]) -> list[Batch]:
    found = []
    for name in names:
        build, loss_fn = IGNORING[name]
        torch.manual_seed(0)
        engine = lowtide.initialize(build(), config_of(1, **config), loss_fn=loss_fn)
        batch: dict[str, Any] = batch_of(0, "plain" if name == "module" else "odd")
        key = "labels" if name == "kwarg" else "shift_labels"
        if name == "loss_fn":  # the model has a loss beside it, of -100
            batch["shift_labels"] = functional.pad(batch["labels"], (0, 1))[:, 1:].contiguous()
        if name == "kwarg":
            batch["ignore_index"] = 0
        batch[key] = batch[key].masked_fill(batch[key] % 3 == 0, 0).clamp(min=0)
        result = engine.train_step(batch)
        values = engine.state_dict() | {"loss": result.loss, "norm": result.grad_norm}
        values["evaluated"] = engine.eval_step(batch)
        engine.close()
        found.append({key: value.detach().clone() for key, value in values.items()})
    return found


SPLITS: list[tuple[list[str], dict[str, Any]]] = [
    (["loss_fn"], {"parallel": {"sequence": 2, "pipeline": 2}}),
    (
        ["kwarg"],
        {"parallel": {"sequence": 2, "tensor": 2}, "tensor_parallel": {"plan": {"*head": "vocabulary"}}},
    ),
    (
        ["kwarg", "module", "loss_fn"],
        {"parallel": {"tensor": 2}, "tensor_parallel": {"plan": {"*head": "vocabulary"}}, "tiles": {"loss": 7}},
    ),
]


def test_labels_that_a_loss_ignores_count_nowhere(ranks: RankPool) -> None:
    alone = dict(zip(IGNORING, ranks(1, ignoring, {}, list(IGNORING))[0], strict=True))
    for names, config in SPLITS:
        found = ranks(math.prod(config["parallel"].values()), ignoring, config, names)[0]
        check(found, [alone[name] for name in names])
