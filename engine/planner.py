"""The way from the core to the planner, which is a satellite."""

from __future__ import annotations

from types import ModuleType


def planner() -> ModuleType:
    """`engine/plan/asked.py`: imported here alone, when "auto", a memory report or a trial of `lowtide tune` asks.

    [Note: what few trainings use] in `build.py`.
    """
    from .plan import asked

    return asked
