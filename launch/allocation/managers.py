"""Hosts of a SLURM or LSF job, and helpers for all jobs that lowtide did not start.

[Note: meeting port]
Launchers that run on every host cannot tell each other a port that a launcher has bound. So the port is a hash of the
job's name, below the kernel's range of automatic ports (32768 and up): two jobs on a host rarely collide. MASTER_PORT
overrides it.

SLURM: this process is next to the steps of its job, or a task of a step.

    where lowtide is started                     step     what it does
    sbatch script, shell of salloc               none     launches on all nodes of the job with srun
    `srun --ntasks-per-node=1 lowtide launch`    0, 1 ..  one launcher a node: they join
    `srun --ntasks-per-node=8 lowtide launch`    0, 1 ..  each is a rank already
    `srun --nodes=1 --ntasks=1 lowtide launch`   0, 1 ..  launches on this node alone

Sources: sbatch(1), salloc(1) and srun(1), "OUTPUT ENVIRONMENT VARIABLES"; slurm/slurm.h for the step numbers that are
no steps (SLURM_BATCH_SCRIPT and its neighbours). The shell of salloc may be an "interactive step", with a number
of that kind and a copy of the job's task counts.

LSF counts slots in processors, so a host gets a rank for each accelerator unless --nproc says otherwise. Some systems
(Summit's kind: `batch5 1 h01 42 h02 42`) run the script on a separate host. It is left out.

Sources: IBM Spectrum LSF 10.1, "Environment variables set for job execution" and "Parallel jobs";
github.com/olcf-tutorials/Batch-Script-Examples.
"""

import re
import zlib
from collections.abc import Mapping
from pathlib import Path

from ..hosts.host import Allocation, Host, LaunchError, Rendezvous
from ..hosts.names import expand

_FIRST_PORT, _NUM_PORTS = 20000, 10000


def number(environ: Mapping[str, str], name: str, source: str) -> int:
    """Return the number in a variable that `source` sets. Raises LaunchError if it is missing or no number."""
    value = environ.get(name, "")
    if not value.isascii() or not value.isdigit():
        found = f'"{value}"' if name in environ else "nothing"
        raise LaunchError(
            f"{source}: expected a number in the environment variable {name}, found {found}. "
            "Name the hosts with --hosts, or use --transport local for this machine alone"
        )
    return int(value)


def rendezvous_port(identity: str, environ: Mapping[str, str]) -> int:
    """Return the port at which host 0 of the job `identity` listens. See [Note: meeting port]."""
    if environ.get("MASTER_PORT"):
        return number(environ, "MASTER_PORT", identity)
    # Not hash(): Python salts it, so each host would have another port.
    return _FIRST_PORT + zlib.crc32(identity.encode()) % _NUM_PORTS


def rank_variables(rank: int, size: int, local_rank: int, local_size: int, address: str, port: int) -> dict[str, str]:
    """Return torchrun's variables of a rank that another launcher has started."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_size),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }


_MAX_NORMAL_STEP = 0xFFFFFFF0
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def find_slurm(environ: Mapping[str, str]) -> Allocation | None:
    """Return the job's hosts, or this task's part in its step; None outside SLURM. Raises LaunchError for bad lists."""
    job = environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID")
    if not job or not _nodes(environ):
        return None
    step = environ.get("SLURM_STEP_ID") or environ.get("SLURM_STEPID") or ""
    # The batch script has a number of this range or none. It is no task, so it launches on all nodes of the job.
    if not step.isdigit() or int(step) >= _MAX_NORMAL_STEP or not environ.get("SLURM_STEP_NODELIST"):
        return _job(environ, f"SLURM job {job}")
    return _step(environ, f"SLURM job {job}, step {step}")


def node_names(environ: Mapping[str, str]) -> list[str]:
    """Return the nodes of this process's SLURM job, [] outside SLURM."""
    return expand(_nodes(environ))


def counts(text: str) -> list[int]:
    """Parse SLURM_TASKS_PER_NODE: `8(x2),4` -> [8, 8, 4]. Raises LaunchError for anything else."""
    result: list[int] = []
    for piece in text.split(","):
        match = _COUNT.fullmatch(piece.strip())
        if match is None:
            raise LaunchError(f'expected SLURM\'s form of counts, "8(x2),4", found "{text}". Use --hosts instead')
        result += [int(match[1])] * int(match[2] or 1)
    return result


def _nodes(environ: Mapping[str, str]) -> str:
    return environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST") or ""


def _job(environ: Mapping[str, str], source: str) -> Allocation:
    names = node_names(environ)
    tasks = _asked_tasks(environ, len(names))
    hosts = tuple(
        # A single task on a node is the script or a launcher, so the node gets a rank for each accelerator.
        Host(name, tuple(range(count)) if count > 1 else None, expected_devices=_num_devices(environ, index))
        for index, (name, count) in enumerate(zip(names, tasks, strict=True))
    )
    # Only a process on the node has this variable. The shell of salloc may run on a login node.
    is_here = len(hosts) == 1 and "SLURM_NODEID" in environ
    return Allocation(source, "local" if is_here else "srun", hosts)


