"""Delayed updates and what comes between steps: what is given out has them all, looking changes nothing."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.engine.delaying import GPT, start, take_steps
from tests.kit.ranks import RankPool
from tests.kit.training import Case, share_of
from tests.zero.delayed_update import train_delayed
from tests.zero.test_delayed_update import delayed, in_precision

PLACES = ("cpu", "nvme")


def save_and_load(saved: Case, loaded: Case, folder: Path) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses of a run that saves after step 2, those of one that goes on from there, and where the second ends."""
    engine = start(saved)
    losses = take_steps(engine, saved, 0, 3)
    engine.save_checkpoint(folder / "saved")
    losses += take_steps(engine, saved, 3, 5)
    engine.close()
    engine = start(loaded)
    take_steps(engine, loaded, 7, 9)  # with an update under way, which the load makes void
    engine.load_checkpoint(folder / "saved")
    again = take_steps(engine, loaded, 3, 5)
    state = engine.state_dict()
    engine.close()
    return losses, again, state


@pytest.mark.parametrize(("place", "precision"), [("cpu", "bf16"), ("nvme", "fp32")])
def test_a_save_has_all_updates_and_the_run_goes_on_as_one_that_is_loaded(
    ranks: RankPool, tmp_path: Path, place: str, precision: str
) -> None:
    case = in_precision(GPT, precision)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    expected = train_delayed(case, 2, dtype, settled_after=(2,))
    one, other = delayed(case, 1, tmp_path, place), delayed(case, 3, tmp_path, "cpu")
    losses, again, state = ranks(2, save_and_load, one, other, tmp_path)[0]
    assert losses == expected.losses and again == expected.losses[3:]
    assert [name for name, value in expected.state.items() if not torch.equal(state[name], value)] == []


@pytest.mark.parametrize("overlap", ["none", "speculative"])
def test_a_save_loads_where_nothing_is_delayed(ranks: RankPool, tmp_path: Path, overlap: str) -> None:
    _, again, _ = ranks(
        2, save_and_load, delayed(GPT, 3, tmp_path), delayed(GPT, 1, tmp_path, overlap=overlap), tmp_path
    )[0]
    expected = train_delayed(GPT, 2, settled_after=(2, 3, 4))
    assert again == expected.losses[3:]


def looked_at(case: Case, looks: bool) -> tuple[list[float], list[float]]:
    """Losses of steps, and of evaluations between them."""
    engine = start(case)
    losses, evaluated = [], []
    for step in range(case.steps):
        losses += take_steps(engine, case, step, step + 1)
        if looks:
            evaluated.append(engine.eval_step(share_of(case.global_batch(step + 1, engine.world_size))).item())
            engine.memory()
            with engine.gathered():
                assert all(bool(param.isfinite().all()) for param in engine.module.parameters())
    engine.close()
    return losses, evaluated


@pytest.mark.parametrize("stage", [0, 3])
def test_evaluating_and_looking_change_nothing(ranks: RankPool, tmp_path: Path, stage: int) -> None:
    case = delayed(GPT, stage, tmp_path)
    (plain, _), (losses, evaluated) = (ranks(2, looked_at, case, looks)[0] for looks in (False, True))
    assert losses == plain
    assert evaluated[:-1] == losses[1:]  # what is evaluated is what the next step computes with


def values_given_out(case: Case, folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """After the last step: the state dict, the export loaded elsewhere, the module of an engine that is closed."""
    engine = start(case)
    take_steps(engine, case, 0, case.steps)
    engine.export(folder / "weights")
    engine.close()
    module = {name: value.detach().clone() for name, value in engine.module.state_dict().items()}
    engine = start(case)
    take_steps(engine, case, 0, case.steps)
    state = engine.state_dict()
    take_steps(engine, case, 5, 7)
    engine.load_weights(folder / "weights")
    loaded = engine.state_dict()
    engine.close()
    return state, loaded, module


@pytest.mark.parametrize("place", PLACES)
def test_what_is_given_out_has_all_updates(ranks: RankPool, tmp_path: Path, place: str) -> None:
    expected = train_delayed(GPT, 2).state
    for values in ranks(2, values_given_out, delayed(GPT, 2, tmp_path, place), tmp_path)[0]:
        assert list(values) == list(expected)
        assert [name for name, value in expected.items() if not torch.equal(values[name], value)] == []


def losses_around_a_change(case: Case) -> tuple[list[float], list[float]]:
    """Of two batches after all parameters were set: evaluated, and as the losses of two steps."""
    engine = start(case)
    take_steps(engine, case, 0, 3)
    with torch.no_grad(), engine.gathered(modify=True):
        for param in engine.module.parameters():
            param.fill_(0.5)
    batches = [share_of(case.global_batch(step, engine.world_size)) for step in (3, 4)]
    evaluated = [engine.eval_step(batch).item() for batch in batches]
    losses = take_steps(engine, case, 3, 5)
    engine.close()
    return evaluated, losses


@pytest.mark.parametrize(("stage", "precision"), [(0, "bf16"), (3, "fp32")])
def test_a_change_of_parameters_comes_after_the_update_that_is_under_way(
    ranks: RankPool, tmp_path: Path, stage: int, precision: str
) -> None:
    """Both steps compute with what was set: the first one's own update is late, and there is none before it."""
    evaluated, losses = ranks(2, losses_around_a_change, delayed(in_precision(GPT, precision), stage, tmp_path))[0]
    assert losses == evaluated
