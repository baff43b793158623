"""Models of plain torch have the loss and gradients of the whole model when they run as stages."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lowtide.model.patches import ModelPatches
from lowtide.pipe.split.carried import Carried
from lowtide.pipe.split.split import plan_split
from lowtide.pipe.stage import Stage, make_stages
from tests.kit import models
from tests.pipe.staged import staged, stages_of, whole

WIDTH = 8


def seeded(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        torch.manual_seed(0)
        return build()

    return made


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

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, state: State, *, scale: float, extra: Tensor | None) -> State:
            x = torch.tanh(self.linear(state.x)) * scale + state.notes["base"]
            total = state.notes["total"] + x.sum() if state.count else x.sum()
            return State(x, state.count + 1, {"base": state.notes["base"], "total": total, "none": None})

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(models.FEATURES, WIDTH)
        self.blocks = nn.ModuleList(self.Block() for _ in range(4))

    def forward(self, batch: dict[str, Any]) -> Tensor:
        x = self.first(batch["inputs"][0])
        state = State(x, 0, {"base": torch.sin(x), "total": None, "none": None})
        for block in self.blocks:
            state = block(state, scale=batch["scale"], extra=batch["inputs"][1])
        assert state.count == 4
        return state.x.square().mean() + 0.01 * state.notes["total"]


class BareParameters(nn.Module):
    """Parameters of the root itself: one before the blocks, one in their loop, one behind them, one given to each."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, shared: Tensor) -> Tensor:
            return torch.tanh(self.linear(x) + shared)

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.randn(models.FEATURES, WIDTH))
        self.scale = nn.Parameter(torch.rand(3) + 0.5)
        self.shared = nn.Parameter(torch.randn(WIDTH))
        self.finish = nn.Parameter(torch.randn(WIDTH, 3))
        self.blocks = nn.ModuleList(self.Block() for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = x @ self.start
        for index, block in enumerate(self.blocks):
            x = x + self.scale[index] * block(x, self.shared)
        return functional.mse_loss(x @ self.finish, y)


class Seen(Exception):
    """Raised and caught by the model below around its blocks."""


class CatchesErrors(models.Mlp):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        try:
            return super().forward(x, y)
        except Exception as error:
            raise Seen from error


VECTORS = models.vector_batch(0, 6)
TOKENS = models.token_batch(0, 2)
NESTED = {"inputs": [VECTORS[0], None], "scale": 0.7, "unused": {"name": "a", "flags": (True, None)}}
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Tensor], int]] = {
    "gpt": (models.TinyGPT, lambda model: model(*TOKENS), 3),
    "tied_gpt": (models.tied_gpt, lambda model: model(*TOKENS), 3),
    "residuals_around_blocks": (models.Mlp, lambda model: model(*VECTORS), 3),
    "float64": (models.mlp_float64, lambda model: model(*models.vector_batch_float64(0, 4)), 2),
    "sequential": (sequential, lambda model: functional.cross_entropy(model(TOKENS[0]).mT, TOKENS[1]), 4),
    "torch_transformer": (TorchTransformer, lambda model: model(*TOKENS), 5),
    "structured": (Structured, lambda model: model(NESTED), 4),
    "bare_parameters": (BareParameters, lambda model: model(*VECTORS), 3),
    "catches_errors": (CatchesErrors, lambda model: model(*VECTORS), 3),
}


@pytest.mark.parametrize("name", CASES)
def test_stages_equal_the_whole_model_bitwise(name: str) -> None:
    build, call, most = CASES[name]
    expected = whole(seeded(build)(), call)
    for num_stages in range(1, most + 1):
        assert staged(stages_of(seeded(build), num_stages), call).differences(expected) == [], num_stages


@pytest.mark.parametrize("name", ["tied_gpt", "residuals_around_blocks", "torch_transformer"])
def test_several_stages_of_one_rank_share_a_module(name: str) -> None:
    """The V placement: rank 0 has the first and the last stage."""
    build, call, _ = CASES[name]
    expected = whole(seeded(build)(), call)
    plan = plan_split(seeded(build)(), 3)
    outer, inner = make_stages(seeded(build)(), plan, [0, 2], ModelPatches()), Stage(seeded(build)(), plan, 1)
    assert outer[0].module is outer[1].module
    found = staged([outer[0], inner, outer[1]], call)
    for tied, stages in plan.tied.items():
        if stages == (0, 2):  # one parameter here, whose gradient is there already
            there = outer[0].module.get_parameter(tied).grad
            assert there is not None
            found.gradients[tied] = there
    assert found.differences(expected) == []


