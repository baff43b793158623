"""Under `engine.join` ranks with fewer batches go on without data: the mean is over the microbatches there were."""

import math
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import lowtide
from lowtide.zero import plan
from tests.kit import models
from tests.kit.grids import pairs
from tests.kit.ranks import RankPool
from tests.kit.training import ROWS, Case, adamw, one_thread
from tests.parallel.test_sequence import Plain


def small_gpt() -> torch.nn.Module:
    return models.TinyGPT(layers=2).double()


CASE = Case(small_gpt, models.token_batch, clip=0.3)
ZERO: list[dict[str, Any]] = [
    {"zero_optimization": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}},
    {"zero_optimization": {"offload_optimizer": {"device": "cpu", "overlap": "speculative"}}},
    {"zero_optimization": {"update_in_backward": True}, "gradient_clipping": 0},
    {"communication": {"transport": "native"}},
    {"prescale_gradients": True, "communication": {"transport": "sockets"}},
]


def microbatches(case: Case, rank: int, count: int) -> Iterator[tuple[Tensor, ...]]:
    """Those of a rank: no two ranks have one in common."""
    return (case.batch(100 * rank + number, ROWS) for number in range(count))


def train_unevenly(case: Case, counts: list[int], by_hand: bool) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """counts: of microbatches on each rank. Losses, norms, final state."""
    torch.manual_seed(0)
    engine = lowtide.initialize(case.build(), case.as_config())
    own = list(microbatches(case, engine.rank, counts[engine.rank]))
    results: list[Any] = []
    with engine.join():
        if by_hand:
            for batch in own:
                engine.backward(engine(*batch))
                results.append(engine.step())
        else:
            parts = [own[first : first + case.accumulation] for first in range(0, len(own), case.accumulation)]
            for part in parts:
                results.append(engine.train_step(iter(part)))  # noqa: PERF401  (a loop as users write it)
    assert engine.global_step == max(counts) // case.accumulation
    state = engine.state_dict()
    engine.close()
    results = results[case.accumulation - 1 :: case.accumulation] if by_hand else results
    return [result.loss.item() for result in results], [result.grad_norm.item() for result in results], state


def train_all(cases: list[Case], counts: list[int], by_hand: bool) -> list[Any]:
    return [train_unevenly(case, counts, by_hand) for case in cases]


@one_thread()
def expected(case: Case, counts: list[int]) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """By torch alone: the mean over what there was."""
    torch.manual_seed(0)
    model = case.build()
    optimizer = adamw(model.parameters())
    data = [list(microbatches(case, rank, count)) for rank, count in enumerate(counts)]
    losses, norms = [], []
    for first in range(0, max(counts), case.accumulation):
        present = [batch for own in data for batch in own[first : first + case.accumulation]]
        optimizer.zero_grad()
        loss = torch.stack([model(*batch) for batch in present]).mean()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), case.clip or math.inf).item())
        optimizer.step()
        losses.append(loss.item())
    return losses, norms, model.state_dict()


@pytest.mark.parametrize(
    ("counts", "accumulation", "by_hand"),
    [([3, 1], 1, False), ([3, 4], 2, True), ([1, 3, 2], 1, True), ([2, 0, 4], 2, False)],
)
def test_the_mean_is_over_what_there_was(ranks: RankPool, counts: list[int], accumulation: int, by_hand: bool) -> None:
    """Stages take turns in their transports: of two ranks all of them have both. Three ranks have each stage one
    way."""
    turn = len(counts) + accumulation
    stages = range(4) if len(counts) == 2 else (0, 3) if by_hand else (1, 2)
    transports = [
        {"communication": {"transport": ("shared_memory", "sockets")[(stage + turn) % 2]}} for stage in stages
    ]
    cases = [
        CASE.at(stage, config=transport, accumulation=accumulation)
        for stage, transport in zip(stages, transports, strict=True)
    ]
    losses, norms, state = expected(cases[0], counts)
    for rank, found in enumerate(ranks(len(counts), train_all, cases, counts, by_hand)):
        for own_losses, own_norms, own_state in found:
            num_steps = counts[rank] // accumulation
            torch.testing.assert_close(own_losses, losses[:num_steps], rtol=1e-10, atol=0)
            torch.testing.assert_close(own_norms, norms[:num_steps], rtol=1e-8, atol=0)
            if rank == 0:
                torch.testing.assert_close(own_state, dict(state), rtol=1e-8, atol=1e-9)


def test_it_goes_with_whatever_else_the_config_says(ranks: RankPool) -> None:
    cases = [CASE.at(stage, config=config) for stage, config in zip((3, 1, 2, 0, 3), ZERO, strict=True)]
    found = ranks(2, train_all, cases, [1, 2], True)[1]
    for case, (losses, _, state) in zip(cases, found, strict=True):
        plain = Case(CASE.build, CASE.batch, clip=case.as_config()["gradient_clipping"])
        torch.testing.assert_close(losses, expected(plain, [1, 2])[0], rtol=1e-10, atol=0)
        assert not state  # it is rank 0's


