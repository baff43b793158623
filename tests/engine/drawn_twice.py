"""Models whose weights are filled again after their modules have filled them."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

WIDTH = 24

DRAWS: dict[str, Callable[[Tensor], object]] = {
    "normal": lambda weight: nn.init.normal_(weight, std=0.02),
    "normal of data": lambda weight: weight.data.normal_(mean=0.0, std=0.02),
    "uniform": lambda weight: nn.init.xavier_uniform_(weight),
    "trunc_normal": lambda weight: nn.init.trunc_normal_(weight, std=0.5, a=-0.6, b=0.6),
    "number": lambda weight: nn.init.constant_(weight, 0.5),
    "tensor": lambda weight: weight.data.fill_(torch.tensor(0.25)),
    "copy": lambda weight: weight.data.copy_(torch.rand(weight.shape)),
}
"""Ways to fill a whole weight."""


class DrawnTwice(nn.Module):
    """A language model that draws its weights in a second pass, as GPT-2 does, and some in a third.

    The head is tied, so that its weight is filled once more. A row of it is zeroed in between.
    """

    def __init__(self, draw: str = "normal") -> None:
        super().__init__()
        self.draw = DRAWS[draw]
        self.embedding = nn.Embedding(31, WIDTH, padding_idx=3)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(5)
        )
        self.head = nn.Linear(WIDTH, 31, bias=False)
        self.head.weight = self.embedding.weight
        self.apply(self.init_weights)
        for block in self.blocks:
            self.draw(block.get_parameter("2.weight"))

    def init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            self.draw(module.weight)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
        if isinstance(module, nn.Embedding):
            module.weight.data[3].zero_()


class RowZeroed(nn.Module):
    """A padding row is zeroed after the last draw: all other rows stay."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 9, padding_idx=3)
        nn.init.normal_(self.embedding.weight)
        self.linear = nn.Linear(9, 9)
        nn.init.normal_(self.linear.weight)
        self.embedding.weight.data[3].zero_()


class FilledInPart(nn.Module):
    """Fills that look like those of a whole weight, and leave something of it."""

    def __init__(self) -> None:
        super().__init__()
        flat = torch.rand(18)
        self.left, self.right = nn.Parameter(flat[:9]), nn.Parameter(flat[9:])
        self.rows, self.front, self.turned = (nn.Linear(9, 9) for _ in range(3))
        with torch.no_grad():
            self.left.normal_()
            self.rows.weight[2:].normal_()
            self.front.weight.view(-1)[:40].uniform_()
            self.turned.weight.t().normal_()


class UsedBeforeFilled(nn.Module):
    """Values that something is computed from, before others take their place."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.result, self.own = (nn.Linear(9, 9) for _ in range(3))
        with torch.no_grad():
            view = self.source.weight[1:]
            self.result.weight.copy_(self.source.weight * 2 + 1)
            self.result.bias.copy_(view[0])
            self.source.weight.normal_()
            self.result.weight[0] += view[3]
            self.own.weight.fill_(self.own.weight[1, 2])
            self.own.bias.copy_(self.own.bias)
