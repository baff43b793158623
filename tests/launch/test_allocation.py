"""Where a job's hosts come from, and what this process is in it: the command line, SLURM, LSF, MPI, Kubernetes."""

from pathlib import Path
from typing import Any

import pytest

from lowtide.launch.allocation.allocation import AllocationRequest, find_allocation
from lowtide.launch.hosts.host import Allocation, Host, LaunchError, Rendezvous
from tests.kit.training import refusal

Variables = dict[str, str]


def env(text: str) -> Variables:
    """Of a text such as A=1 B=2."""
    return dict(word.split("=", 1) for word in text.split())


TORCHRUN = env("TORCHELASTIC_RUN_ID=none RANK=3 LOCAL_RANK=1 WORLD_SIZE=4 MASTER_ADDR=h MASTER_PORT=29500")
SLURM = env("SLURM_JOB_ID=7 SLURM_JOB_NODELIST=n[1-3]")
# As sbatch --nodes=3 --gpus-per-node=a100:4 sets it, on the first node.
BATCH = env("SLURM_JOB_ID=4711 SLURM_JOB_NODELIST=gpu[08-09],login1 SLURM_JOB_NUM_NODES=3 SLURM_TASKS_PER_NODE=28(x3)")
BATCH |= env("SLURM_NODEID=0 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_GPUS_ON_NODE=4 SLURM_JOB_GPUS=0,1,2,3")
# As srun --nodes=2 --ntasks-per-node=1 adds to it.
STEP = BATCH | env("SLURM_STEP_ID=2 SLURM_STEP_NODELIST=gpu[08-09] SLURM_STEP_NUM_TASKS=2")
STEP |= env("SLURM_STEP_TASKS_PER_NODE=1(x2)")
POD = env("KUBERNETES_SERVICE_HOST=10.96.0.1 PYTHONUNBUFFERED=1")
# training-operator before 1.7: RANK and WORLD_SIZE are pods. Since 1.7, WORLD_SIZE is pods x nprocPerNode.
OLD = POD | env("MASTER_ADDR=gpt-master-0 MASTER_PORT=23456 WORLD_SIZE=3 RANK=2")
NEW = OLD | env("WORLD_SIZE=24 PET_NNODES=3 PET_NPROC_PER_NODE=8 PET_NODE_RANK=2")
NEW |= env("PET_MASTER_ADDR=gpt-master-0 PET_MASTER_PORT=23456")
ELASTIC = POD | env("HOSTNAME=gpt-worker-1 PET_RDZV_ENDPOINT=gpt-worker-0:29400 PET_RDZV_BACKEND=c10d PET_NNODES=2:4")
ELASTIC |= env("PET_N_PROC_PER_NODE=2")
TRAIN_JOB = POD | env("PET_NNODES=2 PET_NPROC_PER_NODE=auto PET_NODE_RANK=1 PET_MASTER_ADDR=run-node-0-0.run")
TRAIN_JOB |= env("PET_MASTER_PORT=29500 JOB_COMPLETION_INDEX=1")
INDEXED = POD | env("JOB_COMPLETION_INDEX=2 HOSTNAME=train-2")
GPT_PODS = ["gpt-master-0", "gpt-worker-0", "gpt-worker-1"]
MEET_1 = "by hand node1:23456"
BY_HAND = {"num_hosts": 3, "meet": "node1:23456", "nproc": 4}
HEAD = env("MASTER_ADDR=head MASTER_PORT=1234")
STEP_2 = "SLURM job 4711, step 2"
ONE_TASK_OF_NODE_1 = env("SLURM_NODEID=1 SLURM_PROCID=1")
FIVE_TASKS = env("SLURM_NTASKS=5 SLURM_TASKS_PER_NODE=2(x2),1")
TASK_A_RANK = env("SLURM_STEP_TASKS_PER_NODE=2,1 SLURM_PROCID=1 SLURM_LOCALID=1 MASTER_PORT=1234")


def find(environ: Variables, full_name: str = "me.example.org", **request: Any) -> Allocation:
    return find_allocation(AllocationRequest(**request), environ, lambda: full_name)


def seen(found: Allocation) -> dict[str, Any]:
    """The fields of an allocation, of its rendezvous and of its hosts."""
    lists = {
        "names": [host.name for host in found.hosts],
        "slots": [host.slots for host in found.hosts],
        "devices": [host.expected_devices for host in found.hosts],
    }
    return vars(found) | lists | (vars(found.rendezvous) if found.rendezvous else {})