def in_half_precision(dtype: str) -> list[float]:
    config = {dtype: {"enabled": True}, "communication": {"transport": "sockets"}}
    engine = lowtide.initialize(CASE.build().float(), CASE.at(3, config=config).as_config())
    with engine.join():
        results = [engine.train_step(batch) for batch in microbatches(CASE, engine.rank, 2 + 2 * engine.rank)]
    return [result.grad_norm.item() for result in results if not result.skipped]


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_norms_are_of_the_mean_in_half_precision_too(ranks: RankPool, dtype: str) -> None:
    _, norms = ranks(2, in_half_precision, dtype)
    exact = expected(CASE, [2, 4])[1]
    assert norms and norms == pytest.approx(exact[-len(norms) :], rel=0.1)


def do_more_in_the_loop(stage: int, folder: str) -> list[Any]:
    """Evaluates, agrees and saves while rank 1 has run out."""
    config = {"communication": {"transport": "sockets"}, "checkpoint": {"folder": folder, "every_steps": 1}}
    engine = lowtide.initialize(models.tiny_gpt_float64(), CASE.at(stage, config=config).as_config())
    found: list[Any] = []
    with engine.join():
        for number, batch in enumerate(microbatches(CASE, engine.rank, 3 - 2 * engine.rank)):
            engine.train_step(batch)
            with torch.no_grad():
                alone = engine(*batch).item()
            mean = engine.eval_step(batch).item()
            found += [alone, mean, engine.agree(engine.rank == 0), engine.agree(True, how="all")]
            if engine.agree(number == 1):
                break
    return [*found, engine.global_step, engine.load_checkpoint(folder), engine.eval_step(batch).item()]


@pytest.mark.parametrize("stage", [0, 3])
def test_ranks_evaluate_agree_save_and_stop_in_it(ranks: RankPool, stage: int, tmp_path: Any) -> None:
    first, second = ranks(2, do_more_in_the_loop, stage, str(tmp_path))
    assert first[1] == second[1] == pytest.approx((first[0] + second[0]) / 2, rel=1e-12)
    assert first[5] == pytest.approx(first[4], rel=1e-12)  # rank 1 has no data
    assert first[2:4] == second[2:4] == first[6:8] == [True, True]
    assert first[8:10] == second[4:6] == [2, {}] and first[10] == second[6]


def leave_in_the_middle_of_a_step() -> list[float]:
    """Three microbatches of two a step; the fourth comes after the context."""
    engine = lowtide.initialize(models.tiny_gpt_float64(), CASE.at(2, accumulation=2).as_config())
    data = list(microbatches(CASE, engine.rank, 4))
    with engine.join():
        for batch in data[: 3 - engine.rank]:
            engine.backward(engine(*batch))
            first = engine.step()
    engine.backward(engine(*data[3]))
    return [first.loss.item(), engine.step().loss.item(), engine.global_step]


def test_a_step_that_all_leave_unfinished_waits_for_its_rest(ranks: RankPool) -> None:
    torch.manual_seed(0)
    found = ranks(2, leave_in_the_middle_of_a_step)
    model, optimizer = models.tiny_gpt_float64(), None
    losses = []
    for present in ([(0, 0), (0, 1), (1, 0), (1, 1)], [(0, 2), (0, 3), (1, 3)]):
        optimizer = optimizer or adamw(model.parameters())
        optimizer.zero_grad()
        data = {rank: list(microbatches(CASE, rank, 4)) for rank in (0, 1)}
        loss = torch.stack([model(*data[rank][number]) for rank, number in present]).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CASE.clip)
        optimizer.step()
        losses.append(loss.item())
    assert [values[1:] for values in found] == [[pytest.approx(losses[1], rel=1e-10), 2]] * 2


def make_other_calls(what: str) -> str:
    config = {"communication": {"transport": "sockets", "timeout_seconds": 5}}
    with patch.object(plan, "_MIN_END_NUMEL", 1):
        engine, other = (lowtide.initialize(models.tiny_gpt(), CASE.at(3, config=config).as_config()) for _ in range(2))
    batch = next(microbatches(CASE, engine.rank, 1))
    with pytest.raises(RuntimeError) as error, engine.join():
        if what == "save":
            engine.save_checkpoint("nowhere")
        elif what == "gathered":
            with engine.gathered():
                pass
        elif what == "read":
            engine(*batch)
            engine.module.get_parameter("embedding.weight").sum()
        elif what == "gradient":
            engine.gradient("head.weight")
        elif what.startswith("other"):
            if what == "other join":
                with other.join():
                    pass
            other.train_step(batch)
        elif what == "again":
            with engine.join():
                pass
        elif engine.rank == 0:
            engine.agree(True)
        else:
            engine.train_step(batch)
    if what != "differ":
        engine.train_step(batch)
    return str(error.value)


