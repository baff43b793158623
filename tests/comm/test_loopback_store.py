"""The store of a job of one host can be reached from that host alone; that of others is torch's own."""

import os
import socket
from datetime import timedelta

import psutil
import pytest
import torch

from lowtide.comm.rendezvous import loopback_store
from lowtide.comm.world import World
from tests.kit.ranks import RankPool, free_port


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
    torch.distributed.all_reduce(total)
    world.barrier()
    world.leave()
    return found, total.item()


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost"])
def test_a_job_of_one_host_listens_at_the_loopback_address_only(ranks: RankPool, address: str) -> None:
    assert ranks(2, join, address, process_group=False) == [({"127.0.0.1"}, 2.0)] * 2


@pytest.mark.parametrize(
    ("name", "value"),
    [("LOCAL_WORLD_SIZE", "1"), ("TORCHELASTIC_USE_AGENT_STORE", "True"), ("MASTER_ADDR", "node1")],
)
def test_a_store_of_several_hosts_or_of_torchrun_is_not_ours(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    variables = {"MASTER_ADDR": "localhost", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2", name: value}
    for variable in variables.items():
        monkeypatch.setenv(*variable)
    assert loopback_store(timedelta(seconds=1)) is None


def test_a_taken_port_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": "1"}
    for variable in {**variables, "RANK": "0"}.items():
        monkeypatch.setenv(*variable)
    with socket.create_server(("127.0.0.1", port)), pytest.raises(RuntimeError, match=f"port: {port}"):
        loopback_store(timedelta(seconds=1))


def test_a_store_that_still_lives_in_the_process_is_taken_again(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for variable in {**variables, "LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": "1", "RANK": "0"}.items():
        monkeypatch.setenv(*variable)
    first = loopback_store(timedelta(seconds=5))
    second = loopback_store(timedelta(seconds=5))
    assert first is not None and second is not None
    first.set("key", "value")
    assert second.get("key") == b"value"
