"""How ranks find each other, what they tell each other as objects, and that nothing is left when they leave."""

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from unittest import mock

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn

import lowtide
from lowtide.comm import CollectiveError, ParallelDims, World, transport_for
from lowtide.comm.errors import ErrorBroadcast
from lowtide.comm.mesh import _new_group
from lowtide.comm.rendezvous import loopback_store
from lowtide.comm.world import gather_objects
from tests.kit.ranks import RankPool, environment, free_port, on_ranks
from tests.kit.training import refusal, settings


def set_variables(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_a_rank_that_does_not_come_is_an_error_after_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    set_variables(monkeypatch, **environment(0, 2, port := free_port()))
    text = refusal(World.join, "cpu", 0.2, kind=CollectiveError)
    assert text.startswith(f"rank 0 of 2: not all ranks connected to 127.0.0.1:{port} within ")
    assert "(Timed out after " in text and "1/2 clients joined.). A rank died or has left, another program " in text
    assert "the ranks make different numbers of engines. A slow rank needs a larger communication.timeout_s" in text


def test_a_rank_that_dies_while_they_connect_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    set_variables(monkeypatch, **environment(0, 1, port := free_port()))
    died = RuntimeError("[pair.cc:547] Connection closed by peer [127.0.0.1]:4711")
    monkeypatch.setattr(dist, "init_process_group", mock.Mock(side_effect=died))
    text = refusal(World.join, "cpu", 60, kind=CollectiveError)
    assert text.startswith(f"rank 0 of 1: not all ranks connected to 127.0.0.1:{port} within ")
    assert f"({died}). A rank died or has left" in text


@on_ranks(2)
def test_a_rank_that_dies_while_an_axis_connects_is_explained() -> None:
    world = World.join("cpu", 60)
    died = RuntimeError("[pair.cc:547] Connection closed by peer [127.0.0.1]:4711")
    with mock.patch.object(dist, "new_subgroups_by_enumeration", side_effect=died):
        dims = ParallelDims((("data", 2),), data=("data",))
        text = refusal(_new_group, world, dims, ("data",), kind=CollectiveError)
    assert text.startswith(f"rank {world.rank} in the connection of the ranks of an axis: no answer from rank ")
    assert "(Connection closed by peer " in text


def test_a_device_that_does_not_exist_leaves_no_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    monkeypatch.setattr("lowtide.comm.world._choose_device", lambda device: torch.device("cuda", 99))
    monkeypatch.setattr("lowtide.comm.world.make_process_group", lambda *given: made.append(given))
    with pytest.raises(Exception, match=r"(?i)cuda|nvidia|accelerator|device"):
        World.join("cuda:99")
    assert made == []


@pytest.mark.parametrize(("rank", "size"), [("3", "2"), ("2", "2"), ("-1", "2"), ("0", "0"), ("one", "2")])
def test_a_rank_that_is_not_in_the_world_is_told_at_once(monkeypatch: pytest.MonkeyPatch, rank: str, size: str) -> None:
    set_variables(monkeypatch, **environment(0, 2, free_port()) | {"RANK": rank, "WORLD_SIZE": size})
    words = f"expected 0 <= RANK < WORLD_SIZE, found RANK={rank} and WORLD_SIZE={size}. Number the ranks"
    assert words in refusal(World.join, "cpu", 60)


# -- the store: that of a job of one host can be reached from that host alone; that of others is torch's ---------------


def listening() -> set[tuple[str, int]]:
    found = psutil.Process().net_connections("tcp")
    return {(entry.laddr.ip, entry.laddr.port) for entry in found if entry.status == psutil.CONN_LISTEN}


def join(address: str) -> tuple[set[str], float]:
    """Where the process listens while it is in a world, and a sum over its ranks."""
    os.environ["MASTER_ADDR"] = address
    before = listening()  # torch may not have let go yet of what an earlier test of this process had
    world = World.join("cpu")
    found = {ip for ip, _ in listening() - before}
    total = torch.ones(())
    dist.all_reduce(total)
    world.barrier()
    world.leave()
    return found, total.item()


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost"])
def test_a_job_of_one_host_listens_at_the_loopback_address_only(ranks: RankPool, address: str) -> None:
    assert ranks(2, join, address, process_group=False) == [({"127.0.0.1"}, 2.0)] * 2


@pytest.mark.parametrize(
    "variables", [{"LOCAL_WORLD_SIZE": "1"}, {"TORCHELASTIC_USE_AGENT_STORE": "True"}, {"MASTER_ADDR": "node1"}]
)
def test_a_store_of_several_hosts_or_of_torchrun_is_not_ours(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    ours = {"MASTER_ADDR": "localhost", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2"}
    set_variables(monkeypatch, **ours | variables)
    assert loopback_store(timedelta(seconds=1)) is None


def test_a_taken_port_is_an_error_and_a_store_that_still_lives_in_the_process_is_taken_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_variables(monkeypatch, **environment(0, 1, port := free_port()))
    with socket.create_server(("127.0.0.1", port)):
        assert f"port: {port}" in refusal(loopback_store, timedelta(seconds=1), kind=RuntimeError)
    set_variables(monkeypatch, MASTER_PORT=str(free_port()))
    first, second = (loopback_store(timedelta(seconds=5)) for _ in range(2))
    assert first is not None and second is not None
    first.set("key", "value")
    assert second.get("key") == b"value"


# -- objects --------------------------------------------------------------------------------------------------------

LENGTHS = [([0, 100, 7], 1), ([3, 200, 1000], 2), ([9000, 1, 300], 2)]
AT_THE_EDGE = range(225, 240)


@on_ranks(3)
def test_every_rank_hears_what_each_says_however_long_it_is() -> None:
    for lengths, calls in LENGTHS:  # with the collectives that it takes
        with mock.patch.object(dist, "all_gather", wraps=dist.all_gather) as collective:
            heard = gather_objects({dist.get_rank(): b"x" * lengths[dist.get_rank()]})
        assert heard == [{rank: b"x" * length} for rank, length in enumerate(lengths)]
        assert collective.call_count == calls
    assert [len(gather_objects(b"x" * length)[1]) for length in AT_THE_EDGE] == list(AT_THE_EDGE)


@pytest.mark.parametrize(("apart", "found"), [(False, (1, "shared_memory")), (True, (2, "sockets"))])
@on_ranks(2)
def test_containers_that_number_processes_apart_share_no_memory(apart: bool, found: tuple[int, str]) -> None:
    """found: the hosts of the ranks, and the transport that they choose."""
    world = World.join("cpu")
    with mock.patch.object(os, "readlink", return_value="pid:[1]") if apart and world.rank else nullcontext():
        num_hosts = world.num_hosts
    world.leave()
    assert (num_hosts, transport_for("auto", "cpu", world.size, num_hosts)) == found


# -- the end: see [Note: threads at exit] in `comm/world.py` ----------------------------------------------------------


def gloo_threads() -> list[str]:
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    return sorted(name for name in names if "gloo" in name)


def threads_before_and_after_close(transport: str) -> tuple[list[str], list[str]]:
    config = settings(3, communication={"transport": transport})
    engine = lowtide.initialize(nn.Linear(3, 3), config, loss_fn=lambda output, batch: output.square().mean())
    engine.train_step((torch.ones(2, 3),))
    deadline = time.monotonic() + 60
    while "pt_gloo_runloop" not in (meanwhile := gloo_threads()) and time.monotonic() < deadline:
        time.sleep(0.01)  # a thread of a process group names itself some time after it was started
    engine.close()
    return meanwhile, gloo_threads()


@pytest.fixture(scope="module")
def new_ranks() -> Iterator[RankPool]:
    """Processes that no other test has left threads in."""
    pool = RankPool()
    yield pool
    pool.close()


def test_a_world_is_left_while_its_thread_asks_for_the_errors_of_other_ranks() -> None:
    asked, answer = threading.Event(), threading.Event()

    def check(keys: list[str]) -> bool:
        asked.set()
        return not answer.wait(20.0)

    errors = ErrorBroadcast()
    errors.start(0, mock.Mock(check=check), 0)
    errors.wait(errors.channel(0, range(3)), mock.Mock())
    assert asked.wait(20.0)
    errors.end_wait()
    threading.Timer(0.1, answer.set).start()
    errors.close()  # an error of the thread fails the test


@pytest.mark.parametrize(("transport", "world_size"), [("shared_memory", 1), ("shared_memory", 2), ("sockets", 2)])
def test_close_ends_the_threads_of_the_process_group(new_ranks: RankPool, transport: str, world_size: int) -> None:
    for meanwhile, after in new_ranks(world_size, threads_before_and_after_close, transport, process_group=False):
        assert "pt_gloo_runloop" in meanwhile and after == []