def lsf(hosts: str, **more: str) -> Variables:
    return {"LSB_JOBID": "12", "LSB_MCPU_HOSTS": hosts, **more}


def mpi(kind: str, rank: int, size: int, local_rank: int, local_size: int, **more: str) -> Variables:
    """The variables of one process of mpirun."""
    prefix = "OMPI_COMM_WORLD_" if kind == "openmpi" else ""
    names = {
        "openmpi": ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"),
        "mpich": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    }[kind]
    return {prefix + name: str(v) for name, v in zip(names, (rank, size, local_rank, local_size), strict=True)} | more


def rank_variables(rank: int, size: int, local_rank: int, local_size: int, address: str) -> Variables:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    values = map(str, (rank, size, local_rank, local_size))
    return {**dict(zip(names, values, strict=True)), "MASTER_ADDR": address, "MASTER_PORT": "1234"}


def law(name: str, environ: Variables, request: dict[str, Any] | None = None, **expected: Any) -> Any:
    """In this environment and with these options, the allocation has these fields."""
    return pytest.param(environ, request or {}, expected, id=name)


LAWS = [
    # the command line
    law("nothing is said", {}, source="this machine", transport="local", hosts=(Host("localhost"),)),
    law("named hosts", {}, {"hosts": "a:2,b"}, source="--hosts a:2,b", transport="ssh", slots=[(0, 1), None]),
    *(
        law(f"{name} is here", {}, {"hosts": f"{name}:2"}, transport="local")
        for name in ("me", "me.example.org", "localhost", "127.0.0.1")
    ),
    law(
        "filters and nproc",
        SLURM,
        {"include": "n2:0,3@n3", "exclude": "n3:1", "nproc": 2},
        hosts=(Host("n2", (0, 3)), Host("n3", None, (1,))),
        nproc=2,
    ),
    law("nproc auto", {}, {"hosts": "a:4,b:4", "nproc": "auto"}, nproc=None),
    *(
        law(f"transport {name} {len(environ)}", environ, {**hosts, "transport": name}, transport=name)
        for name in ("ssh", "srun", "mpirun")
        for environ, hosts in ((SLURM, {}), ({}, {"hosts": "a,b"}))
    ),
    law(
        "flags over a manager",
        SLURM,
        {"hosts": "n1,x:2"},
        transport="ssh",
        notes=("--hosts overrides SLURM job 7 with n1, n2, n3",),
        names=["n1", "x"],
    ),
    law("hosts of the job", SLURM, {"hosts": "n3,n1"}, transport="srun"),
    law(
        "local in a job",
        SLURM,
        {"transport": "local", "nproc": 2},
        names=["localhost"],
        nproc=2,
        notes=("--transport local overrides SLURM job 7 with n1, n2, n3",),
    ),
    law("by hand, first", {}, {**BY_HAND, "host_index": 0}, part="launcher", transport="join", nproc=4),
    law("by hand, third", {}, {**BY_HAND, "host_index": 2}, part="agent", names=["node1", "host-1", "host-2"]),
    law("where they meet", {}, {**BY_HAND, "host_index": 2}, rendezvous=Rendezvous(2, "node1", 23456, MEET_1)),
    law("by hand, ipv6", {}, {**BY_HAND, "host_index": 0, "meet": "[fe80::1]:23"}, address="fe80::1", port=23),
    law("by hand, one", {}, {"num_hosts": 1, "host_index": 0, "meet": "x:1"}, transport="local"),
    # a rank already
    law(
        "rank of torchrun",
        TORCHRUN,
        part="rank",
        rank_environment={},
        notes=("this process is already rank 3 of 4: it runs the script itself",),
    ),
    *(
        law(f"no {name}", {key: value for key, value in TORCHRUN.items() if key != name}, part="launcher")
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    ),
    # SLURM
    law("batch", BATCH, source="SLURM job 4711", transport="srun", names=["gpu08", "gpu09", "login1"]),
    law("processors are no slots", BATCH, part="launcher", slots=[None] * 3, devices=[4, None, None]),
    law("tasks are slots", BATCH | env("SLURM_NTASKS_PER_NODE=2"), slots=[(0, 1)] * 3),
    law("one task is no slot", BATCH | env("SLURM_NTASKS_PER_NODE=1"), slots=[None] * 3),
    law("counts of tasks", BATCH | FIVE_TASKS, slots=[(0, 1), (0, 1), None]),
    law("gpus of the job", BATCH | env("SLURM_GPUS_ON_NODE="), devices=[4, None, None]),
    law("no gpus", BATCH | env("SLURM_GPUS_ON_NODE= SLURM_JOB_GPUS="), devices=[None] * 3),
    law("gpus per node", BATCH | env("SLURM_GPUS_PER_NODE=8"), devices=[8] * 3),
    law("gpus with a type", BATCH | env("SLURM_GPUS_PER_NODE=a100:2"), devices=[2] * 3),
    law("old names", env("SLURM_JOBID=1 SLURM_NODELIST=a[1,3]"), names=["a1", "a3"]),
    law("one node", env("SLURM_JOB_ID=1 SLURM_JOB_NODELIST=a1 SLURM_NODEID=0"), transport="local"),
    law("one node, from a login node", env("SLURM_JOB_ID=1 SLURM_JOB_NODELIST=a1"), transport="srun"),
    law("shell of salloc", STEP | {"SLURM_STEP_ID": str(0xFFFFFFFA)}, transport="srun"),
    law("other shell of salloc", STEP | {"SLURM_STEP_ID": str(0xFFFFFFFB)}, transport="srun"),
    law("a task a node, first", STEP, part="launcher", transport="join", names=["gpu08", "gpu09"]),
    law("a task a node, second", STEP | ONE_TASK_OF_NODE_1, part="agent", index=1, address="gpu08", identity=STEP_2),
    law("the user's port", STEP | env("MASTER_PORT=1234"), port=1234),
    law(
        "a task a rank",
        STEP | TASK_A_RANK,
        part="rank",
        notes=("srun has started 3 tasks, and this is rank 1: it runs the script itself",),
        rank_environment=rank_variables(1, 3, 1, 2, "gpu08"),
    ),
    law("one task on some nodes only", STEP | env("SLURM_STEP_TASKS_PER_NODE=1,2"), part="rank"),
    law(
        "a step of one task",
        STEP | env("SLURM_STEP_NODELIST=gpu09 SLURM_STEP_TASKS_PER_NODE=1"),
        transport="local",
        names=["gpu09"],
        notes=("this step has 1 of the job's 3 nodes; start lowtide outside srun to use all",),
    ),
    # LSF
    law("hosts with counts", lsf("hostA 4 hostB 2"), source="LSF job 12", names=["hostA", "hostB"]),
    law("a host a slot", {"LSB_JOBID": "1", "LSB_HOSTS": "hostA hostA hostB"}, names=["hostA", "hostB"]),
    law(
        "slots are processors",
        lsf("hostA 40 hostB 40"),
        transport="ssh",
        slots=[None, None],
        notes=("LSF gives up to 40 slots a host, which count processors; --nproc sets the ranks on each host",),
    ),
    law("batch host", lsf("batch5 1 h01 42 h02 42"), names=["h01", "h02"]),
    law("login host", lsf("login2 1 h01 42"), names=["h01"], transport="ssh"),
    law("all have one slot", lsf("batch5 1 h01 1"), names=["batch5", "h01"]),
    law("first of another name", lsf("h00 1 h01 42"), names=["h00", "h01"]),
    law("batch host with slots", lsf("batch5 4 h01 42"), names=["batch5", "h01"]),
    law("batch host alone", lsf("batch5 1"), names=["batch5"], transport="local"),
    law("systems with batch hosts", lsf("x 1 h01 42", CSM_ALLOCATION_ID="9"), names=["h01"]),
    law("no hosts", env("LSB_JOBID=12"), source="this machine"),
    # MPI
    *(
        law(f"{kind} {part}", mpi(kind, rank, 2, 0, 1, **HEAD), part=part, index=rank, address="head", port=1234)
        for kind in ("openmpi", "mpich")
        for rank, part in enumerate(("launcher", "agent"))
    ),
    *(
        law(
            f"{kind}, a process a rank",
            mpi(kind, 5, 8, 1, 4, **HEAD),
            part="rank",
            notes=("mpirun has started 8 processes, and this is rank 5: it runs the script itself",),
            rank_environment=rank_variables(5, 8, 1, 4, "head"),
        )
        for kind in ("openmpi", "mpich")
    ),
    law("names of mpi's hosts", mpi("mpich", 0, 2, 0, 1, **HEAD), transport="join", names=["head", "mpi-1"]),
    law("rank 0 by SLURM", mpi("openmpi", 1, 3, 0, 1) | SLURM, address="n1", names=["n1", "n2", "n3"]),
    law("rank 0 by LSF", mpi("openmpi", 1, 2, 0, 1) | lsf("batch1 1 n1 40 n2 40"), address="n1"),
    law("openmpi alone", mpi("openmpi", 0, 1, 0, 1), source="this machine"),
    law("mpich alone", mpi("mpich", 0, 1, 0, 1), source="this machine"),
    law("pmi of srun", SLURM | env("PMI_RANK=0 PMI_SIZE=2"), source="SLURM job 7"),
    # Kubernetes
    law("old pod", OLD, names=GPT_PODS, index=2, address="gpt-master-0", port=23456, nproc=None),
    law("new pod", NEW, names=GPT_PODS, index=2, address="gpt-master-0", port=23456, nproc=8),
    law("elastic pod", ELASTIC, names=[f"gpt-worker-{i}" for i in range(4)], index=1, port=29400, nproc=2),
    law("pod of a TrainJob", TRAIN_JOB, names=["run-node-0-0.run", "run-node-0-1.run"], index=1, nproc=None),
    law("a later pod", NEW, part="agent", transport="join"),
    law("first old pod", OLD | env("RANK=0"), part="launcher", index=0),
    law("first new pod", NEW | env("PET_NODE_RANK=0"), part="launcher", index=0),
    law("first elastic pod", ELASTIC | env("HOSTNAME=g-0"), part="launcher", index=0),
    law("flags over pods", ELASTIC, {"num_hosts": 2, "nproc": 3}, names=["gpt-worker-0", "gpt-worker-1"], notes=()),
    law(
        "pods that are awaited",
        ELASTIC,
        notes=("PET_NNODES=2:4: waits for all 4 pods; --num-hosts N starts with fewer",),
    ),
    law("one pod", NEW | env("PET_NNODES=1 PET_NODE_RANK=0"), transport="local", rendezvous=None, nproc=8),
    law("given address", INDEXED | env("MASTER_ADDR=10.0.0.5"), {"num_hosts": 3}, names=["10.0.0.5", "pod-1", "pod-2"]),
    law("rank in a pod", NEW | env("LOCAL_RANK=1 TORCHELASTIC_RUN_ID=x"), part="rank"),
    law("pod of no job", POD, source="this machine"),
]


