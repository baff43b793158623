"""The files of a checkpoint: their names, how small ones are written and read, and what goes wrong with them.

Whatever name comes from a caller or out of a file is checked here before it becomes a path, and nowhere else. The files
of a checkpoint have no names of their own choice: how many ranks wrote it says what they are called.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path, PurePath

LATEST = "latest"
MANIFEST = "lowtide.json"
DCP_METADATA = ".metadata"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_MAX_BYTES = 200  # of a name: file systems take 255, and prefixes come before it


class CheckpointError(RuntimeError):
    """A checkpoint could not be saved or read. Says which file, and what is left intact."""


class NoCheckpointError(CheckpointError):
    """There is no checkpoint where one was looked for."""


# -- names ------------------------------------------------------------------------------------------------------------


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


# -- small files ------------------------------------------------------------------------------------------------------


def write_durably(path: Path, data: bytes) -> None:
    """Writes a small file that is whole as soon as it has its name, and on the disk when this returns."""
    new = path.with_name(path.name + ".new")
    with open(new, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, path)


def read_regular(path: Path) -> bytes:
    """All of a file. Raises OSError; a pipe or a device, from which reading might never end, is not read."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        check_regular(os.fstat(descriptor), path)
        with open(descriptor, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(descriptor)


def check_regular(status: os.stat_result, path: Path) -> None:
    """Raises OSError for what is not a regular file."""
    if not stat.S_ISREG(status.st_mode):
        raise OSError(0, f"expected a regular file, found a {_kind(status.st_mode)}", str(path))


def _kind(mode: int) -> str:
    kinds = {stat.S_IFDIR: "folder", stat.S_IFIFO: "pipe", stat.S_IFSOCK: "socket"}
    return kinds.get(stat.S_IFMT(mode), "device")
