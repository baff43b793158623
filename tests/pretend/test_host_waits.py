"""A step waits for its device once, whatever it does: when the host is told of its sum, while the update runs.

And its bits are those of the CPU.
"""

import gc
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide import Engine, NonFiniteGradientError
from lowtide.kernels.quantized_blocks import packed_signs, unpacked_signs
from lowtide.offload import OnHost
from lowtide.zero.codec import Codec
from tests.kit.features import (
    FIRST_STEPS,
    MORE_WAITS,
    OF_THE_CPU,
    case_of,
    feature_sets,
    num_ranks,
    start_in,
    without_places,
)
from tests.kit.models import Chain
from tests.kit.ranks import RankPool, on_device
from tests.kit.training import Case, Outcome, start
from tests.pretend import device, group, queues, values

WIDTH = 32
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}},
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wide = nn.Linear(WIDTH, WIDTH)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.wide(self.norm(x)))


def net(num_blocks: int, lacks: bool = False) -> nn.Module:
    """Blocks, of which the last has a parameter that nobody uses, if `lacks` says so."""
    model = Chain(*(Block() for _ in range(num_blocks)))
    for block in model.blocks[: -1 if lacks else None]:
        del block.unused
    return model


def make_engine(model: nn.Module, config: dict[str, Any], **given: Any) -> Engine:
    group.register()
    options = {"device": "pretend", "optimizer": {"type": "adamw"}, "steps_per_print": 0}
    return lowtide.initialize(model, {**options, **config}, **given)


def waits_of(act: Callable[[], object]) -> list[str]:
    """The waits of the training meanwhile.

    Left out are those of the pretended group, whose messages go through the host, and those of threads beside it.
    """
    with device.host_waits() as waits:
        act()
    of_group = {module.__file__ for module in (group, queues, values)}
    own = [wait for wait in waits if wait.thread.startswith(("MainThread", "Dummy"))]  # Dummy: of torch's backward
    return [str(wait) for wait in own if of_group.isdisjoint(frame.filename for frame in wait.stack)]


def train_on(device: str, case: Case, num_steps: int) -> tuple[list[list[str]], Outcome]:
    """The waits of each step, from a batch on the host, not pinned, with gaps; and what the training gave."""
    waits, outcome = [], Outcome()
    with start(case.at(case.stage, config={"device": device})) as engine:
        for step in range(num_steps):
            batch = [values.repeat_interleave(2, 1)[:, ::2] for values in case.share(engine, step)]
            results: list[Any] = []
            waits.append(waits_of(lambda: results.append(engine.train_step(batch))))  # noqa: B023
            outcome.add(*results)
        outcome.state = engine.state_dict()
    return waits, outcome


def on_the_cpu(names: Iterable[str], num_steps: int) -> Outcome:
    """The numbers of the CPU, with all in memory, whose sums are in the order of the device's group."""
    plain = without_places(names)
    communication = {**plain.config.get("communication", {}), "transport": "native"}
    return train_on("cpu", plain.at(plain.stage, config={"communication": communication}), num_steps)[1]


def check_features(folder: Path, sets: Sequence[Sequence[str]]) -> list[str]:
    """Sets with which a step waits more than once, and where; and sets whose bits are not those of the CPU."""
    start_in(folder)
    group.register()
    broken = []
    for names in sets:
        first = max(FIRST_STEPS.get(name, 0) for name in names)
        num_steps = first + (1 if first else 2)
        waits, outcome = train_on("pretend", case_of(names), num_steps)
        broken += [f"{', '.join(names)}:\n{''.join(step)}" for step in waits[first:] if len(step) > 1]
        broken += [f"{', '.join(names)}: {one}" for one in outcome.differences(on_the_cpu(names, num_steps))]
        gc.collect()
    return broken


SETS = {  # the first ones have each feature, and nine of ten pairs
    2: feature_sets(*OF_THE_CPU, *MORE_WAITS, "hybrid sharding", "hpZ")[:14],
    4: [names for names in feature_sets(*OF_THE_CPU, *MORE_WAITS) if num_ranks(names) == 4][:3],
}


