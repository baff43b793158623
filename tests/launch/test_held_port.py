"""The port of the ranks' store is taken early, known by its answer, and free the moment it is released."""

import contextlib
import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from lowtide.launch.hosts.host import LaunchError
from lowtide.launch.hosts.reach import BANNER, HeldPort, UnreachableError, seconds_to_reach


def test_a_released_port_can_be_listened_to_at_once() -> None:
    held = HeldPort()
    for _ in range(5):
        seconds_to_reach("127.0.0.1", held.port, 5)
    held.release()
    socket.create_server(("127.0.0.1", held.port)).close()
    held.release()  # a second time does nothing


def test_a_local_one_is_held_at_the_loopback_address_only() -> None:
    held = HeldPort(is_local=True)
    seconds_to_reach("127.0.0.1", held.port, 5)
    socket.create_server(("127.0.0.2", held.port)).close()  # nobody listens on all addresses
    held.release()


def test_many_hosts_reach_it_at_the_same_time() -> None:
    held = HeldPort()
    with ThreadPoolExecutor(32) as pool:
        times = list(pool.map(lambda _: seconds_to_reach("127.0.0.1", held.port, 5), range(100)))
    held.release()
    assert len(times) == 100 and max(times) < 5


def test_strangers_who_stay_do_not_hold_up_a_host() -> None:
    held = HeldPort()
    idle = [socket.create_connection(("127.0.0.1", held.port), 5) for _ in range(100)]
    assert seconds_to_reach("127.0.0.1", held.port, 30) < 10  # and not behind them
    held.release()
    for stranger in idle:
        stranger.close()


def test_an_answer_in_drips_has_no_more_time_than_another_one() -> None:
    def drip(server: socket.socket) -> None:
        link, _ = server.accept()
        with link, contextlib.suppress(OSError):
            for byte in BANNER:
                link.sendall(bytes([byte]))
                time.sleep(0.1)

    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        pool.submit(drip, server)
        with pytest.raises(UnreachableError, match=r"no answer within 0\.3 s"):
            seconds_to_reach("127.0.0.1", server.getsockname()[1], 0.3)


def test_a_wanted_port_is_held() -> None:
    first = HeldPort()
    first.release()
    second = HeldPort(first.port)
    assert second.port == first.port
    second.release()


def test_a_taken_port_is_refused_with_its_owner() -> None:
    with socket.create_server(("", 0)) as other, pytest.raises(LaunchError) as caught:
        HeldPort(other.getsockname()[1])
    text = str(caught.value)
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


def test_another_program_at_the_port_is_known_as_such() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other, ThreadPoolExecutor(1) as pool:
        port = other.getsockname()[1]
        reached = pool.submit(seconds_to_reach, "127.0.0.1", port, 5)
        link, _ = other.accept()
        with link:
            link.sendall(b"SSH-2.0-OpenSSH_9.2p1 and so on\r\n")
        with pytest.raises(UnreachableError, match="another program's answer"):
            reached.result()


def test_a_port_that_says_nothing_is_given_up() -> None:
    silent = pytest.raises(UnreachableError, match=r"no answer within 0\.2 s")
    with socket.create_server(("127.0.0.1", 0)) as other, silent:
        seconds_to_reach("127.0.0.1", other.getsockname()[1], 0.2)
