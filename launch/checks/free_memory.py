"""How much memory new processes of this host may take: what the system has left, and what its control groups allow."""

from collections.abc import Iterator
from pathlib import Path

_V1_LEVELS = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2_LEVELS = ("memory.max", "memory.current", "inactive_file")


def free_memory_bytes(root: Path = Path("/")) -> int:
    """What can be taken without swapping and without a limit of this process's control groups. root: of /sys and /proc.

    Page cache that nobody has used lately counts as free in both.
    """
    import psutil  # here: it would take a tenth of a launcher's start, which has no use for it

    left: int = psutil.virtual_memory().available
    for folder, (limit_name, usage_name, cache_name) in _groups(root):
        try:
            limit = (folder / limit_name).read_text().strip()
            usage = int((folder / usage_name).read_text())
            lines = (folder / "memory.stat").read_text().splitlines()
        except OSError:  # the root group has no limit, nor the files
            continue
        if limit != "max":
            cache = next((int(line.split()[1]) for line in lines if line.startswith(f"{cache_name} ")), 0)
            left = min(left, int(limit) - usage + cache)
    return max(left, 0)


def _groups(root: Path) -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """The folders of this process's memory control groups up to the outermost, and the names of what is read there."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        names = _V1_LEVELS if controllers else _V2_LEVELS
        # In a container the path may be that of the outer system; then the mounted root is the container's own group.
        group = Path(path.strip("/"))
        for inner in (group, *group.parents):
            yield base / inner, names
