"""Trainings over pipelines, beside those of one process."""

from typing import Any

from tests import models
from tests.zero.training import Case

SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zb-h1": 1, "zb-v": 2, "dualpipe-v": 2}  # name: chunks
MICROBATCHES = 4


def deep_gpt() -> models.TinyGPT:
    return models.TinyGPT(layers=5)


def deep_tied_gpt() -> models.TinyGPT:
    return models.TinyGPT(layers=5, tied=True)


def pipelined(case: Case, pipeline: int, schedule: str, **config: Any) -> Case:
    """The case over so many pipeline ranks."""
    return case.at(
        case.stage, config={"parallel": {"pipeline": pipeline}, "pipeline": {"schedule": schedule}, **config}
    )
