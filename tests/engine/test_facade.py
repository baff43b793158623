"""An engine offers what a wrapper of the module would, and makes one call at a time, until it is closed."""

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import lowtide
from lowtide import Engine
from lowtide.zero.sequence import StateError
from tests.kit.training import refusal, settings


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


@pytest.fixture(params=[0, 3])
def engine(request: pytest.FixtureRequest) -> Any:
    with lowtide.initialize(Encoder(), settings(request.param)) as engine:
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


STAYS = "expected the engine's device, cpu, and the dtypes of its module, found "


MOVES: tuple[tuple[Callable[[Any], object], str], ...] = (
    (lambda engine: engine.to("meta"), f"to(): {STAYS}meta"),
    (lambda engine: engine.to(torch.bfloat16), f"to(): {STAYS}torch.bfloat16"),
    (lambda engine: engine.to(torch.zeros(1, dtype=torch.float64)), f"to(): {STAYS}torch.float64"),
    (
        lambda engine: engine.to(memory_format=torch.channels_last),
        "to(): expected no memory_format, found torch.channels_last",
    ),
    (lambda engine: engine.half(), f"half(): {STAYS}"),
    (lambda engine: engine.double(), f"double(): {STAYS}"),
    (lambda engine: engine.bfloat16(), f"bfloat16(): {STAYS}"),
    (lambda engine: engine.cuda(device=0), f"cuda(): {STAYS}"),
    (lambda engine: engine.xpu(), f"xpu(): {STAYS}"),
    (lambda engine: engine.type(dst_type=torch.float64), f"type(): {STAYS}"),
    (lambda engine: engine.to_empty(device="cpu"), f"to_empty(): {STAYS}"),
    (lambda engine: engine.share_memory(), f"share_memory(): {STAYS}"),
)


def test_what_would_move_or_cast_it_is_refused(engine: Engine) -> None:
    before = [param.dtype for param in engine.parameters()]
    for call, words in MOVES:
        assert refusal(call, engine).startswith(f"engine.{words}")
    assert [param.dtype for param in engine.parameters()] == before


def test_what_returns_a_module_returns_the_engine(engine: Engine) -> None:
    seen: list[nn.Module] = []
    assert engine.apply(seen.append) is engine and seen[-1] is engine.module
    assert engine.requires_grad_(False) is engine and not any(param.requires_grad for param in engine.parameters())


def test_an_engine_is_not_copied(engine: Engine) -> None:
    for make in (copy.copy, copy.deepcopy, pickle.dumps, cast(Any, AveragedModel)):
        with pytest.raises(TypeError, match=r"an engine cannot be copied or pickled, .* is engine.ema\(decay\)"):
            make(engine)


def test_an_engine_that_is_not_made_yet_has_no_attributes() -> None:
    with pytest.raises(AttributeError, match="'Engine' object has no attribute 'layers'"):
        _ = Engine.__new__(Engine).layers


BATCH = torch.ones(2, 4)


CALLS: dict[str, Callable[[Engine], Any]] = {
    "engine.train_step()": lambda engine: engine.train_step(BATCH),
    "engine(...)": lambda engine: engine(BATCH),
    "engine.backward()": lambda engine: engine.backward(torch.ones((), requires_grad=True)),
    "engine.step()": Engine.step,
    "engine.eval_step()": lambda engine: engine.eval_step(BATCH),
    "engine.state_dict()": Engine.state_dict,
    "engine.full()": lambda engine: engine.full("weight"),
    "engine.set_full()": lambda engine: engine.set_full("weight", torch.zeros(2, 4)),
    "engine.local()": lambda engine: engine.local("weight"),
    "engine.set_local()": lambda engine: engine.set_local("weight", torch.zeros(8)),
    "engine.gradient()": lambda engine: engine.gradient("weight"),
    "engine.clip_grad_norm_()": lambda engine: engine.clip_grad_norm_(1.0),
    "engine.load_state_dict()": lambda engine: engine.load_state_dict({}),
    "engine.ema()": Engine.ema,
    "engine.export()": lambda engine: engine.export("nowhere"),
    "engine.load_weights()": lambda engine: engine.load_weights("nowhere"),
    "engine.save_checkpoint()": lambda engine: engine.save_checkpoint("nowhere"),
    "engine.load_checkpoint()": lambda engine: engine.load_checkpoint("nowhere"),
    "engine.gathered() (zero.GatheredParameters in lowtide.deepspeed)": lambda engine: engine.gathered().__enter__(),
    "engine.close()": Engine.close,
}


def make_engine() -> Engine:
    return lowtide.initialize(nn.Linear(4, 2), settings(3), loss_fn=lambda output, batch: output.square().mean())


def test_a_closed_engine_makes_no_call() -> None:
    engine = make_engine()
    engine.close()
    engine.close()
    for what, call in CALLS.items():
        if what != "engine.close()":
            text = refusal(call, engine, kind=StateError)
            assert text.startswith(
                f"{what}: expected an open engine, found a closed engine (engine.close(), destroy() in"
            )


@pytest.mark.parametrize("what", [what for what in CALLS if "gathered" not in what])
def test_a_hook_cannot_make_a_call_of_the_engine(what: str) -> None:
    with make_engine() as engine:
        weight = engine.module.get_parameter("weight")
        for register in (engine.module.register_forward_hook, weight.register_post_accumulate_grad_hook):
            handle = register(lambda *unused: CALLS[what](engine) and None)
            text = refusal(engine.train_step, BATCH, kind=StateError)
            handle.remove()
            assert text.startswith(f"{what}: expected no call in progress, found engine.train_step(): ")
            assert text.endswith("or a signal handler; call it when engine.train_step() has returned")
        assert engine.train_step(BATCH).loss.isfinite()


def test_a_hook_may_read_full_values() -> None:
    seen: list[Tensor] = []
    with make_engine() as engine:
        weight = engine.module.get_parameter("weight")

        def read(*unused: Any) -> None:
            with engine.gathered(weight):
                seen.append(weight.detach().clone())

        engine.module.register_forward_pre_hook(read)
        engine.eval_step(BATCH)
    assert seen[0].shape == (2, 4)


def test_two_threads_cannot_be_in_an_engine_at_once() -> None:
    is_inside, may_go_on = threading.Event(), threading.Event()

    def stop(*unused: Any) -> None:
        is_inside.set()
        assert may_go_on.wait(20)

    with make_engine() as engine:
        handle = engine.module.register_forward_hook(stop)
        thread = threading.Thread(target=engine.train_step, args=(BATCH,), name="trainer")
        thread.start()
        assert is_inside.wait(20)
        texts = {what: refusal(call, engine, kind=StateError) for what, call in CALLS.items()}
        may_go_on.set()
        thread.join()
        handle.remove()
        assert engine.global_step == 1 and engine.train_step(BATCH).loss.isfinite()
    for what, text in texts.items():
        assert text == (
            f"{what}: an engine belongs to a single thread at a time: expected it free for thread 'MainThread', found "
            "thread 'trainer' in engine.train_step(); make all calls in the same thread, or hold a lock from the "
            "forward to the end of the step"
        )
