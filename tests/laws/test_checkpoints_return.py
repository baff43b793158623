"""A checkpoint that was written with any features goes on without them at another stage, bit for bit, and back."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import lowtide
from tests.kit.features import case_of, feature_sets, start_in, without_places
from tests.kit.ranks import RankPool
from tests.kit.training import Case

STEPS = 2  # before the checkpoint, and after it


def advance(engine: lowtide.Engine, case: Case, first: int) -> list[Any]:
    """The losses of STEPS steps from number `first`, and the weights after them, on rank 0."""
    losses = []
    for step in range(first, first + STEPS):
        batch = case.global_batch(step, engine.data_size)
        share = tuple(tensor.chunk(engine.data_size)[engine.data_rank] for tensor in batch)
        losses.append(engine.train_step(share).loss.item())
    return [losses, {name: value.clone() for name, value in engine.state_dict().items()}]


def save_and_go_on(case: Case, folder: Path) -> list[Any]:
    torch.manual_seed(0)
    with lowtide.initialize(case.build(), case.as_config()) as engine:
        advance(engine, case, 0)
        engine.save_checkpoint(folder)
        return advance(engine, case, STEPS)


def load_and_go_on(case: Case, folder: Path) -> list[Any]:
    torch.manual_seed(1)
    with lowtide.initialize(case.build(), case.as_config()) as engine:
        engine.load_checkpoint(folder)
        return advance(engine, case, STEPS)


def differ(found: list[Any], expected: list[Any]) -> bool:
    (losses, state), (expected_losses, expected_state) = found, expected
    same = all(torch.equal(state[name], value) for name, value in expected_state.items())
    return losses != expected_losses or list(state) != list(expected_state) or not same


def wrong_ways(folder: Path, sets: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """The ways on which a training does not go on as it was."""
    start_in(folder)
    wrong = []
    for number, names in enumerate(sets):
        case = case_of(names)
        plain = without_places(names)
        plain = plain.at(plain.stage ^ 1)  # gradients are summed in the same order
        expected = save_and_go_on(case, folder / f"{number}")
        if differ(load_and_go_on(plain, folder / f"{number}"), expected):
            wrong.append(("saved with", *names))
        if differ(save_and_go_on(plain, folder / f"{number} plain"), expected):
            wrong.append(("otherwise than with", *names))
        if differ(load_and_go_on(case, folder / f"{number} plain"), expected):
            wrong.append(("loaded with", *names))
    return wrong


def test_a_checkpoint_goes_on_bit_for_bit(ranks: RankPool, tmp_path: Path) -> None:
    """States in 8 bits are written as values, which do not all return (`test_state_dtype.py`)."""
    for wrong in ranks(2, wrong_ways, tmp_path, feature_sets("states in 8 bits"), timeout=240):
        assert "\n".join(map(str, wrong)) == ""