@pytest.mark.parametrize("size", SETS)
def test_all_features_wait_once_and_have_bits_of_the_cpu(pretend_ranks: RankPool, tmp_path: Path, size: int) -> None:
    found = pretend_ranks(size, check_features, tmp_path, SETS[size], process_group=False, timeout=240)
    assert "\n".join(text for broken in found for text in broken) == ""


@on_device(2)
def test_what_waits_more_often_is_declared(tmp_path: Path) -> None:
    """That what is declared is so."""
    start_in(tmp_path)
    group.register()
    for one in MORE_WAITS:
        case = case_of({"stage 3"} | ({one} if isinstance(one, str) else one))
        assert len(train_on("pretend", case, 1)[0][0]) > 1, one
    for one, error in OF_THE_CPU.items():
        case = case_of({"stage 3"} | ({one} if isinstance(one, str) else one))
        with pytest.raises(ValueError, match=error):
            train_on("pretend", case, 0)


def by_hand(engine: Engine, batch: Tensor) -> None:
    engine.backward(engine(batch))
    engine.clip_grad_norm_(0.1)
    engine.step()


def in_a_loop_of_torch(engine: Engine, batch: Tensor) -> None:
    engine(batch).backward()
    engine.step()


def with_averages(engine: Engine, batch: Tensor) -> None:
    if engine.global_step == 0:
        engine.ema(0.9)
    engine.train_step((batch,))


def train_step(engine: Engine, batch: Tensor) -> None:
    engine.train_step((batch,))


IN_BACKWARD: dict[str, Any] = {"zero_optimization": {"stage": 3, "update_in_backward": True}}
SPECULATIVE: dict[str, Any] = {
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.5, "overlap": "speculative"}}
}
DELAYED = {"offload_optimizer": {"device": "cpu", "overlap": "delayed", "delay_after_steps": 1}}
IN_8_BITS = {"optimizer": {"type": "adamw", "params": {"state_dtype": "int8"}}}
WAYS: dict[str, tuple[dict[str, Any], Callable[[Engine, Tensor], None]]] = {
    "clipping by hand": ({}, by_hand),
    "loss.backward()": ({"gradient_clipping": 0.1}, in_a_loop_of_torch),
    "averages": ({}, with_averages),
    "a delayed update after a step": ({"zero_optimization": DELAYED}, train_step),
    "an optimizer of torch": ({"optimizer": None}, train_step),
}


def check_monitors(folder: str) -> None:
    place = {"enabled": True, "output_path": folder}
    for stage in (0, 3):
        config = {"zero_optimization": {"stage": stage}, "csv_monitor": place, "profile": {"enabled": True, "step": 2}}
        with make_engine(net(3), {**config, "gradient_clipping": 0.1}) as engine:
            for _ in range(3):  # the second one is profiled
                waits = waits_of(lambda: engine.train_step((torch.randn(2, WIDTH),)))
                assert len(waits) <= 1, "\n".join(waits)


def test_a_step_that_is_written_and_profiled_waits_once_too(pretend_ranks: RankPool, tmp_path: Path) -> None:
    pretend_ranks(2, check_monitors, str(tmp_path), process_group=False)
    (table,) = tmp_path.glob("*/metrics.csv")
    assert [line.partition(",")[0] for line in table.read_text().splitlines()] == ["step", "1", "2", "3"]


@pytest.mark.parametrize("way", WAYS)
@on_device()
def test_other_ways_to_step_wait_once_too(way: str) -> None:
    config, act = WAYS[way]
    model = net(3, lacks=True)  # of the parameter without a gradient, all ranks must say so
    given = {"optimizer": lambda params: torch.optim.RMSprop(params)} if "optimizer" in config else {}
    with make_engine(model, config, **given) as engine:
        for _ in range(2):
            waits = waits_of(lambda: act(engine, torch.randn(2, WIDTH)))
            assert len(waits) <= 1, "\n".join(waits)


# -- what the device knows before the host does -----------------------------------------------------------------------


def weights(engine: Engine) -> list[Tensor]:
    return list(engine.state_dict().values())


