"""A folder of checkpoints: which there are, which is the latest, and how a new one takes its place.

    folder/latest                   the tag of the newest complete checkpoint
    folder/global_step100/          a complete checkpoint
    folder/.saving-global_step200/  one that is being written, or was when its job died

[Note: never half]
A checkpoint is written into a folder of another name. When every file is on the disk, the folder is renamed, and then
`latest` is replaced; each of the two is one atomic step, made durable before the next. So whatever moment a job dies
at, what has a tag's name is complete. A tag that exists is replaced in two renames: the old one gets another name
first, and goes by that if the job dies in between.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import psutil

from .checkpoint import Checkpoint
from .dcp import metadata_bytes
from .errors import CheckpointError, NoCheckpointError
from .index import DCP_METADATA, MANIFEST, FileEntry, Manifest, RankIndex, data_name, index_name, write_durably

LATEST = "latest"
_SAVING = ".saving-"
_REPLACED = ".replaced-"
_DELETED = ".deleted-"
_OWNER = "owner.json"


class CheckpointFolder:
    """The checkpoints below one folder."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    # -- reading --------------------------------------------------------------------------------------------------

    def tags(self) -> list[str]:
        """The tags of the complete checkpoints, oldest first."""
        found = []
        for entry in self._entries():
            if (entry / MANIFEST).is_file():
                tag = entry.name.removeprefix(_REPLACED)
                with contextlib.suppress(CheckpointError):
                    found.append((Manifest.read(entry / MANIFEST).saved_at, tag))
        return list(dict.fromkeys(tag for _, tag in sorted(found)))

    def unfinished(self) -> list[str]:
        """The tags whose saving has not ended, or never will: their jobs died."""
        return sorted(entry.name.removeprefix(_SAVING) for entry in self._entries(_SAVING))

    def latest(self) -> str | None:
        """The tag that `latest` names; None where there is no checkpoint yet."""
        try:
            return (self.path / LATEST).read_text(encoding="utf-8").strip()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def open(self, tag: str | None = None) -> Checkpoint:
        """The checkpoint of a tag, or the latest. Raises NoCheckpointError, or CheckpointError for a damaged one."""
        chosen = tag if tag is not None else self.latest()
        if chosen is None:
            known = self.tags()
            raise NoCheckpointError(
                f"{self.path}: expected a file `latest` that names a checkpoint, found none"
                + (f"; there are {', '.join(known)}: name one of them as `tag`" if known else " and no checkpoint")
            )
        for name in (chosen, _REPLACED + chosen):
            if (self.path / name).is_dir():
                return Checkpoint(self.path / name)
        found = ", ".join(self.tags()) or "none"
        raise NoCheckpointError(f"{self.path}: expected a checkpoint with the tag '{chosen}', found {found}")

    def alternative_to(self, tag: str) -> str | None:
        """The newest complete checkpoint with another tag."""
        return next((other for other in reversed(self.tags()) if other != tag), None)

    # -- writing --------------------------------------------------------------------------------------------------

    def saving_folder(self, tag: str) -> Path:
        """Where a checkpoint is while it is written."""
        return self.path / (_SAVING + tag)

    def begin(self, tag: str) -> Path:
        """An empty folder that the checkpoint is written into. Clears what dead jobs have left. Raises OSError."""
        if not tag or tag.startswith(".") or "/" in tag or "\\" in tag or tag == LATEST:
            raise ValueError(
                f"tag: expected a name for a folder, without slashes and with no dot in front, found {tag!r}"
            )
        self.path.mkdir(parents=True, exist_ok=True)
        self._clear_remains()
        target = self.saving_folder(tag)
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        (target / _OWNER).write_text(json.dumps(_this_process()))
        return target

    def commit(self, manifest: Manifest, stepped: Sequence[str], keep_last: int | None) -> None:
        """Completes what every rank has written, gives it its name, and deletes what is above `keep_last`.

        stepped: see `dcp.metadata_bytes`. Raises OSError and CheckpointError; nothing has changed then.
        """
        saving = self.saving_folder(manifest.tag)
        files = []
        ranks = []
        for rank in range(manifest.num_files):
            text = (saving / index_name(rank)).read_bytes()
            ranks.append(RankIndex.parse(text))
            files.append(FileEntry(data_name(rank), ranks[-1].file_nbytes, None))
            files.append(FileEntry(index_name(rank), len(text), zlib.crc32(text)))
        prefixed = {f"model.{alias}": f"model.{name}" for alias, name in manifest.aliases.items()}
        metadata = metadata_bytes(manifest.tensors, prefixed, stepped, ranks)
        write_durably(saving / DCP_METADATA, metadata)
        files.append(FileEntry(DCP_METADATA, len(metadata), zlib.crc32(metadata)))
        replace(manifest, files=tuple(files), saved_at=time.time()).write(saving / MANIFEST)
        (saving / _OWNER).unlink()
        _sync_folder(saving)
        self._take_name(saving, manifest.tag)
        self._write_latest(manifest.tag)
        if keep_last is not None:
            self._keep_last(keep_last)

    def discard(self, tag: str) -> None:
        """Removes what was written of a checkpoint that could not be completed."""
        shutil.rmtree(self.saving_folder(tag), ignore_errors=True)

    # -- pieces of it ---------------------------------------------------------------------------------------------

    def _entries(self, prefix: str = "") -> list[Path]:
        try:
            entries = sorted(self.path.iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return []
        if prefix:
            return [entry for entry in entries if entry.name.startswith(prefix)]
        return [entry for entry in entries if not entry.name.startswith((_SAVING, _DELETED))]

    def _take_name(self, saving: Path, tag: str) -> None:
        target, replaced = self.path / tag, self.path / (_REPLACED + tag)
        if target.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            os.rename(target, replaced)
        os.rename(saving, target)
        _sync_folder(self.path)
        self._delete(replaced)

    def _write_latest(self, tag: str) -> None:
        write_durably(self.path / LATEST, (tag + "\n").encode())
        _sync_folder(self.path)

    def _keep_last(self, count: int) -> None:
        own = [tag for tag in self.tags() if not Manifest.read(self.open(tag).path / MANIFEST).has_own_tag]
        for tag in own[:-count]:
            self._delete(self.path / tag)

    def _delete(self, folder: Path) -> None:
        """Under another name first: what is half deleted must not look like a checkpoint."""
        if not folder.exists():
            return
        name = folder.name.removeprefix(_REPLACED)
        doomed = folder.with_name(f"{_DELETED}{name}")
        shutil.rmtree(doomed, ignore_errors=True)
        os.rename(folder, doomed)
        shutil.rmtree(doomed, ignore_errors=True)

    def _clear_remains(self) -> None:
        for entry in self._entries(_DELETED):
            shutil.rmtree(entry, ignore_errors=True)
        for entry in self._entries(_SAVING):
            try:
                owner = json.loads((entry / _OWNER).read_text())
            except (OSError, ValueError):
                continue
            if _is_dead(owner):
                shutil.rmtree(entry, ignore_errors=True)


def _this_process() -> dict[str, object]:
    return {"boot": _boot(), "pid": os.getpid(), "started": psutil.Process().create_time()}


def _is_dead(owner: dict[str, object]) -> bool:
    """True where it is known: a process of this host that is gone, or had its number before another."""
    if owner.get("boot") != _boot() or not owner.get("boot"):
        return False
    try:
        return psutil.Process(int(str(owner["pid"]))).create_time() != owner["started"]
    except psutil.NoSuchProcess:
        return True


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
