"""The uses of a module's attributes are read from its source text in the order in which they happen."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lowtide.pipe.split.usage import mentions

PARTS = ("first", "layers", "between", "last")


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.between, self.last = nn.Linear(1, 1), nn.Linear(1, 1), nn.Linear(1, 1)
        self.layers = nn.ModuleList(nn.Linear(1, 1) for _ in range(2))
        self.count = 2


class Nested(Parts):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layers[1](self.layers[0](self.first(x))))


class Comprehension(Parts):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        parts = [layer(x) for layer in self.layers]
        return self.last(sum(parts))


class WhileLoop(Parts):
    def forward(self, x: Tensor) -> Tensor:
        x, index = self.first(x), 0
        while index < len(self.layers):
            x = self.layers[index](x)
            index += 1
        return self.last(x)


class Methods(Parts):
    def forward(self, x: Tensor) -> Tensor:
        return self.finish(self.middle(self.begin(x)))

    def finish(self, x: Tensor) -> Tensor:
        return self.last(x)

    def middle(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def begin(self, x: Tensor) -> Tensor:
        return self.first(x)


class LocalFunction(Parts):
    def forward(self, x: Tensor) -> Any:
        def run(x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return self.last(x)

        return checkpoint(run, self.first(x), use_reentrant=False)


class Lambda(Parts):
    def forward(self, x: Tensor) -> Any:
        return checkpoint(lambda x: self.last(self.layers[0](x)), self.first(x), use_reentrant=False)


class Partial(Parts):
    def forward(self, x: Tensor) -> Any:
        def run(scale: float, x: Tensor) -> Tensor:
            return self.last(self.layers[0](x)) * scale

        return partial(run, 2.0)(self.first(x))


class Metadata(Parts):
    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.last.weight.dtype) if len(self.layers) and hasattr(self, "last") else x
        return self.last(self.layers[0](self.first(x)))


def order(kind: Callable[[], nn.Module]) -> list[str]:
    found = [mention.name for mention in mentions(kind()) if mention.name in PARTS]
    return list(dict.fromkeys(found))


@pytest.mark.parametrize("kind", [Nested, Comprehension, WhileLoop, Methods, LocalFunction, Lambda, Metadata])
def test_the_order_is_that_of_execution(kind: Callable[[], nn.Module]) -> None:
    assert order(kind) == ["first", "layers", "last"]


def test_a_function_that_is_wrapped_counts_where_it_is_wrapped() -> None:
    assert set(order(Partial)) == {"first", "layers", "last"}


class InLoop(Parts):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers[: self.count]:
            x = self.between(layer(x))
        return self.last(x)


def test_what_stands_in_the_loop_over_the_layers_is_marked_with_it() -> None:
    found = {mention.name: mention for mention in mentions(InLoop())}
    assert found["layers"].strong and found["layers"].loops == found["between"].loops != frozenset()
    assert found["first"].loops == found["last"].loops == frozenset()


def test_a_method_of_a_part_is_no_call_of_the_part() -> None:
    class Asks(Parts):
        def forward(self, x: Tensor) -> Tensor:
            self.layers.extend([])
            return self.layers[0](x)

    assert [mention.strong for mention in mentions(Asks())] == [False, True]


def test_a_forward_without_source_text_mentions_nothing() -> None:
    kind = type("Made", (Parts,), {"forward": eval("lambda self, x: self.first(x)")})
    assert mentions(kind()) == []
