"""What else an engine is asked for gives the same bits on the pretended device as on the CPU."""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import lowtide
from lowtide import Engine
from tests.kit import models
from tests.kit.models import TinyGPT
from tests.kit.ranks import RankPool, on_device
from tests.kit.training import settings
from tests.pretend.group import register
from tests.zero.test_special_parameters import read_in_hooks, sums_beside_the_model

gpt, tied_gpt = partial(TinyGPT, layers=2), partial(TinyGPT, layers=2, tied=True)
Make = Callable[..., Engine]
Use = Callable[[Make, str], list[Tensor]]


def maker(device: str) -> Make:
    """Engines of two microbatches a step. On that transport the CPU sums in the order in which the device's group
    does."""

    def make(build: Any = gpt, stage: int = 0, given: Any = None, **config: Any) -> Engine:
        torch.manual_seed(0)
        communication = {"transport": "auto" if device == "auto" else "native"}
        own = {"device": device, "communication": communication, "kernels": {"fuse_modules": False}, **config}
        return lowtide.initialize(build(), settings(stage, **own), **(given or {}))

    return make


def batch(engine: Engine, step: int) -> tuple[Tensor, ...]:
    accumulation = engine.config.gradient_accumulation_steps or 1
    rows = 2 * accumulation * engine.data_size
    return tuple(one.chunk(engine.data_size)[engine.data_rank] for one in models.token_batch(step, rows))


def train(engine: Engine, steps: range = range(2)) -> list[Tensor]:
    return [torch.stack([result.loss.cpu(), result.grad_norm.cpu().float()]) for result in results(engine, steps)]


def results(engine: Engine, steps: range) -> list[Any]:
    return [engine.train_step(batch(engine, step)) for step in steps]


def state_of(engine: Engine) -> list[Tensor]:
    state = list(engine.state_dict().values())
    engine.close()
    return state


# -- one use each -----------------------------------------------------------------------------------------------------


def loops(make: Make, folder: str) -> list[Tensor]:
    """Backwards of the caller's own: two forwards with one loss, then a graph that is kept and another use of it."""
    engine = make(stage=3)
    for step in range(2):
        first, second = engine(*batch(engine, step)), engine(*batch(engine, step + 7))
        (first + 0.5 * second).backward()
        again = engine(*batch(engine, step + 9))
        again.backward(retain_graph=True)
        again.square().backward()
        engine.step()
    return state_of(engine)


def set_gradients(make: Make, folder: str) -> list[Tensor]:
    engine = make(stage=2)
    for step in range(2):
        engine.backward(engine(*batch(engine, step)))
        param = engine.module.get_parameter("blocks.1.up.weight")
        engine.set_gradient(param, torch.full(param.shape, 0.01, device=engine.device))
        engine.clip_grad_norm_(0.3)
        engine.step()
    return state_of(engine)


def gradients_so_far(make: Make, folder: str) -> list[Tensor]:
    """Between microbatches, of sums that are full on each rank, and of sums that have left the device."""
    found = []
    for stage in (1, 2):
        zero = {"offload_optimizer": HOST}
        with make(stage=stage, bf16={"enabled": True}, zero_optimization=zero, gradient_accumulation_steps=3) as engine:
            for step in range(3):
                engine.backward(engine(*batch(engine, step)))
                shown = engine.gradient("blocks.1.up.weight")
                assert shown is not None and shown.any()
                found.append(shown.cpu())
            found += [engine.step().grad_norm, *engine.state_dict().values()]
    return found


def join(make: Make, folder: str) -> list[Tensor]:
    """Rank 0 has a batch more."""
    engine = make(stage=3)
    with engine.join():
        for step in range(3 - engine.rank):
            engine.train_step(batch(engine, step))
    return state_of(engine)


def averages(make: Make, folder: str) -> list[Tensor]:
    engine = make(stage=3, bf16={"enabled": True})
    engine.ema(0.9)
    train(engine)
    with engine.ema_weights():
        found = list(engine.state_dict().values())
    return [*found, *state_of(engine)]


