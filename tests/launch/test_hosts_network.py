"""The hosts that other tests are made of: real enough to fail as hosts do, and gone when their maker is."""

import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from tests.launch import network as network_module
from tests.launch.network import FOLDER_PREFIX, REQUIRED, Network, require_network
from tests.launch.virtual_host import main_process

# A process that makes hosts of its own, says where their files are, and waits.
MAKER = """
import sys
from tests.launch.network import Network
network = Network(["a", "b"])
sleeper = network["b"].popen(["sleep", "1000"])
print(network.folder, flush=True)
sys.stdin.read()
"""


def test_a_cut_host_is_silent_until_it_is_restored(hosts: Network) -> None:
    hosts["n1"].cut()
    with pytest.raises(RuntimeError, match="Connection timed out"):
        hosts["login"].run("ssh", "-o", "ConnectTimeout=1", "n1", "true")
    assert "n2" in hosts["login"].run("ssh", "n2", "hostname")
    hosts["n1"].restore()
    assert "n1" in hosts["login"].run("ssh", "n1", "hostname")


def test_a_killed_host_takes_its_processes_along_and_comes_back(hosts: Network) -> None:
    process = hosts["n1"].popen(["setsid", "sleep", "1000"])
    sleeper = main_process(process)
    assert sleeper in hosts["n1"].processes()
    hosts["n1"].kill()
    assert process.wait(5) == -signal.SIGKILL
    assert not psutil.pid_exists(sleeper.pid) and hosts["n1"].processes() == []
    with pytest.raises(RuntimeError, match="Connection timed out"):
        hosts["login"].run("ssh", "-o", "ConnectTimeout=1", "n1", "true")
    hosts["n1"].start()
    assert "n1" in hosts["login"].run("ssh", "n1", "hostname")


def test_a_zombie_counts_as_a_process(hosts: Network) -> None:
    keeper = "import os, time; os.fork() or os._exit(0); print(flush=True); time.sleep(1000)"
    process = hosts["n1"].popen([sys.executable, "-c", keeper], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    deadline = time.monotonic() + 60
    while psutil.STATUS_ZOMBIE not in (found := [entry.status() for entry in hosts["n1"].processes()]):
        assert time.monotonic() < deadline, found
    assert len(found) == 2
    main_process(process).kill()
    assert process.wait(5) == -signal.SIGKILL
    process.stdout.close()
    assert hosts["n1"].wait_until_idle() == []


def test_nothing_outlives_a_maker_that_is_killed(network: Network) -> None:
    maker = subprocess.Popen([sys.executable, "-c", MAKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert maker.stdout is not None and maker.stdin is not None
    folder = Path(maker.stdout.readline().strip())
    assert folder.name.startswith(FOLDER_PREFIX) and folder.parent == Path(tempfile.gettempdir())
    below = psutil.Process(maker.pid).children(recursive=True)
    assert {"sshd", "sleep"} <= {process.name() for process in below}
    maker.kill()
    maker.wait()
    maker.stdin.close()
    maker.stdout.close()
    _, left = psutil.wait_procs(below, timeout=60)
    assert all(process.status() == psutil.STATUS_ZOMBIE for process in left)  # of a machine whose init reaps nothing
    assert folder.exists()
    network_module.remove_dead_folders()
    assert not folder.exists() and network.folder.exists()


def test_a_machine_without_namespaces_skips_and_ci_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network_module, "network_fault", lambda: "sshd not found")
    monkeypatch.delenv(REQUIRED, raising=False)
    with pytest.raises(pytest.skip.Exception, match="sshd not found"):
        require_network()
    monkeypatch.setenv(REQUIRED, "1")
    with pytest.raises(pytest.fail.Exception, match=f"{REQUIRED}=1, but sshd not found"):
        require_network()
