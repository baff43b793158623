"""Which attempt of its job a launcher makes, and what agents and ranks are told of that."""

from dataclasses import dataclass

from ..hosts.plan import JobPlan
from ..wire.messages import Job
from .request import Request


@dataclass(frozen=True)
class Attempt:
    """identity: of the job, the same in all attempts.

    restarts: how many attempts came before it; first_world_size: the ranks of the first one, None in that one itself.
    """

    identity: str
    restarts: int = 0
    first_world_size: int | None = None

    def job(self, plan: JobPlan, request: Request, inherits_terminal: bool) -> Job:
        """What every agent is told."""
        return Job(
            identity=self.identity,
            command=plan.command,
            folder=plan.folder,
            environment=dict(plan.environment),
            inherits_terminal=inherits_terminal,
            sends_output=not request.quiet_ranks,
            log_folder=request.log_dir,
            appends_logs=self.restarts > 0,
        )

    def environment(self, port: int, world_size: int) -> dict[str, str]:
        """Of every rank: what the plan cannot know. port: of rank 0's store."""
        return {
            "MASTER_PORT": str(port),
            "LOWTIDE_RESTART_COUNT": str(self.restarts),
            "LOWTIDE_FIRST_WORLD_SIZE": str(self.first_world_size or world_size),
            "TORCHELASTIC_RESTART_COUNT": str(self.restarts),
            "TORCHELASTIC_RUN_ID": self.identity,
            # Inside of a job of torchrun it is set, and rank 0 would look for torchrun's store instead of opening one.
            "TORCHELASTIC_USE_AGENT_STORE": "False",
        }
