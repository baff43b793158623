"""The port of the ranks' store is taken early, known by its answer, and free the moment it is released."""

import contextlib
import os
import socket
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from lowtide.launch.hosts.host import LaunchError
from lowtide.launch.hosts.reach import BANNER, HeldPort, UnreachableError, seconds_to_reach
from tests.kit.training import refusal

HOME = "127.0.0.1"


@pytest.fixture
def held() -> Iterator[HeldPort]:
    held = HeldPort()
    yield held
    held.release()


def test_a_released_port_can_be_listened_to_at_once_and_be_held_again(held: HeldPort) -> None:
    for _ in range(5):
        seconds_to_reach(HOME, held.port, 5)
    held.release()
    socket.create_server((HOME, held.port)).close()
    held.release()  # a second time does nothing
    wanted = HeldPort(held.port)
    assert wanted.port == held.port
    wanted.release()


def test_a_local_one_is_held_at_the_loopback_address_only() -> None:
    held = HeldPort(is_local=True)
    seconds_to_reach(HOME, held.port, 5)
    socket.create_server(("127.0.0.2", held.port)).close()  # nobody listens on all addresses
    held.release()


def test_many_hosts_reach_it_at_the_same_time_beside_strangers_who_stay(held: HeldPort) -> None:
    idle = [socket.create_connection((HOME, held.port), 5) for _ in range(100)]
    with ThreadPoolExecutor(32) as pool:
        times = list(pool.map(lambda _: seconds_to_reach(HOME, held.port, 30), range(100)))
    assert len(times) == 100 and max(times) < 10  # and not behind them
    for stranger in idle:
        stranger.close()


@pytest.mark.parametrize(
    ("answer", "pause", "limit", "why"),
    [
        ([], 0.0, 0.2, r"no answer within 0\.2 s"),
        ([bytes([byte]) for byte in BANNER], 0.1, 0.3, r"no answer within 0\.3 s"),  # in drips
        ([b"SSH-2.0-OpenSSH_9.2p1 and so on\r\n"], 0.0, 5.0, "another program's answer"),
    ],
    ids=["silence", "drips", "another_program"],
)
def test_another_program_at_the_port_is_known_as_such(
    answer: Sequence[bytes], pause: float, limit: float, why: str
) -> None:
    def speak(server: socket.socket) -> None:
        link, _ = server.accept()
        with link, contextlib.suppress(OSError):
            for part in answer:
                link.sendall(part)
                time.sleep(pause)
            link.recv(1)

    with socket.create_server((HOME, 0)) as server, ThreadPoolExecutor(1) as pool:
        pool.submit(speak, server)
        with pytest.raises(UnreachableError, match=why):
            seconds_to_reach(HOME, server.getsockname()[1], limit)


def test_a_taken_port_is_refused_with_its_owner() -> None:
    with socket.create_server(("", 0)) as other:
        text = refusal(HeldPort, other.getsockname()[1], kind=LaunchError)
    assert f" for the ranks' store is taken by process {os.getpid()} (" in text
    assert text.endswith(". Choose another with --master-port, or leave it out to find a free port")


def test_a_port_that_the_system_refuses_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*address: object, **options: object) -> socket.socket:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(socket, "create_server", refuse)
    with pytest.raises(LaunchError, match=r"port 80 for .* cannot be used: Permission denied. Ports below 1024 are"):
        HeldPort(80)
    with pytest.raises(LaunchError, match="expected a free port for the ranks' store, found none: Permission denied"):
        HeldPort()
