"""The examples are scripts beside each other, so their folder is where their imports are looked for."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
