"""SLURM: its lists, and what a process is by where it was started."""

import pytest

from lowtide.launch.allocation.allocation import AllocationRequest, find_allocation
from lowtide.launch.allocation.managers import counts
from lowtide.launch.hosts.host import Allocation, Host, LaunchError, Rendezvous

# As sbatch --nodes=3 --gpus-per-node=a100:4 sets it, on the first node.
BATCH = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NODELIST": "gpu[08-09],login1",
    "SLURM_JOB_NUM_NODES": "3",
    "SLURM_TASKS_PER_NODE": "28(x3)",
    "SLURM_NODEID": "0",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_GPUS_ON_NODE": "4",
    "SLURM_JOB_GPUS": "0,1,2,3",
}
# As srun --nodes=2 --ntasks-per-node=1 adds to it.
STEP = BATCH | {
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NODELIST": "gpu[08-09]",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
}


def find(environ: dict[str, str], **request: object) -> Allocation:
    return find_allocation(AllocationRequest(**request), environ, lambda: "x")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "expected"), [("4", [4]), ("8(x2),4", [8, 8, 4]), ("1(x3)", [1, 1, 1]), ("2,3(x2)", [2, 3, 3])]
)
def test_counts_are_read_as_slurm_writes_them(text: str, expected: list[int]) -> None:
    assert counts(text) == expected


def test_a_script_launches_on_all_nodes_with_srun() -> None:
    found = find(BATCH)
    assert (found.source, found.transport, found.part) == ("SLURM job 4711", "srun", "launcher")
    assert [host.name for host in found.hosts] == ["gpu08", "gpu09", "login1"]


def test_processors_that_slurm_counts_as_tasks_make_no_slots() -> None:
    assert [host.slots for host in find(BATCH).hosts] == [None, None, None]


@pytest.mark.parametrize(
    ("more", "slots"),
    [
        ({"SLURM_NTASKS_PER_NODE": "4"}, [4, 4, 4]),
        ({"SLURM_NTASKS_PER_NODE": "1"}, [None, None, None]),
        ({"SLURM_NTASKS": "5", "SLURM_TASKS_PER_NODE": "2(x2),1"}, [2, 2, None]),
    ],
)
def test_tasks_that_were_asked_for_are_slots(more: dict[str, str], slots: list[int | None]) -> None:
    expected = [None if count is None else tuple(range(count)) for count in slots]
    assert [host.slots for host in find(BATCH | more).hosts] == expected


@pytest.mark.parametrize(
    ("changes", "devices"),
    [
        ({}, [4, None, None]),
        ({"SLURM_GPUS_ON_NODE": ""}, [4, None, None]),
        ({"SLURM_GPUS_ON_NODE": "", "SLURM_JOB_GPUS": ""}, [None, None, None]),
        ({"SLURM_GPUS_PER_NODE": "8"}, [8, 8, 8]),
        ({"SLURM_GPUS_PER_NODE": "a100:2"}, [2, 2, 2]),
    ],
)
def test_the_accelerators_that_slurm_gives_are_noted(changes: dict[str, str], devices: list[int | None]) -> None:
    assert [host.expected_devices for host in find(BATCH | changes).hosts] == devices


def test_the_old_names_are_read_too() -> None:
    assert [host.name for host in find({"SLURM_JOBID": "1", "SLURM_NODELIST": "a[1,3]"}).hosts] == ["a1", "a3"]


