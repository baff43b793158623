"""1-bit Adam is its paper's formulas, and sends a bit for each element."""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.comm import regions_of
from lowtide.engine.blueprint.blueprint import Blueprint
from lowtide.engine.blueprint.footprint import MemoryPhase, RankBytes, bytes_of
from lowtide.engine.config.config import Config, ConfigError
from lowtide.kernels.quantized_blocks import packed_signs, unpacked_signs
from lowtide.watch.log import logger
from lowtide.zero.layout import FlatLayout, round_up
from lowtide.zero.sign_update import SignLayout
from tests.engine.saving import Trip, load_trips, save_trips
from tests.kit.models import short_gpt, short_gpt_float64, tiny_gpt_float64, token_batch
from tests.kit.ranks import RankPool
from tests.kit.training import Case, Outcome, one_thread, rank_and_world, share_of, train_all

PARAMS = {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-6, "weight_decay": 0.1, "freeze_step": 2}
STEPS = 8


def config_of(**more: Any) -> dict[str, Any]:
    return {"optimizer": {"type": "OneBitAdam", "params": PARAMS}, **more}


Build = Callable[[], nn.Module]


def case_of(build: Build = short_gpt_float64, accumulation: int = 1, **more: Any) -> Case:
    return Case(build, token_batch, accumulation=accumulation, steps=STEPS, config=config_of(**more))


