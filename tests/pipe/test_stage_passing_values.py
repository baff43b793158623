"""A value that a stage's first block does not take, and that later code needs, passes through that stage."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lowtide.pipe.split.split import plan_split
from tests.kit import models
from tests.pipe.staged import staged, stages_of, whole

WIDTH = 7
CALL = lambda model: model(*models.vector_batch(0, 6))  # noqa: E731


class FirstInputAgain(models.Mlp):
    """Mixes what the blocks began with into the input of every block."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(layers=5)
        self.mix = nn.Parameter(torch.rand(5, 2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        start = functional.layer_norm(torch.tanh(self.first(x)), (WIDTH,))
        x = start
        for mix, layer in zip(self.mix, self.layers, strict=True):
            x = torch.tanh(layer(mix[0] * x + mix[1] * start))
        return functional.mse_loss(self.last(x), y)


class SkipConnections(models.Mlp):
    """The outputs of the first blocks are added before the last ones, in the other order."""

    layers: Any  # torch types a slice of it as a module, not as a Sequential

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(layers=6)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.first(x)
        skipped = []
        for layer in self.layers[:3]:
            x = layer(x)
            skipped.append(x)
            x = torch.tanh(x)
        for layer in self.layers[3:]:
            x = torch.tanh(layer(x + skipped.pop()))
        return functional.mse_loss(self.last(x), y)


class UsedBehind(models.Mlp):
    """The head takes a part of what was made before the blocks."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(layers=4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x, gate = torch.tanh(self.first(x)), self.first(x).split([3, 4], dim=1)[1]
        start = x
        for layer in self.layers:
            x = layer(x)
        return functional.mse_loss(self.last(x * gate.mean()), y) + start.square().mean()


class TwoWidths(models.Mlp):
    """Two lists of blocks on tensors of different sizes, and a gate that is made first and used last."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.narrow = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.first(x)
        gate, z = torch.sigmoid(x[:, :1]), torch.sin(x[:, 2:5])
        for layer in self.layers:
            x = torch.tanh(layer(x))
        for layer in self.narrow:
            z = z + torch.tanh(layer(z))
        return functional.mse_loss(z * gate + self.last(x), y)


class TwoKinds(models.Mlp):
    """A batch with a target has its start used at the end, and its blocks are called with a scale."""

    class Layer(nn.Linear):
        def forward(self, x: Tensor, scale: float | None = None) -> Tensor:
            return super().forward(x) * (1.0 if scale is None else scale)

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.layers = nn.Sequential(*(self.Layer(WIDTH, WIDTH) for _ in range(3)))

    def forward(self, x: Tensor, y: Tensor | None) -> Tensor:
        start = self.first(x)
        x = start
        for layer in self.layers:
            x = layer(x) if y is None else layer(x, scale=0.5)
        return self.last(x).square().mean() if y is None else functional.mse_loss(self.last(x + start), y)


@pytest.mark.parametrize("build", [FirstInputAgain, SkipConnections, UsedBehind, TwoWidths])
def test_stages_equal_the_whole_model_bitwise(build: Callable[[], nn.Module]) -> None:
    expected = whole(build(), CALL)
    for num_stages in range(2, len(plan_split(build(), 1).blocks) + 1):
        assert staged(stages_of(build, num_stages), CALL).differences(expected) == [], num_stages


def test_only_what_is_still_needed_passes() -> None:
    found = staged(stages_of(SkipConnections, 6), CALL)
    # The input of the next block, and outputs of earlier blocks that wait for one of the last three. Block 3 takes the
    # sum with the output of block 2.
    assert [len(output.spec.passing) for output in found.carried] == [1, 2, 2, 1, 0]
    assert [len(output.tensors) for output in found.carried] == [2, 3, 3, 2, 1]


def test_a_tensor_that_goes_two_ways_is_sent_once() -> None:
    stages = stages_of(FirstInputAgain, 2, [1, 4])
    (output,) = staged(stages, CALL).carried
    assert len(output.spec.slots) == 1 and len(output.spec.passing) == 1 and len(output.tensors) == 2


def test_calls_of_hooks_without_gradients_do_not_shift_the_names() -> None:
    expected = whole(UsedBehind(), CALL)
    stages = stages_of(UsedBehind, 3)

    def gather(module: nn.Module, args: object) -> None:
        with torch.no_grad():
            torch.tanh(torch.ones(3)).split([1, 2])

    stages[0].module.register_forward_pre_hook(gather)
    assert staged(stages, CALL).differences(expected) == []


def test_a_batch_of_another_kind_finds_its_own_needs() -> None:
    x, y = models.vector_batch(0, 6)
    stages = stages_of(TwoKinds, 3)
    for target in (None, y, None, y):
        call = lambda model, target=target: model(x, target)  # noqa: E731
        for stage in stages:
            stage.module.zero_grad()
        assert staged(stages, call).differences(whole(TwoKinds(), call)) == []


class KeepsItsInput(SkipConnections):
    """Holds what its forward began with, as a recomputation does."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.kept = self.first(x)
        return super().forward(x, y)


def test_named_values_do_not_outlive_the_forward() -> None:
    first, second, _ = stages_of(KeepsItsInput, 3)
    output = first.run(CALL).detached()
    seen: list[weakref.ref[Tensor]] = []
    second.module.get_submodule("layers.2").register_forward_hook(
        lambda module, args, output: seen.append(weakref.ref(output))
    )
    gc.disable()
    try:
        sent = second.run(CALL, output)
        assert sent.spec.passing and type(second.module.kept) is not Tensor
        assert [ref() for ref in seen] == [None]  # what tanh made of it is all that the graph needs
    finally:
        gc.enable()
