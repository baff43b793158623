"""Operations on tensors without memory are not asked twice for their sizes; what is counted stays the same."""

import pytest
import torch

from lowtide.engine.planning import tracker
from lowtide.engine.planning.meta_run import MetaRun
from lowtide.engine.planning.profile import Profile
from lowtide.zero.plan import Dtypes
from lowtide.zero.units import plan_units
from tests import models


def profiles() -> list[Profile]:
    """Of a first run, of one with what that has found, and of one in which blocks are computed again."""
    model = models.tiny_gpt()
    run = MetaRun(model, plan_units(model), Dtypes(torch.bfloat16, None, None), "cuda")
    batch = models.token_batch(0, 2)
    return [run.profile(batch, 2, every) for every in (0, 0, 1)]


def test_what_is_remembered_is_what_torch_says(monkeypatch: pytest.MonkeyPatch) -> None:
    first, again, recomputed = profiles()
    assert first == again
    monkeypatch.setattr(tracker, "_makes_new", lambda func: False)
    assert profiles() == [first, again, recomputed]