@pytest.mark.parametrize(("environ", "request_", "expected"), LAWS)
def test_a_process_knows_its_job(environ: Variables, request_: dict[str, Any], expected: dict[str, Any]) -> None:
    found = seen(find(environ, **request_))
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("environ", "request_", "start"),
    [
        (TORCHRUN | env("LOWTIDE_JOB_ID=x"), {}, "lowtide launch (RANK, LOCAL_RANK, WORLD_SIZE,"),
        ({**TORCHRUN, "TORCHELASTIC_RUN_ID": ""}, {}, "the environment (RANK, LOCAL_RANK, WORLD_SIZE,"),
        (TORCHRUN, {"transport": "local"}, "--transport local overrides torchrun (RANK, LOCAL_"),
        (lsf("batch5 1 h01 42"), {}, "batch5 is left out: its only slot is for the script"),
    ],
)
def test_a_process_says_why(environ: Variables, request_: dict[str, Any], start: str) -> None:
    found = find({name: value for name, value in environ.items() if value}, **request_)
    assert found.source.startswith(start) or found.notes[0].startswith(start)


def test_files_of_hosts_are_read(tmp_path: Path) -> None:
    path = tmp_path / "hosts.txt"
    path.write_text("a slots=2\nb slots=1\n")
    assert find({}, hostfile=path) == Allocation(f"hostfile {path}", "ssh", (Host("a", (0, 1)), Host("b", (0,))))
    path.write_text("hostA\nhostA\nhostB\nhostA\n")
    found = find({"LSB_JOBID": "12", "LSB_DJOB_HOSTFILE": str(path), "LSB_HOSTS": "short"})
    assert [host.name for host in found.hosts] == ["hostA", "hostB"]


