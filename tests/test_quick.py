"""What `bin/test --quick` runs: what there is, and something of every folder."""

import re
from pathlib import Path

TESTS = Path(__file__).parent
LAWS = [line for line in (TESTS / "quick.txt").read_text().splitlines() if line and not line.startswith("#")]


def test_every_line_is_a_file_or_a_test() -> None:
    for line in LAWS:
        path, _, name = line.partition("::")
        source = (TESTS.parent / path).read_text()
        assert not name or re.search(rf"^def {name.partition('[')[0]}\(", source, re.MULTILINE), line


def test_every_folder_has_a_law() -> None:
    assert {line.split("/")[1] for line in LAWS} >= {path.parent.name for path in TESTS.glob("*/test_*.py")}
