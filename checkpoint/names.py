"""Names that become paths: of a folder, of a checkpoint in it, of its files, and of files beside plain weights.

Whatever comes from a caller or out of a file is checked here before it becomes a path, and nowhere else. The files of a
checkpoint have no names of their own choice: how many ranks wrote it says what they are called.
"""

from __future__ import annotations

import os
from pathlib import Path, PurePath

LATEST = "latest"
MANIFEST = "lowtide.json"
DCP_METADATA = ".metadata"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_MAX_BYTES = 200  # of a name: file systems take 255, and prefixes come before it


def folder_path(path: str | os.PathLike[str]) -> Path:
    """The path that a caller gives. Raises ValueError for "", which would mean the working directory unsaid."""
    text = os.fspath(path)
    if not text.strip():
        raise ValueError(f'expected the path of a folder ("." for the working directory), found {text!r}')
    return Path(text)


def check_tag(tag: str) -> None:
    """Raises ValueError for a tag that is not the name of one folder, the same in every list of them."""
    if not _is_plain(tag) or tag.strip() != tag or tag[0] == "." or tag == LATEST:
        raise ValueError(
            f"tag: expected a name for a folder, of at most {_MAX_BYTES} bytes, without slashes, with no dot in front "
            f"and no space around, and not '{LATEST}'; found {shortened(tag)}"
        )


def check_model_file(name: str) -> None:
    """Raises ValueError for a name that would lie elsewhere than beside weights, or in the place of their index."""
    if not _is_plain(name) or name[0] == "." or not name.endswith(".json") or name == INDEX:
        raise ValueError(
            f"expected a file name that ends in .json, without slashes and with no dot in front, and not "
            f"'{INDEX}'; found {shortened(name)}"
        )


def check_weights_file(name: object) -> None:
    """Raises ValueError for what an index of safetensors may not name: a file that is not below its own folder."""
    path = PurePath(name) if isinstance(name, str) and name.isprintable() else None
    if path is None or path.is_absolute() or not path.parts or ".." in path.parts:
        raise ValueError(f"expected names of files below its folder, found {shortened(name)}")


def data_name(rank: int) -> str:
    """The file that a rank writes its boxes to; the name that torch.distributed.checkpoint gives it too."""
    return f"__{rank}_0.distcp"


def index_name(rank: int) -> str:
    """The file that says what is in it."""
    return f"rank{rank}.json"


def shortened(value: object) -> str:
    """A value from a file for a message: in quotes, without control characters, and not endless."""
    text = repr(value if not isinstance(value, (str, bytes)) else value[:100])
    return text if len(text) <= 120 else text[:117] + "..."


def _is_plain(name: str) -> bool:
    return name.isprintable() and not {*"/\\"} & {*name} and 0 < len(name.encode()) <= _MAX_BYTES
