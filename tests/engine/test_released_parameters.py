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

ROUTES = ["shared_memory", "sockets"]
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
    "detach": lambda p: p.detach(),
    "index": lambda p: p[0],
    "assignment": assign,
    "item": lambda p: p.sum().item(),
    "cat": lambda p: torch.cat([p, p]),
    "stack in a tuple": lambda p: torch.stack((torch.ones(5, 5), p)),
    "addition": lambda p: p + 1,
    "addition from the left": lambda p: torch.ones(5, 5) + p,
    "in place": lambda p: p.add_(1),
    "clone": lambda p: p.clone(),
    "tolist": lambda p: p.tolist(),
    "numpy": lambda p: p.numpy(force=True),
    "data_ptr": lambda p: p.data_ptr(),
    "storage": lambda p: p.untyped_storage(),
    "norm": lambda p: torch.linalg.vector_norm(p),
    "dtype": lambda p: p.to(torch.float64),
    "transposed": lambda p: p.T,
    "copy from it": lambda p: torch.zeros(5, 5).copy_(p),
    "isfinite": lambda p: torch.isfinite(p).all(),
    "deepcopy": copy.deepcopy,
    "state_dict": lambda p: MODEL[0].state_dict(),
    "layer_norm": lambda p: functional.layer_norm(torch.ones(5, 5), (5, 5), weight=p),
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
    config = {
        "optimizer": {"type": "sgd"},
        "zero_optimization": {"stage": 3},
        "communication": {"transport": transport},
        "steps_per_print": 0,
    }
    model = Net()
    engine = lowtide.initialize(model, config)
    engine.train_step((torch.ones(2, 5),))
    param = model.get_parameter(NAME)
    MODEL[:] = [model]
    found = {}
    for name, read in {**READS, "in an object": lambda p: handle_torch_function(sum_of, (p,), TensorChunk(p))}.items():
        try:
            found[name] = "nothing", str(read(param))
        except Exception as error:
            found[name] = type(error).__name__, str(error)
    harmless = [
        tuple(param.shape),
        param.dtype,
        param.requires_grad,
        param.numel(),
        param.dim(),
        len(param),
        repr(param),
    ]
    harmless += [param.is_leaf, param.grad, str(param), isinstance(param, nn.Parameter), param in {param}]
    model.reads_other_block = True
    engine.train_step((torch.ones(2, 5),))
    model.reads_other_block = False
    after = "trains on" if engine.train_step((torch.ones(2, 5),)).loss.isfinite() else "loss is not finite"
    with engine.gathered(param):
        assert torch.isfinite(param).all() and type(param) is nn.Parameter
    engine.close()
    return found, harmless, after


@pytest.mark.parametrize("transport", ROUTES)
def test_reading_a_released_parameter_is_an_error_that_names_it(ranks: RankPool, transport: str) -> None:
    for found, harmless, after in ranks(2, read_released, transport):
        kind, message = found.pop("in an object")
        assert kind == "ReleasedParameterError"
        assert message.startswith("a parameter is released: only its shards exist here, so sum_of cannot read it.")
        for name, (kind, message) in found.items():
            assert kind == "ReleasedParameterError", (name, kind, message)
            assert message.startswith(f"parameter '{NAME}' is released"), name
        assert "engine.gathered(parameter)" in found["index"][1]
        assert (
            "To save the model, call engine.state_dict() (module_state_dict() in lowtide.deepspeed) or"
            in found["state_dict"][1]
        )
        assert "engine.state_dict()" in found["deepcopy"][1]
        shown = f"ReleasedParameter('{NAME}', shape=(5, 5), dtype=torch.float32)"
        assert harmless == [(5, 5), torch.float32, True, 25, 2, 5, shown, True, None, shown, True, True]
        assert after == "trains on"
