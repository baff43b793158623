"""A benchmark is a script beside its helpers, not a package: tests get its modules from the fixture `helper`."""

from collections.abc import Callable
from types import ModuleType

Helper = Callable[[str], ModuleType]
