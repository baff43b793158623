"""Hosts of a SLURM job, and whether this process stands beside its steps or is a task of one.

    where lowtide is started                     step     what it does
    sbatch script, shell of salloc               none     launches on all nodes of the job with srun
    `srun --ntasks-per-node=1 lowtide launch`    0, 1 ..  one launcher a node: they join
    `srun --ntasks-per-node=8 lowtide launch`    0, 1 ..  each is a rank already
    `srun --nodes=1 --ntasks=1 lowtide launch`   0, 1 ..  launches on this node alone

Sources: sbatch(1), salloc(1) and srun(1), "OUTPUT ENVIRONMENT VARIABLES"; the step numbers that are none are those of
slurm/slurm.h (SLURM_BATCH_SCRIPT and its neighbours). The shell of salloc may be an "interactive step", which has a
number of that kind and a copy of the job's task counts.
"""

import re
from collections.abc import Mapping

from ..hosts.host import Allocation, Host, LaunchError, Meeting
from ..hosts.names import expand
from .started import meeting_port, number, rank_variables

_MAX_NORMAL_STEP = 0xFFFFFFF0
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def find(environ: Mapping[str, str]) -> Allocation | None:
    """The job's hosts, or this task's part in its step; None outside of SLURM. Raises LaunchError for broken lists."""
    job = environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID")
    if not job or not _nodes(environ):
        return None
    step = environ.get("SLURM_STEP_ID") or environ.get("SLURM_STEPID") or ""
    if not step.isdigit() or int(step) >= _MAX_NORMAL_STEP or not environ.get("SLURM_STEP_NODELIST"):
        return _job(environ, f"SLURM job {job}")
    return _step(environ, f"SLURM job {job}, step {step}")


def node_names(environ: Mapping[str, str]) -> list[str]:
    """The nodes of the SLURM job that this process belongs to; none outside of SLURM."""
    return expand(_nodes(environ))


def counts(text: str) -> list[int]:
    """`8(x2),4` -> [8, 8, 4], as SLURM_TASKS_PER_NODE has it. Raises LaunchError for anything else."""
    result: list[int] = []
    for piece in text.split(","):
        match = _COUNT.fullmatch(piece.strip())
        if match is None:
            raise LaunchError(f'expected counts as SLURM writes them, "8(x2),4", found "{text}"; say --hosts instead')
        result += [int(match[1])] * int(match[2] or 1)
    return result


def _nodes(environ: Mapping[str, str]) -> str:
    return environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST") or ""


def _job(environ: Mapping[str, str], source: str) -> Allocation:
    names = node_names(environ)
    tasks = _asked_tasks(environ, len(names))
    hosts = tuple(
        Host(name, tuple(range(count)) if count > 1 else None, expected_devices=_num_devices(environ, index))
        for index, (name, count) in enumerate(zip(names, tasks, strict=True))
    )
    return Allocation(source, "srun" if len(hosts) > 1 else "local", hosts)


def _asked_tasks(environ: Mapping[str, str], num_nodes: int) -> list[int]:
    """Tasks per node where the user has asked for them.

    SLURM_TASKS_PER_NODE alone says nothing: without --ntasks and its kin it may count processors.
    """
    per_node = environ.get("SLURM_NTASKS_PER_NODE", "")
    if per_node.isdigit():
        return [int(per_node)] * num_nodes
    if not environ.get("SLURM_NTASKS") or not environ.get("SLURM_TASKS_PER_NODE"):
        return [1] * num_nodes
    tasks = counts(environ["SLURM_TASKS_PER_NODE"])
    if len(tasks) != num_nodes:
        raise LaunchError(
            f"SLURM_TASKS_PER_NODE={environ['SLURM_TASKS_PER_NODE']} has {len(tasks)} nodes, "
            f"SLURM_JOB_NODELIST={_nodes(environ)} has {num_nodes}; say the hosts with --hosts"
        )
    return tasks


def _num_devices(environ: Mapping[str, str], index: int) -> int | None:
    """The job's accelerators on node `index`: asked for on each, or counted on the first, where the script runs."""
    asked = environ.get("SLURM_GPUS_PER_NODE", "").rpartition(":")[2]  # "8" or "a100:8"
    if asked.isdigit():
        return int(asked)
    if index > 0 or "SLURM_NODEID" not in environ:
        return None
    if environ.get("SLURM_GPUS_ON_NODE", "").isdigit():
        return int(environ["SLURM_GPUS_ON_NODE"])
    numbers = environ.get("SLURM_JOB_GPUS", "")
    return len(numbers.split(",")) if numbers else None


def _step(environ: Mapping[str, str], source: str) -> Allocation:
    names = expand(environ["SLURM_STEP_NODELIST"])
    tasks = counts(environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE", ""))
    hosts = tuple(Host(name) for name in names)
    if len(tasks) != len(names):
        raise LaunchError(
            f"{source}: its {len(tasks)} task counts do not fit its {len(names)} nodes; start one task a node: "
            "srun --ntasks-per-node=1 lowtide launch ..."
        )
    if tasks == [1]:
        num_others = len(node_names(environ)) - 1
        note = f"this step has 1 of the job's {num_others + 1} nodes; start lowtide outside of srun to use all"
        return Allocation(source, "local", hosts, notes=(note,) if num_others else ())
    index = number(environ, "SLURM_NODEID", source)
    if index >= len(names):
        raise LaunchError(f"{source}: SLURM_NODEID={index} is outside of its {len(names)} nodes; say --hosts instead")
    port = meeting_port(source, environ)
    if set(tasks) == {1}:
        meeting = Meeting(index, names[0], port, source)
        return Allocation(source, "join", hosts, part="agent" if index else "launcher", meeting=meeting)
    rank = number(environ, "SLURM_PROCID", source)
    local_rank = number(environ, "SLURM_LOCALID", source)
    address = names[0] if len(names) > 1 else "127.0.0.1"
    variables = rank_variables(rank, sum(tasks), local_rank, tasks[index], address, port)
    note = f"srun has started {sum(tasks)} tasks, of which this is rank {rank}: the script runs in its place"
    return Allocation(source, "join", hosts, notes=(note,), part="rank", rank_environment=variables)
