"""Models of plain torch have the loss and gradients of the whole model when they run as stages."""

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lowtide.pipe.executor import form_of
from tests.kit import models
from tests.kit.training import refusal
from tests.pipe.staged import Call, equal_staged, seeded, staged, stages_of, whole

WIDTH = 8
VECTORS, TOKENS = models.vector_batch(0, 6), models.token_batch(0, 2)


def of_vectors(model: nn.Module) -> Any:
    return model(*VECTORS)


def of_tokens(model: nn.Module) -> Any:
    return model(*TOKENS)


def sequential() -> nn.Module:
    parts: list[nn.Module] = [nn.Embedding(models.VOCAB, WIDTH)]
    for _ in range(4):
        parts += [nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    return nn.Sequential(*parts, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, models.VOCAB))


class TorchTransformer(nn.Module):
    """Torch's own encoder and decoder layers; the decoder's layers take the encoder's output."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(models.VOCAB, WIDTH)
        self.transformer = nn.Transformer(WIDTH, 2, 2, 3, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, models.VOCAB)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        mask = self.transformer.generate_square_subsequent_mask(targets.shape[1])
        embedded = self.embedding(targets)
        x = self.transformer(self.embedding(ids), embedded, tgt_mask=mask, tgt_is_causal=True)
        return functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


class State(NamedTuple):
    x: Tensor
    count: int  # type: ignore[assignment]  # it hides tuple.count
    notes: dict[str, Any]


class Structured(nn.Module):
    """Blocks that take and return nested structures with numbers, None and tensors that go along."""

    class Block(nn.Linear):
        def forward(self, state: State, *, scale: float, extra: Tensor | None) -> State:  # type: ignore[override]
            x = torch.tanh(super().forward(state.x)) * scale + state.notes["base"]
            total = state.notes["total"] + x.sum() if state.count else x.sum()
            return State(x, state.count + 1, {"base": state.notes["base"], "total": total, "none": None})

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(models.FEATURES, WIDTH)
        self.blocks = nn.ModuleList(self.Block(WIDTH, WIDTH) for _ in range(4))

    def forward(self, batch: dict[str, Any]) -> Tensor:
        x = self.first(batch["inputs"][0])
        state = State(x, 0, {"base": torch.sin(x), "total": None, "none": None})
        for block in self.blocks:
            state = block(state, scale=batch["scale"], extra=batch["inputs"][1])
        assert state.count == 4
        return state.x.square().mean() + 0.01 * state.notes["total"]


class BareParameters(nn.Module):
    """Parameters of the root itself: one before the blocks, one in their loop, one behind them, one given to each."""

    class Block(nn.Linear):
        def forward(self, x: Tensor, shared: Tensor) -> Tensor:  # type: ignore[override]
            return torch.tanh(super().forward(x) + shared)

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.randn(models.FEATURES, WIDTH))
        self.scale = nn.Parameter(torch.rand(3) + 0.5)
        self.shared = nn.Parameter(torch.randn(WIDTH))
        self.finish = nn.Parameter(torch.randn(WIDTH, 3))
        self.blocks = nn.ModuleList(self.Block(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = x @ self.start
        for index, block in enumerate(self.blocks):
            x = x + self.scale[index] * block(x, self.shared)
        return functional.mse_loss(x @ self.finish, y)


class FirstInputAgain(models.Mlp):
    """Mixes what the blocks began with into the input of every block, and catches errors."""

    def __init__(self) -> None:
        super().__init__(layers=5)
        self.mix = nn.Parameter(torch.rand(5, 2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        start = functional.layer_norm(torch.tanh(self.first(x)), (7,))
        x = start
        try:
            for mix, layer in zip(self.mix, self.layers, strict=True):
                x = torch.tanh(layer(mix[0] * x + mix[1] * start))
        except Exception as error:
            raise RuntimeError("caught") from error
        return functional.mse_loss(self.last(x), y)


class SkipConnections(models.Mlp):
    """The outputs of the first blocks are added before the last ones, in the other order."""

    layers: Any  # torch types a slice of it as a module, not as a Sequential

    def __init__(self) -> None:
        super().__init__(layers=6)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.kept = x = self.first(x)  # as a recomputation holds what its forward began with
        skipped = []
        for layer in self.layers[:3]:
            x = layer(x)
            skipped.append(x)
            x = torch.tanh(x)
        for layer in self.layers[3:]:
            x = torch.tanh(layer(x + skipped.pop()))
        return functional.mse_loss(self.last(x), y)


class UsedBehind(models.Mlp):
    """The head takes a part of what was made before the blocks, and a transpose that an attribute has made there."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x, gate = torch.tanh(self.first(x)), self.first(x).split([3, 4], dim=1)[1]
        start, turned = x, x.T
        for layer in self.layers:
            x = layer(x)
        return functional.mse_loss(self.last(x @ turned @ x * gate.mean()), y) + start.square().mean()