class Oracle:
    """The algorithm as the paper has it, of all ranks in one process, parameter by parameter.

    parts: for each parameter the unit it is in is one flat vector, of which each rank serves a region: an element's
    scale is that of its parameter's part in the region.
    """

    def __init__(self, weights: dict[str, Tensor], parts: dict[str, list[slice]], size: int) -> None:
        self.size, self.parts, self.weights = size, parts, weights
        self.m = {k: torch.zeros_like(v) for k, v in weights.items()}
        self.v = {k: torch.zeros_like(v) for k, v in weights.items()}
        self.worker = [{k: torch.zeros_like(v) for k, v in weights.items()} for _ in range(size)]
        self.server = {k: torch.zeros_like(v) for k, v in weights.items()}

    def compressed(self, key: str, x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for part in self.parts[key]:
            scale = x[part].norm() / math.sqrt(x[part].numel())
            out[part] = torch.where(x[part] >= 0, scale, -scale)
        return out

    def all_reduced(self, key: str, xs: Sequence[Tensor]) -> Tensor:
        if self.size == 1:
            return xs[0]
        total = torch.zeros_like(xs[0])
        for rank, x in enumerate(xs):
            said = self.compressed(key, x + self.worker[rank][key])
            self.worker[rank][key] = x + self.worker[rank][key] - said
            total += said
        total = total / self.size + self.server[key]
        said = self.compressed(key, total)
        self.server[key] = total - said
        return said

    def step(self, step: int, gradients: Sequence[dict[str, Tensor]]) -> None:
        for key, w in self.weights.items():
            own = [one[key] for one in gradients]
            if step <= 2:
                g = sum(own[1:], own[0]) / self.size
                self.m[key] = 0.9 * self.m[key] + 0.1 * g
                self.v[key] = 0.95 * self.v[key] + 0.05 * g * g
            else:
                self.m[key] = self.all_reduced(key, [0.9 * self.m[key] + 0.1 * one for one in own])
            direction = torch.where(self.v[key] == 0, 0.0, self.m[key] / (self.v[key].sqrt() + 1e-6))
            self.weights[key] = w - 1e-3 * (direction + 0.1 * w)


def parts_of(groups: list[list[tuple[str, int]]], size: int) -> dict[str, list[slice]]:
    """(name, elements) of each unit's parameters -> the parts that lie in one rank's region."""
    found: dict[str, list[slice]] = {}
    for group in groups:
        offset, places = 0, {}
        for name, numel in group:
            places[name] = (offset, offset + numel)
            offset += round_up(numel, 16)
        regions = regions_of(round_up(offset, 1024), size)
        for name, (low, high) in places.items():
            cut = [(max(low, one.start), min(high, one.stop)) for one in regions]
            found[name] = [slice(a - low, b - low) for a, b in cut if a < b]
    return found


@one_thread()
def by_hand(
    size: int, groups: list[list[tuple[str, int]]], build: Build = short_gpt_float64, accumulation: int = 1
) -> Outcome:
    torch.manual_seed(0)
    model = build()
    named = dict(model.named_parameters())
    start = {key: param.detach().reshape(-1).clone() for key, param in named.items()}
    oracle, outcome = Oracle(start, parts_of(groups, size), size), Outcome()
    for step in range(1, STEPS + 1):
        batch = token_batch(step - 1, 2 * accumulation * size)
        gradients, losses = [], []
        for key, value in oracle.weights.items():
            named[key].data = value.view(named[key].shape)
        for rank in range(size):
            model.zero_grad()
            loss = model(*(tensor.chunk(size)[rank] for tensor in batch))
            loss.backward()
            gradients.append({key: param.grad.reshape(-1).clone() for key, param in named.items()})  # type: ignore[union-attr]
            losses.append(loss.item())
        oracle.step(step, gradients)
        outcome.losses.append(sum(losses) / size)
    outcome.state = {key: value.view(named[key].shape) for key, value in oracle.weights.items()}
    return outcome


def groups_of(build: Build = short_gpt_float64, **more: Any) -> list[list[tuple[str, int]]]:
    """The parameters of each unit that this rank has, in order."""
    engine = lowtide.initialize(build(), case_of(**more).as_config())
    found = [[(slot.name, slot.numel) for slot in shard.group.layout.param_views] for shard in engine.optimizer.shards]
    engine.close()
    return found


@pytest.mark.parametrize(("size", "transport"), [(1, "auto"), (2, "sockets"), (3, "shared_memory")])
def test_it_is_the_papers_formulas(ranks: RankPool, size: int, transport: str) -> None:
    groups = ranks(1, groups_of)[0]
    found = ranks(size, train_all, [case_of(communication={"transport": transport})])[0][0]
    assert_close_to(found, by_hand(size, groups))


def assert_close_to(outcome: Outcome, expected: Outcome) -> None:
    torch.testing.assert_close(outcome.losses, expected.losses, rtol=1e-9, atol=0)
    for key, value in expected.state.items():
        torch.testing.assert_close(outcome.state[key], value, rtol=1e-7, atol=1e-9, msg=f"{key}: {{}}".format)


def test_it_is_so_with_accumulation_and_pipelines(ranks: RankPool) -> None:
    piped: Any = {"parallel": {"pipeline": 2}}
    of_ranks = ranks(4, groups_of, tiny_gpt_float64, **piped)
    groups = of_ranks[0] + of_ranks[2]  # the first rank of each stage
    found = ranks(4, train_all, [case_of(tiny_gpt_float64, 2, **piped)])[0][0]
    assert_close_to(found, by_hand(2, groups, tiny_gpt_float64, 2))


def sent() -> tuple[list[int], list[int], list[int]]:
    """(bytes that this rank sends in each step, what the layouts say, elements of each group)."""
    engine = lowtide.initialize(short_gpt(), case_of(short_gpt).as_config())
    rank, size = rank_and_world()
    exchange = engine.optimizer.shards[0].group.axes.exchange_along(("replica",))
    found, before = [], 0
    for step in range(STEPS):
        engine.train_step(share_of(token_batch(step, 2 * size)))
        found.append(exchange.bytes_sent - before)
        before = exchange.bytes_sent
    layouts = [SignLayout.of(one.group.layout, size, torch.float32) for one in engine.optimizer.shards]
    numels = [one.group.layout.padded_numel for one in engine.optimizer.shards]
    engine.close()
    return found, [one.bytes_sent(rank) for one in layouts], numels


def test_a_bit_is_sent_for_each_element(ranks: RankPool) -> None:
    for found, of_groups, numels in ranks(2, sent):
        assert found == [0, 0, *[sum(of_groups)] * (STEPS - 2)]
        # Signs of the other's region, and of the own one to it; fp32 all-reduces send 4 bytes of each.
        assert sum(numels) / 8 <= sum(of_groups) < sum(numels) / 8 * 1.35


def planned_bytes(case: Case, rank: int, size: int) -> RankBytes:
    blueprint = Blueprint.of(Config.load(case.as_config()).resolve(size), case.build(), size)
    return bytes_of(blueprint, rank, MemoryPhase.BETWEEN_STEPS)


def held(bf16: bool) -> tuple[int, int, int]:
    """(gradients and states as they are, as they are planned, and of these the errors)."""
    case = case_of(short_gpt, bf16={"enabled": bf16})
    engine = lowtide.initialize(short_gpt(), case.as_config())
    rank, size = rank_and_world()
    for step in range(4):  # the last two send signs
        engine.train_step(share_of(token_batch(step, 2 * size)))
    memory, planned = engine.memory(), planned_bytes(case, rank, size)
    errors = sum(
        4 * SignLayout.of(one.group.layout, size, torch.float32).error_numel(rank) for one in engine.optimizer.shards
    )
    engine.close()
    return memory.optimizer_bytes + memory.gradient_bytes, planned.optimizer + planned.gradients, errors


@pytest.mark.parametrize("bf16", [False, True])
def test_errors_are_in_the_planned_bytes(ranks: RankPool, bf16: bool) -> None:
    for found, planned, errors in ranks(2, held, bf16):
        assert found == planned and errors > 0


def one_batch(step: int, rows: int) -> tuple[Tensor, ...]:
    return token_batch(0, rows)


def assert_skips_change_nothing(ranks: RankPool, cases: Sequence[Case]) -> None:
    """The scale of float16 doubles after two steps, is too large then, and comes down in a step that is skipped."""
    grows = {"enabled": True, "initial_scale_power": 17, "hysteresis": 1, "loss_scale_window": 2}
    with_skips = ranks(2, train_all, [case.at(case.stage, steps=14, config={"fp16": grows}) for case in cases])[0]
    plain = []
    for case, outcome in zip(cases, with_skips, strict=True):
        first = outcome.skipped.index(False)
        assert first and outcome.skipped[first:].count(True) > 2
        fp16 = {"enabled": True, "loss_scale": outcome.scales[first]}
        plain.append(case.at(case.stage, steps=outcome.skipped.count(False), config={"fp16": fp16}))
    for outcome, expected in zip(with_skips, ranks(2, train_all, plain)[0], strict=True):
        assert expected.skipped.count(True) == 0
        counted = [number for number, skipped in enumerate(outcome.skipped) if not skipped]
        assert [outcome.losses[number] for number in counted] == expected.losses
        assert [outcome.norms[number] for number in counted] == expected.norms
        assert all(torch.equal(value, expected.state[name]) for name, value in outcome.state.items())


def test_a_step_that_is_skipped_is_not_remembered(ranks: RankPool) -> None:
    assert_skips_change_nothing(ranks, [replace(case_of(short_gpt), batch=one_batch)])


def test_a_checkpoint_goes_on_with_the_same_bits(ranks: RankPool, tmp_path: Path) -> None:
    cases = [case_of(short_gpt, bf16={"enabled": bf16}) for bf16 in (False, True)]
    trips = [Trip(case, case, steps_before=7) for case in cases]
    before = ranks(2, save_trips, trips, tmp_path, 2)[0]
    after = ranks(2, load_trips, trips, tmp_path, 2)[0]
    for one, other in zip(before, after, strict=True):
        assert other.differences(one) == []


def load_elsewhere(case: Case, folder: Path) -> tuple[float, list[str], dict[str, Tensor]]:
    """(largest error after the load, warnings, parameters)."""
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    engine = lowtide.initialize(case.build(), case.as_config())
    engine.load_checkpoint(folder)
    found = [float(values.abs().max()) for *_, values in engine.optimizer.by_parameter.rank_states()]
    state = engine.state_dict()
    engine.close()
    logger.removeHandler(handler)
    return max(found), warnings, state


def save_here(case: Case, folder: Path) -> dict[str, Tensor]:
    engine = lowtide.initialize(case.build(), case.as_config())
    for step in range(5):
        engine.train_step(share_of(token_batch(step, 2 * engine.world_size)))
    engine.save_checkpoint(folder)
    state = engine.state_dict()
    engine.close()
    return state


def test_errors_are_zero_at_another_number_of_ranks(ranks: RankPool, tmp_path: Path) -> None:
    case = case_of(short_gpt)
    saved = ranks(2, save_here, case, tmp_path)[0]
    largest, warnings, state = ranks(4, load_elsewhere, case, tmp_path)[0]
    assert largest == 0 and any("the residuals begin with zero" in one for one in warnings)
    assert all(torch.equal(value, saved[name]) for name, value in state.items())
    assert ranks(2, load_elsewhere, case, tmp_path)[0][0] > 0


def test_signs_are_packed() -> None:
    values = torch.randn(4096)
    values[:3] = torch.tensor([0.0, -0.0, math.inf])
    packed = packed_signs(values)
    assert packed.dtype == torch.uint8 and packed.numel() == 512
    assert torch.equal(unpacked_signs(packed, torch.float32), torch.where(values >= 0, 1.0, -1.0))
    first = packed_signs(torch.tensor([1.0] + [-1.0] * 7))
    assert first.tolist() == [128]


def test_every_element_has_a_place() -> None:
    layout = FlatLayout.of([("a", (40, 50)), ("b", (7,)), ("c", (1000,))], 1)
    for size in (1, 2, 3, 4):
        signs = SignLayout.of(layout, size, torch.float32)
        lengths = [0, 0, 0]
        for stretches in signs.stretches:
            for index, low, high in stretches:
                lengths[index] += high - low
        assert lengths == [2000, 7, 1000]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"zero_optimization": {"stage": 1}}, 'zero_optimization.stage: optimizer.type "onebitadam" needs 0, found 1'),
        ({"parallel": {"tensor": 2}}, 'parallel.tensor: optimizer.type "onebitadam" needs 1, found 2'),
        ({"parallel": {"sequence": 2}}, 'parallel.sequence: optimizer.type "onebitadam" needs 1, found 2'),
        ({"parallel": {"expert": 2}}, 'parallel.expert: optimizer.type "onebitadam" needs 1, found 2'),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, 'needs "none", found "cpu"'),
        ({"zero_optimization": {"update_in_backward": True}}, "needs false, found true"),
        ({"bf16": {"enabled": True, "masters": False}}, "bf16.masters: .* needs true, found false"),
        ({"communication": {"power_sgd": {"rank": 1}}}, "power_sgd.rank: needs 0 with .*, found 1"),
        ({"communication": {"gradient_bits": 4}}, 'needs null with optimizer.type "onebitadam", .*, found 4'),
    ],
)
def test_what_does_not_go_together(more: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Config.load(config_of(**more))


def test_deepspeeds_other_keys_are_taken() -> None:
    params = {"lr": 1e-3, "freeze_step": 5, "cuda_aware": False, "comm_backend_name": "nccl", "bias_correction": False}
    config = Config.load({"optimizer": {"type": "OneBitAdam", "params": params}})
    assert config.optimizer is not None and config.optimizer.type == "onebitadam"
    for key in ("cuda_aware", "comm_backend_name", "bias_correction"):
        assert any(f"optimizer.params.{key}" in note and "no effect" in note for note in config.notes), key