def gathered(make: Make, folder: str) -> list[Tensor]:
    engine = make(stage=3)
    train(engine, range(1))
    params = [engine.module.get_parameter(name) for name in ("embedding.weight", "blocks.0.up.weight")]
    with engine.gathered(*params, modify=True), torch.no_grad():
        for param in params:
            param.mul_(0.5)
    with engine.gathered(*params):
        seen = [param.detach().cpu().clone() for param in params]
    return [*seen, *train(engine), *state_of(engine)]


def half_frozen() -> nn.Module:
    model = gpt()
    model.requires_grad_(False)
    model.head.requires_grad_(True)
    return model


def added_groups(make: Make, folder: str) -> list[Tensor]:
    engine = make(half_frozen, 2)
    train(engine, range(1))
    added = [engine.module.get_parameter("blocks.1.up.weight"), *engine.module.get_submodule("norm").parameters()]
    engine.optimizer.add_param_group({"params": added, "lr": 0.05})
    return [*train(engine), *state_of(engine)]


def own_optimizer(make: Make, folder: str) -> list[Tensor]:
    given = {"optimizer": lambda params: torch.optim.RMSprop(params, lr=0.01, momentum=0.9)}
    engine = make(stage=3, given=given, optimizer=None)
    return [*train(engine), *state_of(engine)]


def deferred(make: Make, folder: str) -> list[Tensor]:
    engine = make(lambda: TinyGPT, 3)
    return [*train(engine), *state_of(engine)]


def export(make: Make, folder: str) -> list[Tensor]:
    """Weights in one file, and in several with an index; an engine of its own takes them up."""
    engine = make(tied_gpt, 3, bf16={"enabled": True})
    train(engine)
    engine.export(f"{folder}/one")
    engine.export(f"{folder}/several", dtype="fp32", shard_bytes=4000)
    engine.close()
    values: dict[str, Tensor] = {}
    for file in sorted(Path(folder).glob("*/*.safetensors")):
        values |= {f"{file.parent.name} {name}": value for name, value in load_file(file).items()}
    second = make(tied_gpt, 2)
    second.load_weights(f"{folder}/several")
    return [*values.values(), *train(second), *state_of(second)]


HOST = {"device": "cpu"}
USES: dict[str, Use] = {
    "loops of the caller's own": loops,
    "gradients that are set": set_gradients,
    "gradients so far": gradients_so_far,
    "join": join,
    "averages": averages,
    "gathered": gathered,
    "late groups": added_groups,
    "an optimizer of torch": own_optimizer,
    "a deferred model": deferred,
    "export": export,
}


@on_device(2)
def test_every_use_gives_the_bits_of_the_cpu(tmp_path: Path) -> None:
    register()
    found = {}  # by use, which of its values differ
    for name, use in USES.items():
        values = []
        for device in ("cpu", "auto"):
            own = tmp_path / name / device
            own.mkdir(parents=True, exist_ok=True)
            values.append(use(maker(device), str(own)))
        pairs = zip(*values, strict=True)
        found[name] = [index for index, (ours, theirs) in enumerate(pairs) if not torch.equal(ours, theirs)]
    assert found == {name: [] for name in USES}


@on_device(2)
def test_a_norm_says_that_gradients_are_not_finite() -> None:
    """A loop of the caller's own may skip its step by it, as with torch's."""
    register()
    engine = maker("auto")(stage=2)
    engine.backward(engine(*batch(engine, 0)) * math.inf)
    assert engine.clip_grad_norm_(0.3).isnan()
    with pytest.raises(lowtide.NonFiniteGradientError, match="finite"):
        engine.step()
    engine.close()


def reads_on_device(stage: int) -> list[float]:
    register()
    return [*sums_beside_the_model(stage, "auto"), *read_in_hooks(stage, "auto")]


def test_losses_and_hooks_beside_the_model_may_read_what_is_released(pretend_ranks: RankPool) -> None:
    expected, found = (pretend_ranks(2, reads_on_device, stage, process_group=False)[0] for stage in (0, 3))
    assert found == pytest.approx(expected, rel=1e-6)