NESTED = {"inputs": [VECTORS[0], None], "scale": 0.7, "unused": {"name": "a", "flags": (True, None)}}
CASES: dict[str, tuple[Callable[[], nn.Module], Call, int]] = {  # with the most stages
    "tied_gpt": (models.tied_gpt, of_tokens, 3),
    "float64": (models.mlp_float64, lambda model: model(*models.vector_batch_float64(0, 4)), 3),
    "sequential": (sequential, lambda model: functional.cross_entropy(model(TOKENS[0]).mT, TOKENS[1]), 4),
    "torch_transformer": (TorchTransformer, of_tokens, 5),
    "structured": (Structured, lambda model: model(NESTED), 4),
    "bare_parameters": (BareParameters, of_vectors, 3),
    "first_input_again": (FirstInputAgain, of_vectors, 5),
    "skip_connections": (SkipConnections, of_vectors, 6),
    "used_behind": (partial(UsedBehind, 4), of_vectors, 4),
    "recomputes_blocks": (partial(models.Recomputing, "inside"), of_tokens, 3),
    "recomputes_blocks_reentrant": (partial(models.Recomputing, "inside", True), of_tokens, 3),
    "recomputes_around_blocks": (partial(models.Recomputing, "around"), of_tokens, 3),
    "recomputes_around_all": (partial(models.Recomputing, "around all"), of_tokens, 3),
}


@pytest.mark.parametrize("name", CASES)
def test_stages_equal_the_whole_model_bitwise(name: str) -> None:
    build, call, most = CASES[name]
    for num_stages in range(1, most + 1):
        equal_staged(build, call, num_stages)


def test_only_what_is_still_needed_passes_and_once() -> None:
    found = equal_staged(SkipConnections, of_vectors, 6)
    # The input of the next block, and outputs of earlier blocks that wait for one of the last three. Block 3 takes the
    # sum with the output of block 2.
    assert [len(output.spec.passing) for output in found.carried] == [1, 2, 2, 1, 0]
    assert [len(output.tensors) for output in found.carried] == [2, 3, 3, 2, 1]
    (output,) = equal_staged(FirstInputAgain, of_vectors, 2, [1, 4]).carried
    assert (len(output.spec.slots), len(output.spec.passing), len(output.tensors)) == (1, 1, 2)


def test_calls_of_hooks_without_gradients_do_not_shift_the_names() -> None:
    stages = stages_of(UsedBehind, 3)

    def gather(module: nn.Module, args: object) -> None:
        with torch.no_grad():
            torch.tanh(torch.ones(3)).split([1, 2])

    stages[0].module.register_forward_pre_hook(gather)
    assert staged(stages, of_vectors).differences(whole(seeded(UsedBehind), of_vectors)) == []


class Kinds(models.Mlp):
    """A batch with a target has its start used at the end, and its blocks are called with a scale.

    A mask adds calls before the start, and changes no argument of a block.
    """

    class Layer(nn.Linear):
        def forward(self, x: Tensor, scale: float | None = None) -> Tensor:
            return super().forward(x) * (1.0 if scale is None else scale)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(self.Layer(7, 7) for _ in range(3)))

    def forward(self, x: Tensor, y: Tensor | None, mask: Tensor | None = None) -> Tensor:
        x = start = torch.tanh(self.first(x if mask is None else torch.tanh(x * mask)))
        for layer in self.layers:
            x = layer(x) if y is None else layer(x, scale=0.5)
        return self.last(x).square().mean() if y is None else functional.mse_loss(self.last(x + start), y)


def test_batches_of_another_kind_or_with_another_key_find_their_own_needs() -> None:
    """Of a key, the form of the batch tells."""
    batch: dict[str, Any] = dict(zip("xy", VECTORS, strict=True))
    kinds = [batch | {"y": None}, batch] * 2
    with_keys = [batch, batch | {"mask": torch.full_like(batch["x"], 0.5)}, batch | {"mask": None}]
    for batches, knows_form in ((kinds, False), (with_keys, True)):
        stages = stages_of(Kinds, 3)
        for batch in batches:
            call = lambda model, batch=batch: model(**batch)  # noqa: E731
            for stage in stages:
                stage.module.zero_grad()
            found = staged(stages, call, form_of(batch) if knows_form else None)
            assert found.differences(whole(seeded(Kinds), call)) == []


def test_frozen_blocks_send_a_value_that_needs_no_gradient() -> None:
    def build() -> nn.Module:
        model = models.TinyGPT()
        for part in (model.embedding, model.blocks[0]):
            part.requires_grad_(False)
        model.position.requires_grad_(False)
        return model

    found = equal_staged(build, of_tokens, 3)
    assert [output.spec.needs_grad for output in found.carried] == [(False,), (True,)]


