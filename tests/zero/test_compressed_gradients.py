"""1-bit Adam and PowerSGD are their papers' algorithms, send what they say, and remember what they did not send."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowtide.comm import regions_of
from lowtide.engine.config.config import Config, ConfigError
from lowtide.offload import round_up
from lowtide.zero.layout import FlatLayout
from lowtide.zero.powersgd import PowerSGDOptions, ThinLayout
from lowtide.zero.sign_update import SignLayout
from tests.engine.saving import Trip, load_trips, save_trips
from tests.kit.models import short_gpt, short_gpt_float64, tiny_gpt_float64, token_batch
from tests.kit.ranks import RankPool, on_ranks
from tests.kit.training import (
    Case,
    Outcome,
    adamw,
    assert_alike,
    assert_close,
    differences,
    logged,
    one_thread,
    take_step,
    train_all,
    trained,
    wrong_bytes,
)

Build = Callable[[], nn.Module]
Gradients = dict[str, Tensor]
START = 2  # the steps with whole gradients
RANK = 2


def signs(build: Build = short_gpt, accumulation: int = 1, **more: Any) -> Case:
    params = {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-6, "weight_decay": 0.1, "freeze_step": START}
    config = {"optimizer": {"type": "OneBitAdam", "params": params}, **more}
    return Case(build, token_batch, accumulation=accumulation, steps=START + 3, config=config)


def low_rank(
    stage: int = 0, build: Build = short_gpt, power_sgd: Any = (), transport: str = "auto", **more: Any
) -> Case:
    """Four steps: the last remembers what was not sent of the one before it."""
    power_sgd = {"rank": RANK, "start_step": START, "min_compression_rate": 2, **dict(power_sgd)}
    config = {"communication": {"power_sgd": power_sgd, "transport": transport}, **more}
    return Case(build, token_batch, stage, steps=4, clip=0.5, config=config)


# -- the papers' formulas ---------------------------------------------------------------------------------------------


@one_thread()
def by_hand(case: Case, size: int, update: Callable[[int, nn.Module, list[Gradients]], float]) -> Outcome:
    """All ranks in one process. update: (step, model, gradients of each rank) changes parameters, gives the norm."""
    torch.manual_seed(0)
    model, outcome = case.build(), Outcome()
    for step in range(case.steps):
        gradients, losses = [], []
        for part in zip(*(tensor.chunk(size) for tensor in case.global_batch(step, size)), strict=True):
            loss = model(*part)
            found = torch.autograd.grad(loss, list(model.parameters()))
            gradients.append({name: g for (name, _), g in zip(model.named_parameters(), found, strict=True)})
            losses.append(loss.item())
        with torch.no_grad():
            outcome.norms.append(update(step, model, gradients))
        outcome.losses.append(sum(losses) / size)
    outcome.state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return outcome


class OneBitAdam:
    """Parameter by parameter.

    parts: for each parameter the unit it is in is one flat vector, of which each rank serves a region: an element's
    scale is that of its parameter's part in the region.
    """

    def __init__(self, build: Build, parts: dict[str, list[slice]], size: int) -> None:
        self.size, self.parts = size, parts
        self.m, self.v, self.server, *self.worker = (
            {name: torch.zeros_like(param).flatten() for name, param in build().named_parameters()}
            for _ in range(3 + size)
        )

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
        for worker, x in zip(self.worker, xs, strict=True):
            said = self.compressed(key, x + worker[key])
            worker[key] = x + worker[key] - said
            total += said
        total = total / self.size + self.server[key]
        said = self.compressed(key, total)
        self.server[key] = total - said
        return said

    def __call__(self, step: int, model: nn.Module, gradients: list[Gradients]) -> float:
        for key, param in model.named_parameters():
            own = [one[key].flatten() for one in gradients]
            if step < START:
                g = sum(own[1:], own[0]) / self.size
                self.m[key] = 0.9 * self.m[key] + 0.1 * g
                self.v[key] = 0.95 * self.v[key] + 0.05 * g * g
            else:
                self.m[key] = self.all_reduced(key, [0.9 * self.m[key] + 0.1 * one for one in own])
            direction = torch.where(self.v[key] == 0, 0.0, self.m[key] / (self.v[key].sqrt() + 1e-6))
            param.sub_(1e-3 * (direction.view_as(param) + 0.1 * param))
        return 0.0


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


def groups_of(case: Case) -> list[list[tuple[str, int]]]:
    """The parameters of each unit that this rank has, in order."""
    with trained(case, 0) as engine:
        layouts = [shard.group.layout for shard in engine.optimizer.shards]
        return [[(slot.name, slot.numel) for slot in layout.param_views] for layout in layouts]


@pytest.mark.parametrize(
    ("num_ranks", "case"),
    [
        (1, signs(short_gpt_float64)),
        (3, signs(short_gpt_float64, communication={"transport": "shared_memory"})),
        (4, signs(tiny_gpt_float64, 2, parallel={"pipeline": 2}, communication={"transport": "sockets"})),
    ],
)
def test_one_bit_adam_is_the_papers_formulas(ranks: RankPool, num_ranks: int, case: Case) -> None:
    size = num_ranks // case.config.get("parallel", {}).get("pipeline", 1)
    firsts = ranks(num_ranks, groups_of, case)[::size]  # of each stage
    outcome = ranks(num_ranks, train_all, [case])[0][0]
    expected = by_hand(case, size, OneBitAdam(case.build, parts_of([*chain(*firsts)], size), size))
    torch.testing.assert_close(outcome.losses, expected.losses, rtol=1e-9, atol=0)
    torch.testing.assert_close(outcome.state, expected.state, rtol=1e-7, atol=1e-9)


def is_thin(param: Tensor) -> bool:
    if param.dim() < 2:
        return False
    rows, columns = param.shape[0], param.numel() // param.shape[0]
    return (rows + columns) * min(RANK, rows, columns) * 2 < param.numel()


class PowerSGD:
    """With AdamW. q_of: Q of the first step that is sent so, of each matrix."""

    def __init__(self, size: int, q_of: Gradients, remembers: bool) -> None:
        self.q_of, self.remembers = dict(q_of), remembers
        self.errors: list[Gradients] = [{} for _ in range(size)]
        self.optimizer: torch.optim.Optimizer | None = None

    def __call__(self, step: int, model: nn.Module, gradients: list[Gradients]) -> float:
        self.optimizer = self.optimizer or adamw(model.parameters())
        size = len(gradients)
        for key, param in model.named_parameters():
            own = [one[key] for one in gradients]
            param.grad = sum(own[1:], own[0]) / size
            if step < START or not is_thin(param) or size == 1:
                continue
            matrices = [g.view(g.shape[0], -1) + error.get(key, 0.0) for g, error in zip(own, self.errors, strict=True)]
            p = gram_schmidt(torch.stack([m @ self.q_of[key] for m in matrices]).mean(0))
            self.q_of[key] = torch.stack([m.T @ p for m in matrices]).mean(0)
            sent = p @ self.q_of[key].T
            param.grad = sent.view_as(param)
            for error, matrix in zip(self.errors if self.remembers else (), matrices, strict=False):
                error[key] = matrix - sent
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item()
        self.optimizer.step()
        return norm


def gram_schmidt(matrix: Tensor) -> Tensor:
    found: list[Tensor] = []
    for column in matrix.T:
        for other in found:
            column = column - (column @ other) * other
        found.append(column / column.norm())
    return torch.stack(found, 1)


def first_factors() -> Gradients:
    """As the engine draws them for step START."""
    found: Gradients = {}
    with trained(low_rank(build=short_gpt_float64), 0) as engine:
        for shard in engine.optimizer.shards:
            names, sender = shard.gradient.group.layout.names, shard.gradient.low_rank
            assert sender is not None
            sender.step = lambda: START
            found |= {names[one.index]: sender._factor(one) for one in sender._layout.thin}
    return found


@pytest.mark.parametrize(("size", "transport"), [(2, "shared_memory"), (3, "sockets")])
def test_power_sgd_is_the_papers_formula(ranks: RankPool, size: int, transport: str) -> None:
    first = ranks(1, first_factors)[0]
    assert first
    cases = [low_rank(stage, short_gpt_float64, transport=transport) for stage in (0, 1)]
    cases.append(low_rank(0, short_gpt_float64, {"error_feedback": False}))
    for number, outcome in enumerate(ranks(size, train_all, cases)[0]):
        expected = by_hand(cases[number], size, PowerSGD(size, first, remembers=number < 2))
        expected.lrs = [1e-2] * 4
        assert_close(outcome, expected, 1e-7, 1e-8)


# -- what is sent, held, remembered -----------------------------------------------------------------------------------


def bytes_of_signs(layout: FlatLayout, size: int, rank: int) -> int:
    return SignLayout.of(layout, size, torch.float32).bytes_sent(rank)


def bytes_of_thin(layout: FlatLayout, size: int, rank: int) -> int:
    """Two ranks send half of both matrices, twice."""
    thin = ThinLayout.of(layout, PowerSGDOptions(RANK, START, 2.0, True, True, 0))
    return 4 * (thin.num_first + thin.num_second) if thin.thin else 0


@pytest.mark.parametrize(
    ("case", "axis", "said"),
    [
        (signs(), "replica", bytes_of_signs),
        (low_rank(0), "replica", bytes_of_thin),
        (low_rank(1), "shard", bytes_of_thin),
    ],
)
@on_ranks(2)
def test_a_bit_of_each_element_or_thin_matrices_are_sent(case: Case, axis: str, said: Any) -> None:
    with trained(case, 0) as engine:
        layouts = [shard.group.layout for shard in engine.optimizer.shards]
        exchange = engine.optimizer.shards[0].group.axes.exchange_along((axis,))
        totals = [0]
        for step in range(case.steps):
            take_step(engine, case, step)
            totals.append(exchange.bytes_sent)
        expected = sum(said(layout, engine.world_size, engine.rank) for layout in layouts)
    assert [after - before for before, after in pairwise(totals)] == [0] * START + [expected] * (case.steps - START)
    # Signs of the other's region, and of the own one to it; fp32 all-reduces send 4 bytes of each.
    numel = sum(layout.padded_numel for layout in layouts)
    assert said is bytes_of_thin or numel / 8 <= expected < numel / 8 * 1.35


@on_ranks(2)
def test_errors_are_in_the_planned_bytes() -> None:
    """Those of PowerSGD are asked in tests/laws."""
    case = signs(bf16={"enabled": True})
    with trained(case, 4) as engine:
        assert wrong_bytes(engine, case) == ""


@on_ranks(2)
def test_reset_states_forgets_what_was_not_sent() -> None:
    """Else the gradients of the old weights would be added to those of the new."""
    with trained(low_rank(1), 4) as engine:

        def has_errors() -> dict[str, bool]:
            found = engine.optimizer.by_parameter.rank_states()
            return {shard.group.layout.names[part.index]: bool(error.any()) for shard, part, _, error in found}

        before = has_errors()
        reset, *others = before
        engine.reset_states(reset)
        assert others and all(before.values()) and has_errors() == before | {reset: False}
        take_step(engine, low_rank(1), 4)
        assert all(has_errors().values())


def one_batch(step: int, rows: int) -> tuple[Tensor, ...]:
    return token_batch(0, rows)


def test_a_step_that_is_skipped_is_not_remembered(ranks: RankPool) -> None:
    """The scale of float16 doubles after two steps, is too large then, and comes down in a step that is skipped."""
    cases = [case.at(case.stage, batch=one_batch) for case in (signs(), low_rank(1))]
    grows = {"enabled": True, "initial_scale_power": 17, "hysteresis": 1, "loss_scale_window": 2}
    with_skips = ranks(2, train_all, [case.at(case.stage, steps=14, config={"fp16": grows}) for case in cases])[0]
    plain = []
    for case, outcome in zip(cases, with_skips, strict=True):
        first = outcome.skipped.index(False)
        assert first and outcome.skipped[first:].count(True) > 2
        fp16 = {"enabled": True, "loss_scale": outcome.scales[first]}
        plain.append(case.at(case.stage, steps=outcome.skipped.count(False), config={"fp16": fp16}))
    for outcome, expected in zip(with_skips, ranks(2, train_all, plain)[0], strict=True):
        assert True not in expected.skipped
        counted = [number for number, skipped in enumerate(outcome.skipped) if not skipped]
        outcome.losses = [outcome.losses[number] for number in counted]
        outcome.norms = [outcome.norms[number] for number in counted]
        assert_alike([outcome, expected])


def test_a_checkpoint_goes_on_with_the_same_bits(ranks: RankPool, tmp_path: Path) -> None:
    """That of PowerSGD with an optimizer of the config is asked in tests/laws."""
    case = signs(bf16={"enabled": True})
    trips = [Trip(case, case, steps_before=START + 2)]
    for stage in (0, 1):
        case = low_rank(stage, optimizer=None)
        # No rule of ours: each rank's part is a parameter of torch's optimizer, which counts steps.
        trips.append(Trip(case, case, {"optimizer": partial(torch.optim.Adam, amsgrad=True)}, steps_before=START + 2))
    before, after = (ranks(2, one, trips, tmp_path, 2)[0] for one in (save_trips, load_trips))
    assert [found.differences(expected) for found, expected in zip(after, before, strict=True)] == [[]] * len(trips)


@pytest.mark.parametrize("changed", [{"rank": 1}, {"warm_start": False}])
@on_ranks(2)
def test_thin_matrices_of_another_config_are_not_taken(tmp_path: Path, changed: dict[str, Any]) -> None:
    with trained(low_rank(1), 4) as engine:
        engine.save_checkpoint(tmp_path)
    case, found = low_rank(1, power_sgd=changed), []
    for forgets in (True, False):
        with trained(case, 0) as engine:
            engine.load_checkpoint(tmp_path)
            for shard in engine.optimizer.shards if forgets else ():
                assert shard.gradient.low_rank is not None
                shard.gradient.low_rank.factors.clear()
            for step in (4, 5):
                take_step(engine, case, step)
            found.append(engine.state_dict())
    assert differences(*found) == []


def save_here(folder: Path) -> Gradients:
    with trained(signs(), 5) as engine:
        engine.save_checkpoint(folder)
        return engine.state_dict()


def load_elsewhere(folder: Path) -> tuple[float, list[str], Gradients]:
    """(largest error after the load, warnings, parameters)."""
    with logged("WARNING") as warnings, trained(signs(), 0) as engine:
        engine.load_checkpoint(folder)
        largest = max(float(values.abs().max()) for *_, values in engine.optimizer.by_parameter.rank_states())
        return largest, warnings, engine.state_dict()


def test_errors_are_zero_at_another_number_of_ranks(ranks: RankPool, tmp_path: Path) -> None:
    saved = ranks(2, save_here, tmp_path)[0]
    largest, warnings, state = ranks(4, load_elsewhere, tmp_path)[0]
    assert largest == 0 and any("the residuals begin with zero" in one for one in warnings)
    assert all(torch.equal(value, saved[name]) for name, value in state.items())
    assert ranks(2, load_elsewhere, tmp_path)[0][0] > 0


# -- settings ---------------------------------------------------------------------------------------------------------

SIGNS = {"optimizer": {"type": "OneBitAdam", "params": {"freeze_step": 2}}}
POWER_SGD = {"communication": {"power_sgd": {"rank": 1}}, "optimizer": {"type": "adamw"}}


REFUSED = [  # config, what is beside it, words; what else does not go with PowerSGD is asked in tests/laws
    *(
        (config, {"parallel": {axis: 2}}, f"parallel.{axis}: {name} needs 1, found 2")
        for config, name in ((SIGNS, 'optimizer.type "onebitadam"'), (POWER_SGD, "communication.power_sgd"))
        for axis in ("tensor", "sequence", "expert")
    ),
    (SIGNS, {"zero_optimization": {"stage": 1}}, 'stage: optimizer.type "onebitadam" needs 0, found 1'),
    (SIGNS, {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, 'needs "none", found "cpu"'),
    (SIGNS, {"zero_optimization": {"update_in_backward": True}}, "needs false, found true"),
    (SIGNS, {"bf16": {"enabled": True, "masters": False}}, "bf16.masters: .* needs true, found false"),
    (SIGNS, {"communication": {"power_sgd": {"rank": 1}}}, 'rank: optimizer.type "onebitadam" needs 0, found 1'),
    (SIGNS, {"communication": {"gradient_bits": 4}}, 'gradient_bits: optimizer.type "onebitadam" needs null, found 4'),
]


@pytest.mark.parametrize(("config", "more", "words"), REFUSED)
def test_what_does_not_go_together(config: dict[str, Any], more: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Config.load({**config, **more})


def test_deepspeeds_other_keys_are_taken() -> None:
    params = {"lr": 1e-3, "freeze_step": 5, "cuda_aware": False, "comm_backend_name": "nccl", "bias_correction": False}
    config = Config.load({"optimizer": {"type": "OneBitAdam", "params": params}})
    assert config.optimizer is not None and config.optimizer.type == "onebitadam"
    for key in ("cuda_aware", "comm_backend_name", "bias_correction"):
        assert any(f"optimizer.params.{key}" in note and "no effect" in note for note in config.notes), key
