"""An engine offers what a wrapper of the module would: its parameters, submodules and attributes."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide import Engine


class Encoder(nn.Module):
    """Has attributes and methods beside its forward, of which the engine has some too."""

    full = "of the module"

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.register_buffer("scale", torch.ones(1))

    def encode(self, x: Tensor) -> Tensor:
        found: Tensor = self.layers(x)
        return found

    def forward(self, x: Tensor) -> Tensor:
        return self.encode(x).square().mean()


CONFIG: dict[str, Any] = {"optimizer": {"type": "sgd"}, "steps_per_print": 0}


@pytest.fixture(params=[0, 3])
def engine(request: pytest.FixtureRequest) -> Any:
    with lowtide.initialize(Encoder(), {**CONFIG, "zero_optimization": {"stage": request.param}}) as engine:
        yield engine


def test_it_lists_what_the_module_has(engine: Engine) -> None:
    module = engine.module
    for name in ("named_parameters", "named_buffers", "named_modules", "named_children"):
        assert [(key, id(one)) for key, one in getattr(engine, name)()] == [
            (key, id(one)) for key, one in getattr(module, name)()
        ]
    for name in ("parameters", "buffers", "modules", "children"):
        assert list(map(id, getattr(engine, name)())) == list(map(id, getattr(module, name)()))
    assert next(name for name, _ in engine.named_parameters("a")) == "a.layers.0.weight"
    assert not list(engine.parameters(recurse=False)) and [name for name, _ in engine.named_buffers(recurse=False)] == [
        "scale"
    ]
    assert list(engine.state_dict()) == list(module.state_dict(keep_vars=True))
    assert engine.training and not engine.eval().training


def test_other_attributes_are_the_modules(engine: Engine) -> None:
    x = torch.randn(2, 4)
    with torch.no_grad():
        assert engine.encode(x).square().mean() == engine(x)
    assert engine.layers is engine.module.layers
    assert callable(engine.full)  # the engine's own names go first


def test_what_neither_has_is_told(engine: Engine) -> None:
    words = "neither the engine nor its module has an attribute 'genrate': expected an attribute of lowtide.Engine or E"
    with pytest.raises(AttributeError, match=words):
        _ = engine.genrate
    assert not hasattr(engine, "__len__")


def test_it_stays_on_its_device_in_its_dtype(engine: Engine) -> None:
    same = [engine.to(engine.device), engine.to("cpu", non_blocking=True), engine.to(torch.zeros(1)), engine.float()]
    assert all(one is engine for one in (*same, engine.cpu(), engine.type(torch.float32)))
    for other in ("meta", torch.bfloat16, torch.zeros(1, dtype=torch.float64)):
        words = r"engine\.to\(\): expected the engine's device, cpu, and the dtypes of its module, found (meta|torch)"
        with pytest.raises(ValueError, match=words):
            engine.to(other)


def test_its_memory_has_no_other_format(engine: Engine) -> None:
    with pytest.raises(ValueError, match=r"engine\.to\(\): expected no memory_format, found torch.channels_last"):
        engine.to(memory_format=torch.channels_last)


MOVES: dict[str, dict[str, Any]] = {
    "half": {},
    "double": {},
    "bfloat16": {},
    "cuda": {"device": 0},
    "xpu": {},
    "type": {"dst_type": torch.float64},
    "to_empty": {"device": "cpu"},
    "share_memory": {},
}


@pytest.mark.parametrize("call", MOVES)
def test_what_would_move_or_cast_it_is_refused(engine: Engine, call: str) -> None:
    before = [param.dtype for param in engine.parameters()]
    with pytest.raises(ValueError, match=rf"engine\.{call}\(\): expected the engine's device, cpu, and the dtypes"):
        getattr(engine, call)(**MOVES[call])
    assert [param.dtype for param in engine.parameters()] == before


def test_what_returns_a_module_returns_the_engine(engine: Engine) -> None:
    seen: list[nn.Module] = []
    assert engine.apply(seen.append) is engine and seen[-1] is engine.module
    assert engine.requires_grad_(False) is engine and not any(param.requires_grad for param in engine.parameters())


def test_an_engine_is_not_copied(engine: Engine) -> None:
    for make in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="an engine cannot be copied or pickled, since it holds connections"):
            make(engine)


def test_an_engine_that_is_not_made_yet_has_no_attributes() -> None:
    with pytest.raises(AttributeError, match="'Engine' object has no attribute 'layers'"):
        _ = Engine.__new__(Engine).layers
