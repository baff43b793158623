"""Hosts of an LSF job.

LSF counts slots in processors, so a host has as many ranks as accelerators unless --nproc says otherwise. On systems
that put the script on a host of its own (Summit's kind: `batch5 1 h01 42 h02 42`) that host is left out.

Sources: IBM Spectrum LSF 10.1, "Environment variables set for job execution" and "Parallel jobs";
github.com/olcf-tutorials/Batch-Script-Examples.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from ..hosts.host import Allocation, Host, LaunchError

_BATCH_HOST = re.compile(r"(batch|login|launch)\d*(\..*)?")


def find(environ: Mapping[str, str]) -> Allocation | None:
    """The job's hosts, or None outside of LSF. Raises LaunchError for lists that cannot be read."""
    job = environ.get("LSB_JOBID")
    if not job:
        return None
    slots = _slots(environ)
    if not slots:
        return None
    source = f"LSF job {job}"
    names = list(slots)
    notes: list[str] = []
    if len(names) > 1 and _runs_only_the_script(slots, environ):
        notes.append(f"{names[0]} is left out: it has one slot, for the script")
        names = names[1:]
    most = max(slots[name] for name in names)
    if most > 1:
        notes.append(
            f"LSF gives up to {most} slots a host, which count processors; --nproc sets the ranks on each host"
        )
    hosts = tuple(Host(name) for name in names)
    alone = len(hosts) == 1 and len(slots) == 1
    return Allocation(source, "local" if alone else "ssh", hosts, notes=tuple(notes))


def host_names(environ: Mapping[str, str]) -> list[str]:
    """The hosts of the LSF job that this process belongs to; none outside of LSF."""
    allocation = find(environ)
    return [host.name for host in allocation.hosts] if allocation else []


def _slots(environ: Mapping[str, str]) -> dict[str, int]:
    """Host -> slots, in LSF's order. LSB_HOSTS comes last: LSF leaves it out where it would be long."""
    if text := environ.get("LSB_MCPU_HOSTS"):
        words = text.split()
        if len(words) % 2 or not all(word.isdigit() for word in words[1::2]):
            raise LaunchError(f'LSB_MCPU_HOSTS: expected "hostA 4 hostB 4", found "{text}"; say --hosts instead')
        pairs = [(name, int(count)) for name, count in zip(words[::2], words[1::2], strict=True)]
    elif path := environ.get("LSB_DJOB_HOSTFILE"):
        try:
            pairs = [(name, 1) for name in Path(path).read_text(encoding="utf-8").split()]
        except (OSError, UnicodeDecodeError) as error:
            raise LaunchError(f"cannot read LSB_DJOB_HOSTFILE={path}: {error}; say --hosts instead") from None
    else:
        pairs = [(name, 1) for name in environ.get("LSB_HOSTS", "").split()]
    slots: dict[str, int] = {}
    for name, count in pairs:
        slots[name] = slots.get(name, 0) + count
    return slots


def _runs_only_the_script(slots: Mapping[str, int], environ: Mapping[str, str]) -> bool:
    first, *others = slots
    named_so = _BATCH_HOST.fullmatch(first) is not None or "CSM_ALLOCATION_ID" in environ
    return named_so and slots[first] == 1 and all(slots[other] > 1 for other in others)
