"""PowerSGD is the paper's algorithm at stages 0 and 1, and remembers what was not sent of steps that count."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lowtide
from lowtide.engine.blueprint.blueprint import Blueprint
from lowtide.engine.blueprint.footprint import MemoryPhase, bytes_of
from lowtide.engine.config.config import Config, ConfigError
from lowtide.zero.powersgd import PowerSGDOptions, ThinLayout
from tests.engine.saving import Trip, load_trips, save_trips
from tests.kit.models import short_gpt, short_gpt_float64, tiny_gpt_float64, token_batch
from tests.kit.ranks import RankPool
from tests.kit.training import Case, Outcome, assert_close, one_thread, share_of, train_all
from tests.zero.test_signs import assert_skips_change_nothing, one_batch

RANK, START = 2, 2
POWER_SGD: dict[str, Any] = {"rank": RANK, "start_step": START, "min_compression_rate": 2}
STEPS = 4  # the last remembers what was not sent of the one before it


def case_of(stage: int = 0, build: Any = short_gpt_float64, **more: Any) -> Case:
    config = {
        "communication": {"power_sgd": {**POWER_SGD, **more.pop("power_sgd", {})}, **more.pop("communication", {})}
    }
    return Case(build, token_batch, steps=STEPS, clip=0.5, config={**config, **more}).at(stage)


def is_thin(param: Tensor) -> bool:
    if param.dim() < 2:
        return False
    rows, columns = param.shape[0], param.numel() // param.shape[0]
    return (rows + columns) * min(RANK, rows, columns) * 2 < param.numel()


def gram_schmidt(matrix: Tensor) -> Tensor:
    found: list[Tensor] = []
    for column in matrix.T:
        for other in found:
            column = column - (column @ other) * other
        found.append(column / column.norm())
    return torch.stack(found, 1)


@one_thread()
def by_hand(size: int, first: dict[str, Tensor], remembers: bool) -> Outcome:
    """In one process. first: Q of the first step that is sent so, of each matrix."""
    torch.manual_seed(0)
    model = short_gpt_float64()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1)
    errors: list[dict[str, Tensor]] = [{} for _ in range(size)]
    q_of, outcome = dict(first), Outcome()
    for step in range(STEPS):
        gradients, losses = [], []
        for rank in range(size):
            model.zero_grad()
            loss = model(*(tensor.chunk(size)[rank] for tensor in token_batch(step, 2 * size)))
            loss.backward()
            gradients.append({k: p.grad.clone() for k, p in model.named_parameters()})  # type: ignore[union-attr]
            losses.append(loss.item())
        for key, param in model.named_parameters():
            own = [one[key] for one in gradients]
            param.grad = sum(own[1:], own[0]) / size
            if step < START or not is_thin(param) or size == 1:
                continue
            matrices = [g.view(g.shape[0], -1) + errors[rank].get(key, 0.0) for rank, g in enumerate(own)]
            p = gram_schmidt(sum(m @ q_of[key] for m in matrices) / size)  # type: ignore[arg-type]
            q_of[key] = sum(m.T @ p for m in matrices) / size  # type: ignore[assignment]
            for rank, matrix in enumerate(matrices if remembers else ()):
                errors[rank][key] = matrix - p @ q_of[key].T
            param.grad = (p @ q_of[key].T).view_as(param)
        outcome.norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        outcome.lrs.append(1e-2)
        optimizer.step()
        outcome.losses.append(sum(losses) / size)
    outcome.state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return outcome


def first_factors() -> dict[str, Tensor]:
    """As the engine draws them for step START."""
    engine = lowtide.initialize(short_gpt_float64(), case_of().as_config())
    found = {}
    for shard in engine.optimizer.shards:
        gradient, low_rank = shard.gradient, shard.gradient.low_rank
        assert low_rank is not None
        low_rank.step = lambda: START
        for one in low_rank._layout.thin:
            found[gradient.group.layout.names[one.index]] = low_rank._factor(one)
    engine.close()
    return found


@pytest.mark.parametrize(("size", "transport"), [(1, "auto"), (2, "shared_memory"), (3, "sockets")])
def test_it_is_the_papers_formula(ranks: RankPool, size: int, transport: str) -> None:
    first = ranks(1, first_factors)[0]
    assert first
    cases = [case_of(stage, communication={"transport": transport}) for stage in (0, 1)]
    *found, forgetful = ranks(size, train_all, [*cases, case_of(power_sgd={"error_feedback": False})])[0]
    expected = by_hand(size, first, True)
    for outcome in found:
        assert_close(outcome, expected, 1e-7, 1e-8)
    assert_close(forgetful, by_hand(size, first, False), 1e-7, 1e-8)


def sent(stage: int) -> tuple[list[int], int]:
    """(bytes that this rank sends as thin matrices and beside them in each step, what the layouts say)."""
    engine = lowtide.initialize(short_gpt(), case_of(stage, short_gpt).as_config())
    group = engine.optimizer.shards[0].group
    exchange = group.axes.exchange_along(("shard",) if stage else ("replica",))
    found, before = [], 0
    for step in range(STEPS):
        engine.train_step(share_of(token_batch(step, 2 * engine.world_size)))
        found.append(exchange.bytes_sent - before)
        before = exchange.bytes_sent
    low_rank = PowerSGDOptions(RANK, START, 2.0, True, True, 0)
    layouts = [ThinLayout.of(one.group.layout, low_rank) for one in engine.optimizer.shards]
    numel = sum(one.num_first + one.num_second for one in layouts if one.thin)
    engine.close()
    return found, 2 * 4 * numel // 2


@pytest.mark.parametrize("stage", [0, 1])
def test_thin_matrices_are_all_that_is_sent(ranks: RankPool, stage: int) -> None:
    for found, expected in ranks(2, sent, stage):
        assert found == [0] * START + [expected] * (STEPS - START)


def held(stage: int) -> tuple[int, int]:
    case = case_of(stage, short_gpt)
    engine = lowtide.initialize(short_gpt(), case.as_config())
    for step in range(START + 1):
        engine.train_step(share_of(token_batch(step, 2 * engine.world_size)))
    found = sum(shard.gradient.held_bytes for shard in engine.optimizer.shards)
    blueprint = Blueprint.of(Config.load(case.as_config()).resolve(engine.world_size), short_gpt(), engine.world_size)
    planned = bytes_of(blueprint, engine.rank, MemoryPhase.BETWEEN_STEPS).gradients
    engine.close()
    return found, planned


@pytest.mark.parametrize("stage", [0, 1])
def test_errors_are_in_the_planned_bytes(ranks: RankPool, stage: int) -> None:
    assert all(found == planned for found, planned in ranks(2, held, stage))


def test_a_step_that_is_skipped_is_not_remembered(ranks: RankPool) -> None:
    assert_skips_change_nothing(ranks, [replace(case_of(stage, short_gpt), batch=one_batch) for stage in (0, 1)])


def test_pipelines_and_accumulation_change_nothing(ranks: RankPool) -> None:
    case = replace(case_of(build=tiny_gpt_float64), accumulation=2)
    plain, divided = ranks(2, train_all, [case, case.at(1)])[0]
    (piped,) = ranks(4, train_all, [case.at(0, config={"parallel": {"pipeline": 2}})])[0]
    assert_close(divided, plain, 1e-9, 1e-9)
    assert_close(piped, plain, 1e-7, 1e-8)


def test_stages_agree_in_bfloat16_and_without_masters(ranks: RankPool) -> None:
    """And each form of the weights is another one, with the losses of the first but for a step of bfloat16's."""
    forms = [True, False, "kahan", "int8"]
    cases = [
        case_of(0, short_gpt, bf16={"enabled": True, "masters": form}, communication_data_type="bf16") for form in forms
    ]
    found = ranks(2, train_all, [case.at(stage) for case in cases for stage in (0, 1)])[0]
    for form, plain, divided in zip(forms, found[::2], found[1::2], strict=True):
        assert divided.differences(plain) == [], form
        assert plain.losses == pytest.approx(found[0].losses, rel=2**-7), form
        assert form is True or plain.differences(found[0]), form


