"""What a stage refuses, and with which words."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lowtide.pipe.split.carried import Carried
from lowtide.pipe.stage import Stage
from tests.kit import models
from tests.pipe.staged import staged, stages_of

X, Y = models.vector_batch(0, 6)
CALL = lambda model: model(X, Y)  # noqa: E731


def refused(text: str) -> Any:
    return pytest.raises(ValueError, match=re.escape(text))


def three(build: Callable[[], nn.Module] = models.Mlp) -> list[Stage]:
    return stages_of(build, 3)


class DynamicCache:
    """Stands for a store of keys and values."""


class ReturnsObject(models.Mlp):
    class Layer(nn.Linear):
        def forward(self, given: Any) -> Any:
            return super().forward(given[0] if isinstance(given, tuple) else given), self.kept()

        def kept(self) -> Any:
            return object()

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(self.Layer(7, 7) for _ in range(3)))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return functional.mse_loss(self.last(x[0]), y)


class ReturnsCache(ReturnsObject):
    class Layer(ReturnsObject.Layer):
        def kept(self) -> Any:
            return DynamicCache()


@pytest.mark.parametrize(
    ("build", "found"),
    [(ReturnsObject, "object, a type that cannot be sent to the next stage"),
     (ReturnsCache, "DynamicCache, a type that cannot be sent to the next stage; set use_cache to False")],
)  # fmt: skip
def test_a_block_whose_output_cannot_be_carried(build: Callable[[], nn.Module], found: str) -> None:
    text = "pipeline: expected 'layers.0' to return tensors, numbers, strings and None, nested in tuples, lists and "
    with refused(f"{text}dictionaries, found {found}"):
        three(build)[0].run(CALL)
    stages_of(build, 1)[0].run(CALL)  # nothing is carried


class StopsEarly(models.Mlp):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return functional.mse_loss(self.last(self.layers[0](self.first(x))), y)


def test_a_forward_that_does_not_reach_the_blocks_of_the_next_stage() -> None:
    text = (
        "pipeline: the forward finished on stage 0 without a call of 'layers.1', the first block of the next stage; "
        "the model must call each block, as block(...) and not block.forward(...), for every batch"
    )
    with refused(text):
        three(StopsEarly)[0].run(CALL)


class CallsForward(models.Mlp):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer.forward(x)
        return functional.mse_loss(self.last(x), y)


def test_a_forward_that_does_not_reach_the_blocks_of_the_last_stage() -> None:
    output = three()[1].run(CALL, three()[0].run(CALL))
    text = "pipeline: the forward finished on stage 2 without a call of 'layers.2', the first block of this stage"
    with refused(text):
        three(CallsForward)[2].run(CALL, output)


class SkipsOne(models.Mlp):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.first(x)
        return functional.mse_loss(self.last(self.layers[2](self.layers[1](x))), y)


def test_a_stage_all_of_whose_blocks_are_skipped() -> None:
    text = (
        "pipeline: the forward came to 'layers.1' and has called no block of stage 0 (layers.0 to layers.0); it must "
        "call at least one block of each stage"
    )
    with refused(text):
        three(SkipsOne)[0].run(CALL)


class Backwards(models.Mlp):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.first(x)
        for layer in (self.layers[0], self.layers[2], self.layers[1]):
            x = layer(x)
        return functional.mse_loss(self.last(x), y)


def test_blocks_that_are_called_in_another_order() -> None:
    text = (
        "pipeline: expected a forward that calls the blocks in the order layers.0 ... layers.2, found a call of "
        "'layers.1' after 'layers.2'; register the blocks in a single list, in the order of their calls"
    )
    with refused(text):
        stages_of(Backwards, 2, [1, 2])[1].run(CALL, stages_of(models.Mlp, 2, [1, 2])[0].run(CALL))


def test_a_value_that_a_hidden_use_needs_is_named_with_its_origin() -> None:
    class Hidden(models.Mlp):
        """Adds an element of what was made before the blocks, in a way that no look ahead sees."""

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            start = torch.tanh(self.first(x))
            x = start
            for number, layer in enumerate(self.layers):
                x = layer(x)
                if number == 2 and not hasattr(self.layers[0].weight, "origin"):
                    return functional.mse_loss(self.last(x), y)
                x = self.layers[2](x + start) if number == 1 and type(x) is Tensor else x
            return functional.mse_loss(self.last(x), y)

    text = (
        "pipeline: 'layers.2' takes a tensor of shape (6, 7) that stage 1 (layers.1 to layers.2) does not have: it "
        "comes from 'first.weight', and 'layers.1' does not take it as an argument; pass it to every block"
    )
    with refused(text):
        staged(stages_of(Hidden, 2, [1, 2]), CALL)


def test_a_loss_that_reads_a_value_of_another_stage() -> None:
    class Reads(models.Mlp):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return super().forward(x, y) * float(self.first.bias[0])

    text = (
        "__float__ needs values that pipeline stage 2 does not have: they come from 'first.bias' of an earlier or "
        "later stage"
    )
    with refused(text):
        staged(three(Reads), CALL)


def test_a_model_that_writes_absent_values_into_a_tensor() -> None:
    class Writes(models.Mlp):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            whole = torch.zeros(6, models.FEATURES)
            whole[:, :3] = x[:, :3] * self.first.weight.mean()
            return super().forward(whole, y)

    text = (
        "the forward writes with __setitem__ into a tensor of shape (6, 5), with values that pipeline stage 1 does "
        "not have: they come from 'first.weight' of an earlier or later stage; build the tensor from its parts "
        "(torch.cat, torch.where), or move this code into a block"
    )
    with refused(text):
        staged(three(Writes), CALL)


def test_a_microbatch_of_another_shape_than_what_was_received() -> None:
    first, second, _ = three()
    output = first.run(CALL)
    text = "pipeline: stage 1 received a tensor of shape (4, 7) for 'layers.1', expected (6, 7): it belongs to a "
    with refused(text + "different microbatch"):
        second.run(CALL, Carried((torch.zeros(4, 7),), output.spec))


def test_a_microbatch_with_other_arguments_than_on_the_stage_before() -> None:
    first, second, _ = three()
    output = first.run(CALL)
    text = (
        "pipeline: 'layers.1' takes 1 arguments on stage 1, but 3 on the previous stage ('layers.1'): the stages got "
        "different batches, or the forward depends on the rank"
    )
    with refused(text):
        second.run(CALL, Carried(output.tensors, replace(output.spec, num_arguments=3)))


def test_a_forward_that_takes_another_course_where_values_are_absent() -> None:
    class LooksAtItself(models.Mlp):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            computed = type(self.first.weight) is nn.Parameter
            x = self.first(x)
            for layer in self.layers:
                x = layer(x) if computed else layer(x, None)
            return functional.mse_loss(self.last(x), y)

    text = (
        "pipeline: 'layers.1' is called with 1 arguments on stage 0 and with 2 on stage 1: their forwards take "
        "different branches. Outside the blocks, a forward must not depend on values that a block computes"
    )
    with refused(text):
        three(LooksAtItself)[0].run(CALL)


def test_received_on_the_first_stage_or_missing_on_another() -> None:
    first, second, _ = three()
    output = first.run(CALL)
    with refused("pipeline: stage 0 expected nothing as `received`, found a Carried"):
        first.run(CALL, output)
    with refused("pipeline: stage 1 expected the output of stage 0 as `received`, found nothing"):
        second.run(CALL)


def test_a_block_of_another_rank_that_is_called_outside_of_run() -> None:
    stage = three()[1]
    text = (
        "pipeline: 'layers.0' is not on this rank, which has stage 1 of 3; with a pipeline, call the engine "
        "and not the module"
    )
    with refused(text):
        stage.module.get_submodule("layers.0")(torch.zeros(1, 7))
    assert stage.module.get_submodule("layers.1")(torch.zeros(1, 7)).shape == (1, 7)


def test_after_an_error_the_stage_runs_again() -> None:
    first = three()[0]
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        first.run(lambda model: model(X[:, :2], Y))
    assert isinstance(first.run(CALL), Carried)
