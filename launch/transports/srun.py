"""Transport "srun": SLURM starts the agents, as one step over all nodes of the job."""

from collections.abc import Sequence


def srun_command(agent: Sequence[str], hosts: Sequence[str]) -> list[str]:
    """One task a node, which may use all that the job has there, also beside other steps of the job.

    Source: SLURM's srun manual; --overlap since 20.11. Without --exact a step has all cores of its nodes.
    """
    return [
        "srun",
        f"--nodes={len(hosts)}",
        f"--ntasks={len(hosts)}",
        "--ntasks-per-node=1",
        f"--nodelist={','.join(hosts)}",
        "--overlap",
        "--export=ALL",
        "--input=none",
        "--cpu-bind=none",
        "--kill-on-bad-exit=0",
        *agent,
    ]
