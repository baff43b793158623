"""`lowtide`: each command imports only its own module."""

import pytest

from tests.test_public_api import in_fresh_python


@pytest.mark.parametrize("arguments", [["--help"], ["launch", "--help"], ["config", "--help"]])
def test_the_command_starts_without_torch(arguments: list[str]) -> None:
    code = f"""
import sys
from lowtide.bin.main import main
try:
    main({arguments})
except SystemExit:
    pass
print("torch" in sys.modules)
"""
    assert in_fresh_python(code).endswith("\nFalse")
