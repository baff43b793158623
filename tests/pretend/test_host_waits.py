"""A step waits for its device once, whatever it does: when the host is told of its sum, while the update runs."""

import gc
import math
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide import Engine, NonFiniteGradientError
from tests.kit.ranks import RankPool
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


class Net(nn.Module):
    """blocks: of which the last has a parameter that nobody uses, if `lacks` says so."""

    def __init__(self, num_blocks: int, lacks: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        for block in self.blocks[: None if not lacks else -1]:
            del block.unused

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def make_engine(model: nn.Module, config: dict[str, Any], **given: Any) -> Engine:
    group.register()
    options = {"device": "pretend", "optimizer": {"type": "adamw"}, "steps_per_print": 0}
    return lowtide.initialize(model, {**options, **config}, **given)


def collected(act: Callable[..., None], *args: Any) -> None:
    """Leaves no memory of the device in use: with a loss scale, an engine's cycles go through nodes of the graph."""
    act(*args)
    gc.collect(), gc.collect()


def waits_of(act: Callable[[], object]) -> list[str]:
    """The waits of the training meanwhile.

    Left out are those of the pretended group, whose messages go through the host, and those of the thread of updates.
    """
    with device.host_waits() as waits:
        act()
    of_group = {module.__file__ for module in (group, queues, values)}
    own = [wait for wait in waits if not wait.thread.startswith("lowtide update")]
    return [str(wait) for wait in own if of_group.isdisjoint(frame.filename for frame in wait.stack)]


def check_steps(cases: list[tuple[int, int, int, str, float]]) -> None:
    for stage, num_blocks, accumulation, precision, clip in cases:
        config = {"zero_optimization": {"stage": stage}, "gradient_accumulation_steps": accumulation}
        config |= {"gradient_clipping": clip, **PRECISIONS[precision]}
        with make_engine(Net(num_blocks), config) as engine:
            batch = (torch.randn(2 * accumulation, WIDTH + 1)[:, 1:],)  # of the host, not pinned, with gaps
            for _ in range(2):
                waits = waits_of(lambda: engine.train_step(batch))  # noqa: B023
                assert len(waits) <= 1, "\n".join(map(str, (*cases, *waits)))


def test_a_step_waits_once(pretend_ranks: RankPool) -> None:
    others = [(1, "fp32", 0.1), (3, "bf16", 0.1), (1, "bf16", 0.0), (3, "fp16", 0.0), (1, "fp16", 0.1)]
    cases = [(stage, n, *other) for (stage, n), other in product(product(range(4), (2, 5)), others)]
    pretend_ranks(2, collected, check_steps, cases[::9], process_group=False)


def check_pipeline(schedule: str) -> None:
    config = {"parallel": {"pipeline": 2}, "pipeline": {"schedule": schedule}, "gradient_accumulation_steps": 4}
    with make_engine(Net(4), {**config, "gradient_clipping": 0.1}) as engine:
        counts = [len(waits_of(lambda: engine.train_step((torch.randn(8, WIDTH),)))) for _ in range(3)]
        assert max(counts[1:]) <= 1, counts  # the first one agrees on shapes


def test_a_pipeline_waits_once_too(pretend_ranks: RankPool) -> None:
    pretend_ranks(2, collected, check_pipeline, "1f1b", process_group=False)


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
WAYS: dict[str, tuple[dict[str, Any], Callable[[Engine, Tensor], None]]] = {
    "clipping by hand": ({}, by_hand),
    "loss.backward()": ({"gradient_clipping": 0.1}, in_a_loop_of_torch),
    "averages": ({}, with_averages),
    "update in backward": (IN_BACKWARD, train_step),
    "momentum": ({"optimizer": {"type": "sgd", "params": {"momentum": 0.9}}}, train_step),
    "8-bit states": ({"optimizer": {"type": "adamw", "params": {"state_dtype": "int8"}}}, train_step),
}


def check_way(way: str) -> None:
    config, act = WAYS[way]
    with make_engine(
        Net(3, lacks=True), config
    ) as engine:  # of the parameter without a gradient, all ranks must say so
        for _ in range(2):
            waits = waits_of(lambda: act(engine, torch.randn(2, WIDTH)))
            assert len(waits) <= 1, "\n".join(waits)


def check_monitors(folder: str) -> None:
    place = {"enabled": True, "output_path": folder}
    for stage in (0, 3):
        config = {"zero_optimization": {"stage": stage}, "csv_monitor": place, "profile": {"enabled": True, "step": 2}}
        with make_engine(Net(3), {**config, "gradient_clipping": 0.1}) as engine:
            for _ in range(3):  # the second one is profiled
                waits = waits_of(lambda: engine.train_step((torch.randn(2, WIDTH),)))
                assert len(waits) <= 1, "\n".join(waits)


def test_a_step_that_is_written_and_profiled_waits_once_too(pretend_ranks: RankPool, tmp_path: Path) -> None:
    pretend_ranks(2, collected, check_monitors, str(tmp_path), process_group=False)
    (table,) = tmp_path.glob("*/metrics.csv")
    assert [line.partition(",")[0] for line in table.read_text().splitlines()] == ["step", "1", "2", "3"]


def check_own_optimizer() -> None:
    model = Net(3)
    with make_engine(model, {"optimizer": None}, optimizer=lambda params: torch.optim.RMSprop(params)) as engine:
        for _ in range(2):
            assert len(waits_of(lambda: engine.train_step((torch.randn(2, WIDTH),)))) <= 1


@pytest.mark.parametrize("way", WAYS)
def test_other_ways_to_step_wait_once_too(pretend_ranks: RankPool, way: str) -> None:
    pretend_ranks(1, collected, check_way, way, process_group=False)


def test_an_optimizer_of_torch_waits_once_too(pretend_ranks: RankPool) -> None:
    pretend_ranks(1, collected, check_own_optimizer, process_group=False)


def check_overlaps(cases: list[tuple[str, int, str, int, float, bool]]) -> None:
    for overlap, stage, precision, accumulation, ratio, params in cases:
        place: dict[str, Any] = {"device": "cpu"}
        late = {"delay_after_steps": 1} if overlap == "delayed" else {}
        zero = {"stage": stage, "offload_optimizer": {**place, "ratio": ratio, "overlap": overlap, **late}}
        zero |= {"offload_param": place} if params else {}
        config = {"zero_optimization": zero, "gradient_clipping": 10.0, "gradient_accumulation_steps": accumulation}
        with make_engine(Net(4), {**config, **PRECISIONS[precision]}) as engine:
            for _ in range(3):
                waits = waits_of(lambda: engine.train_step((torch.randn(2 * accumulation, WIDTH),)))  # noqa: B023
                assert len(waits) <= 1, "\n".join(map(str, (overlap, stage, precision, accumulation, ratio, *waits)))


OVERLAPS = [  # overlap, stage, precision, accumulation, ratio, whether parameters rest on the host too
    *((overlap, 3, "bf16", 1, 1.0, False) for overlap in ("none", "speculative", "delayed")),
    *((overlap, 2, "fp32", 2, 0.5, False) for overlap in ("none", "speculative", "delayed")),
    *((overlap, 3, "fp16", 2, 0.5, True) for overlap in ("none", "speculative")),
]


def test_an_update_on_the_host_waits_once_too(pretend_ranks: RankPool) -> None:
    pretend_ranks(1, collected, check_overlaps, OVERLAPS, process_group=False)


# -- what the device knows before the host does -----------------------------------------------------------------------


def weights(engine: Engine) -> list[Tensor]:
    return list(engine.state_dict().values())


def step_with_infinity(config: dict[str, Any], in_backward: bool) -> None:
    with make_engine(Net(2), config) as engine:
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


@pytest.mark.parametrize(
    "config",
    [
        *({}, {"gradient_clipping": 0.1}, PRECISIONS["bf16"], PRECISIONS["fp16"], WAYS["8-bit states"][0], IN_BACKWARD),
        *(SPECULATIVE, {**SPECULATIVE, **PRECISIONS["fp16"]}),
    ],
)
def test_an_update_that_was_started_changes_nothing(pretend_ranks: RankPool, config: dict[str, Any]) -> None:
    pretend_ranks(1, collected, step_with_infinity, config, config is IN_BACKWARD, process_group=False)


def change_by_data() -> None:
    with make_engine(Net(2), {**PRECISIONS["bf16"], "gradient_accumulation_steps": 2}) as engine:
        for _ in range(2):
            train_step(engine, torch.randn(2, WIDTH))
        weight = engine.module.get_parameter("blocks.1.wide.weight")
        weight.data.add_(1.0)
        for _ in range(2):  # until it is put right
            with pytest.raises(ValueError, match=r"'blocks.1.wide.weight' was changed through \.data"):
                train_step(engine, torch.randn(2, WIDTH))


def test_a_change_by_data_is_told_at_the_end_of_the_step(pretend_ranks: RankPool) -> None:
    pretend_ranks(1, collected, change_by_data, process_group=False)
