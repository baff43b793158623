"""Models whose blocks are never called, but the modules in them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.kit import models

WIDTH = 47


class Net(nn.Module):
    """A list of blocks between two layers, in float64. `run` says how a block's parts are called."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(models.FEATURES, WIDTH)
        self.blocks = nn.ModuleList(self.block(index) for index in range(3))
        self.last = nn.Linear(WIDTH, 3)
        self.change()
        self.double()

    def block(self, index: int) -> nn.Module:
        raise NotImplementedError

    def change(self) -> None: ...

    def run(self, block: Any, x: Tensor) -> Tensor:  # a module of another class in each
        raise NotImplementedError

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        for block in self.blocks:
            x = x + self.run(block, x)
        return functional.mse_loss(self.last(x), y)


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


class Dicts(Net):
    """A norm, which is small, stands before each layer."""

    def block(self, index: int) -> nn.Module:
        return nn.ModuleDict({"norm": nn.LayerNorm(WIDTH), "up": linear(), "act": nn.GELU(), "down": linear()})

    def run(self, block: Any, x: Tensor) -> Tensor:
        return block["down"](block["act"](block["up"](block["norm"](x))))


class Loose(nn.Module):
    """A class without a forward, whose own parameters are read by the model's."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.5))
        self.layer = linear()
        self.more = nn.ParameterList([torch.zeros(WIDTH)])


class OwnClass(Net):
    def block(self, index: int) -> nn.Module:
        return Loose()

    def run(self, block: Any, x: Tensor) -> Tensor:
        return block.layer(x) * block.scale + block.more[0]


class OnlyParameters(Net):
    """Nothing in the blocks is ever called."""

    def block(self, index: int) -> nn.Module:
        return nn.ParameterDict({"weight": 0.1 * torch.randn(WIDTH, WIDTH)})

    def run(self, block: Any, x: Tensor) -> Tensor:
        return functional.linear(x, block["weight"])


class Mixed(Net):
    """Containers beside what is called, None, and what has no parameters; and a list without anything."""

    def change(self) -> None:
        inner = nn.ModuleDict({"0": nn.ModuleList([linear(), linear()]), "1": linear(), "none": nn.ModuleList()})
        blocks = [linear(), None, inner, nn.Identity(), linear(), nn.ModuleList([nn.Sequential(linear(), nn.Tanh())])]
        self.blocks = nn.ModuleList(blocks)  # type: ignore[arg-type]  # torch takes None, and says so nowhere
        self.nothing = nn.ModuleList()
        self.register_module("none", None)

    def block(self, index: int) -> nn.Module:
        return nn.Identity()

    def run(self, block: Any, x: Tensor) -> Tensor:
        if block is None:
            return x
        if isinstance(block, nn.ModuleDict):
            first, second = block["0"].children()
            return block["1"](second(first(x)))
        return block[0](x) if isinstance(block, nn.ModuleList) else block(x)


KINDS: list[Callable[[], nn.Module]] = list(Net.__subclasses__())