def test_the_last_stage_returns_what_the_call_returns_with_received_values_in_it() -> None:
    class ReturnsAll(models.Mlp):
        def forward(self, x: Tensor, y: Tensor) -> Any:
            x = torch.tanh(self.first(x))
            states = []
            for layer in self.layers:
                states.append(x)
                x = x + layer(x)
            return {"loss": functional.mse_loss(self.last(x), y), "states": states, "x": x, "name": "all"}

    expected = of_vectors(seeded(ReturnsAll))
    output: Any = None
    for stage in stages_of(ReturnsAll, 2, [2, 1]):
        output = stage.run(of_vectors, output)
    assert torch.equal(output["loss"], expected["loss"]) and output["name"] == "all"
    received = output["states"][2]
    assert torch.equal(received, expected["states"][2]) and type(received) is Tensor
    text = refusal(output["states"][1].sum().item)
    assert text.startswith("item needs values that pipeline stage 1 does not have") and "'first.weight'" in text


@contextmanager
def outputs_of(module: nn.Module) -> Iterator[list[weakref.ref[Tensor]]]:
    """What it returns, as long as somebody holds it; without a collection of garbage."""
    seen: list[weakref.ref[Tensor]] = []
    module.register_forward_hook(lambda module, args, output: seen.append(weakref.ref(output)))
    gc.disable()
    try:
        yield seen
    finally:
        gc.enable()


def test_activations_before_the_cut_are_freed_when_what_was_sent_is() -> None:
    stage = stages_of(models.TinyGPT, 3)[0]
    with outputs_of(stage.module.get_submodule("blocks.0")) as seen:
        for number in range(2):
            stage.run(of_tokens)
            assert [ref() for ref in seen] == [None] * (number + 1)


def test_named_values_do_not_outlive_the_forward() -> None:
    first, second, _ = stages_of(SkipConnections, 3)
    output = first.run(of_vectors).detached()
    with outputs_of(second.module.get_submodule("layers.2")) as seen:
        sent = second.run(of_vectors, output)
        assert sent.spec.passing and type(second.module.kept) is not Tensor
        assert [ref() for ref in seen] == [None]  # what tanh made of it is all that the graph needs


def test_random_state_is_drawn_once_although_the_first_run_calls_the_model_twice() -> None:
    class Noisy(models.Mlp):
        form = "plain"

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            x = start = self.first(x + torch.rand(x.shape))
            for layer in self.layers:
                x = layer(x)
            return functional.mse_loss(self.last(x + start if self.form == "with start" else x), y)

    stage = stages_of(Noisy, 3)[0]
    for Noisy.form in ("plain", "with start"):
        found = []
        for _ in range(2):
            torch.manual_seed(3)
            found.append((stage.run(of_vectors, form=Noisy.form).tensors[0], torch.get_rng_state()))
        assert all(torch.equal(first, second) for first, second in zip(*found, strict=True))


# -- hooks and compilers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_hooks_run_on_a_stages_own_blocks_and_on_the_root_of_the_last_stage(num_stages: int) -> None:
    seen: list[tuple[int, str, Any]] = []
    carried = None
    for stage in stages_of(partial(models.TinyGPT, layers=4), num_stages):

        def note(name: str, module: nn.Module, args: Any, output: Any = None, index: int = stage.index) -> None:
            seen.append((index, name, args))

        stage.module.register_forward_hook(partial(note, "root"))
        for name in stage.plan.blocks:
            block = stage.module.get_submodule(name)
            block.register_forward_pre_hook(partial(note, f"before {name}"))
            block.register_forward_hook(partial(note, f"after {name}"))
        received = carried
        carried = stage.run(of_tokens, received)
        if received is not None:
            begun = next(args for index, _, args in seen if index == stage.index)
            assert begun[0] is received.tensors[0]
    each = 4 // num_stages
    blocks = [(at // each, f"{when} blocks.{at}") for at in range(4) for when in ("before", "after")]
    assert [(index, name) for index, name, _ in seen] == [*blocks, (num_stages - 1, "root")]


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")  # torch says so too
def test_reentrant_checkpointing_around_a_block_is_refused_where_its_gradient_would_be_lost() -> None:
    stages = stages_of(partial(models.Recomputing, "around", True), 2, [2, 1])
    assert refusal(staged, stages, of_tokens) == (
        "pipeline: 'blocks.2' is called without gradients, as reentrant checkpointing around a block does, so its "
        "input would get no gradient; checkpoint with use_reentrant=False, or set activation_checkpointing in the "
        "config"
    )