def test_the_number_of_blocks_of_each_stage_may_be_given() -> None:
    build, call, _ = CASES["sequential"]
    stages = stages_of(seeded(build), 3, [1, 1, 4 + 1])
    assert [len(stage.plan.blocks_of(stage.index)) for stage in stages] == [1, 1, 5]
    assert staged(stages, call).differences(whole(seeded(build)(), call)) == []


def test_evaluation_gives_the_output_of_the_whole_model_and_keeps_no_graph() -> None:
    model, (ids, targets) = seeded(models.TinyGPT)().eval(), TOKENS
    stages = stages_of(lambda: seeded(models.TinyGPT)().eval(), 3)
    with torch.no_grad():
        expected = model(ids, targets)
        output: Any = None
        for stage in stages:
            output = stage.run(lambda model: model(ids, targets), output)
            if isinstance(output, Carried):
                assert output.spec.needs_grad == (False,) and not output.tensors[0].requires_grad
    assert torch.equal(output, expected)


def test_frozen_blocks_send_a_value_that_needs_no_gradient() -> None:
    def build() -> nn.Module:
        model = seeded(models.TinyGPT)()
        for part in ("embedding", "blocks.0"):
            model.get_submodule(part).requires_grad_(False)
        model.get_parameter("position").requires_grad_(False)
        return model

    call = CASES["gpt"][1]
    expected = whole(build(), call)
    found = staged(stages_of(build, 3), call)
    assert found.differences(expected) == []
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

    call = lambda model: model(*VECTORS)  # noqa: E731
    expected = call(seeded(ReturnsAll)())
    output: Any = None
    for stage in stages_of(seeded(ReturnsAll), 2, [2, 1]):
        output = stage.run(call, output)
    assert torch.equal(output["loss"], expected["loss"]) and output["name"] == "all"
    assert torch.equal(output["states"][2], expected["states"][2])  # what stage 1 received
    assert type(output["states"][2]) is Tensor
    with pytest.raises(ValueError, match=r"item needs values that pipeline stage 1 does not have.*'first.weight'"):
        output["states"][1].sum().item()


def test_activations_before_the_cut_are_freed_when_what_was_sent_is() -> None:
    import gc
    import weakref

    stage = stages_of(seeded(models.TinyGPT), 3)[0]
    seen: list[weakref.ref[Tensor]] = []
    stage.module.get_submodule("blocks.0").register_forward_hook(
        lambda module, args, output: seen.append(weakref.ref(output))
    )
    gc.disable()
    try:
        for _ in range(2):
            output = stage.run(CASES["gpt"][1])
            del output
            assert [ref() for ref in seen] == [None] * len(seen)
    finally:
        gc.enable()


def test_random_state_is_drawn_once_although_the_first_run_calls_the_model_twice() -> None:
    class Noisy(models.Mlp):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return super().forward(x + torch.rand(x.shape), y)

    stage = stages_of(seeded(Noisy), 3)[0]
    torch.manual_seed(3)
    first = stage.run(CASES["catches_errors"][1])
    state = torch.get_rng_state()
    torch.manual_seed(3)
    second = stage.run(CASES["catches_errors"][1])
    assert torch.equal(first.tensors[0], second.tensors[0]) and torch.equal(state, torch.get_rng_state())


def call_with_rows(rows: int, model: nn.Module) -> Any:
    return model(*models.vector_batch(0, rows))


def test_the_description_is_the_same_object_while_shapes_stay_the_same() -> None:
    stage = stages_of(seeded(models.Mlp), 3)[0]
    runs = [stage.run(partial(call_with_rows, rows)) for rows in (4, 4, 3)]
    assert runs[0].spec is runs[1].spec
    assert [run.spec.tensors[0].shape for run in runs] == [(4, 7), (4, 7), (3, 7)]
