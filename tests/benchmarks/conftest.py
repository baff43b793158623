"""Fixtures of the benchmarks' tests."""

import importlib
from pathlib import Path

import pytest

from tests.benchmarks import Helper

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def helper(monkeypatch: pytest.MonkeyPatch) -> Helper:
    """`helper("compare")` imports a script, or a helper such as "_harness", as the scripts beside it do."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module
