"""What this host reports about itself: accelerators, processors, NUMA nodes, and the variables that concern them."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from .devices import find_devices
from .host import REPORTED_VARIABLES, HostReport
from .numa import allowed_processors, core_limit, numa_nodes, physical_cores


def report_host(
    environ: Mapping[str, str] | None = None,
    root: Path = Path("/"),
    list_nvidia: Callable[[], str | None] | None = None,
) -> HostReport:
    """The report of this host; takes as long as `nvidia-smi -L`, where there is one.

    environ: None: that of this process. root: of /sys, /proc and /dev. list_nvidia: as for `find_devices`.
    """
    values = os.environ if environ is None else environ
    kind, devices = find_devices(root, list_nvidia)
    allowed = allowed_processors()
    return HostReport(
        kind=kind,
        devices=devices,
        cores=physical_cores(root, allowed),
        core_limit=core_limit(root),
        nodes=numa_nodes(root, allowed),
        environment={name: values[name] for name in REPORTED_VARIABLES if name in values},
    )