@pytest.mark.parametrize(
    "config",
    [
        *({}, {"gradient_clipping": 0.1}, PRECISIONS["bf16"], PRECISIONS["fp16"], IN_8_BITS, IN_BACKWARD),
        *(SPECULATIVE, {**SPECULATIVE, **PRECISIONS["fp16"]}),
    ],
)
@on_device()
def test_an_update_that_was_started_changes_nothing(config: dict[str, Any]) -> None:
    in_backward = config == IN_BACKWARD
    with make_engine(net(2), config) as engine:
        train_step(engine, torch.randn(2, WIDTH))
        before, num_steps = weights(engine), engine.optimizer.num_steps
        bad = torch.full((2, WIDTH), math.inf)
        if "fp16" in config:
            assert engine.train_step((bad,)).skipped
            assert engine.train_step((torch.randn(2, WIDTH),)).loss_scale == 8
            assert engine.optimizer.num_steps == num_steps + 1
            return
        outcome = "gradients are finite were updated" if in_backward else "No parameter was updated"
        with pytest.raises(NonFiniteGradientError, match=rf"'blocks\.\d\.\w+\.\w+' on rank 0.*{outcome}"):
            engine.train_step((bad,))
        if not in_backward:
            assert all(torch.equal(a, b) for a, b in zip(before, weights(engine), strict=True))
            assert engine.optimizer.num_steps == num_steps


@pytest.mark.parametrize(("value", "num_steps"), [(1.0, 2), (math.inf, 1)])
@on_device()
def test_ctrl_c_while_the_host_waits_counts_what_the_device_has_updated(value: float, num_steps: int) -> None:
    real, interrupts = OnHost.read, [KeyboardInterrupt()]

    def read(self: OnHost) -> Tensor:
        if interrupts:
            raise interrupts.pop()
        return real(self)

    with make_engine(net(2), PRECISIONS["bf16"]) as engine:
        engine.ema(0.5)
        train_step(engine, torch.randn(2, WIDTH))
        with pytest.raises(KeyboardInterrupt), patch.object(OnHost, "read", read):
            train_step(engine, torch.randn(2, WIDTH) * value)
        assert engine.optimizer.averages is not None
        assert engine.optimizer.num_steps == engine.optimizer.averages.num_updates == num_steps


@on_device()
def test_a_change_by_data_is_told_at_the_end_of_the_step() -> None:
    with make_engine(net(2), {**PRECISIONS["bf16"], "gradient_accumulation_steps": 2}) as engine:
        for _ in range(2):
            train_step(engine, torch.randn(2, WIDTH))
        weight = engine.module.get_parameter("blocks.1.wide.weight")
        weight.data.add_(1.0)
        for _ in range(2):  # until it is put right
            with pytest.raises(ValueError, match=r"'blocks.1.wide.weight' was changed through \.data"):
                train_step(engine, torch.randn(2, WIDTH))


@on_device()
def test_pieces_of_a_gradient_get_the_order_of_ranks_without_a_wait() -> None:
    sent = list[Tensor]()

    def reduce_scatter(staged: Tensor, spare: None, what: str) -> Any:
        sent.append(staged)
        return SimpleNamespace(arrived=None, region=slice(0), summed=None)

    axis: Any = SimpleNamespace(size=2, places=(1, 0), transport=SimpleNamespace(reduce_scatter=reduce_scatter))
    codec = Codec(axis, torch.float32, parts=[[0, 2], [1, 3]])
    staged = torch.arange(8.0, device="pretend")
    with device.host_waits() as waits:
        codec.reduce_scatter(staged, None, "a gradient")
    assert not waits, "\n".join(map(str, waits))
    assert sent[0].tolist() == [2, 3, 6, 7, 0, 1, 4, 5]


@on_device()
def test_signs_are_packed_without_a_wait() -> None:
    values = torch.arange(-8.0, 8.0, device="pretend")
    with device.host_waits() as waits:
        signs = unpacked_signs(packed_signs(values), torch.float32)
    assert not waits, "\n".join(map(str, waits))
    assert signs.tolist() == [-1] * 8 + [1] * 8