def test_a_checkpoint_goes_on_with_the_same_bits(ranks: RankPool, tmp_path: Path) -> None:
    trips = [Trip(case_of(stage, short_gpt), case_of(stage, short_gpt), steps_before=4) for stage in (0, 1)]
    before = ranks(2, save_trips, trips, tmp_path, 2)[0]
    after = ranks(2, load_trips, trips, tmp_path, 2)[0]
    assert [other.differences(one) for one, other in zip(before, after, strict=True)] == [[], []]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"zero_optimization": {"stage": 2}}, "zero_optimization.stage: communication.power_sgd needs 0 or 1, found 2"),
        ({"zero_optimization": {"stage": 1, "shard_size": 2}}, "shard_size: .* needs null, found 2"),
        ({"communication": {"power_sgd": {"rank": 1}, "gradient_bits": 4}}, "gradient_bits: needs null .*, found 4"),
        ({"parallel": {"tensor": 2}}, "parallel.tensor: communication.power_sgd needs 1, found 2"),
        ({"parallel": {"sequence": 2}}, "parallel.sequence: communication.power_sgd needs 1, found 2"),
        ({"parallel": {"expert": 2}}, "parallel.expert: communication.power_sgd needs 1, found 2"),
        ({"zero_optimization": {"update_in_backward": True}}, "update_in_backward: .* needs false, found true"),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "cpu", "overlap": "delayed"}}},
            'overlap: .* needs "none", found "delayed"',
        ),
    ],
)
def test_what_does_not_go_together(more: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Config.load({"communication": {"power_sgd": {"rank": 1}}, "optimizer": {"type": "adamw"}, **more})
