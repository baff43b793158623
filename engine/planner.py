"""The only import of the planner, a satellite, from the core."""

from __future__ import annotations

from types import ModuleType


def planner() -> ModuleType:
    """Import `engine/plan/for_engine.py`, for "auto", a memory report or a trial of `lowtide tune`.

    [Note: what few trainings use] in `build.py`.
    """
    from .plan import for_engine

    return for_engine