def test_one_node_needs_no_srun() -> None:
    assert find({"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "a1"}).transport == "local"


@pytest.mark.parametrize("step", [0xFFFFFFFA, 0xFFFFFFFB])
def test_the_shell_of_salloc_is_no_task(step: int) -> None:
    assert find(STEP | {"SLURM_STEP_ID": str(step)}).transport == "srun"


@pytest.mark.parametrize(("index", "part"), [("0", "launcher"), ("1", "agent")])
def test_one_task_a_node_joins(index: str, part: str) -> None:
    found = find(STEP | {"SLURM_NODEID": index, "SLURM_PROCID": index})
    assert (found.part, found.transport, found.hosts) == (part, "join", (Host("gpu08"), Host("gpu09")))
    assert found.rendezvous is not None and 20000 <= found.rendezvous.port < 30000
    assert found.rendezvous == Rendezvous(int(index), "gpu08", found.rendezvous.port, "SLURM job 4711, step 2")


def test_all_tasks_of_a_step_know_one_port_and_those_of_another_an_other() -> None:
    ports = [
        found.rendezvous.port
        for changes in ({"SLURM_NODEID": "0"}, {"SLURM_NODEID": "1"}, {"SLURM_STEP_ID": "3"}, {"MASTER_PORT": "1234"})
        if (found := find(STEP | changes)).rendezvous is not None
    ]
    assert ports[0] == ports[1] != ports[2] and ports[3] == 1234


def test_a_task_a_rank_runs_the_script() -> None:
    step = {"SLURM_STEP_TASKS_PER_NODE": "2,1", "SLURM_NODEID": "0", "SLURM_PROCID": "1", "SLURM_LOCALID": "1"}
    found = find(STEP | step | {"MASTER_PORT": "1234"})
    assert found.part == "rank"
    assert found.notes == ("srun has started 3 tasks, and this is rank 1: it runs the script itself",)
    assert found.rank_environment == {
        "RANK": "1",
        "WORLD_SIZE": "3",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "gpu08",
        "MASTER_PORT": "1234",
    }


def test_ranks_on_one_node_meet_at_home() -> None:
    step = {"SLURM_STEP_NODELIST": "gpu08", "SLURM_STEP_TASKS_PER_NODE": "4"}
    assert find(STEP | step).rank_environment["MASTER_ADDR"] == "127.0.0.1"


def test_a_step_of_one_task_launches_on_its_node_and_says_so() -> None:
    found = find(STEP | {"SLURM_STEP_NODELIST": "gpu09", "SLURM_STEP_TASKS_PER_NODE": "1"})
    assert (found.transport, found.hosts) == ("local", (Host("gpu09"),))
    assert found.notes == ("this step has 1 of the job's 3 nodes; start lowtide outside srun to use all",)


@pytest.mark.parametrize(
    ("environ", "request_", "error"),
    [
        (BATCH | {"SLURM_JOB_NODELIST": "a[1-"}, {}, 'found "a[1-" with an unmatched bracket'),
        (
            BATCH | {"SLURM_NTASKS": "9", "SLURM_TASKS_PER_NODE": "3(x4)"},
            {},
            "SLURM_TASKS_PER_NODE=3(x4) has 4 nodes, SLURM_JOB_NODELIST=gpu[08-09],login1 has 3. Name the hosts with",
        ),
        (
            STEP | {"SLURM_STEP_TASKS_PER_NODE": "x"},
            {},
            'expected SLURM\'s form of counts, "8(x2),4", found "x". Use --hosts instead',
        ),
        (
            STEP | {"SLURM_STEP_TASKS_PER_NODE": "1"},
            {},
            "its 1 task counts do not match its 2 nodes. Start a task on each node",
        ),
        (STEP | {"SLURM_NODEID": "2"}, {}, "SLURM job 4711, step 2: SLURM_NODEID=2 is out of range for its 2 nodes"),
        (STEP | {"SLURM_NODEID": ""}, {}, 'expected a number in the environment variable SLURM_NODEID, found ""'),
        (STEP | {"MASTER_PORT": "x"}, {}, 'expected a number in the environment variable MASTER_PORT, found "x"'),
        (
            STEP | {"SLURM_STEP_TASKS_PER_NODE": "4(x2)"},
            {"nproc": 4},
            "--nproc plans ranks, but this process is already a rank: SLURM job 4711, step 2. Start lowtide",
        ),
        (
            STEP,
            {"transport": "ssh"},
            "--transport ssh starts agents from a single launcher, but launchers run on every host: SLURM",
        ),
        (
            STEP,
            {"exclude": "gpu09"},
            "--include and --exclude cannot leave out hosts that run lowtide already",
        ),
    ],
)
def test_what_cannot_be_is_explained(environ: dict[str, str], request_: dict[str, object], error: str) -> None:
    with pytest.raises(LaunchError) as caught:
        find(environ, **request_)
    assert error in str(caught.value)


def test_a_step_with_one_task_on_some_nodes_only_has_a_task_a_rank() -> None:
    found = find(STEP | {"SLURM_STEP_TASKS_PER_NODE": "1,2", "SLURM_NODEID": "0", "SLURM_PROCID": "0"})
    assert found.part == "rank" and found.rank_environment["LOCAL_WORLD_SIZE"] == "1"
