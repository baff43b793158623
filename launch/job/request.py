"""What a user asks of the launcher, apart from where."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ..hosts.plan import Bind


@dataclass(frozen=True)
class Request:
    """What the user asks of the launcher.

    command: of a rank, the interpreter first; arguments: those of the script. environment: as `job_environment` gives
    it. grace_seconds: between asking a rank to stop and killing it. step_limit_seconds: None: as the ranks' config
    says. connect_seconds: for the agents of all hosts to come.
    notes_of_one_rank: what is said where the job has no more than one.
    """

    command: tuple[str, ...]
    folder: str
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    quiet_ranks: bool = False
    log_dir: str | None = None
    grace_seconds: float = 15.0
    master_port: int | None = None
    bind: Bind = "auto"
    preflight: bool = True
    check_folders: tuple[str, ...] = ()
    step_limit_seconds: float | None = None
    on_stall: Literal["report", "stop"] = "report"
    connect_seconds: float = 60.0
    notes_of_one_rank: tuple[str, ...] = ()
