"""Where islands save, and which checkpoint they load together.

    folder/island0/latest, global_step100/      each island saves for itself, as a job of its own would
    folder/island1/latest, global_step100/

All islands load the same tag: the one of the last step that each of them sees, in its own folder or another's. An
island whose own folder does not have it (it is new, or was lost before) takes another's.
"""

from __future__ import annotations

import os
from pathlib import Path

from ..checkpoint.errors import CheckpointError, NoCheckpointError
from ..checkpoint.folder import CheckpointFolder
from ..comm import Ring, World
from .archive.agreement import all_or_none, shown


def own_folder(folder: str | os.PathLike[str], island: int) -> Path:
    """Where an island saves."""
    return Path(folder) / f"island{island}"


def chosen(ring: Ring, world: World, folder: str | os.PathLike[str], tag: str | None) -> tuple[Path, str | None]:
    """(folder, tag) that this island loads. A collective of all islands.

    tag: None: the last that all islands see. Where no island has ever saved there, it is the folder itself.
    Raises NoCheckpointError where there is none that all see.
    """
    found: tuple[Path, str | None] | None = None
    absent = ""
    with all_or_none(world, f"looking for checkpoints of islands in {shown(folder)}"):
        if world.rank == 0:
            seen = _seen(Path(folder), tag)
            told = ring.tell({name: max(steps.values()) for name, steps in seen.items()})
            try:
                found = _of_all(ring, Path(folder), tag, seen, told)
            except NoCheckpointError as error:
                absent = str(error)
    found, absent = world.broadcast_object((found, absent))
    if found is None:
        raise NoCheckpointError(absent)
    return found


def _seen(folder: Path, tag: str | None) -> dict[str, dict[str, int]]:
    """tag -> island's folder -> step, of what may be loaded."""
    seen: dict[str, dict[str, int]] = {}
    for path in sorted(folder.glob("island*")):
        own = CheckpointFolder(path)
        for name in [tag] if tag is not None else own.tags():
            try:
                seen.setdefault(name, {})[path.name] = own.open(name).manifest.step
            except CheckpointError:
                continue  # it is damaged, or not there: then it is not one of all
    return seen


def _of_all(
    ring: Ring, folder: Path, tag: str | None, seen: dict[str, dict[str, int]], told: dict[int, dict[str, int]]
) -> tuple[Path, str | None]:
    """told: island -> tag -> step."""
    if not any(told.values()) and CheckpointFolder(folder).latest() is not None:
        return folder, tag
    common = {name for steps in told.values() for name in steps}
    common = {name for name in common if len({steps.get(name) for steps in told.values()}) == 1 and name in seen}
    if not common:
        each = "; ".join(f"island {island}: {', '.join(steps) or 'none'}" for island, steps in told.items())
        raise NoCheckpointError(
            f"{folder}: expected a checkpoint {f'with the tag {tag!r} ' if tag else ''}that all islands see, of one "
            f"step, found {each}"
        )
    own_told = told[ring.islands.island]
    best = max(common, key=lambda name: (own_told[name], name))
    places = sorted(place for place, step in seen[best].items() if step == own_told[best])
    own = own_folder(folder, ring.islands.island)
    return own if own.name in places else folder / places[ring.islands.island % len(places)], best
