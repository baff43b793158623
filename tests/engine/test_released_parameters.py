"""A released parameter: its shape can be asked for; whatever needs its values is an error that names it."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import handle_torch_function

import lowtide
from tests.kit.ranks import RankPool
from tests.kit.training import settings

NAME = "blocks.0.weight"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))
        self.reads_other_block = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[1](self.blocks[0](x))
        if self.reads_other_block:
            x = x + self.get_parameter(NAME).sum()
        return x.square().mean()


def assign(param: nn.Parameter) -> None:
    param[0] = 1.0


READS: dict[str, Callable[[nn.Parameter], Any]] = {
    "linear": lambda p: functional.linear(torch.ones(1, 5), p),
    "data": lambda p: p.data,
    "index": lambda p: p[0],
    "assignment": assign,
    "cat": lambda p: torch.cat([p, p]),
    "addition from the left": lambda p: torch.ones(5, 5) + p,
    "in place": lambda p: p.add_(1),
    "tolist": lambda p: p.tolist(),
    "numpy": lambda p: p.numpy(force=True),
    "data_ptr": lambda p: p.data_ptr(),
    "storage": lambda p: p.untyped_storage(),
    "dtype": lambda p: p.to(torch.float64),
    "transposed": lambda p: p.T,
    "copy from it": lambda p: torch.zeros(5, 5).copy_(p),
    "deepcopy": copy.deepcopy,
    "state_dict": lambda p: MODEL[0].state_dict(),
    "by its name alone": lambda p: torch.add(torch.ones(5, 5), other=p),
    "in a mapping": lambda p: handle_torch_function(sum_of, (p,), {"weights": [p]}),
}


def sum_of(weights: Any) -> Tensor:
    raise NotImplementedError


MODEL: list[nn.Module] = []


class TensorChunk:
    """Hides a parameter from those who look for it among arguments."""

    def __init__(self, param: nn.Parameter) -> None:
        self.param = param


def read_released(transport: str) -> tuple[dict[str, tuple[str, str]], list[Any], str]:
    """(error of each read, what may be asked for, state after a forward that reads another block)."""
    model = Net()
    engine = lowtide.initialize(model, settings(3, communication={"transport": transport}))
    engine.train_step(torch.ones(2, 5))
    param = model.get_parameter(NAME)
    MODEL[:] = [model]
    found = {}
    for name, read in {**READS, "in an object": lambda p: handle_torch_function(sum_of, (p,), TensorChunk(p))}.items():
        try:
            found[name] = "nothing", str(read(param))
        except Exception as error:
            found[name] = type(error).__name__, str(error)
    harmless = [tuple(param.shape), param.dtype, param.requires_grad, param.numel(), param.dim(), len(param)]
    harmless += [repr(param), param.is_leaf, param.grad, str(param), isinstance(param, nn.Parameter), param in {param}]
    model.reads_other_block = True
    engine.train_step(torch.ones(2, 5))
    model.reads_other_block = False
    after = "trains on" if engine.train_step(torch.ones(2, 5)).loss.isfinite() else "loss is not finite"
    with engine.gathered(param):
        assert torch.isfinite(param).all() and type(param) is nn.Parameter
    engine.close()
    return found, harmless, after


@pytest.mark.parametrize("transport", ["shared_memory", "sockets"])
def test_reading_a_released_parameter_is_an_error_that_names_it(ranks: RankPool, transport: str) -> None:
    for found, harmless, after in ranks(2, read_released, transport):
        kind, message = found.pop("in an object")
        assert kind == "ReleasedParameterError"
        assert message.startswith("a parameter is released: only its shards exist here, so sum_of cannot read it.")
        for name, (kind, message) in found.items():
            assert kind == "ReleasedParameterError", (name, kind, message)
            assert message.startswith(f"parameter '{NAME}' is released"), name
        assert "engine.gathered(parameter)" in found["index"][1]
        words = "To save the model, call engine.state_dict() (module_state_dict() in lowtide.deepspeed) or"
        assert words in found["state_dict"][1]
        assert "engine.state_dict()" in found["deepcopy"][1]
        shown = f"ReleasedParameter('{NAME}', shape=(5, 5), dtype=torch.float32)"
        assert harmless == [(5, 5), torch.float32, True, 25, 2, 5, shown, True, None, shown, True, True]
        assert after == "trains on"