def _asked_tasks(environ: Mapping[str, str], num_nodes: int) -> list[int]:
    """Return tasks per node if the user asked for them, else 1 for each.

    SLURM_TASKS_PER_NODE alone is not enough: without --ntasks and related options it may count processors.
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
            f"SLURM_JOB_NODELIST={_nodes(environ)} has {num_nodes}. Name the hosts with --hosts"
        )
    return tasks


def _num_devices(environ: Mapping[str, str], index: int) -> int | None:
    """Return the job's accelerators on node `index`: as asked for, or counted on the first node, the script's."""
    asked = environ.get("SLURM_GPUS_PER_NODE", "").rpartition(":")[2]  # "8" or "a100:8"
    if asked.isdigit():
        return int(asked)
    # The variables below describe the node of this process. The shell of salloc may run on a login node.
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
            f"{source}: its {len(tasks)} task counts do not match its {len(names)} nodes. Start a task on each node: "
            "srun --ntasks-per-node=1 lowtide launch ..."
        )
    # The user asked srun for this node alone, so the remaining nodes of the job are not used.
    if tasks == [1]:
        num_others = len(node_names(environ)) - 1
        note = f"this step has 1 of the job's {num_others + 1} nodes; start lowtide outside srun to use all"
        return Allocation(source, "local", hosts, notes=(note,) if num_others else ())
    # The number counts within the step's nodes, as does `names`.
    index = number(environ, "SLURM_NODEID", source)
    if index >= len(names):
        raise LaunchError(
            f"{source}: SLURM_NODEID={index} is out of range for its {len(names)} nodes. Use --hosts instead"
        )
    port = rendezvous_port(source, environ)
    # With a task on each node, every task is a launcher of its node. With more tasks, every task is a rank.
    if set(tasks) == {1}:
        rendezvous = Rendezvous(index, names[0], port, source)
        return Allocation(source, "join", hosts, part="agent" if index else "launcher", rendezvous=rendezvous)
    rank = number(environ, "SLURM_PROCID", source)
    local_rank = number(environ, "SLURM_LOCALID", source)
    address = names[0] if len(names) > 1 else "127.0.0.1"
    variables = rank_variables(rank, sum(tasks), local_rank, tasks[index], address, port)
    note = f"srun has started {sum(tasks)} tasks, and this is rank {rank}: it runs the script itself"
    return Allocation(source, "join", hosts, notes=(note,), part="rank", rank_environment=variables)


_BATCH_HOST = re.compile(r"(batch|login|launch)\d*(\..*)?")


def find_lsf(environ: Mapping[str, str]) -> Allocation | None:
    """Return the job's hosts, or None outside LSF. Raises LaunchError for unreadable lists."""
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
        notes.append(f"{names[0]} is left out: its only slot is for the script")
        names = names[1:]
    most = max(slots[name] for name in names)
    if most > 1:
        notes.append(
            f"LSF gives up to {most} slots a host, which count processors; --nproc sets the ranks on each host"
        )
    hosts = tuple(Host(name) for name in names)
    # If the script's host was left out, the remaining host is another host and needs ssh.
    alone = len(hosts) == 1 and len(slots) == 1
    return Allocation(source, "local" if alone else "ssh", hosts, notes=tuple(notes))


def host_names(environ: Mapping[str, str]) -> list[str]:
    """Return the hosts of this process's LSF job, [] outside LSF."""
    allocation = find_lsf(environ)
    return [host.name for host in allocation.hosts] if allocation else []


def _slots(environ: Mapping[str, str]) -> dict[str, int]:
    """Return host -> slots, in LSF's order. LSB_HOSTS comes last: LSF omits it if it would be long."""
    if text := environ.get("LSB_MCPU_HOSTS"):
        words = text.split()
        if len(words) % 2 or not all(word.isdigit() for word in words[1::2]):
            raise LaunchError(f'LSB_MCPU_HOSTS: expected "hostA 4 hostB 4", found "{text}". Use --hosts instead')
        pairs = [(name, int(count)) for name, count in zip(words[::2], words[1::2], strict=True)]
    elif path := environ.get("LSB_DJOB_HOSTFILE"):
        try:
            pairs = [(name, 1) for name in Path(path).read_text(encoding="utf-8").split()]
        except (OSError, UnicodeDecodeError) as error:
            raise LaunchError(f"cannot read LSB_DJOB_HOSTFILE={path}: {error}. Use --hosts instead") from None
    else:
        pairs = [(name, 1) for name in environ.get("LSB_HOSTS", "").split()]
    slots: dict[str, int] = {}
    # LSB_HOSTS and the host file repeat a host for each of its slots.
    for name, count in pairs:
        slots[name] = slots.get(name, 0) + count
    return slots


def _runs_only_the_script(slots: Mapping[str, int], environ: Mapping[str, str]) -> bool:
    first, *rest = slots
    # By name, or on CSM systems (Summit) by its variable. An ordinary host with a single slot is not left out.
    named_so = _BATCH_HOST.fullmatch(first) is not None or "CSM_ALLOCATION_ID" in environ
    return named_so and slots[first] == 1 and all(slots[name] > 1 for name in rest)
