"""A folder of checkpoints: its tags, the latest, and how a new checkpoint is committed.

    folder/latest                   the tag of the newest complete checkpoint
    folder/global_step100/          a complete checkpoint
    folder/.saving-global_step200/  a checkpoint being written, or left by a dead job
    folder/.owner-global_step200    the process that writes it; made first and removed last, so a dead writer is known

[Note: never half]
A checkpoint is written into a folder with a temporary name. When every file is on the disk, the folder is renamed, and
then `latest` is replaced. Each step is atomic, and durable before the next. So a folder with the name of a tag is
complete, whenever a job dies. An existing tag is replaced in two renames: the old checkpoint first gets another name,
under which it is found if the job dies in between.

[Note: neighbours]
Foreign entries in the folder must not stop a save or a load. An entry that cannot be read or deleted stays, with a
warning. It does not count for `keep_last` and is never offered.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import psutil

from .checkpoint import Checkpoint, check_coverage
from .dcp import OptimizerNames, metadata_bytes
from .files import (
    DCP_METADATA,
    LATEST,
    MANIFEST,
    CheckpointError,
    Count,
    NoCheckpointError,
    Number,
    Text,
    check_tag,
    data_name,
    folder_path,
    index_name,
    read_regular,
    sync_folder,
    write_durably,
)
from .index import LAST_MOMENT, FileContent, FileEntry, Manifest, RankIndex, rows_by_name

_SAVING = ".saving-"
_REPLACED = ".replaced-"
_DELETED = ".deleted-"
_OWNER = ".owner-"
_CLOCK_SECONDS = 10.0  # psutil tells the start of a process by the clock of the host, which may be set meanwhile
_logger = logging.getLogger("lowtide")


class CheckpointFolder:
    """The checkpoints in a folder."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Raise ValueError for the path ""."""
        self.path = folder_path(path)

    # -- reading --------------------------------------------------------------------------------------------------

    def tags(self) -> list[str]:
        """List the tags of the complete checkpoints, oldest first."""
        return list(self._manifests())

    def unfinished(self) -> list[str]:
        """List the tags of checkpoints being saved, or left by dead jobs."""
        return sorted(entry.name.removeprefix(_SAVING) for entry in self._entries(_SAVING))

    def latest(self) -> str | None:
        """Return the tag in `latest`. None if there is no checkpoint yet. Raises CheckpointError for bad content."""
        path = self.path / LATEST
        try:
            tag = read_regular(path).decode().strip()
            if tag:
                check_tag(tag)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror}. Pass the `tag` of a checkpoint.") from error
        except ValueError as error:
            raise CheckpointError(f"{path}: {error}. Pass the `tag` of a checkpoint.") from None
        return tag or None

    def open(self, tag: str | None = None) -> Checkpoint:
        """Open the checkpoint of a tag, or the latest.

        Raises NoCheckpointError if there is none, CheckpointError if it is damaged.
        """
        chosen = self.find(tag)
        # The second path exists alone if a job died between the two renames of [Note: never half].
        return Checkpoint(next(path for path in self._paths_of(chosen) if path.is_dir()))

    def find(self, tag: str | None = None) -> str:
        """Return the tag, or the latest tag. Raises NoCheckpointError if the folder has no checkpoint, or not this tag.

        Raises ValueError for an impossible tag, CheckpointError if `latest` names none of the folder's checkpoints.
        """
        if tag is not None:
            check_tag(tag)
        if not self.path.exists():
            raise NoCheckpointError(f"{self.path}: expected a folder with checkpoints, but it does not exist")
        if (self.path / MANIFEST).is_file():
            raise CheckpointError(
                f"{self.path}: expected a folder with checkpoints, found a checkpoint. Pass its parent "
                f"'{self.path.absolute().parent}' and the tag '{self.path.absolute().name}'."
            )
        chosen = tag if tag is not None else self.latest()
        if chosen is not None and any(path.is_dir() for path in self._paths_of(chosen)):
            return chosen
        known = ", ".join(self.tags())
        if tag is not None:
            raise NoCheckpointError(f"{self.path}: expected a checkpoint with the tag '{tag}', found {known or 'none'}")
        named = "none" if chosen is None else f"'{chosen}' in it"
        text = f"{self.path}: expected a file `latest` that names a checkpoint, found {named}"
        if not known:
            raise NoCheckpointError(f"{text} and no checkpoint")
        # Not NoCheckpointError: scripts take that for their first start, and would train anew.
        raise CheckpointError(f"{text}. Pass a `tag`: the folder has {known}.")

    def alternative_to(self, tag: str) -> str | None:
        """Return the newest complete checkpoint with another tag."""
        return next((other for other in reversed(self._manifests(warns=True)) if other != tag), None)

    # -- writing --------------------------------------------------------------------------------------------------

    def saving_folder(self, tag: str) -> Path:
        """The folder of a checkpoint while it is written."""
        return self.path / (_SAVING + tag)

    def begin(self, tag: str) -> Path:
        """Make an empty folder to write into, and clear leftovers of dead jobs.

        Raises OSError, also if a living process of this host writes the tag: two writers would mix their files.
        """
        check_tag(tag)
        self.path.mkdir(parents=True, exist_ok=True)
        self._clear_remains()
        target = self.saving_folder(tag)
        writer = _writer_of(self._owner_of(tag))
        if writer is not None and writer.is_another:
            raise FileExistsError(
                f"{self.path}: expected a folder for this run alone, found that process {writer.pid} saves '{tag}' "
                "into it now; give each run a folder or a tag of its own"
            )
        # Whoever left it: the owner of a job on another host cannot be judged, and this job saves the tag anew.
        shutil.rmtree(target, ignore_errors=True)
        try:
            # The owner first: a folder without an owner could not be told from that of a dead job.
            self._owner_of(tag).write_text(WritingProcess.this().model_dump_json())
            target.mkdir()
        except OSError:
            self.discard(tag)
            raise
        return target

    def commit(
        self, manifest: Manifest, optimizer: OptimizerNames, keep_last: int | None, is_latest: bool = True
    ) -> None:
        """Complete the checkpoint that all ranks have written, give it its name, and enforce `keep_last`.

        is_latest: let `latest` name it. Raises OSError, or ValueError if parts are missing; existing checkpoints are
        then unchanged.
        """
        saving = self.saving_folder(manifest.tag)
        files = []
        ranks = []
        for rank in range(manifest.num_files):
            text = (saving / index_name(rank)).read_bytes()
            ranks.append(RankIndex.from_json(text))
            # No checksum of the file: each of its rows has a checksum, and a part can then be verified alone.
            files.append(FileEntry(name=data_name(rank), nbytes=ranks[-1].file_nbytes, crc32=None))
            files.append(FileEntry(name=index_name(rank), nbytes=len(text), crc32=zlib.crc32(text)))
        prefixed = {f"model.{alias}": f"model.{name}" for alias, name in manifest.aliases.items()}
        rows = rows_by_name(ranks)
        check_coverage(manifest.tensors, rows, [index.file_nbytes for index in ranks])
        metadata = metadata_bytes(manifest.tensors, prefixed, optimizer, rows)
        write_durably(saving / DCP_METADATA, metadata)
        files.append(FileEntry(name=DCP_METADATA, nbytes=len(metadata), crc32=zlib.crc32(metadata)))
        # The manifest last: a folder with it counts as a checkpoint, see `find` and `_manifests`.
        complete = {"files": tuple(files), "saved_at": self._next_moment()}
        manifest.model_copy(update=complete).write(saving / MANIFEST)
        sync_folder(saving)
        self._take_name(saving, manifest.tag)
        if is_latest:
            self._write_latest(manifest.tag)
        # From here on the checkpoint is safe: what cannot be removed stays, with a warning.
        with _tolerated(self._owner_of(manifest.tag)):
            self._owner_of(manifest.tag).unlink(missing_ok=True)
        if keep_last is not None:
            self._keep_last(keep_last, manifest.tag)

    def discard(self, tag: str) -> None:
        """Remove an incomplete checkpoint."""
        with contextlib.suppress(OSError):
            self._remove_unfinished(tag)

    # -- names and renames ----------------------------------------------------------------------------------------

    def _paths_of(self, tag: str) -> tuple[Path, Path]:
        """Return the path of a checkpoint, and its path while another checkpoint replaces it."""
        return self.path / tag, self.path / (_REPLACED + tag)

    def _entries(self, prefix: str = "") -> list[Path]:
        try:
            entries = sorted(self.path.iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return []
        if prefix:
            return [entry for entry in entries if entry.name.startswith(prefix)]
        return [entry for entry in entries if not entry.name.startswith((_SAVING, _OWNER, _DELETED))]

    def _owner_of(self, tag: str) -> Path:
        return self.path / (_OWNER + tag)

    def _next_moment(self) -> float:
        """Return the time, or just after the latest checkpoint if the clock was set back, so newer means later."""
        now = time.time()
        with contextlib.suppress(CheckpointError):
            latest = self.latest()
            if latest is not None:
                return max(now, min(Manifest.read(self.path / latest / MANIFEST).saved_at + 0.001, LAST_MOMENT - 1))
        return now

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
        sync_folder(self.path)
        with _tolerated(replaced):
            self._delete(replaced)

    def _write_latest(self, tag: str) -> None:
        new = self.path / tag / LATEST  # in the checkpoint's folder: another run may write its `latest` now
        write_durably(new, (tag + "\n").encode())
        os.replace(new, self.path / LATEST)
        sync_folder(self.path)

    def _manifests(self, warns: bool = False) -> dict[str, Manifest]:
        """Read the description of each complete checkpoint, by tag, oldest first. See [Note: neighbours]."""
        found: dict[str, Manifest] = {}
        # If both exist, the folder with the tag's name is newer: it comes later and takes the place in `found`.
        replaced_first = sorted(self._entries(), key=lambda entry: not entry.name.startswith(_REPLACED))
        for entry in replaced_first:
            # A broken link counts as a description: its checkpoint is damaged, and a warning says so.
            if not os.path.lexists(entry / MANIFEST):
                continue
            tag = entry.name.removeprefix(_REPLACED)
            try:
                check_tag(tag)
                found[tag] = Manifest.read(entry / MANIFEST)
            except (CheckpointError, ValueError) as error:
                if warns:
                    _logger.warning("a checkpoint in %s is damaged and ignored: %s", self.path, error)
        return dict(sorted(found.items(), key=lambda item: (item[1].saved_at, item[1].step, item[0])))

    def _keep_last(self, count: int, newest: str) -> None:
        """Delete all but the last `count` automatic checkpoints, and the checkpoint that `latest` names.

        newest: counts as the last, even if `latest` was unreadable and could not order the times.
        """
        named: str | None = None
        with contextlib.suppress(CheckpointError):
            named = self.latest()  # older than the newest after saves with `is_latest` False
        automatic = [tag for tag, manifest in self._manifests(warns=True).items() if not manifest.has_own_tag]
        # A stable sort: it moves only the newest tag, to the end.
        automatic.sort(key=lambda tag: tag == newest)
        for tag in [tag for tag in automatic[:-count] if tag != named]:
            with _tolerated(self.path / tag):
                self._delete(self.path / tag)

    def _delete(self, folder: Path) -> None:
        """Delete a folder, after a rename: a half-deleted folder must not look like a checkpoint."""
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
        for entry in self._entries(_REPLACED):  # a job died between two renames, or before it deleted the old folder
            target = self.path / entry.name.removeprefix(_REPLACED)
            with _tolerated(entry):
                self._delete(entry) if target.exists() else os.rename(entry, target)
        for entry in self._entries(_OWNER):
            tag = entry.name.removeprefix(_OWNER)
            with _tolerated(entry):
                if _is_abandoned(entry, self.saving_folder(tag)):
                    self._remove_unfinished(tag)

    def _remove_unfinished(self, tag: str) -> None:
        shutil.rmtree(self.saving_folder(tag), ignore_errors=True)
        if not self.saving_folder(tag).exists():  # without an owner, no later job would clear what is left
            self._owner_of(tag).unlink()


def _is_abandoned(owner: Path, saving: Path) -> bool:
    """Return True if the owner is known to be gone, or died before it wrote anything."""
    writer = _writer_of(owner)
    # Without a readable owner, a folder may be in use. Without a folder nothing can be lost.
    return not saving.exists() if writer is None else writer.is_dead


def _writer_of(owner: Path) -> WritingProcess | None:
    """Read the process in the file of an owner. None without a readable owner."""
    try:
        writer: WritingProcess = WritingProcess.parse(json.loads(read_regular(owner)))
    except (FileNotFoundError, ValueError, RecursionError):
        return None
    return writer


@contextlib.contextmanager
def _tolerated(path: Path) -> Iterator[None]:
    """Turn an OSError into a warning. See [Note: neighbours]."""
    try:
        yield
    except OSError as error:
        _logger.warning("%s could not be removed and stays: %s", path, error.strerror)


# -- the writing process ----------------------------------------------------------------------------------------------


class WritingProcess(FileContent):
    """The identity of a process for other processes on its host."""

    host: Text  # boot id and pid namespace (containers number their processes separately); "" if unknown
    pid: Count
    started: Number  # seconds since 1970, since the system reuses pids

    @classmethod
    def this(cls) -> WritingProcess:
        return cls(host=_host(), pid=os.getpid(), started=psutil.Process().create_time())

    @property
    def is_dead(self) -> bool:
        """True if it is known that the process of this host is gone, or that its pid was reused."""
        if not self.host or self.host != _host():
            return False
        try:
            found = psutil.Process(self.pid)
            # A zombie writes nothing more, but keeps its pid until its parent asks for it.
            is_same = abs(found.create_time() - self.started) < _CLOCK_SECONDS
            return not is_same or found.status() == psutil.STATUS_ZOMBIE
        except (psutil.NoSuchProcess, ValueError, OverflowError):
            return True

    @property
    def is_another(self) -> bool:
        """True if it is known to be another living process of this host."""
        return bool(self.host) and self.host == _host() and not self.is_dead and self.pid != os.getpid()


def _host() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""
