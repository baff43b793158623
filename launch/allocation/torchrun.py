"""A rank that torchrun, or anything else that sets its variables, has started: there is nothing to plan.

Source: https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables
"""

from collections.abc import Mapping

from ..hosts.host import Allocation, Host
from .started import number

_OF_A_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def find(environ: Mapping[str, str]) -> Allocation | None:
    """This process as a rank of the world that is there, or None. LOCAL_RANK tells it from a pod (kubernetes.py)."""
    if not all(environ.get(name) for name in _OF_A_RANK):
        return None
    starters = {"LOWTIDE_JOB_ID": "lowtide launch", "TORCHELASTIC_RUN_ID": "torchrun"}
    starter = next((starter for name, starter in starters.items() if name in environ), "the environment")
    source = f"{starter} (RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set)"
    rank, size = number(environ, "RANK", source), number(environ, "WORLD_SIZE", source)
    note = f"this process is rank {rank} of {size} already: the script runs in its place"
    return Allocation(source, "join", (Host("localhost"),), notes=(note,), part="rank")