@pytest.mark.parametrize(
    ("what", "text"),
    [
        (
            "save",
            "saving a checkpoint: expected a call outside of `with engine.join():`, found it inside: ranks that ",
        ),
        (
            "gathered",
            "reading or writing full weights: expected a call outside of `with engine.join():`, found it inside",
        ),
        (
            "read",
            "torch.autograd.grad, or a weight read beside the model, gathered from other ranks: expected a call "
            "outside of `with engine.join():`, found it inside",
        ),
        (
            "gradient",
            "engine.gradient(), set_gradient() or clip_grad_value_(): expected a call outside of `with engine.join():`",
        ),
        (
            "other",
            "a forward of another engine: expected a call outside of `with engine.join():`, found it inside: r",
        ),
        (
            "other join",
            "engine.join(): expected a single join at a time, found it inside of the join of another engine",
        ),
        ("again", "engine.join(): expected a single join at a time, found it inside of another; remove either"),
        (
            "differ",
            "engine.join(): expected the same calls of the engine on all ranks that have data, found a forward on 1 "
            "and engine.agree() on 1",
        ),
    ],
)
def test_what_ranks_without_data_cannot_join_is_refused(ranks: RankPool, what: str, text: str) -> None:
    assert all(found.startswith(text) for found in ranks(2, make_other_calls, what))


def join_what_takes_the_same_batches(parallel: dict[str, int]) -> str:
    config = {**CASE.as_config(), "parallel": parallel}
    plan = {"blocks.*.up": "column", "blocks.*.down": "row"}
    more = {"tensor_parallel": {"plan": plan}} if "tensor" in parallel else {"pipeline": {"schedule": "gpipe"}}
    model = Plain() if "sequence" in parallel else models.tiny_gpt()
    engine = lowtide.initialize(model, {**config, **more})
    with pytest.raises(ValueError, match="expected a config without") as error, engine.join():
        pass
    return str(error.value)


@pytest.mark.parametrize("axis", ["pipeline", "tensor", "sequence"])
def test_ranks_that_take_the_same_batches_are_refused(ranks: RankPool, axis: str) -> None:
    assert ranks(2, join_what_takes_the_same_batches, {axis: 2})[0].startswith(
        "engine.join(): expected a config without parallel.pipeline, tensor and sequence, found it: these ranks take "
    )


def test_one_rank_needs_nobody() -> None:
    found = train_unevenly(CASE.at(3), [3], by_hand=True)
    torch.testing.assert_close(found[0], expected(CASE, [3])[0], rtol=1e-10, atol=0)


def train_as_torch_does(cases: list[Case], counts: list[int]) -> list[tuple[dict[str, Tensor], int]]:
    return [train_one_as_torch_does(case, counts) for case in cases]


def train_one_as_torch_does(case: Case, counts: list[int]) -> tuple[dict[str, Tensor], int]:
    """`loss.backward()`, and the last of a step as the caller says."""
    torch.manual_seed(0)
    config = {**case.as_config(), "gradient_accumulation_steps": 1}
    engine = lowtide.initialize(case.build(), config)
    with engine.join():
        for number, batch in enumerate(microbatches(case, engine.rank, counts[engine.rank])):
            with engine.accumulate(last=number % case.accumulation == case.accumulation - 1):
                (engine(*batch) / case.accumulation).backward()
            engine.step()
    return engine.state_dict(), engine.global_step


def test_torch_s_own_backward_and_steps_by_hand(ranks: RankPool) -> None:
    cases = []
    for stage, transport, overlap in pairs([0, 3], ["shared_memory", "sockets"], ["none", "speculative"]):
        zero = {"offload_optimizer": {"device": "cpu", "overlap": overlap}}
        config = {"communication": {"transport": transport}, "zero_optimization": zero}
        cases.append(CASE.at(stage, config=config, accumulation=2))
    wanted = dict(expected(cases[0], [4, 1])[2])
    for state, num_steps in ranks(2, train_as_torch_does, cases, [4, 1])[0]:
        assert num_steps == 2
        torch.testing.assert_close(state, wanted, rtol=1e-8, atol=1e-9)


def clip_by_hand(cases: list[Case], counts: list[int], max_norm: float) -> list[dict[str, Tensor]]:
    found = []
    for case in cases:
        torch.manual_seed(0)
        with lowtide.initialize(case.build(), case.as_config()) as engine:
            with engine.join():
                for batch in microbatches(case, engine.rank, counts[engine.rank]):
                    engine.backward(engine(*batch))
                    assert engine.clip_grad_norm_(max_norm, error_if_nonfinite=True) == engine.step().grad_norm
            found.append(engine.state_dict())
    return found


@pytest.mark.parametrize("transport", ["shared_memory", "sockets"])
def test_clipping_by_hand(ranks: RankPool, transport: str) -> None:
    """Ranks without data learn how, and do it too."""
    cases = [CASE.at(stage, clip=0.0, config={"communication": {"transport": transport}}) for stage in (0, 3)]
    state = expected(CASE, [3, 1])[2]
    for found in ranks(2, clip_by_hand, cases, [3, 1], CASE.clip)[0]:
        torch.testing.assert_close(found, dict(state), rtol=1e-8, atol=1e-9)
