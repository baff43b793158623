"""Pods: PyTorchJob of several ages, elastic ones, TrainJob, and the indexed Job of Kubernetes itself."""

import pytest

from lowtide.launch.allocation.allocation import AllocationRequest, find_allocation
from lowtide.launch.hosts.host import Allocation, LaunchError

POD = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "PYTHONUNBUFFERED": "1"}
# training-operator before 1.7: RANK and WORLD_SIZE are pods.
OLD = POD | {"MASTER_ADDR": "gpt-master-0", "MASTER_PORT": "23456", "WORLD_SIZE": "3", "RANK": "2"}
# Since 1.7: WORLD_SIZE is pods x nprocPerNode.
NEW = OLD | {
    "WORLD_SIZE": "24",
    "PET_NNODES": "3",
    "PET_NPROC_PER_NODE": "8",
    "PET_NODE_RANK": "2",
    "PET_MASTER_ADDR": "gpt-master-0",
    "PET_MASTER_PORT": "23456",
}
ELASTIC = POD | {
    "HOSTNAME": "gpt-worker-1",
    "PET_RDZV_ENDPOINT": "gpt-worker-0:29400",
    "PET_RDZV_BACKEND": "c10d",
    "PET_NNODES": "2:4",
    "PET_N_PROC_PER_NODE": "2",
}
TRAIN_JOB = POD | {
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "auto",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "run-node-0-0.run",
    "PET_MASTER_PORT": "29500",
    "JOB_COMPLETION_INDEX": "1",
}
INDEXED = POD | {"JOB_COMPLETION_INDEX": "2", "HOSTNAME": "train-2"}


def find(environ: dict[str, str], full_name: str = "x", **request: object) -> Allocation:
    return find_allocation(AllocationRequest(**request), environ, lambda: full_name)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("environ", "names", "index", "address", "port", "nproc"),
    [
        (OLD, ["gpt-master-0", "gpt-worker-0", "gpt-worker-1"], 2, "gpt-master-0", 23456, None),
        (NEW, ["gpt-master-0", "gpt-worker-0", "gpt-worker-1"], 2, "gpt-master-0", 23456, 8),
        (ELASTIC, [f"gpt-worker-{index}" for index in range(4)], 1, "gpt-worker-0", 29400, 2),
        (TRAIN_JOB, ["run-node-0-0.run", "run-node-0-1.run"], 1, "run-node-0-0.run", 29500, None),
    ],
)
def test_a_pod_knows_its_job(
    environ: dict[str, str], names: list[str], index: int, address: str, port: int, nproc: int | None
) -> None:
    found = find(environ)
    assert [host.name for host in found.hosts] == names and found.nproc == nproc
    assert found.rendezvous is not None and (found.part, found.transport) == ("agent", "join")
    assert (found.rendezvous.index, found.rendezvous.address, found.rendezvous.port) == (index, address, port)


@pytest.mark.parametrize("environ", [OLD | {"RANK": "0"}, NEW | {"PET_NODE_RANK": "0"}, ELASTIC | {"HOSTNAME": "g-0"}])
def test_the_first_pod_launches(environ: dict[str, str]) -> None:
    found = find(environ)
    assert found.part == "launcher" and found.rendezvous is not None and found.rendezvous.index == 0


def test_a_master_pod_that_is_told_localhost_has_the_identity_of_the_others() -> None:
    master = find(OLD | {"RANK": "0", "MASTER_ADDR": "localhost", "HOSTNAME": "gpt-master-0"}).rendezvous
    worker = find(OLD).rendezvous
    assert master is not None and worker is not None
    assert (master.address, master.port, master.identity) == (worker.address, worker.port, worker.identity)


def test_the_command_line_goes_over_the_pods_environment() -> None:
    found = find(ELASTIC, num_hosts=2, nproc=3)
    assert len(found.hosts) == 2 and found.nproc == 3 and found.notes == ()


def test_an_elastic_job_says_how_many_pods_it_waits_for() -> None:
    assert find(ELASTIC).notes == ("PET_NNODES=2:4: waits for all 4 pods; --num-hosts N starts with fewer",)


def test_a_job_of_one_pod_is_local() -> None:
    found = find(NEW | {"PET_NNODES": "1", "PET_NODE_RANK": "0"})
    assert (found.transport, found.rendezvous, found.nproc) == ("local", None, 8)


@pytest.mark.parametrize(
    ("environ", "request_"), [(INDEXED, {"num_hosts": 3}), (INDEXED | {"JOB_COMPLETIONS": "3"}, {})]
)
def test_pods_of_an_indexed_job_meet_in_its_service(environ: dict[str, str], request_: dict[str, int]) -> None:
    found = find(environ, "train-2.workers.default.svc.cluster.local", **request_)
    assert [host.name for host in found.hosts] == [
        f"train-{index}.workers.default.svc.cluster.local" for index in range(3)
    ]
    assert found.rendezvous is not None
    assert (found.rendezvous.index, found.rendezvous.address) == (2, "train-0.workers.default.svc.cluster.local")


def test_all_pods_of_an_indexed_job_know_one_port() -> None:
    ports = {
        found.rendezvous.port
        for index in range(3)
        if (found := find(INDEXED | {"JOB_COMPLETION_INDEX": str(index)}, f"t-{index}.s", num_hosts=3)).rendezvous
    }
    assert len(ports) == 1


def test_the_address_of_an_indexed_job_can_be_given() -> None:
    found = find(INDEXED | {"MASTER_ADDR": "10.0.0.5"}, num_hosts=3)
    assert [host.name for host in found.hosts] == ["10.0.0.5", "pod-1", "pod-2"]


def test_ranks_that_torchrun_starts_in_a_pod_are_ranks() -> None:
    assert find(NEW | {"LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "x"}).part == "rank"


def test_a_pod_of_no_job_is_this_machine() -> None:
    assert find(POD).source == "this machine"


@pytest.mark.parametrize(
    ("environ", "name", "request_", "error"),
    [
        (
            INDEXED,
            "x",
            {},
            "indexed Job, pod 2: the number of pods is unknown (Kubernetes does not tell it). Use",
        ),
        (INDEXED, "train-2", {"num_hosts": 3}, 'expected this pod\'s name as "JOB-2.SERVICE", found "train-2". Make a'),
        (INDEXED, "other.svc", {"num_hosts": 3}, "or set MASTER_ADDR in the pods"),
        (INDEXED, "t-2.s", {"num_hosts": 2}, "this is pod 2, but the job has 2, numbered from 0. Check --num-hosts"),
        (POD | {"WORLD_SIZE": "x", "MASTER_ADDR": "m"}, "x", {}, 'in the environment variable WORLD_SIZE, found "x"'),
        (POD | {"PET_NNODES": "2"}, "x", {}, "expected the address of pod 0 in MASTER_ADDR, PET_MASTER_ADDR or"),
        (ELASTIC | {"HOSTNAME": "gpt"}, "x", {}, 'or at the end of its name, found "gpt". Set PET_NODE_RANK'),
        (
            NEW,
            "x",
            {"transport": "ssh"},
            "--transport ssh starts agents from a single launcher, but launchers run on every host",
        ),
    ],
)
def test_what_is_missing_is_explained(
    environ: dict[str, str], name: str, request_: dict[str, object], error: str
) -> None:
    with pytest.raises(LaunchError) as caught:
        find(environ, name, **request_)
    assert error in str(caught.value)