def test_all_processes_of_a_job_know_one_meeting_place_and_those_of_another_an_other() -> None:
    def meets(environ: Variables, full_name: str = "x", **request: Any) -> tuple[str, int, str]:
        rendezvous = find(environ, full_name, **request).rendezvous
        assert rendezvous is not None
        return rendezvous.address, rendezvous.port, rendezvous.identity

    first, second, other = (meets(STEP | more) for more in ({}, ONE_TASK_OF_NODE_1, env("SLURM_STEP_ID=3")))
    assert first == second and first[1] != other[1] and 20000 <= first[1] < 30000
    pods = [meets(INDEXED | {"JOB_COMPLETION_INDEX": str(i)}, f"t-{i}.s", num_hosts=3) for i in range(3)]
    assert len(set(pods)) == 1
    told_localhost = OLD | env("RANK=0 MASTER_ADDR=localhost HOSTNAME=gpt-master-0")
    assert meets(told_localhost) == meets(OLD)


@pytest.mark.parametrize("request_", [{"num_hosts": 3}, {}], ids=["by_flag", "by_variable"])
def test_pods_of_an_indexed_job_meet_in_its_service(request_: dict[str, int]) -> None:
    environ = INDEXED if request_ else INDEXED | env("JOB_COMPLETIONS=3")
    service = "workers.default.svc.cluster.local"
    found = seen(find(environ, f"train-2.{service}", **request_))
    assert found["names"] == [f"train-{index}.{service}" for index in range(3)]
    assert (found["index"], found["address"]) == (2, f"train-0.{service}")


