"""docs/api.md says what the docstrings say, and the tables of docs/config.md what the schema says."""

import runpy
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"


def test_the_pages_are_fresh() -> None:
    made = runpy.run_path(str(DOCS / "reference.py"))
    assert (DOCS / "api.md").read_text() == made["reference"](), "run: python docs/reference.py"
    page = (DOCS / "config.md").read_text()
    assert page == made["config_page"](page), "run: python docs/reference.py"
    assert page.count("<!-- ") > 30
