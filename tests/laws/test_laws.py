"""The laws of every training, asked of sets of features in which each two meet (`tests/kit/features.py`).

- No stage, no transport and no place of a tensor changes a bit of it, and all ranks have the same numbers.
- After an error in a step, which all ranks meet, it goes on as if that step had not been.
- Its checkpoint goes on without the features at another stage, whose checkpoint goes on with them, bit for bit.
- Between steps it holds the bytes that its blueprint says.
- In float64 its numbers are those of plain torch.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from tests.kit.features import (
    NUMBERS,
    OF_FOUR_RANKS,
    REFUSED,
    TwoBlocks,
    case_of,
    feature_sets,
    num_ranks,
    start_in,
    without_places,
)
from tests.kit.ranks import RankPool
from tests.kit.training import (
    Case,
    Outcome,
    adamw,
    assert_close,
    differences,
    start,
    take_step,
    train_all,
    train_plainly,
    wrong_bytes,
)

Names = tuple[str, ...]
FAULTS = {  # what goes wrong in a step, and the error
    "forward": "ArithmeticError",
    "backward": "ArithmeticError",
    "loss": "ValueError",
    "batch": "TypeError",
    "end of the data": "ValueError",
}


def parts_of(sets: Sequence[Names]) -> dict[str, tuple[int, list[Names]]]:
    """By name: a number of ranks, and a few of the sets for so many."""
    found: dict[str, tuple[int, list[Names]]] = {}
    for size in (2, 4):
        own = [names for names in sets if num_ranks(names) == size]
        found |= {f"{size}-{first // 5}": (size, own[first : first + 5]) for first in range(0, len(own), 5)}
    return found


def take_steps(engine: lowtide.Engine, case: Case, *steps: int) -> Outcome:
    outcome = Outcome()
    for step in steps:
        outcome.add(take_step(engine, case, step))
    outcome.state = copied(engine)
    return outcome


def copied(engine: lowtide.Engine) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in engine.state_dict().items()}


def error_of(engine: lowtide.Engine, case: Case, fault: str) -> str:
    """The error of a step with this fault."""
    batch, model = case.share(engine, 2), engine.module
    given = {"batch": batch[:1], "end of the data": iter(case.microbatches(engine, 2)[1:])}
    vars(model)["fault"] = fault
    try:
        engine.train_step(given.get(fault, batch))
    except Exception as error:
        return type(error).__name__
    finally:
        vars(model)["fault"] = ""
    return "none"


def differ(found: Outcome, expected: Outcome, is_rounded: bool = False) -> bool:
    if is_rounded:
        return found.losses != pytest.approx(expected.losses, rel=1e-2)
    told = [str((one.losses, one.norms, one.scales, one.skipped)) for one in (found, expected)]  # with NaN
    return told[0] != told[1] or differences(found.state, expected.state) != []


def broken_laws(folder: Path, sets: Sequence[Names]) -> tuple[list[str], list[Any]]:
    """What does not hold, and the numbers of this rank."""
    start_in(folder)
    broken, numbers = [], []
    for number, names in enumerate(sets):
        here, there = folder / f"{number}", folder / f"{number} plain"
        is_rounded = "states in 8 bits" in names  # they are written as values, which do not all return
        faults = [] if "pipeline" in names else list(FAULTS)  # whose stages are parts of the model
        case, plain = case_of(names), without_places(names)
        with start(case) as engine:
            before = take_steps(engine, case, 0, 1)
            engine.save_checkpoint(here)
            errors = [error_of(engine, case, fault) for fault in faults]
            after = take_steps(engine, case, 2, 3)
            bytes_differ = wrong_bytes(engine, case)
        with start(plain) as engine:
            expected_before, expected_after = take_steps(engine, plain, 0, 1), take_steps(engine, plain, 2, 3)
            engine.load_checkpoint(here)
            engine.save_checkpoint(there)
            again = take_steps(engine, plain, 2, 3)
        with start(case) as engine:
            engine.load_checkpoint(there)
            moved = take_steps(engine, case, 2, 3)
        numbers.append((before.losses, before.norms, after.losses, after.lrs))
        found = {
            "places change bits": differ(before, expected_before),
            f"after errors {errors}": errors != [FAULTS[fault] for fault in faults] or differ(after, expected_after),
            "its checkpoint goes on otherwise": differ(again, after, is_rounded),
            "it goes on otherwise from a checkpoint": differ(moved, after, is_rounded),
            bytes_differ: bool(bytes_differ),
        }
        broken += [f"{law}: {', '.join(names)}" for law, is_broken in found.items() if is_broken]
    return broken, numbers


ALL = parts_of(feature_sets())


@pytest.mark.parametrize("part", ALL)
def test_every_law_holds_with_all_features(ranks: RankPool, tmp_path: Path, part: str) -> None:
    size, sets = ALL[part]
    found = ranks(size, broken_laws, tmp_path, sets, timeout=240)
    assert "\n".join(text for broken, _ in found for text in broken) == ""
    assert [numbers for _, numbers in found] == [found[0][1]] * size


OF_TORCH = {  # the rest of NUMBERS rounds, or is ours
    *("accumulation", "clipping", "sgd", "units by name", "compiled blocks", "tiles of the loss"),
    *OF_FOUR_RANKS,
}
SETS = feature_sets(*(NUMBERS.keys() - OF_TORCH))
EXACT = parts_of(SETS) | {f"{size}": (size, [one for one in SETS if num_ranks(one) == 2][::4]) for size in (1, 3)}


def float64() -> nn.Module:
    return TwoBlocks().double()


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1e-2, momentum=0.9)


def outcomes(folder: Path, cases: Sequence[Case]) -> list[Outcome]:
    start_in(folder)
    return train_all(cases)


@pytest.mark.parametrize("part", EXACT)
def test_a_training_in_float64_is_that_of_torch(ranks: RankPool, tmp_path: Path, part: str) -> None:
    size, sets = EXACT[part]
    cases = [replace(case_of(names), build=float64, steps=2) for names in sets]
    for names, case, outcome in zip(sets, cases, ranks(size, outcomes, tmp_path, cases, timeout=240)[0], strict=True):
        data_size = size // (1 if {"pipeline", "split layers"}.isdisjoint(names) else 2)
        expected = train_plainly(case, data_size, sgd if "sgd" in names else adamw)
        assert_close(outcome, expected, 1e-10, 1e-10, str(names))


def accepted(size: int) -> list[frozenset[str]]:
    """The pairs of REFUSED for so many ranks with which an engine starts, if need be at stage 3."""
    found = []
    for pair, stage in product((pair for pair in REFUSED if num_ranks(pair) == size), (None, 3)):
        case = case_of(pair, stage)
        try:
            lowtide.initialize(case.build(), case.as_config()).close()
        except ValueError:
            continue
        found.append(pair)
    return [pair for pair in found if found.count(pair) == 2]


@pytest.mark.parametrize("size", [2, 4])
def test_pairs_that_do_not_go_together_are_refused(ranks: RankPool, size: int) -> None:
    assert ranks(size, accepted, size) == [[]] * size


def fail_in_backward(module: nn.Module, inputs: object, output: Tensor) -> None:
    output.register_hook(lambda gradient: 1 / 0)


def test_an_error_after_an_update_in_backward_says_that_some_parameters_have_changed() -> None:
    case = case_of(("update in backward",))
    with start(case) as engine:
        before = copied(engine)
        engine.module.get_submodule("embedding").register_forward_hook(fail_in_backward)
        with pytest.raises(ZeroDivisionError) as caught:
            take_step(engine, case, 0)
        after = engine.state_dict()
        changed = [name for name, value in before.items() if not torch.equal(value, after[name])]
        assert changed and len(changed) < len(before)
        assert caught.value.__notes__ == [
            "zero_optimization.update_in_backward: this backward had updated some parameters before the error, others "
            "not; continue from a checkpoint (engine.load_checkpoint), or start again"
        ]
        assert engine.global_step == 0