def test_ranks_on_one_node_meet_at_home_and_at_one_port() -> None:
    tasks = STEP | env("SLURM_STEP_NODELIST=gpu08 SLURM_STEP_TASKS_PER_NODE=4")
    assert find(tasks).rank_environment["MASTER_ADDR"] == "127.0.0.1"
    found = [find(mpi("openmpi", rank, 2, rank, 2, PMIX_NAMESPACE="prte-1@1")).rank_environment for rank in range(2)]
    assert found[0]["MASTER_PORT"] == found[1]["MASTER_PORT"]
    assert found[0]["MASTER_ADDR"] == found[1]["MASTER_ADDR"] == "127.0.0.1"


MEET_A = {"num_hosts": 2, "host_index": 0, "meet": "a:1"}
RANK_OF_SRUN = STEP | env("SLURM_STEP_TASKS_PER_NODE=4(x2)")
REFUSED: list[tuple[Variables, dict[str, Any], str]] = [
    ({}, {"hosts": "a", "hostfile": Path("h")}, "--hosts a and --hostfile h both name hosts: remove either"),
    ({}, {"nproc": 0}, "--nproc must be at least 1, found 0"),
    ({}, {"num_hosts": -1}, "--num-hosts must be at least 1, found -1"),
    ({}, {"num_hosts": 2}, "--num-hosts 2 != number of hosts (1) of this machine: remove it, name"),
    (SLURM, {"num_hosts": 2}, "--num-hosts 2 != number of hosts (3) of SLURM job 7: remove it, name"),
    (
        {},
        {"host_index": 1},
        "expected --num-hosts, --host-index and --meet HOST:PORT together, found no --num-hosts and",
    ),
    ({}, {"num_hosts": 2, "meet": "a:1"}, "found no --host-index. They are for a launcher that you"),
    ({}, {**MEET_A, "host_index": 2}, "--host-index 2 is not between 0 and 1, for --num-hosts 2"),
    ({}, {**MEET_A, "meet": "a"}, '--meet: expected HOST:PORT, for example node1:23456, found "a"'),
    ({}, {**MEET_A, "meet": "a:99999"}, 'found "a:99999"'),
    ({}, {**MEET_A, "hosts": "a,b"}, "remove --hosts and --hostfile"),
    ({}, {"hosts": "localhost:2,b:2"}, 'remote hosts cannot reach this host by the name "localhost"'),
    ({}, {"transport": "ssh"}, "--transport ssh needs hosts, found none. Name them with --hosts or --hostfile"),
    ({}, {"hosts": "a,b", "transport": "local"}, "--transport local is for a single host, found 2 (a, b): leave it"),
    ({}, {"hosts": "a,b", "transport": "join"}, "--transport join is for launchers that are started on every host"),
    ({}, {"include": "b"}, '--include b: no host "b": choose from localhost'),
    (TORCHRUN, {"nproc": 2}, "--nproc plans ranks, but this process is already a rank: torchrun (RANK, LOCAL_RANK,"),
    (TORCHRUN, {"include": "a"}, "--include plans ranks, but this process is already a rank"),
    (TORCHRUN | env("RANK=x"), {}, 'expected a number in the environment variable RANK, found "x"'),
    (BATCH | env("SLURM_JOB_NODELIST=a[1-"), {}, 'found "a[1-" with an unmatched bracket'),
    (
        BATCH | env("SLURM_NTASKS=9 SLURM_TASKS_PER_NODE=3(x4)"),
        {},
        "SLURM_TASKS_PER_NODE=3(x4) has 4 nodes, SLURM_JOB_NODELIST=gpu[08-09],login1 has 3. Name the hosts with",
    ),
    (
        STEP | env("SLURM_STEP_TASKS_PER_NODE=x"),
        {},
        'expected SLURM\'s form of counts, "8(x2),4", found "x". Use --hosts instead',
    ),
    (
        STEP | env("SLURM_STEP_TASKS_PER_NODE=1"),
        {},
        "its 1 task counts do not match its 2 nodes. Start a task on each node",
    ),
    (STEP | env("SLURM_NODEID=2"), {}, "SLURM job 4711, step 2: SLURM_NODEID=2 is out of range for its 2 nodes"),
    (STEP | env("SLURM_NODEID="), {}, 'expected a number in the environment variable SLURM_NODEID, found ""'),
    (STEP | env("MASTER_PORT=x"), {}, 'expected a number in the environment variable MASTER_PORT, found "x"'),
    (RANK_OF_SRUN, {"nproc": 4}, "this process is already a rank: SLURM job 4711, step 2. Start lowtide"),
    (STEP, {"transport": "ssh"}, "--transport ssh starts agents from a single launcher, but launchers run on every"),
    (STEP, {"exclude": "gpu09"}, "--include and --exclude cannot leave out hosts that run lowtide already"),
    (lsf("a 4 b"), {}, 'LSB_MCPU_HOSTS: expected "hostA 4 hostB 4", found "a 4 b". Use --hosts instead'),
    (lsf("a b"), {}, 'expected "hostA 4 hostB 4", found "a b"'),
    (lsf("", LSB_DJOB_HOSTFILE="/no/such"), {}, "cannot read LSB_DJOB_HOSTFILE=/no/such: "),
    (mpi("openmpi", 0, 2, 0, 1), {}, "MPI does not tell the host of rank 0 among several, and MASTER_ADDR is not set."),
    (mpi("mpich", 1, 4, 1, 2), {}, "mpiexec -genv MASTER_ADDR node1), or start lowtide once, outside mpirun"),
    (mpi("openmpi", 0, 2, 0, 3), {}, "OMPI_COMM_WORLD_LOCAL_SIZE=3 is not between 1 and 2. Use --hosts instead"),
    (mpi("mpich", 0, 2, 0, 2, PMI_RANK="x"), {}, 'in the environment variable PMI_RANK, found "x"'),
    (mpi("mpich", 0, 2, 0, 2), {"nproc": 2}, "--nproc plans ranks, but this process is already a rank: MPICH"),
    (INDEXED, {}, "indexed Job, pod 2: the number of pods is unknown (Kubernetes does not tell it). Use"),
    (
        INDEXED,
        {"num_hosts": 3, "full_name": "train-2"},
        'expected this pod\'s name as "JOB-2.SERVICE", found "train-2". Make a',
    ),
    (INDEXED, {"num_hosts": 3, "full_name": "other.svc"}, "or set MASTER_ADDR in the pods"),
    (
        INDEXED,
        {"num_hosts": 2, "full_name": "t-2.s"},
        "this is pod 2, but the job has 2, numbered from 0. Check --num-hosts",
    ),
    (POD | env("WORLD_SIZE=x MASTER_ADDR=m"), {}, 'in the environment variable WORLD_SIZE, found "x"'),
    (POD | env("PET_NNODES=2"), {}, "expected the address of pod 0 in MASTER_ADDR, PET_MASTER_ADDR or"),
    (ELASTIC | env("HOSTNAME=gpt"), {}, 'or at the end of its name, found "gpt". Set PET_NODE_RANK'),
    (NEW, {"transport": "ssh"}, "--transport ssh starts agents from a single launcher, but launchers run on every"),
]


@pytest.mark.parametrize(("environ", "request_", "error"), REFUSED)
def test_what_cannot_be_is_explained(environ: Variables, request_: dict[str, Any], error: str) -> None:
    assert error in refusal(find, environ, kind=LaunchError, **request_)
