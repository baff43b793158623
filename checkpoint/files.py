"""The files of a checkpoint: names, reading and writing small files, and errors.

Every name from a caller or a file is checked here before it becomes a path. The names of a checkpoint's files follow
from the number of ranks that wrote it.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path, PurePath
from typing import Annotated

from pydantic import Field

# Values of files. Strict: "1" and true are no numbers. At most 63 bits: torch's sizes and offsets are int64.
Count = Annotated[int, Field(strict=True, ge=0, lt=1 << 63)]
Flag = Annotated[bool, Field(strict=True)]
Number = Annotated[float, Field(strict=True)]
Text = Annotated[str, Field(strict=True)]

LATEST = "latest"
MANIFEST = "lowtide.json"
DCP_METADATA = ".metadata"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_MAX_BYTES = 200  # of a name: file systems allow 255, and prefixes are added


class CheckpointError(RuntimeError):
    """A checkpoint could not be saved or read. Names the file and the intact checkpoints."""


class NoCheckpointError(CheckpointError):
    """The folder has no checkpoint."""


# -- names ------------------------------------------------------------------------------------------------------------


def folder_path(path: str | os.PathLike[str]) -> Path:
    """Convert a caller's path. Raises ValueError for "", which would silently mean the working directory."""
    text = os.fspath(path)
    if not text.strip():
        raise ValueError(f'expected the path of a folder ("." for the working directory), found {text!r}')
    return Path(text)


def check_tag(tag: str) -> None:
    """Raise ValueError unless the tag is a plain folder name."""
    # A leading dot is for the names that the folder makes: `.saving-`, `.owner-` and so on.
    if not _is_plain(tag) or tag.strip() != tag or tag[0] == "." or tag == LATEST:
        raise ValueError(
            f"tag: expected a folder name of at most {_MAX_BYTES} bytes, without slashes, without a leading dot, "
            f"without spaces around it, and not '{LATEST}'; found {shortened(tag)}"
        )


def check_model_file(name: str) -> None:
    """Raise ValueError unless the name is a plain .json file name, different from the index of weights."""
    if not _is_plain(name) or name[0] == "." or not name.endswith(".json") or name == INDEX:
        raise ValueError(
            f"expected a file name that ends in .json, without slashes and without a leading dot, and not "
            f"'{INDEX}'; found {shortened(name)}"
        )


def check_weights_file(name: object) -> None:
    """Raise ValueError if an index of safetensors names a file outside its folder."""
    # Subfolders are allowed. A path to elsewhere would let an index name any file.
    path = PurePath(name) if isinstance(name, str) and name.isprintable() else None
    if path is None or path.is_absolute() or not path.parts or ".." in path.parts:
        raise ValueError(f"expected names of files below the folder of the index, found {shortened(name)}")


def data_name(rank: int) -> str:
    """The file with the chunks of a rank, named as torch.distributed.checkpoint names it."""
    return f"__{rank}_0.distcp"


def index_name(rank: int) -> str:
    """The index of a rank's file."""
    return f"rank{rank}.json"


def shortened(value: object) -> str:
    """Quote a value from a file for an error: escaped, and at most 120 characters."""
    text = repr(value if not isinstance(value, (str, bytes)) else value[:100])
    return text if len(text) <= 120 else text[:117] + "..."


def _is_plain(name: str) -> bool:
    # A backslash separates folders on Windows, and a checkpoint may be copied to Windows.
    return name.isprintable() and not {*"/\\"} & {*name} and 0 < len(name.encode()) <= _MAX_BYTES


# -- small files ------------------------------------------------------------------------------------------------------


def write_durably(path: Path, data: bytes) -> None:
    """Write a small file atomically. It is on the disk when this returns. Without room it leaves nothing."""
    new = path.with_name(path.name + ".new")
    try:
        with open(new, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)  # after the sync: else a crash may leave an empty file of this name
    except OSError:
        with contextlib.suppress(OSError):
            new.unlink()
        raise


def sync_folder(folder: Path) -> None:
    """Bring names and renames in a folder to the disk: a sync of a file does not include its name."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_regular(path: Path) -> bytes:
    """Read a whole file. Raises OSError, also for a pipe or a device, which might never end."""
    # O_NONBLOCK: to open a pipe would wait for a writer. The open file is checked, since a path may change.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        check_regular(os.fstat(descriptor), path)
        with open(descriptor, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(descriptor)


def check_regular(status: os.stat_result, path: Path) -> None:
    """Raise OSError unless it is a regular file."""
    if not stat.S_ISREG(status.st_mode):
        raise OSError(0, f"expected a regular file, found a {_kind(status.st_mode)}", str(path))


def _kind(mode: int) -> str:
    kinds = {stat.S_IFDIR: "folder", stat.S_IFIFO: "pipe", stat.S_IFSOCK: "socket"}
    return kinds.get(stat.S_IFMT(mode), "device")
