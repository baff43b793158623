"""docs/api.md says what the docstrings say."""

import runpy
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"


def test_the_page_is_fresh() -> None:
    expected = runpy.run_path(str(DOCS / "reference.py"))["reference"]()
    assert (DOCS / "api.md").read_text() == expected, "run: python docs/reference.py"
