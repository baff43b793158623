"""Islands train as DiLoCo says, at every stage, and every island has the same bits where they have met."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from tests import models
from tests.engine.outer_training import Plan, batch_of, by_torch, loaded, meets, resumed, train_islands
from tests.ranks import RankPool
from tests.zero.training import ADAMW, Case


def of_two_blocks() -> nn.Module:
    return models.TinyGPT(layers=2)


def of_two_blocks_float64() -> nn.Module:
    return of_two_blocks().double()


CASE = Case(of_two_blocks_float64, models.token_batch, clip=0.5, steps=9)
UNITS = [[""], ["blocks.0."], ["blocks.1."]]
PLANS = [  # with a stage
    (0, Plan()),
    (3, Plan(optimizer="sgd", momentum=0.0, lr=0.5)),
    (2, Plan(optimizer="average", every=3)),
    (1, Plan(overlap=2, alpha=0.5)),
    (3, Plan(every=6, fragments=3, overlap=1, alpha=0.25)),
]


def train_all(cases: list[tuple[Case, dict[str, Any]]]) -> list[Any]:
    return [train_islands(case, outer) for case, outer in cases]


def test_islands_train_as_one_process_that_simulates_them(
    ranks: RankPool,
) -> None:
    """Two of them; three train in `tests/launch/test_islands.py`."""
    found = ranks(4, train_all, [(CASE.at(stage), plan.as_config(2)) for stage, plan in PLANS], process_group=False)
    for index, (_, plan) in enumerate(PLANS):
        expected = by_torch(CASE, plan, 2, 2, UNITS)
        for island, (losses, state) in enumerate(expected):
            own_losses, own = found[2 * island][index]
            torch.testing.assert_close(own_losses, losses, rtol=1e-11, atol=1e-11, msg=f"{plan}: {{}}".format)
            for name, value in state.items():
                torch.testing.assert_close(own[name], value, rtol=1e-9, atol=1e-11, msg=f"{plan} {name}: {{}}".format)


def save_and_go_on(cases: list[tuple[Case, dict[str, Any], str, int]]) -> list[Any]:
    return [resumed(*case) for case in cases]


def test_checkpoints_go_on_bit_by_bit_with_an_exchange_under_way_too(ranks: RankPool, tmp_path: Path) -> None:
    streaming = Plan(every=6, fragments=3, overlap=3, alpha=0.25).as_config(2)
    cases = [(CASE.at(3), Plan().as_config(2), str(tmp_path / "plain"), 6)]
    cases.append((CASE.at(1), streaming, str(tmp_path / "two under way"), 6))
    cases.append((CASE.at(2), {**streaming, "dtype": "int4"}, str(tmp_path / "few bits"), 7))
    ranks(4, save_and_go_on, cases, process_group=False)


OUTER = Plan(every=2).as_config(2)
BF16 = {"bf16": {"enabled": True}}
FORMS: dict[str, tuple[int, dict[str, Any], str]] = {  # stage, more of the config, and whose bits it has
    "fp32": (0, {}, ""),
    "host": (
        3,
        {"zero_optimization": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}},
        "fp32",
    ),
    "speculative": (
        1,
        {"zero_optimization": {"offload_optimizer": {"device": "cpu", "overlap": "speculative"}}},
        "fp32",
    ),
    "averages, hybrid": (
        2,
        {"averages": True, "zero_optimization": {"shard_size": 1}, "communication": {"route": "sockets"}},
        "fp32",
    ),
    "bf16": (0, BF16, ""),
    "no masters": (2, {"bf16": {"enabled": True, "masters": False}, "seed": 1}, ""),
    "fp16": (1, {"fp16": {"enabled": True, "initial_scale_power": 20}, "steps": 4}, ""),
    "in backward": (2, {"zero_optimization": {"update_in_backward": True}, "gradient_clipping": 0.0}, ""),
    "delayed": (
        1,
        {
            "zero_optimization": {"offload_optimizer": {"device": "cpu", "overlap": "delayed", "delay_after_steps": 1}},
            "steps": 4,
        },
        "",
    ),
    "bf16 on the wire": (1, {"outer": {**OUTER, "dtype": "bf16"}}, ""),
    "8 bits on the wire": (3, {"outer": {**OUTER, "dtype": "int8"}}, ""),
    "4 bits on the wire, copies": (0, {"outer": {**OUTER, "dtype": "int4"}}, ""),
    "few bits, gathered": (3, {"communication": {"weight_bits": 8, "gradient_bits": 8, "route": "sockets"}}, ""),
    "few bits, differences": (1, {"communication": {"weight_bits": 4, "gradient_bits": 4, "route": "sockets"}}, ""),
    "thin matrices": (1, {"communication": {"power_sgd": {"rank": 2, "start_step": 1}}}, ""),
    "signs": (0, {"optimizer": {"type": "onebitadam", "params": {"lr": 1e-3, "freeze_step": 2}}, "steps": 4}, ""),
    "layered": (
        3,
        {"zero_optimization": {"layered_gradient_accumulation": True}, "gradient_accumulation_steps": 2},
        "",
    ),
    "stages": (1, {"parallel": {"pipeline": 2}, "gradient_accumulation_steps": 2}, ""),
    "split layers": (1, {"parallel": {"tensor": 2}}, ""),
}


def meet_all(forms: list[tuple[int, dict[str, Any]]]) -> list[Any]:
    found = []
    for stage, config in forms:
        more = {**config}
        case = Case(of_two_blocks, models.token_batch, clip=0.5, steps=more.pop("steps", 2), stage=stage)
        outer = more.pop("outer", OUTER)
        zero = {"stage": stage, **more.pop("zero_optimization", {})}
        case = replace(case, accumulation=more.get("gradient_accumulation_steps", 1))
        found.append(meets(case, outer, zero_optimization=zero, **more))
    return found


def test_islands_meet_in_every_form_of_training_bit_by_bit(ranks: RankPool) -> None:
    found = ranks(4, meet_all, [(stage, config) for stage, config, _ in FORMS.values()], process_group=False)
    first, second = (dict(zip(FORMS, states, strict=True)) for states in (found[0], found[2]))
    for name, (_, _, base) in FORMS.items():
        assert first[name], name
        for key, value in first[name].items():
            assert torch.equal(value, second[name][key]), f"{name}: islands differ in {key}"
            assert not base or torch.equal(value, first[base][key]), f"{name}: {key} differs from {base}"


def save_and_load(case: Case, folder: str) -> list[Any]:
    """On 2 islands of 2 ranks, then on 4 of one rank, and on one of all four."""
    two = Plan().as_config(2)
    torch.manual_seed(0)
    with lowtide.initialize(case.build(), {**case.as_config(), "outer": two}) as engine:
        for step in range(6):
            engine.train_step(batch_of(engine, case, step))
        engine.save_checkpoint(folder)
        own = engine.state_dict()
    same, four, one = (loaded(case, {**two, "ranks": size}, folder) for size in (2, 1, 4))
    plain, nothing = loaded(case, None, folder + "/island1"), loaded(case, None, folder)
    missing = loaded(case, two, folder, "unknown")
    return [own, same, four, one, plain, nothing, missing]


def test_checkpoints_load_on_other_islands_with_other_ranks(ranks: RankPool, tmp_path: Path) -> None:
    found = ranks(4, save_and_load, CASE.at(2), str(tmp_path), process_group=False)
    saved = [found[0][0], found[2][0]]
    assert any(not torch.equal(saved[0][name], saved[1][name]) for name in saved[0])  # between two exchanges
    kept = [found[rank][1][2] for rank in (0, 1)]
    sums = {kind: kept[0][kind] + kept[1][kind] for kind in kept[0]}
    for rank in range(4):
        step, state, own = found[rank][2]
        assert step == 6 and all(torch.equal(value, saved[rank % 2][name]) for name, value in state.items())
        assert all(own[kind] == pytest.approx(sums[kind], rel=1e-12) and sums[kind] > 0 for kind in sums)
    assert all(torch.equal(value, saved[0][name]) for name, value in found[0][3][1].items())
    assert all(torch.equal(value, saved[1][name]) for name, value in found[0][4][1].items())
    assert "what is there was saved by islands (outer): name the folder of one, such as island0" in found[0][5]
    assert (
        "expected a checkpoint with the tag 'unknown' that all islands see, of one step, found island 0: none"
        in (found[0][6])
    )


def mean_of_all(case: Case, outers: list[dict[str, Any]]) -> list[Any]:
    return [train_islands(case, outer, optimizer=optimizer) for outer in outers for optimizer in (ADAMW, SGD)]


SGD = {"type": "sgd", "params": {"lr": 0.1}}


def test_each_step_the_plain_mean_is_data_parallelism_bit_by_bit(ranks: RankPool) -> None:
    """As the config says it. What is exchanged instead is the same up to the order of sums where updates are linear."""
    case = Case(of_two_blocks_float64, models.token_batch, steps=2, stage=1)
    plain: dict[str, Any] = {"every": 1, "optimizer": "average", "ranks": 2}
    exchanged = {"every": 1, "optimizer": "sgd", "lr": 1.0, "momentum": 0.0, "ranks": 2}
    found = ranks(4, mean_of_all, case, [{}, plain, exchanged], process_group=False)[0]
    adamw, sgd, plain_adamw, plain_sgd, other_adamw, other_sgd = found
    assert plain_adamw[0] == adamw[0] and plain_sgd[0] == sgd[0]
    for name, value in adamw[1].items():
        assert torch.equal(plain_adamw[1][name], value) and torch.equal(plain_sgd[1][name], sgd[1][name])
        torch.testing.assert_close(other_sgd[1][name], sgd[1][name], rtol=1e-11, atol=1e-12)
    assert any(not torch.allclose(other_adamw[1][name], value, rtol=1e-6) for name, value in adamw[1].items())


def exchanged(cases: list[dict[str, Any]]) -> list[tuple[int, dict[str, Any]]]:
    """(bytes that this rank sends in an exchange, the config)"""
    found = []
    for config in cases:
        torch.manual_seed(0)
        with lowtide.initialize(models.tiny_gpt(), config, sample_batch=models.token_batch(0, 1)) as engine:
            assert engine._outer is not None
            before = engine._outer.ring.bytes_sent
            batch = models.token_batch(0, engine.data_size)
            for _ in range(4):
                engine.train_step(tuple(one[engine.data_rank :][:1] for one in batch))
            found.append((engine._outer.ring.bytes_sent - before, engine.config.as_dict()))
    return found


def test_a_plan_knows_what_islands_send_and_auto_knows_islands(ranks: RankPool) -> None:
    base = {"train_batch_size": 4, "optimizer": ADAMW, "steps_per_print": 0}
    outers: list[dict[str, Any]] = [
        {"every": 4},
        {"every": 4, "dtype": "bf16", "fragments": 2},
        {"every": 4, "dtype": "int4"},
    ]
    cases: list[dict[str, Any]] = [
        {**base, "zero_optimization": {"stage": stage}, "outer": {**outer, "ranks": 2}}
        for stage, outer in (
            (3, outers[1]),
            ("auto", outers[0]),
            (2, outers[2]),
        )
    ]
    found = ranks(4, exchanged, cases, process_group=False)[0]
    for config, (sent, used) in zip(cases, found, strict=True):
        plan = lowtide.plan(models.tiny_gpt, used, world_size=4, hosts=1, sample_batch=models.token_batch(0, 1))
        assert 4 * plan.wire_bytes["outer"] == sent, config
        assert plan.samples_per_step == 4 and plan.machine.num_islands == 2
