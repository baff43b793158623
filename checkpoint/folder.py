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
from dataclasses import replace
from pathlib import Path

import psutil

from .checkpoint import Checkpoint
from .dcp import OptimizerNames, metadata_bytes
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
        return list(self._manifests())

    def unfinished(self) -> list[str]:
        """The tags whose saving has not ended, or never will: their jobs died."""
        return sorted(entry.name.removeprefix(_SAVING) for entry in self._entries(_SAVING))

    def latest(self) -> str | None:
        """The tag that `latest` names; None where there is no checkpoint yet."""
        try:
            return (self.path / LATEST).read_text(encoding="utf-8").strip() or None
        except (FileNotFoundError, NotADirectoryError):
            return None

    def open(self, tag: str | None = None) -> Checkpoint:
        """The checkpoint of a tag, or the latest. Raises NoCheckpointError, or CheckpointError for a damaged one."""
        chosen = self.find(tag)
        return Checkpoint(next(path for path in self._paths_of(chosen) if path.is_dir()))

    def find(self, tag: str | None = None) -> str:
        """The tag, or that of the latest. Raises NoCheckpointError, which names the tags that there are."""
        chosen = tag if tag is not None else self.latest()
        if chosen is None:
            known = self.tags()
            raise NoCheckpointError(
                f"{self.path}: expected a file `latest` that names a checkpoint, found none"
                + (f"; there are {', '.join(known)}: name one of them as `tag`" if known else " and no checkpoint")
            )
        if not any(path.is_dir() for path in self._paths_of(chosen)):
            found = ", ".join(self.tags()) or "none"
            raise NoCheckpointError(f"{self.path}: expected a checkpoint with the tag '{chosen}', found {found}")
        return chosen

    def alternative_to(self, tag: str) -> str | None:
        """The newest complete checkpoint with another tag."""
        return next((other for other in reversed(self.tags()) if other != tag), None)

    # -- writing --------------------------------------------------------------------------------------------------

    def saving_folder(self, tag: str) -> Path:
        """Where a checkpoint is while it is written."""
        return self.path / (_SAVING + tag)

    def begin(self, tag: str) -> Path:
        """An empty folder that the checkpoint is written into. Clears what dead jobs have left. Raises OSError."""
        if not tag.isprintable() or tag.strip() != tag or tag[:1] in ("", ".") or {*"/\\"} & {*tag} or tag == LATEST:
            raise ValueError(
                "tag: expected a name for a folder, without slashes, with no dot in front and no space around, "
                f"and not '{LATEST}'; found {tag!r}"
            )
        self.path.mkdir(parents=True, exist_ok=True)
        self._clear_remains()
        target = self.saving_folder(tag)
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        (target / _OWNER).write_text(json.dumps(_this_process()))
        return target

    def commit(self, manifest: Manifest, optimizer: OptimizerNames, keep_last: int | None) -> None:
        """Completes what every rank has written, gives it its name, and deletes what is above `keep_last`.

        Raises OSError and CheckpointError; the checkpoints that there were are as they were then.
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
        metadata = metadata_bytes(manifest.tensors, prefixed, optimizer, ranks)
        write_durably(saving / DCP_METADATA, metadata)
        files.append(FileEntry(DCP_METADATA, len(metadata), zlib.crc32(metadata)))
        replace(manifest, files=tuple(files), saved_at=time.time()).write(saving / MANIFEST)
        _sync_folder(saving)
        self._take_name(saving, manifest.tag)
        (self.path / manifest.tag / _OWNER).unlink(missing_ok=True)  # the last moment: without it nobody clears up
        self._write_latest(manifest.tag)
        if keep_last is not None:
            self._keep_last(keep_last, manifest.tag)

    def discard(self, tag: str) -> None:
        """Removes what was written of a checkpoint that could not be completed."""
        shutil.rmtree(self.saving_folder(tag), ignore_errors=True)

    # -- pieces of it ---------------------------------------------------------------------------------------------

    def _paths_of(self, tag: str) -> tuple[Path, Path]:
        """Where it is, and where it is while another takes its place."""
        return self.path / tag, self.path / (_REPLACED + tag)

    def _entries(self, prefix: str = "") -> list[Path]:
        try:
            entries = sorted(self.path.iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return []
        if prefix:
            return [entry for entry in entries if entry.name.startswith(prefix)]
        return [entry for entry in entries if not entry.name.startswith((_SAVING, _DELETED))]

    def _take_name(self, saving: Path, tag: str) -> None:
        target, replaced = self._paths_of(tag)
        if target.exists():
            self._delete(replaced)
            os.rename(target, replaced)
        try:
            os.rename(saving, target)
        except OSError:
            if replaced.exists():
                os.rename(replaced, target)
            raise
        _sync_folder(self.path)
        self._delete(replaced)

    def _write_latest(self, tag: str) -> None:
        write_durably(self.path / LATEST, (tag + "\n").encode())
        _sync_folder(self.path)

    def _manifests(self) -> dict[str, Manifest]:
        """What each complete checkpoint says of itself, by tag, oldest first."""
        found: dict[str, Manifest] = {}
        replaced_first = sorted(self._entries(), key=lambda entry: not entry.name.startswith(_REPLACED))
        for entry in replaced_first:
            if (entry / MANIFEST).is_file():
                with contextlib.suppress(CheckpointError):
                    found[entry.name.removeprefix(_REPLACED)] = Manifest.read(entry / MANIFEST)
        return dict(sorted(found.items(), key=lambda item: item[1].saved_at))

    def _keep_last(self, count: int, newest: str) -> None:
        """newest: comes last whatever the clocks say; they may differ between this machine and an earlier one."""
        automatic = [tag for tag, manifest in self._manifests().items() if not manifest.has_own_tag]
        automatic.sort(key=lambda tag: tag == newest)
        for tag in automatic[:-count]:
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
        for entry in self._entries(_REPLACED):  # a job has died between two renames, or before it deleted this
            target = self.path / entry.name.removeprefix(_REPLACED)
            self._delete(entry) if target.exists() else os.rename(entry, target)
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
