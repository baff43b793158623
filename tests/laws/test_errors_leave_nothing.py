"""After an error in a step, which all ranks meet, training goes on as if that step had not been, with any features."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from tests.kit.features import case_of, feature_sets, start_in
from tests.kit.ranks import RankPool
from tests.kit.training import Case, Outcome

FAULTS = {"forward": "ArithmeticError", "backward": "ArithmeticError", "batch": "TypeError"}


def train(case: Case, faults: Sequence[str]) -> tuple[Outcome, list[str]]:
    """Train for two steps, and return their outcome. Between them, a step fails for each fault: return the errors."""
    torch.manual_seed(0)
    outcome, errors = Outcome(), []
    with lowtide.initialize(case.build(), case.as_config()) as engine:
        model: Any = engine.module
        for step in range(2):
            batch = case.global_batch(step, engine.data_size)
            share = tuple(tensor.chunk(engine.data_size)[engine.data_rank] for tensor in batch)
            outcome.losses.append(engine.train_step(share).loss.item())
            for fault in faults if step == 0 else ():
                model.fault = fault
                try:
                    engine.train_step(share[:1] if fault == "batch" else share)
                except Exception as error:
                    errors.append(type(error).__name__)
                model.fault = ""
        outcome.state = {name: value.clone() for name, value in engine.state_dict().items()}
    return outcome, errors


def differences(folder: Path, sets: Sequence[tuple[str, ...]]) -> dict[tuple[str, ...], list[str]]:
    start_in(folder)
    found = {}
    for names in sets:
        after_faults, errors = train(case_of(names), list(FAULTS))
        assert errors == list(FAULTS.values()), (names, errors)
        found[names] = after_faults.differences(train(case_of(names), [])[0])
    return found


def test_a_failed_step_leaves_nothing_behind(ranks: RankPool, tmp_path: Path) -> None:
    for found in ranks(2, differences, tmp_path, feature_sets(), timeout=240):
        assert found == {names: [] for names in feature_sets()}


def fail_in_backward(module: nn.Module, inputs: object, output: Tensor) -> None:
    output.register_hook(lambda gradient: 1 / 0)


def test_an_error_after_an_update_in_backward_says_that_some_parameters_have_changed() -> None:
    case = case_of(("update in backward",))
    with lowtide.initialize(case.build(), case.as_config()) as engine:
        before = {name: value.clone() for name, value in engine.state_dict().items()}
        engine.module.embedding.register_forward_hook(fail_in_backward)  # type: ignore[union-attr]
        with pytest.raises(ZeroDivisionError) as caught:
            engine.train_step(case.global_batch(0, 1))
        after = engine.state_dict()
        changed = [name for name, value in before.items() if not torch.equal(value, after[name])]
        assert changed and len(changed) < len(before)
        assert caught.value.__notes__ == [
            "zero_optimization.update_in_backward: this backward had updated some parameters before the error, others "
            "not; continue from a checkpoint (engine.load_checkpoint)"
        ]
        assert engine.global_step == 0
